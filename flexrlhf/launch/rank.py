"""Entry point of a rank. Processes that a rank spawns for reward functions load this module again, so it loads torch in
a function."""

from __future__ import annotations

import sys


def main() -> None:
    """Run the orders of the file that is the first argument; the second one is the file of a request to stop."""
    from flexrlhf.launch.lifetime import end_with_launcher
    from flexrlhf.user_code.processes import keep_children_safe, keep_output

    # torch takes seconds to load, in which the launcher may die
    end_with_launcher()
    keep_output()
    keep_children_safe()
    from flexrlhf.launch.worker import main as run

    run(*sys.argv[1:])


if __name__ == "__main__":
    main()
