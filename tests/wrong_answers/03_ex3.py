# expect: should be 6
def rotation(cache_bytes, call_bytes):
    """Three copies, as custom has it."""
    return 3
