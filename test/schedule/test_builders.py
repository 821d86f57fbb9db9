"""Every builder gives what torch's class of the same name runs, and what can run."""

from collections.abc import Callable
from functools import cache
from itertools import accumulate

import pytest
from hypothesis import given
from schedule.upstream import executed, make
from strategies import StageDag, stage_dags
from torch.distributed.pipelining import (
    Schedule1F1B,
    ScheduleDualPipeV,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
)

from torch_xla_pp.schedule import (
    Schedule,
    chain_of,
    dag_1f1b,
    dualpipev,
    gpipe,
    interleaved_1f1b,
    one_f_one_b,
    peak_live,
    verify,
    zb1p,
    zbv,
)

pytestmark = pytest.mark.pure

RANKS = range(1, 7)
MICROBATCHES = range(1, 14)


def outcome(build: Callable[[], Schedule]) -> Schedule | None:
    """What is built, None if the sizes are refused."""
    try:
        return build()
    except ValueError:
        return None


def stated(
    cls: type, num_ranks: int, num_microbatches: int, **options: int
) -> Schedule:
    """The order that an upstream class of several stages per rank states."""
    schedule, _ = make(cls, num_ranks, num_microbatches, **options)
    order = schedule.pipeline_order
    return Schedule.from_cells(
        ["" if action is None else str(action) for action in order[rank]]
        for rank in range(num_ranks)
    )


@pytest.mark.parametrize("num_ranks", RANKS)
@pytest.mark.parametrize(
    ("build", "cls"), [(gpipe, ScheduleGPipe), (one_f_one_b, Schedule1F1B)]
)
def test_one_stage_per_rank_runs_as_upstream(
    build: Callable[..., Schedule], cls: type, num_ranks: int
) -> None:
    for num_microbatches in range(num_ranks, 10):
        ours = build(num_ranks, num_microbatches)
        assert ours == executed(cls, num_ranks, num_microbatches)


@pytest.mark.parametrize("num_ranks", RANKS)
@pytest.mark.parametrize(
    ("build", "cls"),
    [
        (interleaved_1f1b, ScheduleInterleaved1F1B),
        (zb1p, ScheduleInterleavedZeroBubble),
    ],
)
def test_looped_stages_run_as_upstream(
    build: Callable[..., Schedule], cls: type, num_ranks: int
) -> None:
    for num_microbatches in MICROBATCHES:
        for per_rank in (1, 2, 3):
            size = num_ranks, num_microbatches
            options = {"style": "loop", "per_rank": per_rank}
            ours = outcome(lambda s=size, n=per_rank: build(*s, n))
            assert ours == outcome(lambda s=size, o=options: stated(cls, *s, **o))


@pytest.mark.parametrize("num_ranks", RANKS)
@pytest.mark.parametrize(
    ("build", "cls"), [(zbv, ScheduleZBVZeroBubble), (dualpipev, ScheduleDualPipeV)]
)
def test_v_shaped_stages_run_as_upstream(
    build: Callable[..., Schedule], cls: type, num_ranks: int
) -> None:
    for num_microbatches in MICROBATCHES:
        size = num_ranks, num_microbatches
        ours = outcome(lambda s=size: build(*s))
        theirs = outcome(lambda s=size: stated(cls, *s, style="v", per_rank=2))
        assert ours == theirs


@pytest.mark.parametrize(
    ("build", "cls", "style"),
    [
        (lambda ranks, n: interleaved_1f1b(ranks, n, 2), ScheduleInterleaved1F1B, "l"),
        (lambda ranks, n: zb1p(ranks, n, 2), ScheduleInterleavedZeroBubble, "l"),
        (zbv, ScheduleZBVZeroBubble, "v"),
        (dualpipev, ScheduleDualPipeV, "v"),
    ],
)
def test_upstream_runs_what_it_states(
    build: Callable[..., Schedule], cls: type, style: str
) -> None:
    assert build(3, 6) == executed(cls, 3, 6, style=style, per_rank=2)


@pytest.mark.parametrize("num_ranks", RANKS)
def test_every_order_can_run_in_the_memory_that_it_promises(num_ranks: int) -> None:
    for count in MICROBATCHES:
        single = chain_of(num_ranks)
        verify(gpipe(num_ranks, count), single, max_live=count)
        bound = {stage: num_ranks - stage for stage in range(num_ranks)}
        verify(one_f_one_b(num_ranks, count), single, max_live=bound)
        double = chain_of(2 * num_ranks)
        verify(zbv(num_ranks, count), double, max_live=2 * num_ranks)
        if count >= 2 * num_ranks:
            verify(dualpipev(num_ranks, count), double, max_live=2 * num_ranks + 1)
        for per_rank in (1, 2, 3):
            chain = chain_of(num_ranks * per_rank)
            for build in (interleaved_1f1b, zb1p):
                ours = outcome(lambda b=build, c=count, n=per_rank: b(num_ranks, c, n))
                if ours is not None:
                    verify(ours, chain, num_microbatches=count)


