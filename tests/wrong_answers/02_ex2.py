# expect: nothing but empty parts
def merge_all(outs, lses):
    total = torch.logsumexp(lses, dim=0)
    return (torch.exp(lses - total)[:, None] * outs).sum(0), total
