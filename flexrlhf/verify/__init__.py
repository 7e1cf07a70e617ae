"""Comparison of runs that must have the same numbers: their records, how far these are apart, and where first."""
