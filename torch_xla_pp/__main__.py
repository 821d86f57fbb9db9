"""Run the command line: `python -m torch_xla_pp --help`."""

import sys

from torch_xla_pp.cli import main

sys.exit(main())
