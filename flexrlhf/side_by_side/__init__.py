"""Runs side by side, from the files in their directories: where their metrics differ, and where their time goes.

``recorded`` reads a run, ``metrics`` compares numbers, ``times`` adds up spans, ``tables`` writes both for a person.
"""
