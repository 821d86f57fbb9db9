"""Parts of a traced graph that hold ops of their own: bodies of operators.

Only the top level of a graph can be cut into stages.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch._ops import OpOverload

from torch_xla_pp.errors import PlanError

_SET_GRAD = torch.ops.higher_order.wrap_with_set_grad_enabled
_AUTOCAST = torch.ops.higher_order.wrap_with_autocast


def inline_contexts(traced: fx.GraphModule) -> None:
    """Put the ops of `torch.no_grad` and disabled autocast blocks into the graph.

    An exported graph keeps such a block as a body of an operator. A block without
    gradients is replaced by detached values; autocast that is disabled for the host,
    where the model was traced, has no effect on the XLA device. Blocks that contain
    others are left alone.
    """
    for node in list(traced.graph.nodes):
        is_no_grad = node.target is _SET_GRAD and node.args[0] is False
        is_no_autocast = node.target is _AUTOCAST and node.args[2] is False
        if is_no_grad:
            _inline_body(traced, node, 1, detaches=True)
        elif is_no_autocast and node.args[0] != "xla":
            _inline_body(traced, node, 4, detaches=False)
    traced.graph.lint()  # type: ignore[no-untyped-call]


def _inline_body(
    traced: fx.GraphModule, node: fx.Node, at: int, *, detaches: bool
) -> None:
    """Replace the call of a body by its ops; the body is argument number `at`."""
    (name, *inputs) = [x for x in node.args[at:] if isinstance(x, fx.Node)]
    body = _attribute(traced, str(name.target))
    inline_contexts(body)
    if body.graph.find_nodes(op="get_attr"):
        return
    known = set(traced.graph.nodes)
    results = inline(traced, body, node, inputs)
    if detaches:
        for copied in [n for n in traced.graph.nodes if n not in known]:
            _detach_written(copied)
        results = [r if r in inputs else _detached(r, node) for r in results]
    for user in list(node.users):
        user.replace_all_uses_with(results[int(str(user.args[1]))])
        traced.graph.erase_node(user)
    traced.graph.erase_node(node)
    if not name.users:
        traced.graph.erase_node(name)


def _detached(value: fx.Node, before: fx.Node) -> fx.Node:
    with value.graph.inserting_before(before):
        result = value.graph.call_function(torch.ops.aten.detach.default, (value,))
    result.meta = dict(value.meta)
    return result


def _detach_written(node: fx.Node) -> None:
    """Let an operation in place, as on a buffer, write values without gradients."""
    if not isinstance(node.target, OpOverload) or not node.target._schema.is_mutable:
        return
    for argument, value in zip(node.target._schema.arguments, node.args, strict=False):
        if argument.alias_info is not None or not isinstance(value, fx.Node):
            continue
        if isinstance(value.meta.get("val"), Tensor):
            own = _detached(value, node)
            places = ("nn_module_stack", "stack_trace")
            own.meta |= {key: node.meta[key] for key in places if key in node.meta}
            node.replace_input_with(value, own)


def check_bodies(traced: fx.GraphModule, marks: Sequence[Any]) -> None:
    """Refuse operators with bodies, such as `torch.cond`, with or without marks inside.

    Raises:
        PlanError: There are some; all of them are named.
    """
    faults = []
    for node in traced.graph.nodes:
        bodies = _bodies(traced, node)
        if any(_holds(body, marks) for body in bodies):
            faults.append(
                "pipeline: expected split marks and pipeline_yield at the top level of "
                f"the model's forward, got one inside a branch or body of {node.name}"
                f" ({node.target}). A branch cannot be cut into stages: mark the "
                "stage before or after it."
            )
        elif bodies:
            faults.append(
                f"pipeline: {node.name} ({node.target}) is control flow: expected "
                "operations on tensors only, which is what torch's pipelining can "
                "split. Write it with torch.where, or make the stages by hand."
            )
    if faults:
        raise PlanError("\n".join(faults))


def _bodies(traced: fx.GraphModule, node: fx.Node) -> list[fx.GraphModule]:
    if node.op != "call_function":
        return []
    names = [str(x.target) for x in node.all_input_nodes if x.op == "get_attr"]
    found = [_attribute(traced, name) for name in names]
    return [body for body in found if isinstance(body, fx.GraphModule)]


def _attribute(module: Any, name: str) -> Any:
    for part in name.split("."):
        module = getattr(module, part)
    return module


def _holds(body: fx.GraphModule, marks: Sequence[Any]) -> bool:
    """Return whether a body or a body within it has marks."""
    graphs = [sub.graph for sub in body.modules() if isinstance(sub, fx.GraphModule)]
    return any(node.target in marks for graph in graphs for node in graph.nodes)


def inline(
    traced: fx.GraphModule,
    body: fx.GraphModule,
    place: fx.Node,
    inputs: Sequence[fx.Node],
) -> list[fx.Node]:
    """Copy the ops of a body in front of `place`; return its results."""
    given = iter(inputs)
    copies: dict[fx.Node, fx.Node] = {}
    for node in body.graph.nodes:
        if node.op == "placeholder":
            copies[node] = next(given)
        elif node.op not in ("output", "get_attr"):
            with traced.graph.inserting_before(place):
                copies[node] = traced.graph.node_copy(node, lambda x: copies[x])
            for key in ("nn_module_stack", "stack_trace"):
                if key not in node.meta and key in place.meta:
                    copies[node].meta[key] = place.meta[key]
    (output,) = body.graph.find_nodes(op="output")
    return [copies[x] for x in output.args[0]]
