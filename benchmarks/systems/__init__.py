"""Systems of the field: how each of them places and runs the calls of a step, for comparison with published steps."""
