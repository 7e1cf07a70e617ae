"""``python -m flexrlhf``, and the installed command. It imports nothing of the package before signals are as it needs
them."""

import os
import signal
import sys


def main() -> None:
    """Run the command line. Until a command begins (``with_exit_codes``), Ctrl-C ends the process without a word."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    # of `python -m`: a yaml.py in the current directory is no library
    if sys.path and sys.path[0] in ("", os.getcwd()) and not sys.flags.safe_path:
        del sys.path[0]
    from flexrlhf.cli import main as run

    run()


if __name__ == "__main__":
    main()
