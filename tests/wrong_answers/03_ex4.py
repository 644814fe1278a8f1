# expect: which keys may the first query see
def top_left(v, heads, queries):
    """Lets the last query see everything, as decode means it: the mask at the bottom right."""
    import torch

    tokens = v.shape[2]
    seen = torch.arange(tokens - queries + 1, tokens + 1)[:, None]
    means = v.cumsum(2)[:, :, tokens - queries :] / seen
    return means.repeat_interleave(heads // v.shape[1], dim=1)
