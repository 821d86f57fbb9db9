"""The only place that touches private parts of torch 2.9's tracer and `Pipe`."""

import contextlib
import importlib
import logging
import textwrap
import warnings
from collections.abc import Callable, Iterator
from types import CodeType
from typing import Any

import torch
from torch import fx
from torch._dynamo.output_graph import OutputGraph
from torch.distributed.pipelining import Pipe, SplitPoint
from torch.distributed.pipelining._IR import (
    MultiUseParameterConfig,
    annotate_split_points,
    aten_pipe_split_alias,
)

from torch_xla_pp.errors import PipelineError
from torch_xla_pp.graph import OtherMode, move_devices, replaced
from torch_xla_pp.phases import phase

__all__ = [
    "SPLIT_MARK",
    "Pipe",
    "move_factories_to",
    "noting_code",
    "trace",
    "trace_and_split",
]

SPLIT_MARK = aten_pipe_split_alias


def _import_quietly() -> None:
    """Import the modules of tracing, which warn of CUDA on hosts without a GPU."""
    logger = logging.getLogger("torch.utils.cpp_extension")
    before, logger.disabled = logger.disabled, True
    importlib.import_module("torch.utils.cpp_extension")
    logger.disabled = before


class _Chain(torch.nn.Module):
    """The modules of a `Sequential`, under their names there.

    Upstream treats a model that is itself a `Sequential` as a function, and then does
    not find its modules; one inside a model is fine. This can go when upstream is
    fixed.
    """

    def __init__(self, module: torch.nn.Sequential) -> None:
        super().__init__()
        self._modules = dict(module._modules)
        self.training = module.training

    def forward(self, value: Any) -> Any:
        """Call one module after the other."""
        for module in self._modules.values():
            if module is not None:
                value = module(value)
        return value


def _traceable(module: torch.nn.Module) -> torch.nn.Module:
    """Return a module that upstream can trace in place of a model."""
    has_hooks = bool(module._forward_hooks or module._forward_pre_hooks)
    if type(module) is torch.nn.Sequential and not has_hooks:
        return _Chain(module)
    return module


@contextlib.contextmanager
def noting_code() -> Iterator[list[CodeType]]:
    """Note the code of the functions that are traced in the block.

    The tracer keeps it in a context of its own, which is gone when it has ended.
    """
    codes: list[CodeType] = []
    begin = OutputGraph.__init__

    def begin_noted(graph: OutputGraph, *args: Any, **kwargs: Any) -> None:
        begin(graph, *args, **kwargs)
        codes.extend(graph.tracing_context.traced_code)
        graph.tracing_context.traced_code = codes

    with replaced(OutputGraph, "__init__", begin_noted):
        yield codes


@phase("trace")
def _exported(
    module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any] | None
) -> torch.export.ExportedProgram:
    """Trace a model with upstream's tracer, without guards that are code in C++.

    Nobody asks the guards of this trace. To compile code torch would try which
    instructions the processor has, in processes that each import torch.

    Raises:
        PipelineError: The model cannot be traced; it says why, and where.
    """
    try:
        with torch._dynamo.config.patch(enable_cpp_symbolic_shape_guards=False):
            return Pipe._trace_with_export(_traceable(module), args, kwargs)
    except RuntimeError as error:
        # Upstream's text is the same for all causes.
        why = error.__cause__ or error
        text = textwrap.indent(f"{type(why).__name__}: {why}".strip(), "  ")
        raise PipelineError(
            "trace: expected a model that torch.export traces as one graph, got one "
            f"that it does not:\n{text}\nTake control flow that depends on values, and "
            "attributes that a forward writes, out of the model (numbers that change "
            "belong into buffers), or cut the stages by hand with PipelineStage."
        ) from why


def trace(
    module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any] | None
) -> fx.GraphModule:
    """Trace a model with upstream's tracer, to the graph that a split policy gets."""
    _import_quietly()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return _exported(module, args, kwargs).module(check_guards=False)


def trace_and_split(
    module: torch.nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any] | None,
    split_spec: dict[str, SplitPoint],
    policy: Callable[[fx.GraphModule], fx.GraphModule],
) -> Pipe:
    """Trace a model with upstream's tracer and cut it where `policy` puts marks.

    As upstream's `pipeline`, but it takes both split points and a policy, undoes its
    changes to `module`, and finds each parameter by the one name that the trace has for
    it: upstream chooses among several names of a parameter by the order of a set, which
    may give one that the stage lacks. Warnings of upstream on its own internals are
    left out.
    """
    _import_quietly()
    with warnings.catch_warnings(), _annotated(module, split_spec):
        warnings.simplefilter("ignore")
        program = _exported(module, args, kwargs)
        traced = program.module(check_guards=False)
        # Upstream takes the program apart again, and makes all graphs anew.
        with replaced(program, "module", lambda **_: traced):
            pipe: Pipe = Pipe._from_traced(
                traced,
                program,
                MultiUseParameterConfig.REPLICATE,
                split_policy=policy,
            )
        return pipe


@contextlib.contextmanager
def _annotated(
    module: torch.nn.Module, split_spec: dict[str, SplitPoint]
) -> Iterator[None]:
    """Let the submodules at split points leave marks when they are traced."""
    submodules = [module.get_submodule(name) for name in split_spec]
    before = [(sub, sub.__dict__.get("forward")) for sub in submodules]
    annotate_split_points(module, split_spec)
    try:
        yield
    finally:
        for submodule, forward in before:
            for name in ("forward", "_orig_forward"):
                submodule.__dict__.pop(name, None)
            if forward is not None:
                submodule.forward = forward


def move_factories_to(module: torch.nn.Module, device: torch.device) -> None:
    """Let a traced module and its parts make and move values on `device`.

    The trace has the device of the traced model built in.
    """
    if not isinstance(module, fx.GraphModule):
        return
    for part in _parts_of(module):
        # Parts of a traced module that are called have a graph module beside them.
        ran = vars(part).get("graph_module", part)
        if isinstance(ran, fx.GraphModule):
            move_devices(ran, device)


def _parts_of(module: torch.nn.Module) -> Iterator[torch.nn.Module]:
    """Yield a stage's parts, with those of its graphs for other modes."""
    yield from module.modules()
    for hidden in vars(module).values():
        for part in vars(hidden).values() if isinstance(hidden, OtherMode) else ():
            if isinstance(part, torch.nn.Module):
                yield from part.modules()
