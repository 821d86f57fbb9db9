"""Run scripts in the ranks of worlds, whose workers have loaded torch_xla already.

That is faster than torchrun, which a test may use to start scripts as users do.
"""

import contextlib
import io
import runpy
from pathlib import Path

from torch_xla_pp.testing import Worlds


def run_script(worlds: Worlds, script: Path, *, ranks: int, devices: int) -> str:
    """Run a script in every rank; return what the ranks print, one after the other."""
    args = (str(script),)
    printed = worlds.run(_run, ranks=ranks, devices=devices, args=args, timeout_s=240)
    return "".join(printed)


def run_afresh(script: Path, *, ranks: int, devices: int) -> str:
    """Run a script in new workers, in which it may set XLA_FLAGS."""
    with Worlds() as worlds:
        return run_script(worlds, script, ranks=ranks, devices=devices)


def _run(script: str) -> str:
    with contextlib.redirect_stdout(io.StringIO()) as out:
        runpy.run_path(script, run_name="__main__")
    return out.getvalue()
