"""Runs side by side, from the files in their directories: where their metrics differ, and where their time goes.

``recorded`` reads a run, ``differences`` compares numbers, ``settings`` names what explains
them, ``times`` adds up spans, ``tables`` writes all for a person.
"""
