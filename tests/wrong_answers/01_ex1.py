# expect: of every sequence
def break_even(weight_bytes, layers, kv_heads, head_dim, kv_number_bytes, batch):
    """Forgets that each sequence of the batch brings a cache of its own."""
    return weight_bytes / (2 * layers * kv_heads * head_dim * kv_number_bytes)
