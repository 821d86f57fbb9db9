"""A stage's plan follows from offers, arguments and the rank's layout alone."""

from dataclasses import replace

import pytest
import torch

from torch_xla_pp.errors import StageShapeError
from torch_xla_pp.graph import Template
from torch_xla_pp.mesh import AxisRules, LocalMesh, RankLayout, TensorSpec
from torch_xla_pp.plan import (
    Arguments,
    Offer,
    StageInputs,
    StagePlanner,
    Value,
    Wiring,
    check_kwargs,
)

pytestmark = pytest.mark.pure

MESH = LocalMesh(names=("data",), shape=(2,))
CHAIN = Wiring(inputs=[StageInputs.of(0, None), StageInputs.of(1, None)], ranks=[0, 1])


def planner(stage: int, **changes: object) -> StagePlanner:
    own = StagePlanner(
        stage=stage,
        layout=RankLayout.of(MESH, "auto"),
        free_parameters=lambda num_args, kwargs: frozenset({"mask"}),
    )
    return replace(own, **changes)


def offer(*shapes: tuple[int, ...], rows: int = 4) -> Offer:
    values = [torch.empty(shape, device="meta") for shape in shapes]
    output, _ = Template.of(tuple(values) if len(values) > 1 else values[0])
    specs = tuple(TensorSpec.of(v, ("data", None), True) for v in values)
    return Offer(output=output, values=specs, rows=rows, num_random=3)


def test_the_first_stage_takes_the_batch_split_over_the_data_axis() -> None:
    batch = torch.zeros(4, 8)
    plan = planner(0).plan(CHAIN, {}, 6, (batch,), {})
    assert plan.received == ()
    assert [spec.partition for spec in plan.given] == [("data", None)]
    assert (plan.rows, plan.num_microbatches, plan.random_before) == (4, 6, 0)


def test_a_later_stage_takes_what_was_offered() -> None:
    assert planner(1).needed(CHAIN) == [0]
    plan = planner(1).plan(CHAIN, {0: offer((4, 8), (4, 2))}, 6, (), {})
    assert plan.values == (Value(0, 0), Value(0, 1))
    assert [spec.shape for spec in plan.received] == [(4, 8), (4, 2)]
    assert plan.random_before == 3
    assert plan.consumers[0].uses == {1: (0, 1)}


def test_what_differs_in_the_random_numbers_before_has_equal_programs() -> None:
    plan = planner(1).plan(CHAIN, {0: offer((4, 8))}, 6, (), {})
    later = replace(offer((4, 8)), num_random=5)
    assert plan.is_like(planner(1).plan(CHAIN, {0: later}, 6, (), {}))
    assert not plan.is_like(planner(1).plan(CHAIN, {0: offer((4, 9))}, 6, (), {}))


def test_rows_that_do_not_divide_are_refused() -> None:
    with pytest.raises(ValueError, match="3 rows does not divide over mesh axis"):
        planner(0).plan(CHAIN, {}, 6, (torch.zeros(3, 8),), {})


def test_inputs_that_need_a_gradient_are_refused() -> None:
    with pytest.raises(ValueError, match="stage 0: expected inputs that need no grad"):
        planner(0).plan(CHAIN, {}, 6, (torch.zeros(4, 8, requires_grad=True),), {})


def test_inputs_that_differ_from_the_example_are_refused() -> None:
    own = planner(1, expected_inputs=("float32[4, 9]",))
    with pytest.raises(StageShapeError, match=r"float32\[4, 9\], got float32\[4, 8\]"):
        own.plan(CHAIN, {0: offer((4, 8))}, 6, (), {})


def test_offered_axes_that_this_rank_does_not_know_are_refused() -> None:
    rules = AxisRules(axes={"batch": "data"})
    layout = RankLayout.of(MESH, "auto", rules)
    value = replace(offer((4, 8)).values[0], axes=("batch", "heads"))
    offered = replace(offer((4, 8)), values=(value,))
    with pytest.raises(ValueError, match="stage 1: expected a mesh and axis rules"):
        planner(1, layout=layout).plan(CHAIN, {0: offered}, 6, (), {})


def test_keyword_arguments_that_no_stage_takes_are_refused() -> None:
    plan = planner(0).plan(CHAIN, {}, 6, (torch.zeros(4, 8),), {"mask": True})
    check_kwargs({"mask": True}, [plan])
    with pytest.raises(ValueError, match="that stage 0 of this rank takes, got other"):
        check_kwargs({"other": 1}, [plan])


def test_arguments_print_their_tensors_and_values() -> None:
    arguments, tensors = Arguments.of((torch.zeros(4, 8), 3), {"mask": None})
    assert str(arguments) == "(float32[4, 8], 3, mask=None)"
    args, kwargs = arguments.fill(tensors)
    assert args[0] is tensors[0]
    assert (args[1], kwargs) == (3, {"mask": None})
    other, _ = Arguments.of((torch.zeros(4, 9), 3), {"mask": None})
    assert arguments != other


def test_tensors_of_equal_arguments_are_found_and_of_others_refused() -> None:
    x, y = torch.zeros(4, 8), torch.zeros(4)
    arguments, _ = Arguments.of((x, y), {})
    assert arguments.tensors_of((y.new_ones(4, 8), y), {}) is not None
    others = [(x,), (x, y, y), (y, x), (x, y.long()), (x, 3), ([x], y)]
    assert [arguments.tensors_of(args, {}) for args in others] == [None] * len(others)
    assert arguments.tensors_of((x, y), {"mask": None}) is None
    mixed, tensors = Arguments.of((x, 3), {"mask": [y]})
    assert mixed.tensors_of((x, 3), {"mask": [y]}) == tensors
    assert mixed.tensors_of((x, 4), {"mask": [y]}) is None
    assert Arguments.of((), {})[0].tensors_of((), {}) == []
