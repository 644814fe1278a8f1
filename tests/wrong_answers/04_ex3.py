# expect: all summaries are read
def ratio(tokens, pages, page_size, bound_size):
    """Counts the pages, and forgets that choosing them reads too."""
    return tokens / min(tokens, pages * page_size)
