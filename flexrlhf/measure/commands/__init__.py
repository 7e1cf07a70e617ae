"""Commands that measure: ``doctor``, ``profile``."""
