# expect: Which keys did you read?
def roll_back(keys, kmin, kmax, length, page_size):
    """Rebuilds the page that is cut from all of its keys, those that leave among them."""
    page = length // page_size
    whole = keys[page * page_size : (page + 1) * page_size]
    if len(whole):
        kmin[page], kmax[page] = whole.amin(0), whole.amax(0)
    return length % page_size
