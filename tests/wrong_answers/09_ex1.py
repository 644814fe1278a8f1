# expect: Whose numbers are in it?
def append_key(kmin, kmax, position, key, page_size):
    """Joins the first token of a page to whatever its slot held before."""
    page = position // page_size
    kmin[page], kmax[page] = torch.minimum(kmin[page], key), torch.maximum(kmax[page], key)
