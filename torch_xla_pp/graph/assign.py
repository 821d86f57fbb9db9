"""The stage of each op of a traced graph.

Terms: a *mark* is a position in the program (`split_spec`, `pipe_split`); a *yield*
names values (`pipeline_yield`). The ops between two yields, by data dependency, are a
*group*; marks cut a group into stages, in program order.

Laws: an op's operands are in its own stage or in earlier ones; without yields the
program order is kept.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from torch import fx

from torch_xla_pp.errors import PlanError
from torch_xla_pp.graph.marks import YIELD
from torch_xla_pp.graph.mutation import Written, is_getitem
from torch_xla_pp.graph.op_digests import describe_op, digest_ops

_DATA = ("placeholder", "get_attr", "output")


@dataclass(frozen=True, kw_only=True, slots=True)
class Assignment:
    """The stage of each op.

    Args:
        names: The stages' names.
        stages: Op → index of its stage.
    """

    names: tuple[str, ...]
    stages: Mapping[fx.Node, int]


@dataclass(frozen=True, kw_only=True, slots=True)
class GivenStages:
    """The stages of a model that were chosen elsewhere, by names of ops.

    Args:
        names: The stages' names.
        stages: Name of an op → index of its stage.
        digests: Name of an op → its digest by `digest_ops` in the model that the stages
            were chosen for; other ops are not compared.
    """

    names: tuple[str, ...]
    stages: Mapping[str, int]
    digests: Mapping[str, str] = field(default_factory=dict)


def take_stages(graph: fx.Graph, split_mark: object, given: GivenStages) -> Assignment:
    """Give every op of a graph the stage that was chosen for it.

    Args:
        graph: The traced graph.
        split_mark: Target of the nodes that are marks, which do not count.
        given: The stages; each has an op.

    Raises:
        PlanError: The graph differs from the one that stages were chosen for.
    """
    ops = [node for node in graph.nodes if is_op(node, split_mark)]
    _check_known(graph, ops, given)
    return Assignment(names=given.names, stages={x: given.stages[x.name] for x in ops})


def _check_known(graph: fx.Graph, ops: Sequence[fx.Node], given: GivenStages) -> None:
    """Refuse the stages of another model."""
    names = {op.name for op in ops}
    missing = [name for name in given.stages if name not in names]
    found = [*_strange(graph, ops, given)][:1]
    found += [f"no {name}, which the plan has" for name in missing[:1]]
    if found:
        raise PlanError(
            f"pipeline: expected the {len(given.stages)} operations that were planned, "
            f"got {len(ops)}; the first that differ: {'; '.join(found)}. Pass the "
            "model that was planned, in the same mode and with the same activations, "
            "or plan this one."
        )


def _strange(
    graph: fx.Graph, ops: Sequence[fx.Node], given: GivenStages
) -> Iterator[str]:
    """Describe the operations that differ from the planned ones, in order."""
    nodes = {node.name: node for node in graph.nodes}
    for name, digest in digest_ops(graph, ops).items():
        node = nodes[name]
        if given.digests.get(name, digest) != digest:
            yield f"{source_of(node)}, here {describe_op(node)}, planned is another"
        elif node.op != "output" and name not in given.stages:
            yield f"{source_of(node)}, which the plan has not"


def assign_stages(
    graph: fx.Graph, split_mark: object, written: Sequence[Written]
) -> Assignment:
    """Decide the stage of every op of a graph.

    Args:
        graph: The traced graph.
        split_mark: Target of the nodes that are marks.
        written: Memory that is written in place.

    Raises:
        PlanError: Two yields have one name, a yield's result is unused, a stage
            would be empty, or stages would depend on each other in a cycle.
    """
    yields = [node for node in graph.nodes if node.target is YIELD]
    marks = [node for node in graph.nodes if node.target is split_mark]
    ops = [n for n in graph.nodes if is_op(n, split_mark)]
    names = _names_of(yields)
    groups = _groups(graph, ops, yields)
    if yields:
        _pull_together(ops, groups, written)
        _check_order(ops, groups, yields, names, written)
        _check_groups(groups, names)
    keys = _cut(graph, ops, groups, yields, marks)
    _keep_items(ops, keys)
    ordered = sorted(set(keys.values())) or [(0, 0)]
    index = {key: i for i, key in enumerate(ordered)}
    stages = {op: index[keys[op]] for op in ops}
    return Assignment(names=_stage_names(ordered, names), stages=stages)


def is_op(node: fx.Node, split_mark: object) -> bool:
    """Return whether a node computes something, as opposed to data and marks."""
    if node.op in _DATA or node.target in (YIELD, split_mark):
        return False
    return not is_yielded(node)


def is_yielded(node: fx.Node) -> bool:
    """Return whether a node is the result of a yield."""
    if not is_getitem(node):
        return False
    source = node.args[0]
    return isinstance(source, fx.Node) and source.target is YIELD


def _names_of(yields: Sequence[fx.Node]) -> list[str]:
    """Return the yields' names, empty for those without."""
    names = [str(node.args[1]) for node in yields]
    faults = [
        f"pipeline_yield: expected each name once, got {name!r} {names.count(name)} "
        "times. Give each yield a name of its own, or none."
        for name in sorted(set(names) - {""})
        if names.count(name) > 1
    ]
    faults += [
        f"pipeline_yield: expected the results of {_title(i, names)} to be used, got "
        "none that is. Go on with what pipeline_yield returns."
        for i, node in enumerate(yields)
        if not any(result.users for result in node.users)
    ]
    if faults:
        raise PlanError("\n".join(faults))
    return names


