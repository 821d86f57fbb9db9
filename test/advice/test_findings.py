"""What bounds strategies, against the figures of the guides that derive it."""

import itertools
import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torch_xla_pp.advice import (
    Advice,
    Exchange,
    Machine,
    PipelineLoad,
    StageLoad,
    advise,
    moved_bytes,
)
from torch_xla_pp.advice.findings import bubble_of

pytestmark = pytest.mark.pure

BOOK_V5P = Machine(
    name="v5p of the book",
    flops_per_s=4.59e14,
    memory_bytes_per_s=2.8e12,
    link_bytes_per_s=2 * 9e10,
)
WIDTH, HIDDEN = 8192, 28672


def exchange(kind: str, axis: str, count: int, num_bytes: float, when: str) -> Exchange:
    return Exchange(
        when=when,
        kind=kind,
        axis=axis,
        num_devices=count,
        count=1,
        num_bytes=num_bytes,
    )


def fsdp_layer(tokens: float, count: int) -> PipelineLoad:
    """Return two products of `tokens` rows on each device, in 2 bytes a number."""
    weights = 2 * 2 * WIDTH * HIDDEN
    flops = 4.0 * tokens * WIDTH * HIDDEN
    stage = StageLoad(
        stage=0,
        flops={"F": flops, "B": 2 * flops},
        exchanges=(
            exchange("all-gather", "data", count, weights, "F"),
            exchange("all-gather", "data", count, weights, "B"),
            exchange("reduce-scatter", "data", count, weights, "B"),
        ),
    )
    return PipelineLoad(
        stages=(stage,),
        num_microbatches=4,
        num_ranks=1,
        mesh={"data": count},
        strategies={"data": "fsdp"},
    )


def tp_layer(tokens: float, count: int) -> PipelineLoad:
    flops = 4.0 * tokens * WIDTH * HIDDEN / count
    values = 2 * tokens * WIDTH
    stage = StageLoad(
        stage=0,
        flops={"F": flops},
        exchanges=(
            exchange("all-gather", "model", count, values, "F"),
            exchange("reduce-scatter", "model", count, values, "F"),
        ),
    )
    return PipelineLoad(
        stages=(stage,),
        num_microbatches=1,
        num_ranks=1,
        mesh={"model": count},
        strategies={"model": "tp"},
    )


@pytest.mark.parametrize(("tokens", "is_bound"), [(2450, True), (2650, False)])
def test_fsdp_needs_the_books_2550_tokens_on_a_device(
    tokens: int, is_bound: bool
) -> None:
    (found,) = advise(fsdp_layer(tokens, 10**6), device=BOOK_V5P).bounds
    assert found.is_bound is is_bound
    assert found.needed == pytest.approx(2550)
    assert found.intensity == pytest.approx(tokens, rel=1e-5)


@pytest.mark.parametrize(("count", "is_bound"), [(8, False), (11, False), (16, True)])
def test_tensor_parallelism_is_bound_above_the_width_by_2550(
    count: int, is_bound: bool
) -> None:
    # The book takes n for n - 1, and has 11 for such a model.
    found = [
        advise(tp_layer(tokens, count), device=BOOK_V5P).bounds[0]
        for tokens in (100, 100000)
    ]
    assert [one.is_bound for one in found] == [is_bound] * 2
    assert found[0].intensity == pytest.approx(HIDDEN / (count - 1))
    assert found[0].intensity == pytest.approx(found[1].intensity)


def test_gradients_between_slices_need_the_books_76_000_tokens_of_a_slice() -> None:
    # 8,192 chips of 4.5e14 FLOP/s share 2,048 hosts' 2.5e10 bytes/s.
    chips, tokens = 8192, 1000.0
    machine = Machine(
        name="slice",
        flops_per_s=4.59e14,
        memory_bytes_per_s=1e30,
        link_bytes_per_s=1e30,
        links={"replicas": 2048 * 2.5e10 / chips},
    )
    weights = 2.0 * WIDTH * HIDDEN
    stage = StageLoad(
        stage=0,
        flops={"F": tokens * weights, "B": 2 * tokens * weights},
        exchanges=(exchange("all-reduce", "replicas", 10**6, weights / chips, "step"),),
    )
    load = PipelineLoad(stages=(stage,), num_microbatches=1, num_ranks=1)
    (found,) = advise(load, device=machine).bounds
    assert found.needed == pytest.approx(73_440)
    assert found.intensity == pytest.approx(chips * tokens, rel=1e-5)
    assert not found.is_bound


