"""Traced stages that can be trained and evaluated, as the model that was traced can.

A trace has the mode of its model built in: whether dropout drops, what a batch norm
normalizes by, and all that Python chose by `training`. A model that reads `training` is
therefore traced once in each mode, and a stage has a *graph* for each over the same
parameters and buffers. The `training` flags of the stage's modules, which `train()`
and `eval()` set, tell which one counts.
"""

import contextlib
import inspect
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from functools import partial
from types import BuiltinFunctionType, CellType, CodeType, FunctionType
from typing import Any

import torch
from torch import fx, nn
from torch.nn import functional

from torch_xla_pp.errors import PipelineError, PlanError

_KEY = "torch_xla_pp_modes"
# A part of stages of models whose modules were in different modes when traced.
_MIXED = "mixed_mode"


@dataclass(eq=False, slots=True)
class _Modes:
    """The graphs of a stage, by mode.

    Args:
        parts: The modules whose flags count.
        graphs: Flags of the parts → graph.
        current: Flags of the graph that the stage has now.
        reason: Why there is no graph for other flags.
    """

    parts: tuple[nn.Module, ...]
    graphs: dict[tuple[bool, ...], fx.Graph] = field(default_factory=dict)
    current: tuple[bool, ...] = ()
    reason: str = ""

    def flags(self) -> tuple[bool, ...]:
        return tuple([part.training for part in self.parts])


@contextlib.contextmanager
def in_mode(module: nn.Module, training: bool) -> Iterator[None]:
    """Let a module be in another mode for a while, with all of its parts."""
    before = [(part, part.training) for part in module.modules()]
    module.train(training)
    try:
        yield
    finally:
        for part, flag in before:
            part.training = flag


def has_mixed_mode(module: nn.Module) -> bool:
    """Return whether parts of a module are in different modes."""
    return len({part.training for part in module.modules()}) > 1


def begin_modes(stage: fx.GraphModule, model: nn.Module, *, is_switched: bool) -> None:
    """Give a stage the flags of the model that it was traced from.

    Args:
        stage: The stage's module; its graph counts for these flags.
        model: The model.
        is_switched: Whether the model behaves differently in other modes.
    """
    flags = {name: part.training for name, part in model.named_modules()}
    for name, part in stage.named_modules():
        part.training = flags.get(name, model.training)
    if has_mixed_mode(model):
        stage.add_module(_MIXED, nn.Module())
        stage.get_submodule(_MIXED).training = not model.training
    modes = _Modes(tuple(stage.modules()))
    modes.current = modes.flags()
    modes.graphs[modes.current] = stage.graph
    if not is_switched:
        for flag in (False, True):
            modes.graphs[(flag,) * len(modes.parts)] = stage.graph
    stage.meta[_KEY] = modes


class OtherMode(nn.Module):
    """The parts of a graph for another mode, out of the module's sight.

    They are attributes, not submodules: their tensors are those of the stage, which
    lists them once.
    """


def add_mode(
    stage: fx.GraphModule,
    other: fx.GraphModule,
    names: Collection[str],
    *,
    training: bool,
) -> None:
    """Add the graph of the same stage of a model in another mode.

    Parameters and buffers of the same name are shared.

    Args:
        stage: The stage's module.
        other: What it is in the other mode.
        names: Names of the model's parameters and buffers. A trace of a model without
            memory has objects of its own for them.
        training: Which mode the other one is.

    Raises:
        PlanError: Parts of the same name have different constants.
    """
    modes: _Modes = stage.meta[_KEY]
    hidden = OtherMode()
    prefix = "in_training" if training else "in_evaluation"
    for node in other.graph.nodes:
        if node.op not in ("get_attr", "call_module"):
            continue
        value, own = _item(other, node.target), _item(stage, node.target)
        if isinstance(value, nn.Module):
            first = str(node.target).partition(".")[0]
            vars(hidden)[first] = getattr(other, first)
            node.target = f"{prefix}.{node.target}"
        elif own is None:
            _put(stage, node.target, value)
        elif own is not value and node.target not in names:
            node.target = f"{str(node.target).replace('.', '_')}_{prefix}"
            _put(stage, node.target, value)
    for name, part in other.named_modules():
        if name:
            _share_tensors(stage, name, part, names)
    vars(stage)[prefix] = hidden
    modes.graphs[(training,) * len(modes.parts)] = other.graph


def _share_tensors(
    stage: nn.Module, name: str, part: nn.Module, names: Collection[str]
) -> None:
    """Let a part share the tensors of the stage's part, also when they are replaced."""
    if not part._parameters and not part._buffers:
        return
    own = _item(stage, name)
    if own is None:
        own = nn.Module()
        _put(stage, name, own)
    for attribute in ("_parameters", "_buffers"):
        ours, theirs = getattr(own, attribute), getattr(part, attribute)
        for key, value in theirs.items():
            is_known = f"{name}.{key}" in names
            if ours.setdefault(key, value) is not value and not is_known:
                raise PlanError(f"{name}.{key} has another value in this mode")
        setattr(part, attribute, ours)
    own._non_persistent_buffers_set |= part._non_persistent_buffers_set  # type: ignore[union-attr]


