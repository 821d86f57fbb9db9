"""Hypothesis strategies of the whole suite."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from hypothesis import strategies as st

from torch_xla_pp.mesh import AxisRules, LocalMesh, Tiling
from torch_xla_pp.schedule import Action, Schedule, carriers_of
from torch_xla_pp.simulate import Flow
from torch_xla_pp.timeline import Span, Timeline, Transfer
from torch_xla_pp.work import Amount, Cost, Work, WorkGraph, WorkParameter, WorkValue

AXES = ("data", "model", "expert")


@st.composite
def local_meshes(draw: st.DrawFn) -> LocalMesh:
    """Meshes of one to three axes."""
    count = draw(st.integers(1, 3))
    sizes = draw(st.tuples(*[st.integers(1, 4)] * count))
    return LocalMesh(names=AXES[:count], shape=sizes)


@st.composite
def partitioned_shapes(
    draw: st.DrawFn, mesh: LocalMesh
) -> tuple[tuple[int, ...], tuple[str | None, ...]]:
    """A shape and a partition of it over `mesh`, each axis used at most once."""
    shape = draw(st.lists(st.integers(0, 9), max_size=4))
    names = draw(st.permutations([*mesh.names, *[None] * len(shape)]))
    return tuple(shape), tuple(names[: len(shape)])


@st.composite
def axis_rules(draw: st.DrawFn) -> AxisRules:
    """Rules over the axes of `AXES`, with any names and patterns."""
    words = st.text(min_size=1, max_size=4)
    mesh_axes = st.one_of(
        st.none(),
        st.sampled_from(AXES),
        st.lists(st.sampled_from(AXES), max_size=2, unique=True).map(tuple),
    )
    axes = draw(st.dictionaries(words, mesh_axes, max_size=4))
    logical = st.lists(st.sampled_from([None, *axes]), max_size=3).map(tuple)
    return AxisRules(
        axes=axes,
        parameter_axes=draw(st.dictionaries(words, mesh_axes, max_size=2)),
        parameters=draw(st.dictionaries(words, logical, max_size=3)),
        activations=draw(st.dictionaries(words, logical, max_size=3)),
        gather_once=draw(st.booleans()),
    )


@dataclass(frozen=True, kw_only=True)
class StageDag:
    """Stages, the edges between them, and the rank of each."""

    edges: tuple[tuple[int, int], ...]
    placement: dict[int, int]
    num_microbatches: int

    @property
    def num_stages(self) -> int:
        return len(self.placement)

    @property
    def num_ranks(self) -> int:
        return len(set(self.placement.values()))

    @property
    def carriers(self) -> list[tuple[int, int]]:
        """Pairs (carrier, other), if all that a stage makes is one value."""
        values: dict[int, list[int]] = {}
        for producer, consumer in self.edges:
            values.setdefault(producer, []).append(consumer)
        return carriers_of(values.items(), self.placement)


@st.composite
def stage_dags(draw: st.DrawFn, max_stages: int = 6) -> StageDag:
    """Directed acyclic graphs of stages on one to four ranks."""
    num_stages = draw(st.integers(1, max_stages))
    num_ranks = draw(st.integers(1, min(4, num_stages)))
    pairs = [(p, c) for c in range(num_stages) for p in range(c)]
    edges = tuple(pair for pair in pairs if draw(st.booleans()))
    own = draw(st.permutations(range(num_stages)))
    others = st.integers(0, num_ranks - 1)
    ranks = [rank if rank < num_ranks else draw(others) for rank in own]
    return StageDag(
        edges=edges,
        placement=dict(enumerate(ranks)),
        num_microbatches=draw(st.integers(1, 4)),
    )


@st.composite
def items_taken(
    draw: st.DrawFn, dag: StageDag, num_items: int
) -> dict[tuple[int, int], tuple[int | None, ...]]:
    """What each consumer takes of a producer's output: items, or None for all."""
    keys = st.none() | st.integers(0, num_items - 1)
    some = st.lists(keys, unique=True, min_size=1).map(tuple)
    return {edge: draw(some) for edge in dag.edges}


@st.composite
def shuffled(draw: st.DrawFn, schedule: Schedule) -> Schedule:
    """The same actions on each rank, in any order."""
    rows = [tuple(draw(st.permutations(row))) for row in schedule.actions]
    return Schedule(actions=tuple(rows))


@st.composite
def actions(draw: st.DrawFn) -> Action:
    """Any action."""
    indices = st.integers(0, 99)
    kind = draw(st.sampled_from("FBIW"))
    return Action(stage=draw(indices), kind=kind, microbatch=draw(indices))