def test_a_bubble_is_that_of_the_guide_and_twice_the_ranks_are_recommended() -> None:
    assert bubble_of(4, 1, 8) == pytest.approx(3 / 11)
    assert bubble_of(4, 2, 8) == pytest.approx(3 / 19)
    load = replace(fsdp_layer(1e5, 2), num_ranks=4)
    few = advise(load, device=BOOK_V5P)
    text = "\n".join(few.faults())
    assert "8 microbatches, two for each rank, in place of 4: 27.3 %" in text
    enough = advise(replace(load, num_microbatches=8), device=BOOK_V5P)
    assert [*enough.faults()] == []
    assert "ranks wait 27.3 %" in str(enough)


SIZES = st.integers(2, 64)
LOADS = st.one_of(
    st.builds(fsdp_layer, st.floats(1, 10**5), SIZES),
    st.builds(tp_layer, st.floats(1, 10**5), SIZES),
)


def only(advice: Advice) -> tuple[bool, float]:
    (found,) = advice.bounds
    return found.is_bound, found.intensity


@given(st.floats(1, 10**5), SIZES)
def test_more_rows_are_as_many_as_make_products_the_bound(
    tokens: float, count: int
) -> None:
    (found,) = advise(fsdp_layer(tokens, count), device=BOOK_V5P).bounds
    for change in found.changes:
        if "times the rows" in change.text:
            factor = int(change.text.split()[0])
            is_bound, intensity = only(
                advise(fsdp_layer(factor * tokens, count), device=BOOK_V5P)
            )
            assert intensity == pytest.approx(change.intensity)
            assert change.is_enough
            assert not is_bound or math.isclose(intensity, found.needed)
            fewer = fsdp_layer((factor - 1) * tokens, count)
            assert factor == 2 or only(advise(fewer, device=BOOK_V5P))[0]


@given(LOADS)
def test_a_smaller_axis_is_the_largest_divisor_that_is_enough(
    load: PipelineLoad,
) -> None:
    (found,) = advise(load, device=BOOK_V5P).bounds
    suggested = [
        int(c.text.split()[3]) for c in found.changes if "an axis of" in c.text
    ]
    (axis,) = load.mesh
    count = load.mesh[axis]
    (stage,) = load.stages

    def rebuilt(fewer: int) -> PipelineLoad:
        # Rows in all and weights are the same: a device has more of the rows.
        more = count / fewer
        if axis == "data":
            tokens = stage.flops["F"] / (4.0 * WIDTH * HIDDEN)
            return fsdp_layer(more * tokens, fewer)
        return tp_layer(stage.exchanges[0].num_bytes / 2 / WIDTH, fewer)

    fitting = [
        fewer
        for fewer in range(2, count)
        if count % fewer == 0 and not only(advise(rebuilt(fewer), device=BOOK_V5P))[0]
    ]
    if not found.is_bound:
        assert not suggested
    elif suggested:
        assert suggested == fitting[-1:]
    else:
        assert not fitting


@given(st.floats(1, 10**4), SIZES, st.integers(1, 64))
def test_gathering_once_leaves_two_exchanges_of_a_step(
    tokens: float, count: int, num_microbatches: int
) -> None:
    load = replace(fsdp_layer(tokens, count), num_microbatches=num_microbatches)
    (found,) = advise(load, device=BOOK_V5P).bounds
    once = [c for c in found.changes if "gather_once" in c.text]
    assert bool(once) is found.is_bound
    if once:
        (stage,) = load.stages
        kept = tuple(replace(stage.exchanges[i], when="step") for i in (0, 2))
        moved = sum(e.moved_bytes for e in kept)
        work = num_microbatches * sum(stage.flops.values())
        assert once[0].intensity == pytest.approx(work / moved)
        assert once[0].intensity == pytest.approx(
            1.5 * num_microbatches * found.intensity
        )


def sent_along_a_line(kind: str, count: int) -> float:
    """Count what goes over the busiest link of a line, one way, value by value.

    Each of `count` devices has one value of size 1 for each other device, or one for
    all of them.
    """
    links = [0.0] * (count - 1)
    for sender, receiver in itertools.permutations(range(count), 2):
        if receiver > sender and kind == "all-to-all":
            for link in range(sender, receiver):
                links[link] += 1.0
        elif receiver == sender + 1:
            # A gather hands on all that came so far.
            links[sender] += sender + 1.0
    return max(links)


@pytest.mark.parametrize("count", [2, 4, 6, 8, 64])
def test_bytes_are_those_of_the_busiest_link(count: int) -> None:
    # A device holds `count` values before an all-to-all, and after a gather.
    assert moved_bytes("all-to-all", count, count) == sent_along_a_line(
        "all-to-all", count
    )
    assert moved_bytes("all-gather", count, count) == sent_along_a_line(
        "all-gather", count
    )


