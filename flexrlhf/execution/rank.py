"""What a rank's process starts with. Processes that it spawns for reward functions run this module again, and so
without torch."""

from __future__ import annotations

import sys


def main() -> None:
    from flexrlhf.execution.worker import main as run

    run(sys.argv[1])


if __name__ == "__main__":
    main()
