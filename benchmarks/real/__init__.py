"""A pretrained model on real texts, as a user would train it: ``python -m benchmarks.real --data DIRECTORY``."""