def refuse_modes(stage: fx.GraphModule, reason: str) -> None:
    """Say why a stage has no graph for other modes."""
    stage.meta[_KEY].reason = reason


def follow_mode(module: Any) -> None:
    """Let a stage have the graph for its mode; takes some µs if nothing changed.

    Raises:
        PipelineError: There is none.
    """
    modes: _Modes | None = getattr(module, "meta", {}).get(_KEY)
    if modes is None or (flags := modes.flags()) == modes.current:
        return
    if flags not in modes.graphs:
        raise PipelineError(
            "traced stage: expected its modules in the mode that they were traced in, "
            f"or all in training or evaluation mode, got {_shown(module, modes)}. "
            f"{modes.reason or 'Call train() or eval() of the whole stage'}, or set "
            "the modes before pipeline, or build the stage by hand."
        )
    modes.current = flags
    module.graph = modes.graphs[flags]


def for_each_mode(module: Any, change: Callable[[nn.Module], None]) -> None:
    """Change a stage's graph, in all modes."""
    modes: _Modes | None = getattr(module, "meta", {}).get(_KEY)
    if modes is None:
        change(module)
        return
    for graph in {id(g): g for g in modes.graphs.values()}.values():
        module.graph = graph
        change(module)
    module.graph = modes.graphs[modes.current]


def _shown(module: nn.Module, modes: _Modes) -> str:
    names = {id(part): name for name, part in module.named_modules()}
    flags = modes.flags()
    if len(set(flags)) == 1:
        return "training mode" if flags[0] else "evaluation mode"
    found = [
        f"{names.get(id(part), '') or 'the stage'} in "
        f"{'training' if part.training else 'evaluation'}"
        for part, before in zip(modes.parts, modes.current, strict=True)
        if part.training != before
    ]
    return ", ".join(found)


def _item(module: nn.Module, target: str) -> torch.Tensor | nn.Module | None:
    """Return what a graph reads of a module, None if it has nothing there."""
    value: object = module
    # Names of submodules may have dots.
    for name in str(target).split("."):
        value = getattr(value, name, None)
    return value if isinstance(value, (torch.Tensor, nn.Module)) else None


def _put(module: Any, target: str, value: torch.Tensor | nn.Module | None) -> None:
    path, _, key = target.rpartition(".")
    for name in path.split(".") if path else []:
        if getattr(module, name, None) is None:
            module.add_module(name, nn.Module())
        module = getattr(module, name)
    if isinstance(value, nn.Parameter):
        module.register_parameter(key, value)
    elif isinstance(value, torch.Tensor):
        module.register_buffer(key, value, persistent=False)
    else:
        module.add_module(key, value)


def reads_training(module: nn.Module) -> bool:
    """Return whether a module may behave differently in another mode.

    Told by the code of its parts and of the functions that this names.
    """
    seen: set[CodeType] = set()
    known: set[type] = set()
    for part in module.modules():
        own = [x for x in vars(part).values() if callable(x)]
        own = [x for x in own if not isinstance(x, (nn.Module, torch.Tensor, type))]
        if any(_reads_training(value, seen) for value in own):
            return True
        for cls in type(part).__mro__:
            if cls in (nn.Module, fx.GraphModule) or cls in known:
                continue
            known.add(cls)
            if any(_reads_training(value, seen) for value in vars(cls).values()):
                return True
    return False


def _reads_training(value: Any, seen: set[CodeType]) -> bool:
    """Return whether a function names `training`; True for what is not known."""
    value = inspect.unwrap(value) if callable(value) else value
    for name in ("fget", "__func__", "func"):
        value = getattr(value, name, value)
    if not isinstance(value, FunctionType):
        is_known = not callable(value) or isinstance(value, (BuiltinFunctionType, type))
        return not is_known
    if value.__code__ in seen or value.__module__ == functional.__name__:
        return False
    seen.add(value.__code__)
    names = _names_in(value.__code__)
    if "training" in names:
        return True
    found = [value.__globals__.get(name) for name in names]
    found += [cell.cell_contents for cell in value.__closure__ or () if is_set(cell)]
    return any(
        _reads_training(x, seen)
        for x in found
        if isinstance(x, (FunctionType, partial))
    )


def _names_in(code: CodeType) -> set[str]:
    names = {*code.co_names, *(x for x in code.co_consts if isinstance(x, str))}
    return names.union(
        *(_names_in(x) for x in code.co_consts if isinstance(x, CodeType))
    )


def is_set(cell: CellType) -> bool:
    """Return whether a closure's cell holds something."""
    try:
        cell.cell_contents  # noqa: B018  # an empty cell raises
    except ValueError:
        return False
    return True
