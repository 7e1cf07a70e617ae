"""Graphs: the operators of an algorithm as data, one file an algorithm. Pure Python."""
