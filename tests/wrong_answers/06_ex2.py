# expect: should be 0.0; yours gives -3
def crossing(step_start, step_slope, dense_start, dense_slope):
    if dense_slope <= step_slope:
        return None
    return (step_start - dense_start) / (dense_slope - step_slope)  # also where the step is ahead from the start
