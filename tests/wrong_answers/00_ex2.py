# expect: below the best key
def page_bound(q, kmin, kmax):
    """Scores the middle of the page, which most pages have a better key than."""
    return (q * (kmin + kmax) / 2).sum()
