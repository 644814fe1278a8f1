# expect: should be [0, 1
def pick(scores, pages, sink, local):
    best = sorted(range(len(scores)), key=lambda page: -scores[page])[:pages]
    return sorted(best)  # forgets the forced pages
