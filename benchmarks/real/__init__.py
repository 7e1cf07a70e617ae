"""A pretrained model on real data, as a user would train it: ``python -m benchmarks.real --data DIRECTORY``."""
