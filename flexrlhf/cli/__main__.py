"""``python -m flexrlhf.cli``."""

from flexrlhf.cli import main

main()
