"""What the exercises' checkers share."""


def attempt(fn, *arguments):
    """Call a reader's function: (what it returned, None), or (None, what went wrong) when it raised."""
    try:
        return fn(*arguments), None
    except Exception as error:  # a checker answers in words, whatever a half-written function does
        return None, f"it raises {type(error).__name__}: {error}"


def shown(value):
    """A value as a checker's message shows it: tensors by their shape when they hold more than one number."""
    shape = tuple(getattr(value, "shape", ()))
    return f"a tensor of shape {shape}" if shape else repr(value)
