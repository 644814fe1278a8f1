# expect: below the best key
def page_bound(q, kmin, kmax):
    """Takes the better of two corners as a whole instead of the better end in every dimension."""
    import torch

    return torch.maximum((q * kmin).sum(), (q * kmax).sum())
