"""``python -m flexrlhf``, and the installed command. It imports nothing of the package before signals are as it needs
them."""

import os
import sys


def main() -> None:
    """Run the command line. Until a command begins (``with_exit_codes``), signals end the process at once."""
    _leave_directory()
    from flexrlhf.signals import end_at_once

    end_at_once("".join(sys.argv[1:2]))
    from flexrlhf.cli import main as run

    run()


def _leave_directory() -> None:
    """Find no library in the current directory, where `python -m` does: a yaml.py there is none."""
    try:
        here = os.getcwd()
    except FileNotFoundError:
        # deleted; the command says so
        return
    if sys.flags.safe_path or sys.path[:1] not in ([""], [here]):
        return
    del sys.path[0]
    if os.path.dirname(os.path.dirname(os.path.abspath(__file__))) == here:
        # a checkout that may not be installed: ranks and workers find it, too
        sys.path.append(here)
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (os.environ.get("PYTHONPATH"), here)))


if __name__ == "__main__":
    main()