@st.composite
def tables(draw: st.DrawFn) -> Schedule:
    """Any table of actions, right or wrong, with idle ranks among them."""
    rows = st.lists(actions(), max_size=5).map(tuple)
    return Schedule(actions=tuple(draw(st.lists(rows, min_size=1, max_size=4))))


@st.composite
def legal_tables(draw: st.DrawFn, dag: StageDag) -> Schedule:
    """Tables that can run, of any order: the steps of a run in which ranks take turns.

    Each backward is whole or split by chance.
    """
    whole = {
        (stage, mb): draw(st.booleans())
        for stage in range(dag.num_stages)
        for mb in range(dag.num_microbatches)
    }
    needs = needs_of(dag, whole)
    rows: list[list[Action]] = [[] for _ in range(dag.num_ranks)]
    done: set[Action] = set()
    while len(done) < len(needs):
        ready = [a for a in needs if a not in done and needs[a] <= done]
        action = draw(st.sampled_from(ready))
        done.add(action)
        rows[dag.placement[action.stage]].append(action)
    return Schedule(actions=tuple(map(tuple, rows)))


def needs_of(
    dag: StageDag, whole: dict[tuple[int, int], bool]
) -> dict[Action, set[Action]]:
    """State for every action which others have to be done before."""

    def act(stage: int, kind: str, mb: int) -> Action:
        return Action(stage=stage, kind=kind, microbatch=mb)

    def grad(stage: int, mb: int) -> Action:
        return act(stage, "B" if whole[stage, mb] else "I", mb)

    needs: dict[Action, set[Action]] = {}
    for stage, mb in whole:
        producers = [p for p, c in dag.edges if c == stage]
        consumers = [c for p, c in dag.edges if p == stage]
        carriers = [carrier for carrier, other in dag.carriers if other == stage]
        forward = act(stage, "F", mb)
        needs[forward] = {act(s, "F", mb) for s in producers + carriers}
        if stage == dag.num_stages - 1 and mb > 0:
            needs[forward].add(act(stage, "F", mb - 1))
        needs[grad(stage, mb)] = {forward, *(grad(s, mb) for s in consumers)}
        if not whole[stage, mb]:
            needs[act(stage, "W", mb)] = {grad(stage, mb)}
    return needs


@st.composite
def timelines(draw: st.DrawFn) -> Timeline:
    """Any timeline, also of steps that cannot be."""
    num_ranks = draw(st.integers(1, 3))
    ranks, indices = st.integers(0, num_ranks - 1), st.integers(0, 9)
    seconds = st.floats(0, 1e6)

    @st.composite
    def spans(draw: st.DrawFn) -> Span:
        start, waiting, end = sorted(draw(st.tuples(seconds, seconds, seconds)))
        return Span(
            rank=draw(ranks),
            stage=draw(indices),
            kind=draw(st.sampled_from("FBIW")),
            microbatch=draw(indices),
            start_s=start,
            end_s=end,
            waiting_s=waiting - start,
            dispatch_s=draw(st.none() | seconds),
        )

    transfers = st.builds(
        Transfer,
        sender_stage=indices,
        sender_rank=ranks,
        receiver_stage=indices,
        receiver_rank=ranks,
        kind=st.sampled_from("FBS"),
        microbatch=indices,
        sent_s=seconds,
        received_s=seconds,
        num_bytes=indices,
    )
    peaks = st.lists(st.integers(0), min_size=num_ranks, max_size=num_ranks).map(tuple)
    return Timeline(
        num_ranks=num_ranks,
        spans=tuple(draw(st.lists(spans(), max_size=5))),
        transfers=tuple(draw(st.lists(transfers, max_size=5))),
        peak_bytes=draw(st.just(()) | peaks),
    )


def tensor_programs(names: list[str]) -> st.SearchStrategy[list[tuple[str, int, int]]]:
    """Steps by name, each with two operands out of the results so far."""
    operand = st.integers(0, 5)
    return st.lists(st.tuples(st.sampled_from(names), operand, operand), max_size=8)


