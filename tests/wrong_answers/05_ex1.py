# expect: should be 131,072
def crossover(page_size, pages):
    return pages * page_size  # the budget itself
