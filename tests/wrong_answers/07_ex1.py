# expect: 40 tokens are 3 pages
def mass_by_page(weights, page_size):
    """Cuts whole pages and loses the tokens of the last, partly filled one."""
    return weights.unfold(0, page_size, page_size).sum(-1) if len(weights) >= page_size else weights[:0]
