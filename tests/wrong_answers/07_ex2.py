# expect: do your scores ask the query
def rank_pages(q, kmin, kmax):
    """The largest boxes, whatever the query wants."""
    return (kmax - kmin).sum(-1)
