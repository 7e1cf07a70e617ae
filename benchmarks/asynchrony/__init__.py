"""What a lag and segments cost in learning and gain in speed: the figures of docs/asynchrony.md."""
