"""Environments of other packages, by the packages themselves: a file each."""
