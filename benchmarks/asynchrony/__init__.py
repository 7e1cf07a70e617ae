"""Cost of a lag and of segments in learning, and their gain in speed: the figures of docs/asynchrony.md."""
