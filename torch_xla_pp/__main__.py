"""Run the command line: `python -m torch_xla_pp --help`, or `torch-xla-pp --help`."""

import signal
import sys

from torch_xla_pp.cli import main


def command() -> int:
    """Run one command of the process's own arguments; returns its exit code."""
    # A reader that closes the pipe early, such as `head`, ends the command silently.
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    return main()


if __name__ == "__main__":
    sys.exit(command())
