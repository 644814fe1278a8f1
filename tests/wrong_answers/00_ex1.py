# expect: Keys and values
def conversations(budget_bytes, tokens, layers, kv_heads, head_dim, bytes_per_number):
    """Forgets that keys and values are both cached."""
    return int(budget_bytes // (tokens * layers * kv_heads * head_dim * bytes_per_number))
