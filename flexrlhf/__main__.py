"""``python -m flexrlhf``, and the installed command. It imports nothing of the package before signals are as it needs
them."""

import os
import signal
import sys


def main() -> None:
    """Run the command line. Until it is loaded, Ctrl-C ends the process without a word."""
    before = signal.getsignal(signal.SIGINT)
    if before is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    # of `python -m`: a yaml.py in the current directory is no library
    if sys.path and sys.path[0] in ("", os.getcwd()) and not sys.flags.safe_path:
        del sys.path[0]
    from flexrlhf.cli import main as run

    signal.signal(signal.SIGINT, before)
    run()


if __name__ == "__main__":
    main()
