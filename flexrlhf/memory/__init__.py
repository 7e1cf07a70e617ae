"""Bytes per rank and phase, computed before a run starts."""
