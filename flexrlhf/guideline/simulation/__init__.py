"""Simulation of a plan: its instructions priced, the trainer's loop walked, a run compared with it."""
