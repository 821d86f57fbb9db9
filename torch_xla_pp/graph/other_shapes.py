"""Graphs of a traced stage for other shapes than those of the model's example.

A trace has the shapes of its example built in. The model is traced again for others,
and a stage has a graph for each *number* of shapes, 0 for the example's, in each mode
that was asked for. All graphs use the stage's own parameters and buffers. The stage has
its graph for the example's shapes except while another one is compiled, so the values
that it reads do not depend on shapes.
"""

import contextlib
from collections.abc import Callable, Collection, Iterator

from torch import Tensor, fx, nn

from torch_xla_pp.errors import PlanError
from torch_xla_pp.graph.modes import OtherMode, item_of, modes_of
from torch_xla_pp.graph.ties import original_name


def has_shapes(stage: nn.Module, number: int) -> bool:
    """Return whether a stage has a graph for some shapes in its present mode."""
    return number == 0 or (modes_of(stage).graph, number) in modes_of(stage).others


def mode_to_trace(stage: nn.Module) -> bool | None:
    """Return the mode in which to trace the model for a stage's present mode.

    Returns:
        Whether it is training, None for the modes of its parts when it was traced.
    """
    modes = modes_of(stage)
    is_first = modes.graph is next(iter(modes.graphs.values()))
    return None if is_first else modes.current[0]


def add_shapes(
    stage: fx.GraphModule,
    other: fx.GraphModule,
    names: Collection[str],
    number: int,
    placed: Callable[[Tensor], Tensor],
) -> None:
    """Add the graph of the same stage of a model that was traced for other shapes.

    Args:
        stage: The stage's module.
        other: The same stage for these shapes, in the present mode.
        names: Names of the model's parameters and buffers, which the stage has.
        number: The number of the shapes.
        placed: Puts a constant of the trace on the devices.

    Raises:
        PlanError: The other one reads parameters or buffers that the stage lacks.
    """
    modes = modes_of(stage)
    prefix = f"for_shapes_{number}_{len(modes.others)}"
    hidden = OtherMode()
    missing = []
    for node in other.graph.nodes:
        if node.op not in ("get_attr", "call_module"):
            continue
        value, target = item_of(other, node.target), str(node.target)
        if isinstance(value, nn.Module):
            first = target.partition(".")[0]
            if first not in vars(hidden):
                part = vars(hidden)[first] = getattr(other, first)
                missing += _share(stage, first, part, names, placed)
            node.target = f"{prefix}.{target}"
        elif original_name(target) in names:
            own = _name_of(stage, target)
            missing += [target] if own is None else []
            node.target = own or target
        elif isinstance(value, Tensor):
            name = target.replace(".", "_")
            vars(hidden)[name] = placed(value)
            node.target = f"{prefix}.{name}"
    if missing:
        raise PlanError(
            f"it reads {', '.join(sorted(set(missing)))} there, which it does not with "
            "the example, so that no stage has it"
        )
    vars(stage)[prefix] = hidden
    modes.others[modes.graph, number] = other.graph


def _share(
    stage: nn.Module,
    first: str,
    part: nn.Module,
    names: Collection[str],
    placed: Callable[[Tensor], Tensor],
) -> list[str]:
    """Let a part of a graph share the stage's tensors; return names of missing ones.

    They are shared even after they are replaced. Tensors that are neither parameters
    nor buffers of the model become attributes.
    """
    missing = []
    for path, sub in part.named_modules(prefix=first):
        own = item_of(stage, path) or item_of(stage, original_name(path))
        for attribute in ("_parameters", "_buffers"):
            held = getattr(sub, attribute)
            ours = getattr(own, attribute, {})
            for key, value in held.items():
                if original_name(f"{path}.{key}") not in names:
                    vars(sub)[key] = None if value is None else placed(value)
                elif key not in ours:
                    missing.append(f"{path}.{key}")
            setattr(sub, attribute, ours)
    return missing


def _name_of(stage: nn.Module, name: str) -> str | None:
    """Return the stage's name of a tensor of the model, None if it does not have it.

    A submodule that is called twice has tensors of more names than one.
    """
    for own in (name, original_name(name)):
        if isinstance(item_of(stage, own), Tensor):
            return own
    return None


@contextlib.contextmanager
def in_shapes(stage: nn.Module, number: int) -> Iterator[None]:
    """Give a stage its graph for some shapes for a while."""
    if number == 0 or not isinstance(stage, fx.GraphModule):
        yield
        return
    modes = modes_of(stage)
    stage.graph = modes.others[modes.graph, number]
    try:
        yield
    finally:
        stage.graph = modes.graph


def inputs_in_shapes(stage: fx.GraphModule, number: int) -> list[Tensor] | None:
    """Return the inputs of a stage, by its placeholders; None if some are unknown."""
    graph = stage.graph
    if number:
        modes = modes_of(stage)
        graph = modes.others[modes.graph, number]
    nodes = [node for node in graph.nodes if node.op == "placeholder"]
    values = [node.meta.get("val") for node in nodes]
    tensors = [value for value in values if isinstance(value, Tensor)]
    return tensors if len(tensors) == len(values) else None
