"""The only place that touches private parts of torch 2.9's tracer and `Pipe`."""

import contextlib
import importlib
import logging
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import fx
from torch.distributed.pipelining import Pipe, SplitPoint
from torch.distributed.pipelining._IR import (
    MultiUseParameterConfig,
    _modify_graph_op_device,
    annotate_split_points,
    aten_pipe_split_alias,
)

__all__ = ["SPLIT_MARK", "Pipe", "move_factories_to", "trace", "trace_and_split"]

SPLIT_MARK = aten_pipe_split_alias


def _import_quietly() -> None:
    """Import what tracing does, which warns of CUDA on hosts without a GPU."""
    logger = logging.getLogger("torch.utils.cpp_extension")
    before, logger.disabled = logger.disabled, True
    importlib.import_module("torch.utils.cpp_extension")
    logger.disabled = before


class _Chain(torch.nn.Module):
    """The modules of a `Sequential`, under their names there.

    Upstream takes a model that is a `Sequential` itself for a function, whose modules
    it then does not find; one inside of a model is fine. This can go when it does.
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
    """Return what upstream can trace in place of a model."""
    has_hooks = bool(module._forward_hooks or module._forward_pre_hooks)
    if type(module) is torch.nn.Sequential and not has_hooks:
        return _Chain(module)
    return module


def trace(
    module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any] | None
) -> fx.GraphModule:
    """Trace a model with upstream's tracer; the policy of a split sees the same."""
    _import_quietly()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        program = Pipe._trace_with_export(_traceable(module), args, kwargs)
        return program.module(check_guards=False)


def trace_and_split(
    module: torch.nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any] | None,
    split_spec: dict[str, SplitPoint],
    policy: Callable[[fx.GraphModule], fx.GraphModule],
) -> Pipe:
    """Trace a model with upstream's tracer and cut it where `policy` puts marks.

    As upstream's `pipeline`, but it takes both split points and a policy, undoes its
    changes to `module`, and finds each parameter under the one name that the trace
    has for it: among several names of a parameter upstream takes one by the order of
    a set, which may be one that the stage lacks. Warnings of upstream on its own
    internals are left out.
    """
    _import_quietly()
    with warnings.catch_warnings(), _annotated(module, split_spec):
        warnings.simplefilter("ignore")
        program = Pipe._trace_with_export(_traceable(module), args, kwargs)
        pipe: Pipe = Pipe._from_traced(
            program.module(check_guards=False),
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
    """Let a traced module create its constants on `device`.

    The trace has the device of the traced model built in.
    """
    if isinstance(module, fx.GraphModule):
        _modify_graph_op_device(module, device)
