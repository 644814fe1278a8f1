# expect: luck beyond the control
def count_kept(codes, control, answers):
    """Lets a policy keep what the control never found."""
    right = lambda said: sum(needle.is_right(answer, code) for answer, code in zip(said, codes))  # noqa: E731, F821
    return right(answers), right(control)
