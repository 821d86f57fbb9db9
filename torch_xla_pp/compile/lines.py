"""The line of a model that an operation comes from.

A trace notes the line on its nodes; messages about an operation then name it.
"""

import re
import sys
from pathlib import Path
from types import CodeType, FrameType

import torch
from torch import fx, nn

_LINE = re.compile(r'File "(.*)", line (\d+), in (.*)')
_TORCH = str(Path(torch.__file__).parent)
_PACKAGE = str(Path(__file__).parents[1])


def running_line(outermost: CodeType) -> str | None:
    """Return the innermost line of the model that runs, as tracebacks show it.

    If only code of torch runs, it is the line that a trace noted on the operation of a
    graph that runs, else the innermost module's.

    Args:
        outermost: The code that called the model.

    Returns:
        None if no model runs.
    """
    frame: FrameType | None = sys._getframe(1)
    module = None
    while frame is not None and frame.f_code is not outermost:
        if not _is_foreign(frame.f_code.co_filename):
            return _shown(frame)
        noted = _noted(frame)
        if noted is not None:
            return noted
        if module is None and isinstance(frame.f_locals.get("self"), nn.Module):
            module = _shown(frame)
        frame = frame.f_back
    return module if frame is not None else None


def _noted(frame: FrameType) -> str | None:
    """Return the lines of the node that an interpreter of a graph runs here."""
    if frame.f_code is not fx.Interpreter.run_node.__code__:
        return None
    node = frame.f_locals.get("n")
    trace = node.meta.get("stack_trace") if isinstance(node, fx.Node) else None
    lines = _LINE.findall(trace or "")
    return trace if any(not _is_foreign(path) for path, _, _ in lines) else None


def _is_foreign(path: str) -> bool:
    """Return whether a file is torch's, this package's, or generated code."""
    return path.startswith((_TORCH, _PACKAGE, "<"))


def _shown(frame: FrameType) -> str:
    code = frame.f_code
    return f'File "{code.co_filename}", line {frame.f_lineno}, in {code.co_qualname}'


def place_of(trace: str | None) -> str:
    """Return file, line and function of the innermost line of the model in a trace."""
    lines = _LINE.findall(trace or "")
    own = [line for line in lines if not _is_foreign(line[0])] or lines
    if not own:
        return "at an unknown line"
    path, number, function = own[-1]
    return f"{path}:{number}, in {function}"


def describe(node: fx.Node) -> str:
    """Return the operation of a node and where in the model it is."""
    return f"{node.target} ({place_of(node.meta.get('stack_trace'))})"
