# expect: intensity(12, 2, 4) should be 3
def intensity(heads, kv_heads, number_bytes):
    """Knows the fp16 result and forgets that the size of a number matters."""
    return heads / kv_heads