@st.composite
def tilings(draw: st.DrawFn, shape: tuple[int, ...]) -> Tiling:
    """Any layout of a value of a shape on one to eight devices."""
    grid = tuple(draw(st.sampled_from((1, 1, 2, 3, 4))) for _ in shape)
    while math.prod(grid) > 8:
        grid = (1, *grid[1:]) if grid[0] > 1 else (1, *grid[2:], 1)
    count = math.prod(grid)
    copies = draw(st.integers(1, 8 // count))
    tiles = draw(st.permutations([*range(count)] * copies))
    return Tiling(shape=shape, grid=grid, tiles=tuple(tiles))


@st.composite
def resharded(draw: st.DrawFn) -> tuple[Tiling, Tiling]:
    """Two layouts of one value; sizes need not divide."""
    shape = tuple(draw(st.lists(st.integers(0, 9), max_size=3)))
    return draw(tilings(shape)), draw(tilings(shape))


@st.composite
def work_graphs(draw: st.DrawFn, max_works: int = 6) -> WorkGraph:
    """Works in program order, each of which uses values of some before it."""
    count = draw(st.integers(1, max_works))
    names = [f"w{i}" for i in range(count)]
    sizes = st.integers(0, 1000)
    values: list[WorkValue] = []
    for place, name in enumerate(names):
        users = tuple(user for user in names[place + 1 :] if draw(st.booleans()))
        kept_by, passed_by, again_by, unread_by = (
            tuple(user for user in users if draw(st.booleans())) for _ in range(4)
        )
        producer = draw(st.sampled_from([name, name, None]))
        viewed = [v.name for v in values if producer in (v.producer, *v.users)]
        values.append(
            WorkValue(
                name=f"v{place}",
                bytes_per_row=draw(sizes),
                bytes=draw(sizes),
                # A model's inputs have none.
                has_gradient=producer is not None and draw(st.booleans()),
                producer=producer,
                users=users,
                kept_by=kept_by,
                passed_by=passed_by,
                passed_again_by=again_by,
                unread_by=unread_by,
                view_of=draw(st.sampled_from([None, *viewed])) if producer else None,
            )
        )
    return WorkGraph(
        works=tuple(draw(_works(name)) for name in names),
        values=tuple(values),
        rows=draw(st.integers(1, 8)),
        outputs=(f"v{count - 1}",),
    )


@st.composite
def _works(draw: st.DrawFn, name: str) -> Work:
    numbers = st.integers(0, 1000)
    costs = st.builds(
        Cost, flops_per_row=numbers, flops=numbers, bytes_per_row=numbers, bytes=numbers
    )
    amounts = st.builds(Amount, bytes_per_row=numbers, bytes=numbers)
    parameters = [
        WorkParameter(name=f"{name}.{i}", shape=(size, 2), dtype="float32", bytes=size)
        for i, size in enumerate(draw(st.lists(numbers, max_size=2)))
    ]
    passed = {"none": draw(amounts), "full": draw(amounts)}
    return Work(
        name=name,
        ops=(f"{name}_op",),
        module=draw(st.sampled_from(["", "layers.0"])),
        digest=draw(st.sampled_from("ab")),
        forward=draw(costs),
        backward_input=draw(costs),
        backward_weight=draw(costs),
        saved={"none": draw(amounts), "full": draw(amounts)},
        passed=passed,
        made=draw(st.sampled_from([passed, dict.fromkeys(passed, Amount())])),
        parameters=tuple(parameters),
    )


@st.composite
def series_parallel_graphs(draw: st.DrawFn, max_works: int = 7) -> WorkGraph:
    """Works that are made of series and branches, one within another."""
    count = draw(st.integers(1, max_works))
    edges, _, _ = _joined(draw, 0, count)
    names = [f"w{i}" for i in range(count)]
    values = tuple(
        WorkValue(
            name=f"v{place}",
            bytes_per_row=draw(st.integers(0, 1000)),
            bytes=0,
            has_gradient=True,
            producer=name,
            users=tuple(names[c] for p, c in sorted(edges) if p == place),
            kept_by=tuple(names[c] for p, c in sorted(edges) if p == place),
        )
        for place, name in enumerate(names)
    )
    return WorkGraph(
        works=tuple(draw(_works(name)) for name in names),
        values=values,
        rows=1,
        outputs=(f"v{count - 1}",),
    )


def _joined(
    draw: st.DrawFn, first: int, count: int
) -> tuple[set[tuple[int, int]], list[int], list[int]]:
    """Edges of works from `first` on, those without producers and without users."""
    if count == 1:
        return set(), [first], [first]
    own = draw(st.integers(1, count - 1))
    edges, heads, tails = _joined(draw, first, own)
    others, other_heads, other_tails = _joined(draw, first + own, count - own)
    if draw(st.booleans()):
        between = {(tail, head) for tail in tails for head in other_heads}
        return edges | others | between, heads, other_tails
    return edges | others, heads + other_heads, tails + other_tails


@st.composite
def flows_along(draw: st.DrawFn, edges: Sequence[tuple[int, int]]) -> tuple[Flow, ...]:
    """A value of any size for each edge, made and graded at any part of an action."""
    part = st.floats(0, 1)
    return tuple(
        Flow(
            producer=producer,
            consumers=(consumer,),
            num_bytes=draw(st.integers(0, 9)),
            made_at=draw(part),
            graded_at=(draw(part),),
        )
        for producer, consumer in edges
    )