def test_a_boundary_asks_for_deeper_stages_and_a_faster_axis_is_named() -> None:
    machine = replace(BOOK_V5P, links={"pp": 1e9, "a": 1e9, "b": 1e11})
    stage = StageLoad(
        stage=1,
        flops={"F": 1e9},
        exchanges=(
            exchange("boundary", "pp", 1, 1e4, "F"),
            exchange("all-reduce", "a", 2, 1e4, "F"),
            exchange("all-reduce", "b", 2, 10.0, "F"),
        ),
    )
    load = PipelineLoad(
        stages=(stage,),
        num_microbatches=8,
        num_ranks=4,
        stages_per_rank=8,
        mesh={"a": 2, "b": 2},
    )
    slow, fast, between = advise(load, device=machine).bounds
    assert (slow.axis, fast.axis, between.axis) == ("a", "b", "pp")
    assert [b.is_bound for b in (slow, fast, between)] == [True, False, True]
    assert any("exchange it with b" in c.text and c.is_enough for c in slow.changes)
    (deeper,) = between.changes
    # 459,000 are needed for 100,000: 5 times, and 8 stages make one.
    assert deeper.text == "1 stage on a rank in place of 8" and deeper.is_enough
    few = replace(load, stages_per_rank=2)
    assert "stages of 5 times the layers" in str(advise(few, device=machine))
    none = replace(load, stages_per_rank=1)
    assert "faster links between ranks, or no pipe" in str(advise(none, device=machine))


def test_what_takes_little_is_no_fault() -> None:
    machine = replace(BOOK_V5P, links={"pp": 1e9})
    stages = tuple(
        StageLoad(
            stage=i,
            flops={"F": flops},
            exchanges=(exchange("boundary", "pp", 1, 1e6, "F"),),
        )
        for i, flops in ((0, 1e3), (1, 1e14))
    )
    load = PipelineLoad(stages=stages, num_microbatches=8, num_ranks=2)
    found = advise(load, device=machine)
    assert [bound.is_bound for bound in found.bounds] == [True, False]
    assert [*found.faults()] == []
    longer = replace(stages[1], flops={"F": 1e12})
    load = replace(load, stages=(stages[0], longer))
    assert "pp, stage 0" in "".join(advise(load, device=machine).faults())


def test_memory_is_a_bound_where_it_is_known_and_alike_stages_are_told_once() -> None:
    stages = tuple(
        StageLoad(stage=i, flops={"F": 1e6}, accessed_bytes={"F": 1e5})
        for i in (0, 1, 2, 5)
    )
    load = PipelineLoad(stages=stages, num_microbatches=8, num_ranks=4)
    text = str(advise(load, device=BOOK_V5P))
    assert "memory, stages 0..2, 5: 10 FLOP per byte of 164, bound by memory: " in text
    assert "more rows in a microbatch" in text


def test_a_chip_has_rings_where_an_axis_wraps_around() -> None:
    mesh = {"data": 16, "model": 8}
    machine = Machine.named("v5e", mesh, {"replicas": 1e8})
    assert machine.bytes_per_s("data") == 2 * machine.bytes_per_s("model") == 9e10
    assert machine.bytes_per_s("data+model") == 4.5e10
    assert machine.bytes_per_s("replicas") == 1e8
    assert machine.bytes_per_s("pp") == 3.125e9


def test_a_shorter_axis_is_not_taken_to_wrap_around() -> None:
    load = fsdp_layer(512, 16)
    ring = Machine.named("v5e", load.mesh, {})
    for change in advise(load, device=ring).bounds[0].changes:
        # A quarter of the axis would do if it were a ring, with 2,731 of 2,189.
        assert "an axis of 4" not in change.text
    assert "an axis of 2" in str(advise(load, device=ring))


def test_what_is_not_known_is_refused() -> None:
    load = fsdp_layer(1, 2)
    with pytest.raises(ValueError, match="expected a device, as these stages ran on"):
        advise(load)
    with pytest.raises(ValueError, match="expected a device of v4, v5e, .*got 'gpu'"):
        advise(load, device="gpu")
    with pytest.raises(ValueError, match="expected figures above 0, got links"):
        replace(BOOK_V5P, links={"pp": 0.0})
    with pytest.raises(ValueError, match="expected one of all-gather, .*got 'send'"):
        exchange("send", "a", 2, 1, "F")
