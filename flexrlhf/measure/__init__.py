"""Measurements of machines: their speed for the cost model (``profile``), and checks before a run (``doctor``)."""
