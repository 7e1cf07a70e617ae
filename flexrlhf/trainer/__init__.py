"""A rank's part of a run: it walks the list of instructions, executes its own, and records them."""
