"""Costs of a plan before it runs: seconds of instructions, simulated timelines, and the choice of a placement."""
