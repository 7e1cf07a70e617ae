"""Errors of the cost model on published measurements: ``python -m benchmarks.calibration DIRECTORY``."""
