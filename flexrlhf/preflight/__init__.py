"""Checks before a run: what this machine and the others have and measure, against what the plans need."""
