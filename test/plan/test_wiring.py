"""Who gives what to whom, without devices."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from torch_xla_pp.errors import PlanError
from torch_xla_pp.graph import Source, Template
from torch_xla_pp.plan import Consumers, StageInputs, Value, Wiring

pytestmark = pytest.mark.pure

A, B = torch.ones(1), torch.zeros(1)


def wired(*inputs: object, ranks: tuple[int, ...]) -> Wiring:
    parsed = [StageInputs.of(i, value) for i, value in enumerate(inputs)]  # type: ignore[arg-type]
    return Wiring(inputs=parsed, ranks=ranks)


def test_by_default_a_stage_takes_what_the_previous_one_makes() -> None:
    wiring = wired(None, None, None, ranks=(0, 1, 0))
    assert wiring.edges() == [(0, 1), (1, 2)]
    assert wiring.faults() == []
    output, _ = Template.of((A, B))
    arguments, values = wiring.arguments(1, {0: output})
    assert values == [Value(0, 0), Value(0, 1)]
    assert arguments.fill(["a", "b"]) == (("a", "b"), {})


def test_items_of_outputs_are_arguments_by_position_or_name() -> None:
    wiring = wired(None, [0], {"h": (1, 0), "mask": (0, "mask")}, ranks=(0, 1, 2))
    first, _ = Template.of({"x": A, "mask": B, "count": 3})
    second, _ = Template.of([A])
    arguments, values = wiring.arguments(2, {0: first, 1: second})
    assert values == [Value(1, 0), Value(0, 1)]
    assert arguments.fill(["h", "m"]) == ((), {"h": "h", "mask": "m"})
    whole, _ = wiring.arguments(1, {0: first})
    assert whole.fill(["x", "m"]) == (({"x": "x", "mask": "m", "count": 3},), {})


def test_an_item_that_does_not_exist() -> None:
    output, _ = Template.of({"x": A})
    wiring = wired(None, [(0, "y")], ranks=(0, 1))
    with pytest.raises(PlanError, match=r"output\['y'\] of stage 0.*type dict without"):
        wiring.arguments(1, {0: output})


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ([1], "expected stages before stage 1, got 1"),
        ([(2, 0)], "expected stages before stage 1, got 2"),
        (["x"], "expected stage indices or pairs .* got 'x'"),
    ],
)
def test_sources_must_be_earlier_stages(inputs: list[object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        StageInputs.of(1, inputs)  # type: ignore[arg-type]


def test_a_stage_whose_output_nobody_takes() -> None:
    (fault,) = wired(None, [0], [0], ranks=(0, 1, 2)).faults()
    assert fault.startswith("stage 1: expected an output that another stage takes")


def test_a_value_is_sent_once_to_a_rank() -> None:
    wiring = wired(None, [(0, 0)], [0, 1], ranks=(0, 1, 1))
    output, _ = Template.of((A, B))
    found = wiring.consumers_of_values(0, output)
    assert found.uses == {1: (0,), 2: (0, 1)}
    assert found.passed(0, 1) == (0,)
    assert found.passed(0, 2) == (1,)
    assert found.passed(1, 2) == (0,)
    assert found.consumers_of(0) == (1, 2)
    assert wiring.carriers() == [(1, 2)]


@st.composite
def consumers(draw: st.DrawFn) -> Consumers:
    count = draw(st.integers(2, 6))
    ranks = draw(st.lists(st.integers(0, 2), min_size=count, max_size=count))
    slots = st.lists(st.integers(0, 3), unique=True, min_size=1).map(tuple)
    uses = draw(st.dictionaries(st.integers(1, count - 1), slots, min_size=1))
    return Consumers(producer=0, uses=uses, ranks=ranks)


@given(consumers())
def test_every_consumer_gets_its_values_once_and_every_rank_too(
    found: Consumers,
) -> None:
    stages = range(len(found.ranks))
    crossings: list[tuple[int, int]] = []
    for consumer, slots in found.uses.items():
        got = [s for giver in stages for s in found.passed(giver, consumer)]
        assert sorted(got) == sorted(slots)
        for giver in stages:
            is_remote = found.ranks[giver] != found.ranks[consumer]
            assert not (is_remote and giver != 0 and found.passed(giver, consumer))
        if found.ranks[consumer] != found.ranks[0]:
            crossings += [(found.ranks[consumer], s) for s in found.passed(0, consumer)]
    assert len(crossings) == len(set(crossings))


def test_sources_print_in_words() -> None:
    assert str(Source(1)) == "output of stage 1"
    assert str(Source(1, "h")) == "output['h'] of stage 1"
