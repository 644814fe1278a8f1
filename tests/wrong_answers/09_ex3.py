# expect: What do both sides share
def worthwhile_batch(shared, exact, start, skipping, wanted):
    """Compares attention with attention and forgets what a token takes beside it."""
    gained = exact - wanted * skipping
    return max(1, -int(-wanted * start // gained)) if gained > 0 else None