def most_held(schedule: Schedule) -> list[int]:
    """For each rank, for how many (stage, microbatch) it holds saved values at most."""
    most = []
    for row in schedule.actions:
        changes = [{"F": 1, "I": 0}.get(action.kind, -1) for action in row]
        most.append(max(accumulate(changes)))
    return most


def test_no_rank_of_a_zero_bubble_order_holds_more_than_the_first_of_1f1b() -> None:
    for num_ranks in RANKS:
        assert most_held(one_f_one_b(num_ranks, 24))[0] == num_ranks
        assert max(most_held(zb1p(num_ranks, 2 * num_ranks))) == num_ranks
        # A rank's two stages are half as large.
        assert set(most_held(zbv(num_ranks, 24))) == {2 * num_ranks}


@cache
def tree(num_branches: int) -> tuple[tuple[int, int], ...]:
    """A stage, branches of two stages each, and a stage that joins them."""
    last = 2 * num_branches + 1
    firsts = range(1, last, 2)
    return tuple(edge for s in firsts for edge in ((0, s), (s, s + 1), (s + 1, last)))


@pytest.mark.parametrize("num_ranks", RANKS)
def test_dag_1f1b_on_a_chain_is_1f1b(num_ranks: int) -> None:
    placement = {rank: rank for rank in range(num_ranks)}
    for count in MICROBATCHES:
        ours = dag_1f1b(chain_of(num_ranks), placement, count)
        assert ours == one_f_one_b(num_ranks, count)


def test_branches_run_at_the_same_time() -> None:
    edges, placement = tree(2), {0: 0, 1: 1, 2: 2, 3: 3, 4: 4, 5: 5}
    schedule = dag_1f1b(edges, placement, 8)
    verify(schedule, edges, placement=placement, num_microbatches=8)
    assert peak_live(schedule) == {0: 4, 1: 3, 2: 2, 3: 3, 4: 2, 5: 1}
    first, second = (str(schedule.actions[rank]) for rank in (1, 3))
    assert first.replace("stage=1", "stage=3") == second


@given(stage_dags())
def test_dag_1f1b_can_run_in_the_memory_of_its_longest_path(dag: StageDag) -> None:
    schedule = dag_1f1b(dag.edges, dag.placement, dag.num_microbatches)
    depths = {stage: 1 for stage in dag.placement}
    for producer, consumer in sorted(dag.edges, reverse=True):
        depths[producer] = max(depths[producer], 1 + depths[consumer])
    verify(
        schedule,
        dag.edges,
        placement=dag.placement,
        num_microbatches=dag.num_microbatches,
        max_live=depths,
        carriers=dag.carriers,
    )


@pytest.mark.parametrize(
    ("build", "fault"),
    [
        (
            lambda: gpipe(0, 0),
            "gpipe: expected counts of at least 1, got num_ranks=0, ",
        ),
        (lambda: one_f_one_b(1, 0), "one_f_one_b: .* got num_microbatches=0"),
        (lambda: zb1p(2, 2, 0), "zb1p: .* got stages_per_rank=0"),
        (lambda: zbv(-1, 2), "zbv: .* got num_ranks=-1"),
        (lambda: interleaved_1f1b(2, 5, 2), "expected a multiple of the 2 rounds .* 5"),
        (lambda: dualpipev(2, 3), "as many microbatches as the 4 stages, got 3"),
        (lambda: dag_1f1b([], {0: 0}, 0), "dag_1f1b: .* got num_microbatches=0"),
        (lambda: dag_1f1b([], {}, 1), "stages that count from 0 without gaps, got"),
        (lambda: dag_1f1b([], {1: 0}, 1), r"got stages \[1\]"),
        (lambda: dag_1f1b([], {0: 1}, 1), r"got ranks \[1\]"),
        (lambda: dag_1f1b([(1, 0), (0, 2)], {0: 0, 1: 0}, 1), "got 0->2, 1->0"),
    ],
)
def test_impossible_sizes_are_refused(
    build: Callable[[], Schedule], fault: str
) -> None:
    with pytest.raises(ValueError, match=fault):
        build()
