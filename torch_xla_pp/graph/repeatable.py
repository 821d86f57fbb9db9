"""Values that a model computes from constants alone, such as a causal mask."""

from collections.abc import Mapping, Sequence

import torch
from torch import fx, nn
from torch._ops import OpOverload

from torch_xla_pp.graph.mutation import Written, is_getitem

# It writes nothing: torch.export adds it after every constant.
_DETACH = torch.ops.aten.detach_.default


def copy_constants(
    traced: fx.GraphModule, written: Sequence[Written], stages: Mapping[fx.Node, int]
) -> dict[fx.Node, int]:
    """Let each stage compute the constants that it uses, so that none is sent.

    Parameters are not constants: a stage that used one here would have to take part in
    its gradient. Random numbers are not constants either.

    Args:
        traced: The model, changed in place.
        written: Memory that is written in place.
        stages: Op → stage; ops that become unused are erased from the graph.

    Returns:
        The copies, with their stages.
    """
    constants = constants_of(traced, written)
    copies: dict[fx.Node, int] = {}
    for op in reversed(constants):
        users: dict[int, list[fx.Node]] = {}
        for user in op.users:
            stage = copies.get(user, stages.get(user, stages[op]))
            users.setdefault(stage, []).append(user)
        for stage in set(users) - {stages[op]}:
            with traced.graph.inserting_after(op):
                copy = traced.graph.node_copy(op)
            copies[copy] = stage
            for user in users[stage]:
                user.replace_input_with(op, copy)
        if users and not op.users:
            traced.graph.erase_node(op)
    return copies


def constants_of(traced: fx.GraphModule, written: Sequence[Written]) -> list[fx.Node]:
    """Return the ops that compute constants, in order."""
    changing = {
        op
        for memory in written
        if not _is_written_in_order(memory)
        for op in (memory.root, *memory.accesses, *memory.readers)
    }
    writes = {op for memory in written for op in memory.accesses}
    found: dict[fx.Node, None] = {}
    for node in traced.graph.nodes:
        inputs = node.all_input_nodes
        if node not in changing and _is_repeatable(node, writes):
            if all(x in found or _is_fixed(traced, x, changing) for x in inputs):
                found[node] = None
    return list(found)


def _is_written_in_order(memory: Written) -> bool:
    """Return whether the edges of the graph show every order of writes to memory.

    They do if each access is the only user of the one before it. A buffer outlives the
    graph: nothing but torch.export's mark may use it.
    """
    if all(op.target is _DETACH for op in memory.accesses):
        return True
    chain = zip((memory.root, *memory.accesses), memory.accesses, strict=False)
    return (
        not memory.is_buffer
        and not memory.readers
        and all(list(source.users) == [write] for source, write in chain)
    )


def _is_repeatable(node: fx.Node, writes: set[fx.Node]) -> bool:
    if is_getitem(node):
        return True
    if not isinstance(node.target, OpOverload):
        return False
    if node.is_impure() and node not in writes:
        return False
    return torch.Tag.nondeterministic_seeded not in node.target.tags


def _is_fixed(traced: fx.GraphModule, node: fx.Node, changing: set[fx.Node]) -> bool:
    """Return whether a node is a tensor of the model that never changes."""
    if node.op != "get_attr" or node in changing:
        return False
    path, _, name = str(node.target).rpartition(".")
    value = getattr(traced.get_submodule(path), name)
    return isinstance(value, torch.Tensor) and not isinstance(value, nn.Parameter)
