"""Other people's systems and search spaces, for comparisons: how each places and runs the calls of a step."""
