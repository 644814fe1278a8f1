# expect: should be 207
def busy_batch(flops, bandwidth, weight_number_bytes):
    """Rounds down: at this batch reading still takes longer."""
    return int(flops / bandwidth * weight_number_bytes / 2)
