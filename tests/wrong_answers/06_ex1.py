# expect: replayed at 10, it should give 57.5, not nan
def window_mean(x, lengths):
    positions = torch.arange(64)
    chosen = (positions >= lengths - 4) & (positions < lengths)
    return (x * chosen).sum() / 4  # what lies past the length is multiplied by zero, and NaN survives that
