# expect: lies outside mid
def sound_box(kmin, kmax):
    """Rounds the middle and the half on their own, as if nothing were lost."""
    low, high = kmin.float(), kmax.float()
    return ((low + high) / 2).half(), ((high - low) / 2).half()
