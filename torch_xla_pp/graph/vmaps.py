"""The regions of `torch.vmap` in a traced graph: ops on single elements.

The only file that touches torch.vmap's insides.
"""

import contextlib
import operator
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex
from torch._functorch import predispatch
from torch.fx.experimental.proxy_tensor import make_fx

from torch_xla_pp.graph.patches import replaced
from torch_xla_pp.graph.regions import inline

_ENTER = predispatch._vmap_increment_nesting
_LEAVE = predispatch._vmap_decrement_nesting
_LOAD = predispatch.lazy_load_decompositions
_STACK = "nn_module_stack"


@contextlib.contextmanager
def indexing_by_tensors() -> Iterator[None]:
    """Let torch.export trace the indexing of tensors by elements of others, under vmap.

    Attention masks are made in this way, e.g. by transformers, under torch's
    `TransformGetItemToIndex`. It waits for `Tensor.__getitem__`, but torch 2.9 calls it
    `operator.getitem` in a strict export (`BuiltinVariable.call_function` of dynamo);
    this can go when that is fixed.
    """
    with replaced(TransformGetItemToIndex, "__torch_function__", _index):
        yield


def _index(
    self: Any, function: Any, types: Any, args: Any = (), kwargs: Any = None
) -> Any:
    if function in (operator.getitem, Tensor.__getitem__):
        value, index = args
        indices = list(index) if isinstance(index, (tuple, list)) else [index]
        if all(isinstance(x, Tensor) for x in indices):
            return torch.ops.aten.index(value, indices)
    return function(*args, **(kwargs or {}))


def flatten_vmaps(traced: fx.GraphModule, marks: Sequence[Any]) -> None:
    """Replace vmapped ops by ops on whole batches, where marks may come between them.

    An exported graph keeps `torch.vmap` as a region of ops on single elements, which
    has to stay in one piece. A region that no mark can cut is left alone, unless its
    results are not floats: each stage may compute such a mask itself.
    """
    graph = traced.graph
    _join(reversed(graph.nodes), _ENTER)
    _join(graph.nodes, _LEAVE)
    yields, _split_mark = marks
    has_yields = any(node.target is yields for node in graph.nodes)
    for region in _regions(graph):
        has_mark = has_yields or any(node.target in marks for node in region)
        if has_mark or not any(map(_is_float, _results(region))):
            _flatten(traced, region)
            graph.lint()  # type: ignore[no-untyped-call]


def _join(nodes: Iterable[fx.Node], target: object) -> None:
    """Put each op of a kind into the submodule of the op before it.

    The trace puts those that begin and end a vmap into the model itself, and a
    submodule that they cut in two would lose its first part.
    """
    stack = None
    for node in nodes:
        if node.target is target and stack:
            node.meta[_STACK] = stack
        stack = node.meta.get(_STACK, stack)


def _regions(graph: fx.Graph) -> list[list[fx.Node]]:
    """Return the nodes of each outermost vmap, with those that begin and end it."""
    regions: list[list[fx.Node]] = []
    depth = 0
    for node in graph.nodes:
        if node.target is _ENTER:
            if depth == 0:
                regions.append([])
            depth += 1
        if depth:
            regions[-1].append(node)
        if node.target is _LEAVE:
            depth -= 1
    return regions


def _results(region: Sequence[fx.Node]) -> list[fx.Node]:
    """Return the nodes of a region that are used outside of it."""
    inside = set(region)
    return [node for node in region if any(u not in inside for u in node.users)]


def _is_float(node: fx.Node) -> bool:
    value = node.meta["val"]
    return bool(value.is_floating_point() or value.is_complex())


def _flatten(traced: fx.GraphModule, region: Sequence[fx.Node]) -> None:
    graph = traced.graph
    inside = set(region)
    inputs = list(
        dict.fromkeys(x for n in region for x in n.all_input_nodes if x not in inside)
    )
    outputs = _results(region)
    body = _body_of(traced, region, inputs, outputs)
    flat = make_fx(body)(*(node.meta["val"] for node in inputs))
    flat.graph.eliminate_dead_code()
    if flat.graph.find_nodes(op="get_attr"):
        return
    results = inline(traced, flat, region[0], inputs)
    for node, result in zip(outputs, results, strict=True):
        node.replace_all_uses_with(result)
    for node in reversed(region):
        graph.erase_node(node)


def _body_of(
    traced: fx.GraphModule,
    region: Sequence[fx.Node],
    inputs: Sequence[fx.Node],
    outputs: Sequence[fx.Node],
) -> fx.GraphModule:
    """Return a module of a region's ops."""
    graph = fx.Graph()
    copies = {node: graph.placeholder(node.name) for node in inputs}
    graph.call_function(_LOAD)
    for node in region:
        copies[node] = graph.node_copy(node, lambda x: copies[x])
    graph.output([copies[node] for node in outputs])
    return fx.GraphModule(traced, graph)
