"""Processes that run a user's code, which may hang, crash or raise: their start and end, deadlines, failures."""
