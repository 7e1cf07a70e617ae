"""Presets of ``algorithm.like``: defaults of other engines' trainers, one YAML file for each engine or paper.

Lengths and files are of the data, and no preset sets them. An epoch over a data set is not a setting here: a run has
``steps``.
"""
