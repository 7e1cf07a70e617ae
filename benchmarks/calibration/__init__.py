"""How far the cost model is from published measurements: ``python -m benchmarks.calibration DIRECTORY``."""