def _groups(
    graph: fx.Graph, ops: Sequence[fx.Node], yields: Sequence[fx.Node]
) -> dict[fx.Node, int]:
    """Return the group of each op; the last group follows all yields."""
    index = {node: i for i, node in enumerate(yields)}
    first = _first_yields(graph, index)
    groups = {op: first[op] for op in ops if op in first}
    _follow_operands(ops, groups, len(yields))
    _sink(ops, groups, len(yields))
    return groups


def _first_yields(graph: fx.Graph, index: Mapping[fx.Node, int]) -> dict[fx.Node, int]:
    """Return the first yield that each node feeds, of those that feed one."""
    first: dict[fx.Node, int] = {}
    for node in reversed(graph.nodes):
        fed = [index[u] if u in index else first.get(u) for u in node.users]
        known = [i for i in fed if i is not None]
        if known:
            first[node] = min(known)
    return first


def _follow_operands(
    ops: Sequence[fx.Node], groups: dict[fx.Node, int], last: int
) -> None:
    """Put ops that feed no yield into the group of the latest of their operands."""
    for op in ops:
        if op in groups:
            continue
        made = [last if is_yielded(x) else groups.get(x) for x in op.all_input_nodes]
        known = [group for group in made if group is not None]
        if known:
            groups[op] = max(known)


def _sink(ops: Sequence[fx.Node], groups: dict[fx.Node, int], last: int) -> None:
    """Put ops on inputs and parameters into the group that uses them first.

    An op that nothing uses, such as a counter's update, goes with the one written
    after it.
    """
    after = last
    for op in reversed(ops):
        if op not in groups:
            wanted = [groups.get(user, last) for user in op.users]
            groups[op] = min(wanted, default=after)
        after = groups[op]


def _pull_together(
    ops: Sequence[fx.Node], groups: dict[fx.Node, int], written: Sequence[Written]
) -> None:
    """Move all accesses of memory that is written into the first one's group.

    Operands follow, so that they are still made before they are used.
    """
    before: dict[fx.Node, int] = {}
    while before != groups:
        before = dict(groups)
        for memory in written:
            low = min(groups[op] for op in memory.accesses + memory.readers)
            groups.update(dict.fromkeys(memory.bound, low))
        for op in reversed(ops):
            for operand in op.all_input_nodes:
                if operand in groups:
                    groups[operand] = min(groups[operand], groups[op])


