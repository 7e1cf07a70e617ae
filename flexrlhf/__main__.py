"""``python -m flexrlhf``."""

from flexrlhf.cli import main

main()
