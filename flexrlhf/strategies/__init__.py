"""Strategies: who sits where and who runs when, as instructions. Pure Python."""