def _check_order(
    ops: Sequence[fx.Node],
    groups: Mapping[fx.Node, int],
    yields: Sequence[fx.Node],
    names: Sequence[str],
    written: Sequence[Written],
) -> None:
    """Refuse a group that would need the result of the yield that ends it."""
    index = {node: i for i, node in enumerate(yields)}
    for op in ops:
        for operand in op.all_input_nodes:
            source = operand.args[0] if is_yielded(operand) else None
            if isinstance(source, fx.Node) and index[source] >= groups[op]:
                tied = [m for m in written if groups[m.accesses[0]] == groups[op]]
                raise PlanError(
                    "pipeline: expected stages without a cycle, got "
                    f"{source_of(op)}, which needs {_title(index[source], names)} and "
                    "is needed before it, for the sake of what is written in place: "
                    f"{', '.join(str(m.root.target) for m in tied)}. Keep all uses of "
                    "a tensor that is written in place on one side of the yield."
                )


def _check_groups(groups: Mapping[fx.Node, int], names: Sequence[str]) -> None:
    empty = set(range(len(names))) - set(groups.values())
    if empty:
        raise PlanError(
            "\n".join(
                f"pipeline_yield: expected {_title(i, names)} to end a stage, got "
                "values that earlier stages or the model's inputs hold already: a "
                "stage without work. Remove the yield."
                for i in sorted(empty)
            )
        )


def _cut(
    graph: fx.Graph,
    ops: Sequence[fx.Node],
    groups: Mapping[fx.Node, int],
    yields: Sequence[fx.Node],
    marks: Sequence[fx.Node],
) -> dict[fx.Node, tuple[int, int]]:
    """Return the group of each op, and the number of the group's marks before it.

    Ops of a group that are written before the yield of the group before count as
    written at its beginning, so that marks in other groups do not cut them off.
    """
    order = {node: i for i, node in enumerate(graph.nodes)}
    at = [order[mark] for mark in marks]
    _check_marks([order[op] for op in ops], at)
    passed = {op: sum(place < order[op] for place in at) for op in ops}
    floors = [-1, *(order[node] for node in yields)]
    keys = {}
    for group in sorted(set(groups.values())):
        members = [op for op in ops if groups[op] == group]
        inside = {op for op in members if order[op] > floors[group]} or set(members)
        first = min(passed[op] for op in inside)
        for op in members:
            keys[op] = (group, passed[op] if op in inside else first)
    return keys


def _check_marks(ops: Sequence[int], marks: Sequence[int]) -> None:
    """Refuse marks before the first op or after the last."""
    early = [place for place in marks if not ops or place < ops[0]]
    late = [place for place in marks if ops and place > ops[-1]]
    if early or late:
        where = "before the first" if early else "after the last"
        raise PlanError(
            "pipeline: expected work on both sides of every split point, got one "
            f"{where} operation of the model: a stage without work. Remove it."
        )


def _keep_items(ops: Iterable[fx.Node], keys: dict[fx.Node, tuple[int, int]]) -> None:
    """Take the items of a list or tuple in its own stage: only tensors can be sent."""
    for op in ops:
        source = op.args[0] if is_getitem(op) else None
        if isinstance(source, fx.Node) and source in keys:
            keys[op] = keys[source]


def _stage_names(
    keys: Sequence[tuple[int, int]], names: Sequence[str]
) -> tuple[str, ...]:
    """Name stages after the yield that ends their group, or by their index."""
    parts = [group for group, _ in keys]
    result = []
    for index, group in enumerate(parts):
        name = names[group] if group < len(names) else ""
        part = f".{index - parts.index(group)}" if parts.count(group) > 1 else ""
        result.append(name + part if name else f"stage_{index}")
    return tuple(result)


def _title(index: int, names: Sequence[str]) -> str:
    return f"yield {names[index]!r}" if names[index] else f"yield number {index}"


def source_of(node: fx.Node) -> str:
    """Describe a node, and the line of the model's source that it comes from."""
    lines = str(node.meta.get("stack_trace") or "").strip().splitlines()
    where = [line.strip() for line in lines if line.strip().startswith("File ")]
    return f"{node.name} ({where[-1]})" if where else str(node.name)
