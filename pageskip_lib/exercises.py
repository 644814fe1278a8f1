"""What the exercises' checkers share."""


def attempt(fn, *arguments):
    """Call a reader's function: (what it returned, None), or (None, what went wrong) when it raised."""
    try:
        return fn(*arguments), None
    except Exception as error:  # a checker answers in words, whatever a half-written function does
        return None, f"it raises {type(error).__name__}: {error}"


def shown(value):
    """A value as a checker's message shows it: tensors by their shape when they hold more than one number, also inside a tuple or a list."""
    if isinstance(value, (tuple, list)) and any(hasattr(item, "shape") for item in value):
        return f"a {type(value).__name__} of {', '.join(map(shown, value))}"
    shape = tuple(getattr(value, "shape", ()))
    text = f"a tensor of shape {shape}" if shape else repr(value)
    return text if len(text) <= 200 else text[:200] + "..."
