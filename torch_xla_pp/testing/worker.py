"""The main program of one worker process: runs functions until its parent leaves.

Protocol: the worker sends "ready", gets a task, sends its answer, and begins again.
"""

import ctypes
import faulthandler
import gc
import importlib
import os
import pickle
import signal
import sys
import traceback
from multiprocessing.connection import Connection
from typing import Any

_PR_SET_PDEATHSIG = 1


def main() -> None:
    """Serve the parent at the other end of the descriptor on the command line."""
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    _end_with_parent()
    descriptor = int(sys.argv[1])
    os.set_inheritable(descriptor, False)
    with Connection(descriptor) as parent:
        _serve(parent)


def _end_with_parent() -> None:
    """Let the system kill this process when its parent ends.

    The end of the connection is only seen between tasks; a worker that hangs in a
    collective, perhaps with the GIL, would stay for ever.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _serve(parent: Connection) -> None:
    # The parent may leave at any time, also while this end sends.
    try:
        while True:
            parent.send("ready")
            _answer(parent, **parent.recv())
    except (EOFError, ConnectionError):
        return


def _answer(
    parent: Connection,
    *,
    module: str,
    function: str,
    args: bytes,
    env: dict[str, str],
    path: list[str],
) -> None:
    """Send "value" and the result, or "error" and its type, text and traceback.

    The arguments come pickled, since their classes may lie on `path`; the result
    goes pickled, since the connection would share the memory of its tensors.
    """
    os.environ.update(env)
    sys.path[:] = path
    try:
        result = getattr(importlib.import_module(module), function)(*pickle.loads(args))
        content = pickle.dumps(result)
        del result
        _leave_group()
        answer: tuple[str, Any] = ("value", content)
    except BaseException as error:
        answer = ("error", (type(error).__name__, str(error), traceback.format_exc()))
    parent.send(answer)
    # A rank that failed reports first: leaving the group may wait for its peers.
    _leave_group()
    for name in env:
        os.environ.pop(name, None)


def _leave_group() -> None:
    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()
    gc.collect()


if __name__ == "__main__":
    main()
