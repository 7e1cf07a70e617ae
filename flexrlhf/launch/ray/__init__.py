"""Launcher of ranks in a Ray cluster."""
