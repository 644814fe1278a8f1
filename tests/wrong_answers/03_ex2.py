# expect: the summaries are missing
def step_bytes(tokens, pages, page_size, heads, kv_heads, head_dim, number):
    """Counts the attention and forgets that choosing pages reads too."""
    listed = 2 * pages * page_size * kv_heads * head_dim * number
    return listed + 4 * pages * kv_heads + 2 * heads * head_dim * number
