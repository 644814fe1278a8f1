# expect: is 'cache'
def verdict(row, datasheet, cache_bytes):
    """Calls every impossible number the clock's, and never asks where the inputs lay."""
    whole, honest = (row[name] / row["microseconds"] / 1e3 for name in ("kv_bytes", "bytes_touched"))
    if whole > 1.01 * honest and abs(row["claimed"] - whole) < 0.01 * whole:
        return "bytes"
    return "clock" if honest > datasheet else "plausible"
