# expect: does your ball hold every key
def ball_bound(q, page):
    """Takes the mean distance for the radius, which leaves the far keys outside."""
    mean = page.mean(0)
    return q @ mean + q.norm() * (page - mean).norm(dim=1).mean()
