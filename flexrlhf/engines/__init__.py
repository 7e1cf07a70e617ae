"""Engines: what computes a placed model. The catalogue is pure; each engine file imports its library."""
