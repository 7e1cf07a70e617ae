"""Comparison of runs that must have the same numbers: what they recorded, how far it is apart, and where first."""
