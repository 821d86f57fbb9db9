"""The main program of one worker process: runs functions until its parent leaves.

A worker is forked from a server that has imported this module and its imports, which
take most of the time of a short job. The server has no XLA client: XLA reads its flags
and makes its client in the worker.

Protocol: the worker sends "ready", gets a task, sends its answer, and begins again.
"""

import ctypes
import faulthandler
import gc
import importlib
import os
import pickle
import random
import signal
import sys
import traceback
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from typing import Any

import numpy
import torch._dynamo  # noqa: F401  (imported when a model is first traced)
import torch._functorch.aot_autograd  # noqa: F401
import torch.distributed as dist

import torch_xla_pp
from torch_xla_pp.on_import import prepare_process
from torch_xla_pp.transport import forget_group_numbers

# These are imported when they are first used: here, for all workers.
for name in torch_xla_pp.__all__:
    getattr(torch_xla_pp, name)

_PR_SET_PDEATHSIG = 1


def run_worker(parent: Connection, log: str, env: dict[str, str]) -> None:
    """Serve the other end of `parent` in an environment; print to the file `log`."""
    _end_with_parent()
    with open(log, "ab") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    os.environ.clear()
    os.environ.update(env)
    # The effects of importing the package, with this environment.
    prepare_process()
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    with parent:
        _serve(parent)


def _end_with_parent() -> None:
    """Let the system kill this process when its parent ends.

    The end of the connection is only seen between tasks; a worker that hangs in a
    collective, perhaps holding the GIL, would stay for ever. The server from which it
    is forked ends when no process holds a certain pipe any more, so a worker must close
    it.
    """
    os.close(forkserver._forkserver._forkserver_alive_fd)  # type: ignore[attr-defined]
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

    The arguments come pickled, since their classes may be on `path`; the result
    goes pickled, since the connection would share the memory of its tensors.
    """
    os.environ.update(env)
    sys.path[:] = path
    _seed()
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


def _seed() -> None:
    """Let all ranks draw the same numbers, whatever ran in their processes before."""
    torch.manual_seed(0)
    random.seed(0)
    numpy.random.seed(0)


def _leave_group() -> None:
    """Leave the group, if there is one, and forget groups that could not be made."""
    if dist.is_initialized():
        dist.destroy_process_group()
    forget_group_numbers()
    gc.collect()
