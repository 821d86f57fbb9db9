"""Traced stages that can be trained and evaluated, as the model that was traced can.

A trace has the mode of its model built in: whether dropout drops, what a batch norm
normalizes by, and every branch that Python took by `training`. A model that reads
`training` is therefore traced once in each mode, and a stage has a *graph* for each
over the same parameters and buffers. The `training` flags of the stage's modules, which
`train()` and `eval()` set, select the graph.
"""

import contextlib
import inspect
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from types import BuiltinFunctionType, CellType, CodeType, FunctionType
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn import functional

from torch_xla_pp.deferred import value_of
from torch_xla_pp.errors import PipelineError, PlanError

_KEY = "torch_xla_pp_modes"
# Marks stages of models whose modules were in different modes when traced.
_MIXED = "mixed_mode"
# A class that has its own may switch more than flags.
_SWITCHES = {"train", "eval"}


@dataclass(eq=False, slots=True)
class StageModes:
    """The graphs of a stage, by mode.

    Args:
        parts: The modules whose flags count.
        graphs: Flags of the parts → graph; first those of the model when it was traced.
        current: Flags of the present graph.
        reason: Why there is no graph for other flags.
        others: A graph, number of other shapes → the same graph for those shapes.
    """

    parts: tuple[nn.Module, ...]
    graphs: dict[tuple[bool, ...], fx.Graph] = field(default_factory=dict)
    current: tuple[bool, ...] = ()
    reason: str = ""
    others: dict[tuple[fx.Graph, int], fx.Graph] = field(default_factory=dict)

    def flags(self) -> tuple[bool, ...]:
        """Return the present flags of the parts."""
        return tuple([part.training for part in self.parts])

    @property
    def graph(self) -> fx.Graph:
        """Return the present graph of the stage."""
        return self.graphs[self.current]


def modes_of(stage: nn.Module) -> StageModes:
    """Return the graphs of a traced stage."""
    found: StageModes = stage.meta[_KEY]  # type: ignore[index,assignment]
    return found


@contextlib.contextmanager
def in_mode(module: nn.Module, training: bool) -> Iterator[None]:
    """Put a module and all of its parts into another mode for a while."""
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
    modes = StageModes(tuple(stage.modules()))
    modes.current = modes.flags()
    modes.graphs[modes.current] = stage.graph
    if not is_switched:
        for flag in (False, True):
            modes.graphs[(flag,) * len(modes.parts)] = stage.graph
    stage.meta[_KEY] = modes


class OtherMode(nn.Module):
    """The parts of a graph for another mode, hidden from the module.

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
        other: The same stage in the other mode.
        names: Names of the model's parameters and buffers. A trace of a model without
            memory has objects of its own for them.
        training: Whether the other mode is training.

    Raises:
        PlanError: Parts of the same name have different constants.
    """
    modes = modes_of(stage)
    hidden = OtherMode()
    prefix = "in_training" if training else "in_evaluation"
    for node in other.graph.nodes:
        if node.op not in ("get_attr", "call_module"):
            continue
        value, own = item_of(other, node.target), item_of(stage, node.target)
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
    """Let a part share the tensors of the stage's part, even when they are replaced."""
    if not part._parameters and not part._buffers:
        return
    own = item_of(stage, name)
    if own is None:
        own = nn.Module()
        _put(stage, name, own)
    for attribute in ("_parameters", "_buffers"):
        ours, theirs = getattr(own, attribute), getattr(part, attribute)
        for key, value in theirs.items():
            is_known = f"{name}.{key}" in names
            mine = ours.setdefault(key, value)
            if not is_known and not _are_equal(mine, value):
                raise PlanError(f"{name}.{key} has another value in this mode")
        setattr(part, attribute, ours)
    own._non_persistent_buffers_set |= part._non_persistent_buffers_set  # type: ignore[union-attr]


def _are_equal(first: Tensor | None, second: Tensor | None) -> bool:
    """Return whether constants of two traces have the same value."""
    if first is None or second is None or first is second:
        return first is second
    values = [value_of(x) if x.is_meta else x for x in (first, second)]
    if values[0] is None or values[1] is None or first.dtype != second.dtype:
        return False
    return torch.equal(values[0], values[1])


def refuse_modes(stage: fx.GraphModule, reason: str) -> None:
    """Note why a stage has no graph for other modes."""
    stage.meta[_KEY].reason = reason


def follow_mode(module: Any) -> None:
    """Give a stage the graph of its mode; takes some µs if nothing changed.

    Raises:
        PipelineError: There is none.
    """
    modes: StageModes | None = getattr(module, "meta", {}).get(_KEY)
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
    modes: StageModes | None = getattr(module, "meta", {}).get(_KEY)
    if modes is None:
        change(module)
        return
    for graph in {id(g): g for g in modes.graphs.values()}.values():
        module.graph = graph
        change(module)
    module.graph = modes.graphs[modes.current]


def _shown(module: nn.Module, modes: StageModes) -> str:
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


def item_of(module: nn.Module, target: str) -> torch.Tensor | nn.Module | None:
    """Return what a graph reads of a module by its target, None if it is not there."""
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


def reads_training(module: nn.Module, traced: Iterable[CodeType]) -> bool:
    """Return whether a module may behave differently in another mode.

    Judged by the code that ran when it was traced, that of its parts, which the tracer
    may have called as a whole, and that of functions that these name.

    Args:
        module: The module.
        traced: The code of functions that the tracer has gone through.
    """
    if any("training" in _names_in(code) for code in traced):
        return True
    seen: set[CodeType] = set()
    known: set[type] = set()
    for part in module.modules():
        own = [x for x in vars(part).values() if callable(x)]
        own = [x for x in own if not isinstance(x, (nn.Module, torch.Tensor, type))]
        if any(_reads_training(value, seen) for value in own):
            return True
        for cls in type(part).__mro__:
            if cls in (object, nn.Module, fx.GraphModule) or cls in known:
                continue
            known.add(cls)
            if not _SWITCHES.isdisjoint(vars(cls)):
                return True
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
