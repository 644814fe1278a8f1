# expect: should be True
def window_sees(position, tokens, pages, sink, page_size):
    """Counts back in tokens and forgets the sink."""
    return position >= tokens - (pages - sink) * page_size
