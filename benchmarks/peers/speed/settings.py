"""Settings of both sides that no workload changes."""

LEARNING_RATE = 1e-6
KL = 0.05
