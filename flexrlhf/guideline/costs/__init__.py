"""Seconds and bytes of one piece of work: a model call on a mesh, rows that move, a weight sync."""
