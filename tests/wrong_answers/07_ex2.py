# expect: the right end for each sign
def rank_pages(q, kmin, kmax):
    """The middle of the box alone: ahead of the window, and behind the size of the box."""
    return (q @ ((kmin + kmax) / 2).T).amax(0)
