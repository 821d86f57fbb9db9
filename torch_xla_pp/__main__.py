"""Run the command line: `python -m torch_xla_pp --help`."""

import signal
import sys

from torch_xla_pp.cli import main

# A reader that closes the pipe early, such as `head`, ends the command silently.
signal.signal(signal.SIGPIPE, signal.SIG_DFL)
sys.exit(main())
