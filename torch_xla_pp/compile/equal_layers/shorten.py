"""The graph of a stage's forward, without most of its equal layers."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor, fx, nn
from torch.export.unflatten import InterpreterModule
from torch.nn.modules.module import _has_any_global_hook

from torch_xla_pp.compile.equal_layers.runs import (
    IrregularError,
    LayerRun,
    LayerValue,
    copy_reading,
    find_run,
    held_by_layers,
    in_groups,
    reads_of,
    usual_step,
)
from torch_xla_pp.graph import call_as, item_of, pinned_axes, shard_in_graph

LAST_FIRST = 1
"""The last one of the layers that stay in the beginning; layers that are left out come
behind it, and then those that stay in the end."""

_KEPT = 5
_FEWEST_LEFT_OUT = 2


class Shortened(NamedTuple):
    """A stage's forward without some layers.

    Attributes:
        graph: Its operations; parameters and buffers are read by their names in the
            stage's module.
        held: The parameters and buffers of all layers, by name.
        num_left_out: How many layers are missing.
    """

    graph: fx.Graph
    held: Mapping[str, LayerValue]
    num_left_out: int


def shorten(module: nn.Module) -> Shortened | None:
    """Leave out most of the equal layers of a traced stage.

    Where layers of several kinds alternate, a layer here is one of each.

    Args:
        module: The stage's module.

    Returns:
        None if it is not traced, or has few layers that are equal.
    """
    if not isinstance(module, fx.GraphModule):
        return None
    names = _names(module)
    held = held_by_layers(names.values())
    num_layers = len({x.layer for x in held.values()})
    if num_layers < _KEPT + _FEWEST_LEFT_OUT:
        return None
    try:
        flat = _Flat(module).graph
    except IrregularError:
        return None
    values = {
        node: item_of(module, str(node.target))
        for node in flat.find_nodes(op="get_attr")
    }
    for size in range(1, num_layers // (_KEPT + _FEWEST_LEFT_OUT) + 1):
        grouped = in_groups(held, size)
        of_layers = {
            node: _Owned(grouped[names[id(value)]], _look(value))
            for node, value in values.items()
            if names.get(id(value)) in grouped
        }
        found = _shortened(flat, of_layers)
        if found is not None:
            graph, num_left_out = found
            call_as(graph, module.graph)
            return Shortened(graph, grouped, num_left_out)
    return None


class _Owned(NamedTuple):
    """A parameter or buffer of a layer, and what it looks like."""

    value: LayerValue
    look: tuple[Any, ...]


def _shortened(
    flat: fx.Graph, of_layers: Mapping[fx.Node, _Owned]
) -> tuple[fx.Graph, int] | None:
    """Return a graph without some layers, and how many.

    Args:
        flat: The graph of all.
        of_layers: What reads parameters and buffers of layers in it.
    """
    ops = [node for node in flat.nodes if node.op == "call_function"]
    places = {op: place for place, op in enumerate(ops)}
    first: dict[int, int] = {}
    for place, op in enumerate(ops):
        for node in op.all_input_nodes:
            if node in of_layers:
                first.setdefault(of_layers[node].value.layer, place)
    near, period = usual_step([first[layer] for layer in sorted(first)])

    def repeats(one: fx.Node, other: fx.Node) -> bool:
        if one in places and other in places:
            return places[other] - places[one] == period
        if one not in of_layers or other not in of_layers:
            return False
        (name, layer), look = of_layers[one]
        return of_layers[other] == _Owned(LayerValue(name, layer + 1), look)

    run = find_run(ops, period, near, repeats)
    if run is None or run.count < _KEPT + _FEWEST_LEFT_OUT:
        return None
    num_left_out = run.count - _KEPT
    graph = _without(flat, ops, run, num_left_out)
    return None if graph is None else (graph, num_left_out)


def _names(module: nn.Module) -> dict[int, str]:
    """Return the id of each parameter and buffer that has one name → the name."""
    found: dict[int, str] = {}
    several = set()
    for named in (module.named_parameters, module.named_buffers):
        for name, value in named(remove_duplicate=False):
            if found.setdefault(id(value), name) != name:
                several.add(id(value))
    return {key: name for key, name in found.items() if key not in several}


def _look(value: Any) -> tuple[Any, ...]:
    is_trained = isinstance(value, nn.Parameter) and value.requires_grad
    return type(value), value.shape, value.dtype, value.stride(), is_trained


class _Flat:
    """The operations of a module and its parts, in one graph.

    Args:
        module: The module.

    Attributes:
        graph: The operations.

    Raises:
        IrregularError: A call of the module does more.
    """

    def __init__(self, module: fx.GraphModule) -> None:
        if _has_any_global_hook():  # type: ignore[no-untyped-call]
            raise IrregularError
        self.graph = fx.Graph()
        self._read: dict[str, fx.Node] = {}
        inputs = [
            self.graph.node_copy(node)
            for node in module.graph.find_nodes(op="placeholder")
        ]
        self.graph.output(self._inline(module, "", inputs))

    def _inline(self, module: nn.Module, path: str, inputs: Sequence[Any]) -> Any:
        """Copy what a part does; return its results."""
        given = iter(inputs)
        copies: dict[fx.Node, Any] = {}
        graph: Any = module.graph
        for node in graph.nodes:
            if node.op == "placeholder":
                copies[node] = next(given)
            elif node.op == "get_attr":
                copies[node] = self._attribute(f"{path}{node.target}", node)
            elif node.op == "call_module":
                copies[node] = self._called(module, path, node, copies)
            elif node.op == "output":
                return fx.map_arg(node.args[0], copies.__getitem__)
            else:
                copies[node] = self.graph.node_copy(node, copies.__getitem__)
        return None

    def _attribute(self, target: str, node: fx.Node) -> fx.Node:
        if target not in self._read:
            self._read[target] = self.graph.node_copy(node)
            self._read[target].target = target
        return self._read[target]

    def _called(
        self,
        module: nn.Module,
        path: str,
        node: fx.Node,
        copies: Mapping[fx.Node, Any],
    ) -> Any:
        target = str(node.target)
        part = item_of(module, target)
        hooks = _hooks(part) if isinstance(part, nn.Module) else []
        pins = [axes for axes in map(pinned_axes, hooks) if axes is not None]
        # What is interpreted takes and returns what its graph does.
        is_other = node.kwargs or len(pins) < len(hooks)
        if not isinstance(part, InterpreterModule) or is_other:
            raise IrregularError
        args = fx.map_arg(node.args, copies.__getitem__)
        result = self._inline(part, f"{path}{target}.", args)
        for axes in pins:
            look = result.meta.get("val") if isinstance(result, fx.Node) else None
            if not isinstance(look, Tensor) or look.dim() != len(axes):
                raise IrregularError
            result = self.graph.call_function(shard_in_graph, (result, *axes))
            result.meta["val"] = look
        return result


def _hooks(module: nn.Module) -> list[Any]:
    kinds = (
        module._forward_pre_hooks,
        module._forward_hooks,
        module._backward_pre_hooks,
        module._backward_hooks,
    )
    return [hook for hooks in kinds for hook in hooks.values()]


def _without(
    flat: fx.Graph, ops: Sequence[fx.Node], run: LayerRun, count: int
) -> fx.Graph | None:
    """Copy a graph without some layers; None if anything else needs these."""
    places = {op: place for place, op in enumerate(ops)}
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}

    def instead(read: fx.Node, before: fx.Node) -> fx.Node:
        """Return what a layer reads that comes behind those that are left out."""
        if read is before or read not in places:
            return read
        layer = run.layer_of(places[read])
        if layer > LAST_FIRST + count:
            return read
        # It is of as many layers before, of those that are left.
        return ops[run.place_in(places[read], layer - count)]

    for node in flat.nodes:
        place = places.get(node, -1)
        layer = run.layer_of(place) if run.start <= place < run.end else 0
        if LAST_FIRST < layer <= LAST_FIRST + count:
            continue
        reads = reads_of(node)
        if layer > LAST_FIRST:
            reads = list(map(instead, reads, reads_of(ops[place - run.period])))
        if not copies.keys() >= set(reads):
            return None
        copies[node] = copy_reading(graph, node, [copies[read] for read in reads])
    return graph
