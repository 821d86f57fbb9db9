"""The nodes of a traced graph that write into tensors, and the nodes that this binds.

A traced graph may write in place: into buffers, and into activations that other nodes
have views of. Its edges do not show that, so before nodes are moved to stages the
writes are made explicit here.

Terms: the *root* of a node is the node that owns its memory. An *access* of a root is
an op that reads or writes the memory through any view of it.
"""

import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

# Their schemas do not show that in training they update running statistics.
_STATISTICS = {
    torch.ops.aten.batch_norm.default: ((3, 4), 5),
    torch.ops.aten.instance_norm.default: ((3, 4), 5),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Written:
    """Memory that is written in place.

    Args:
        root: The node that owns it.
        accesses: The ops up to the last write; they must run in one stage.
        readers: Ops that read it after the last write, through views made before it.
    """

    root: fx.Node
    accesses: tuple[fx.Node, ...]
    readers: tuple[fx.Node, ...]

    @property
    def is_buffer(self) -> bool:
        """Return whether the memory belongs to the model."""
        return self.root.op == "get_attr"

    @property
    def bound(self) -> tuple[fx.Node, ...]:
        """Return the ops that must run in one stage.

        Every stage has its own copy of a buffer. An activation is sent after the stage
        that makes it, with all writes to it.
        """
        return self.accesses + self.readers if self.is_buffer else self.accesses


def name_writes(graph: fx.Graph) -> None:
    """Let nodes that read a tensor after a write use the write's result.

    The data dependency is then an edge of the graph. Views that were made before the
    write are left as they are, see `written_memory`.
    """
    for node in graph.nodes:
        for target in _targets(node):
            if _alias_of(node) is not target:
                continue
            for user in list(target.users):
                if user > node:
                    user.replace_input_with(target, node)


def written_memory(graph: fx.Graph, marks: Sequence[Any]) -> list[Written]:
    """Return the memory that a graph writes in place, after `name_writes`.

    Nodes whose target is one of `marks` are not accesses. A node that reads the result
    of the last write sees the right value in any stage, and is not an access either.
    """
    roots = _roots(graph)
    last_write: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        for target in _targets(node):
            last_write[roots[target]] = node
    found = []
    for root, write in last_write.items():
        ops = [n for n in _users(graph, roots, root) if n.target not in marks]
        early = [op for op in ops if op <= write]
        late = [op for op in ops if op > write]
        old = [
            op
            for op in late
            if any(roots[x] is root and x < write for x in op.all_input_nodes)
        ]
        found.append(Written(root=root, accesses=tuple(early), readers=tuple(old)))
    return found


def _users(
    graph: fx.Graph, roots: dict[fx.Node, fx.Node], root: fx.Node
) -> Iterator[fx.Node]:
    """Yield the ops that use memory through any view of it."""
    for node in graph.nodes:
        is_op = node.op not in ("placeholder", "get_attr", "output")
        if is_op and any(roots[x] is root for x in node.all_input_nodes):
            yield node


def _roots(graph: fx.Graph) -> dict[fx.Node, fx.Node]:
    roots: dict[fx.Node, fx.Node] = {}
    attributes: dict[object, fx.Node] = {}
    for node in graph.nodes:
        source = _alias_of(node)
        if node.op == "get_attr":
            roots[node] = attributes.setdefault(node.target, node)
        else:
            roots[node] = node if source is None else roots[source]
    return roots


def _alias_of(node: fx.Node) -> fx.Node | None:
    """Return the node whose memory a node's result shares, None if it has its own."""
    if is_getitem(node):
        source = node.args[0]
        return source if isinstance(source, fx.Node) and _alias_of(source) else None
    schema = _schema(node)
    if schema is None:
        return None
    results = [x.alias_info.before_set for x in schema.returns if x.alias_info]
    for argument, value in _arguments(node, schema):
        if argument.alias_info and any(
            argument.alias_info.before_set & r for r in results
        ):
            return value
    return None


def _targets(node: fx.Node) -> list[fx.Node]:
    """Return the nodes into whose memory a node writes."""
    schema = _schema(node)
    if schema is None:
        return []
    found = [
        value
        for argument, value in _arguments(node, schema)
        if argument.alias_info and argument.alias_info.is_write
    ]
    if node.target in _STATISTICS:
        positions, flag = _STATISTICS[node.target]
        if len(node.args) > flag and node.args[flag]:
            values = [node.args[i] for i in positions]
            found += [value for value in values if isinstance(value, fx.Node)]
    return found


def is_getitem(node: fx.Node) -> bool:
    """Return whether a node takes one item of another's result."""
    return node.target is operator.getitem


def is_view(node: fx.Node) -> bool:
    """Return whether a node's result may share memory, or is an item of another's."""
    return is_getitem(node) or _alias_of(node) is not None


def _schema(node: fx.Node) -> torch._C.FunctionSchema | None:
    if node.op != "call_function":
        return None
    return getattr(node.target, "_schema", None)


def _arguments(
    node: fx.Node, schema: torch._C.FunctionSchema
) -> Iterator[tuple[torch._C.Argument, fx.Node]]:
    """Yield the nodes among a call's arguments, with what the schema says of them."""
    for position, argument in enumerate(schema.arguments):
        given = node.args[position : position + 1]
        value = given[0] if given else node.kwargs.get(argument.name)
        values = value if isinstance(value, (list, tuple)) else [value]
        for item in values:
            if isinstance(item, fx.Node):
                yield argument, item
