# expect: KV head 0, page 0 is
def group_bound(q, kmin, kmax):
    """Adds up the group before the signs are looked at, so that heads cancel."""
    q = q.sum(1, keepdim=True)
    return (q.clamp(min=0) @ kmax.mT + q.clamp(max=0) @ kmin.mT)[:, 0]
