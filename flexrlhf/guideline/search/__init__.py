"""Exact search for placements on tabulated costs.

``SearchProblem`` states a space of placements, ``evaluate`` times one of them, ``search`` finds the fastest with a
proof.
"""
