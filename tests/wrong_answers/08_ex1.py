# expect: with the code on [63, 64]
def share_held(lists, code_pages):
    """Is content with any page of the code."""
    return sum(bool(code_pages & set(pages)) for pages in lists) / len(lists)
