"""Tests, predictions and speed of flexrlhf on the GPU of this machine, or on its CPU: ``make gpu``."""
