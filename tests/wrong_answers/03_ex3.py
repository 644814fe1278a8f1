# expect: should be 216
def rotation(cache_bytes, call_bytes):
    """Three copies, as custom has it."""
    return 3
