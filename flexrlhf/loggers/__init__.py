"""Loggers of a run, a file each: rank 0 sends them its rows of metrics, samples and files."""
