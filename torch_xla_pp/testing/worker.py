"""The main program of one worker process: runs functions until its parent leaves."""

import faulthandler
import gc
import importlib
import os
import pickle
import signal
import sys
import traceback
from multiprocessing.connection import Client, Connection
from typing import Any


def main() -> None:
    """Connect to the parent named on the command line and serve it."""
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    with Client(sys.argv[1], family="AF_UNIX") as parent:
        _serve(parent)


def _serve(parent: Connection) -> None:
    while True:
        try:
            task = parent.recv()
        except EOFError:
            return
        parent.send(_run(**task))


def _run(
    *,
    module: str,
    function: str,
    args: bytes,
    env: dict[str, str],
    path: list[str],
) -> tuple[str, Any]:
    """Return "value" and the result, or "error" and its type, text and traceback.

    The arguments come pickled, since their classes may lie on `path`; the result
    goes pickled, since the connection would share the memory of its tensors.
    """
    os.environ.update(env)
    sys.path[:] = path
    try:
        result = getattr(importlib.import_module(module), function)(*pickle.loads(args))
        return "value", pickle.dumps(result)
    except BaseException as error:
        return "error", (type(error).__name__, str(error), traceback.format_exc())
    finally:
        for name in env:
            os.environ.pop(name, None)
        _leave_group()


def _leave_group() -> None:
    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()
    gc.collect()


if __name__ == "__main__":
    main()
