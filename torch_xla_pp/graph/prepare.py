"""Rewrite a traced graph so that cutting it at marks gives the intended stages.

Afterwards the ops of a stage are adjacent, with one mark between two stages, and every
value that crosses between stages is a tensor that an earlier stage returns:

* the first stage takes all inputs of the model, in the model's order, and returns
  those that later stages read;
* the last stage takes the outputs of the model that earlier stages make, and returns
them.

Both are done with `carry` nodes, which do nothing; `finish_split` takes them out again.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, fx

from torch_xla_pp.errors import PlanError
from torch_xla_pp.graph.assign import (
    GivenStages,
    assign_stages,
    is_yielded,
    source_of,
    take_stages,
)
from torch_xla_pp.graph.call_spec import CallSpec
from torch_xla_pp.graph.marks import YIELD
from torch_xla_pp.graph.mutation import Written, name_writes, written_memory
from torch_xla_pp.graph.regions import check_bodies, inline_contexts
from torch_xla_pp.graph.repeatable import copy_constants
from torch_xla_pp.graph.stage_graph import check_connections
from torch_xla_pp.graph.vmaps import flatten_vmaps

T = TypeVar("T")

_VIEW = torch.ops.aten.view.default


@dataclass(frozen=True, kw_only=True, slots=True)
class Prepared:
    """The facts about a model before its cut that `finish_split` needs.

    Args:
        names: The stages' names.
        call: The call of the model.
    """

    names: tuple[str, ...]
    call: CallSpec


def carry(value: T) -> T:
    """Return `value`; in a graph this carries it through a stage."""
    return value


def prepare(
    traced: fx.GraphModule, split_mark: Any, given: GivenStages | None = None
) -> Prepared:
    """Rewrite a traced model, in place, for the cut into stages.

    Args:
        traced: The model, as exported for training.
        split_mark: Target of the nodes at which it will be cut; those that are there
            count as position marks.
        given: The stage of every op, by its name after `normalize`; marks and yields
            are then ignored.

    Raises:
        PlanError: The model cannot be cut as its marks and yields say, or as is given.
    """
    graph = traced.graph
    call = CallSpec.of(graph)
    written = normalize(traced, split_mark)
    if given is None:
        assignment = assign_stages(graph, split_mark, written)
    else:
        erase_marks(graph, split_mark)
        assignment = take_stages(graph, split_mark, given)
    _check_written(written, assignment.stages)
    stages = dict(assignment.stages)
    stages |= _separate_written(graph, written, stages)
    erase_marks(graph, split_mark)
    stages |= _carry_inputs(graph, stages)
    stages |= _carry_outputs(graph, stages, len(assignment.names) - 1)
    stages |= copy_constants(traced, written, stages)
    stages = {node: stages[node] for node in graph.nodes if node in stages}
    _check_values(stages)
    check_connections(assignment.names, _pairs(stages))
    _reorder(graph, stages, split_mark)
    graph.lint()  # type: ignore[no-untyped-call]
    traced.recompile()
    return Prepared(names=assignment.names, call=call)


def normalize(traced: fx.GraphModule, split_mark: Any) -> list[Written]:
    """Bring a traced model into the form in which stages are chosen, in place.

    Equal models then have the same ops with the same names.

    Args:
        traced: The model, as exported for training.
        split_mark: Target of the nodes that are marks, which stay.

    Returns:
        The memory that is written in place.

    Raises:
        PlanError: The model has operations that cannot be split.
    """
    marks = (YIELD, split_mark)
    _merge_attributes(traced.graph)
    _leave_strangers(traced.graph)
    inline_contexts(traced)
    check_bodies(traced, marks)
    flatten_vmaps(traced, marks)
    name_writes(traced.graph)
    written = written_memory(traced.graph, marks)
    _reshape(traced.graph, written)
    return written


def _merge_attributes(graph: fx.Graph) -> None:
    """Let each parameter and buffer have one node."""
    first: dict[object, fx.Node] = {}
    for node in list(graph.nodes):
        if node.op == "get_attr" and first.setdefault(node.target, node) is not node:
            node.replace_all_uses_with(first[node.target])
            graph.erase_node(node)


def _leave_strangers(graph: fx.Graph) -> None:
    """Count modules that a submodule calls, but does not contain, as its own ops.

    An example is an activation that is a global module; a submodule may also call its
    own attributes, as a parametrization does. Upstream refuses to cut such models.
    """
    for node in graph.nodes:
        parent, own = "", {}
        for key, (path, kind) in node.meta.get("nn_module_stack", {}).items():
            name = path.partition("@")[0]
            if not parent or name.startswith(f"{parent}."):
                parent, own[key] = name, (path, kind)
        if own:
            node.meta["nn_module_stack"] = own


def _reshape(graph: fx.Graph, written: Sequence[Written]) -> None:
    """Let views of values that are never written to copy where they must.

    The strides of a value depend on the device. After an attention on the CPU
    `transpose(1, 2).contiguous()` does nothing and leaves no op, but the `view` behind
    it needs one elsewhere.
    """
    accesses = {op for memory in written for op in memory.accesses}
    for node in graph.find_nodes(op="call_function", target=_VIEW):
        if node not in accesses:
            node.target = torch.ops.aten.reshape.default


def _check_written(written: Sequence[Written], stages: Mapping[fx.Node, int]) -> None:
    """Refuse memory that is written in one stage and used in another.

    The other stage would miss the write.
    """
    faults = []
    for memory in written:
        ops = [*memory.bound, *_stale_readers(memory, stages)]
        places = {stages[op]: op for op in ops}
        if len(places) > 1:
            uses = [f"stage {s} at {source_of(op)}" for s, op in sorted(places.items())]
            kind = "buffer" if memory.is_buffer else "tensor"
            name = memory.root.target if memory.is_buffer else source_of(memory.root)
            faults.append(
                f"pipeline: expected the {kind} {name}, which is written in place, to "
                f"be used by one stage, got {'; '.join(uses)}: stages that depend on "
                "each other in a cycle. Move the split points so that all its uses "
                "are in one stage, or write to a copy."
            )
    if faults:
        raise PlanError("\n".join(faults))


def _stale_readers(memory: Written, stages: Mapping[fx.Node, int]) -> Iterator[fx.Node]:
    """Yield the readers that would get a value without the writes."""
    stage = stages[memory.accesses[-1]]
    is_sent_written = stages.get(memory.root) == stage
    for op in memory.readers:
        if stages[op] < stage or (stages[op] > stage and not is_sent_written):
            yield op


def _separate_written(
    graph: fx.Graph, written: Sequence[Written], stages: Mapping[fx.Node, int]
) -> dict[fx.Node, int]:
    """Let a stage that writes into what it received write into a copy."""
    copies = {}
    for memory in written:
        first = memory.accesses[0]
        if memory.is_buffer or stages.get(memory.root) == stages[first]:
            continue
        with graph.inserting_before(first):
            copy = graph.call_function(torch.ops.aten.clone.default, (memory.root,))
        copy.meta = dict(first.meta) | {"val": memory.root.meta.get("val")}
        copies[copy] = stages[first]
        for op in memory.accesses + memory.readers:
            op.replace_input_with(memory.root, copy)
    return copies


def erase_marks(graph: fx.Graph, split_mark: Any) -> None:
    """Replace the results of yields by their operands, and drop all marks."""
    for node in list(graph.nodes):
        if is_yielded(node):
            source, index = node.args
            node.replace_all_uses_with(source.args[0][index])
            graph.erase_node(node)
    for node in list(graph.nodes):
        if node.target in (YIELD, split_mark):
            graph.erase_node(node)


def _carry_inputs(graph: fx.Graph, stages: Mapping[fx.Node, int]) -> dict[fx.Node, int]:
    """Let the first stage take all inputs and later stages take them from it."""
    first = next(n for n in graph.nodes if n.op not in ("placeholder", "get_attr"))
    carried = {}
    for node in [n for n in graph.nodes if n.op == "placeholder"]:
        copy = _carried(graph, node, first)
        for user in list(node.users):
            if user is not copy and stages.get(user, 1) > 0:
                user.replace_input_with(node, copy)
        carried[copy] = 0
    return carried


def _carry_outputs(
    graph: fx.Graph, stages: Mapping[fx.Node, int], last: int
) -> dict[fx.Node, int]:
    """Let the last stage return outputs that earlier stages or the model hold."""
    output = _output_of(graph)
    carried = {}
    for node in output.all_input_nodes:
        if stages.get(node) != last:
            copy = _carried(graph, node, output)
            output.replace_input_with(node, copy)
            carried[copy] = last
    return carried


def _carried(graph: fx.Graph, node: fx.Node, before: fx.Node) -> fx.Node:
    """Make a node that carries a value, and is part of no submodule."""
    with graph.inserting_before(before):
        copy = graph.create_node("call_function", carry, (node,), name=node.name)
    copy.meta["val"] = node.meta.get("val")
    stacks = (n.meta.get("nn_module_stack") for n in graph.nodes)
    stack = next(filter(None, stacks), {"": ("", "torch.nn.Module")})
    copy.meta["nn_module_stack"] = dict(list(stack.items())[:1])
    return copy


def _check_values(stages: Mapping[fx.Node, int]) -> None:
    """Refuse values other than tensors between stages."""
    faults = []
    for node, stage in stages.items():
        users = [u for u in node.users if stages.get(u, stage) != stage]
        value = node.meta.get("val")
        if users and not isinstance(value, Tensor):
            faults.append(
                f"pipeline: {source_of(node)} of stage {stage} is read by stage "
                f"{stages[users[0]]} at {source_of(users[0])}: expected a tensor, got "
                f"{type(value).__name__}, which cannot cross between stages. Make it "
                "a tensor, compute it in both stages, or move the split points."
            )
    if faults:
        raise PlanError("\n".join(faults))


def _pairs(stages: Mapping[fx.Node, int]) -> Iterator[tuple[int, int]]:
    """Yield the producing and the consuming stage of each value that crosses."""
    for node, stage in stages.items():
        for user in node.users:
            if stages.get(user, stage) != stage:
                yield stage, stages[user]


def _reorder(graph: fx.Graph, stages: Mapping[fx.Node, int], split_mark: Any) -> None:
    """Put the ops of each stage together, and marks between the stages."""
    output = _output_of(graph)
    before = 0
    ops = [node for node in graph.nodes if node in stages]
    for node in sorted(ops, key=lambda op: stages[op]):
        if stages[node] != before:
            with graph.inserting_before(output):
                graph.call_function(split_mark)
            before = stages[node]
        output.prepend(node)


def _output_of(graph: fx.Graph) -> fx.Node:
    (output,) = graph.find_nodes(op="output")
    return output  # type: ignore[no-any-return]
