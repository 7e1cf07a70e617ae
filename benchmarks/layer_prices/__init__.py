"""Whole calls of a model under several layouts, measured and as the sum of its layers."""
