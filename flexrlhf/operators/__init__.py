"""Operators: the model calls of an algorithm, as data (graphs) and as mathematics on tensors (functions, run)."""
