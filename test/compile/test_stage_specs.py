"""Who reads, receives and sends what follows from names alone."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from torch_xla_pp.compile import MARK, Function, ProgramSpec, StageFunctions
from torch_xla_pp.compile.border import Border
from torch_xla_pp.compile.bundles import Bundle
from torch_xla_pp.compile.stage_specs import Borders, StageSpecs, stage_specs

pytestmark = pytest.mark.pure

LAYOUT: Any = object()
OPS: Any = object()


def message(stage: int, name: str) -> Border:
    return Border(stage, (name,), (LAYOUT,), OPS)


def function(name: str, reads: str, gives: str) -> Function:
    return Function(
        name=name,
        module=nn.Identity(),
        inputs=tuple(reads.split()),
        outputs=tuple(gives.split()),
    )


def functions(**others: Any) -> StageFunctions:
    """Return those of `y = tanh(x @ w)`, the tanh saved and the buffer b counted up."""
    made = {
        "forward": function("forward", "input:0 param:w buffer:b", "y new_b"),
        "inference": function("inference", "input:0 param:w buffer:b", "y new_b"),
        "backward": function(
            "backward",
            "y tangent:0 param:w input:0 sum:param:w",
            "dx new_sum:param:w",
        ),
        "backward_input": function("backward_input", "y tangent:0 param:w", "dx dtanh"),
        "backward_weight": function(
            "backward_weight", "dtanh input:0 sum:param:w", "new_sum:param:w"
        ),
    }
    return StageFunctions(
        **{**made, **others},
        outputs=("y",),
        buffer_updates={"buffer:b": "new_b"},
        input_grads={0: "dx"},
        parameter_grads={"param:w": "new_sum:param:w"},
    )


def table(borders: Borders | None = None, **others: Any) -> StageSpecs:
    pins = {"y": "rows", "dx": "rows", "new_b": "whole", "new_sum:param:w": "whole"}
    return stage_specs(functions(**others), borders or Borders(), pins, 1)


def test_a_stage_alone_takes_and_returns_all_values() -> None:
    specs = table()
    programs = specs.programs
    assert [*programs] == [
        "forward",
        "inference",
        "backward",
        "backward input",
        "backward weight",
    ]
    assert programs["forward"].inputs == ("input:0", "param:w", "buffer:b")
    assert programs["forward"].outputs == ("y", "new_b")
    assert programs["backward"].outputs == ("dx", "new_sum:param:w")
    assert programs["backward"].donated == ["sum:param:w"]
    assert programs["backward input"].outputs == ("dx", "dtanh")
    assert not programs["backward input"].donated
    assert programs["backward weight"].donated == ["sum:param:w"]
    assert specs.outputs == {0: "y"} and specs.input_grads == {0: "dx"}


def test_what_backwards_read_is_kept_but_not_what_they_give_each_other() -> None:
    specs = table()
    assert {"y", "input:0"} <= specs.kept
    assert "dtanh" not in specs.kept
    assert {"dtanh", "input:0"} <= specs.residual


def test_a_stage_in_the_middle_receives_first_and_sends_last() -> None:
    borders = Borders(
        inputs=[message(0, "input:0")],
        outputs=[message(2, "output:0")],
        tangents=[message(2, "tangent:0")],
        grads=[message(0, "grad:input:0")],
        consumers={0: [2]},
        returned=(),
    )
    specs = table(borders)
    forward, backward = specs.programs["forward"], specs.programs["backward"]
    assert forward.inputs == ("param:w", "buffer:b", "route:in:0", "route:out:2")
    # What is received and read again comes back as a value of this stage.
    assert forward.outputs == ("y", "new_b", "input:0", "token")
    assert specs.programs["inference"].outputs == ("new_b", "token")
    assert "tangent:0" not in backward.inputs
    assert {"route:in:2", "route:out:0"} < {*backward.inputs}
    assert backward.outputs == ("new_sum:param:w", "token")
    assert not any(name.startswith("route:") for name in specs.kept)
    assert specs.outputs == {} and specs.input_grads == {}


def test_of_two_halves_of_a_backward_only_the_first_receives() -> None:
    coming = [message(2, "tangent:0")]
    borders = Borders(tangents=coming, consumers={0: [2]})
    programs = table(borders).programs
    assert programs["backward input"].received == coming
    assert not programs["backward weight"].received
    # Without inputs that need a gradient there is no first half.
    alone = table(borders, backward_input=None, backward_weight=functions().backward)
    weight = alone.programs["backward weight"]
    assert weight.received == coming


def test_gradients_by_several_consumers_are_added_up() -> None:
    specs = table(Borders(consumers={0: [2, 3]}))
    backward = specs.programs["backward"]
    assert backward.added == {"tangent:0": ["tangent:0@2", "tangent:0@3"]}
    assert "tangent:0" not in backward.inputs
    assert {"tangent:0@2", "tangent:0@3"} < {*backward.inputs, *backward.checked}
    # Nothing of the forward reads them.
    assert not specs.programs["forward"].added


def test_a_frozen_stage_has_no_backward() -> None:
    nothing = {"backward": None, "backward_input": None, "backward_weight": None}
    frozen = replace(
        functions(**nothing), input_grads={}, parameter_grads={}, buffer_updates={}
    )
    specs = stage_specs(frozen, Borders(), {}, 1)
    assert [*specs.programs] == ["forward", "inference"]
    assert specs.kept == frozenset()


def test_a_gradient_that_only_goes_through_makes_a_program() -> None:
    nothing = {"backward": None, "backward_input": None, "backward_weight": None}
    passing = replace(
        functions(**nothing),
        input_grads={0: "tangent:0"},
        parameter_grads={},
    )
    borders = Borders(
        tangents=[message(2, "tangent:0")],
        grads=[message(0, "grad:input:0")],
        consumers={0: [2]},
    )
    backward = stage_specs(passing, borders, {}, 1).programs["backward"]
    assert backward.inputs == ("route:in:2", "route:out:0")
    assert backward.outputs == ("token",)


def test_a_marked_twin_takes_a_mark_and_gives_a_token() -> None:
    spec = ProgramSpec(function=function("f", "x", "y"), pins={"y": "rows"})
    twin = replace(spec, is_marked=True)
    assert twin.inputs == (*spec.inputs, MARK)
    assert twin.outputs == (*spec.outputs, "token")
    assert replace(twin, is_marked=False) == spec


def test_a_program_that_does_nothing_is_known() -> None:
    empty = function("f", "", "")
    assert ProgramSpec(function=empty).is_empty
    one = [message(1, "x")]
    assert not ProgramSpec(function=empty, received=one).is_empty
    assert not ProgramSpec(function=empty, sent=one).is_empty
    parts = {"x": ["a", "b"]}
    assert ProgramSpec(function=empty, parts=parts).is_empty
    assert not ProgramSpec(function=empty, parts=parts, wanted=["x"]).is_empty


def test_what_others_may_keep_takes_no_memory_of_earlier_values() -> None:
    forward = function("forward", "input:0 param:w buffer:b", "y new_b tanh")
    backward = function("backward", "y new_b tanh tangent:0", "dx new_sum:param:w")
    specs = stage_specs(
        functions(forward=forward, backward=backward),
        Borders(),
        {},
        1,
        is_recycling=True,
    )
    # The output is returned, and the buffer becomes the module's.
    assert specs.kept >= {"y", "new_b", "tanh"}
    assert specs.programs["forward"].recycled == ("tanh",)
    # The gradient of the input is returned.
    assert specs.programs["backward input"].recycled == ("dtanh",)


def test_small_values_that_only_the_first_backward_reads_are_not_passed_on() -> None:
    saved = "early_1 early_2 late_1 late_2"
    specs = table(
        forward=function("forward", "input:0 param:w", f"y new_b {saved}"),
        backward=function("backward", f"{saved} tangent:0", "dx new_sum:param:w"),
        backward_input=function("backward_input", "early_1 early_2 tangent:0", "dx"),
        backward_weight=function(
            "backward_weight", "late_1 late_2 tangent:0", "new_sum:param:w"
        ),
    ).bundling(dict.fromkeys(saved.split(), torch.empty(2)), ())
    packs = {name for name in specs.kept if name.startswith("small:")}
    (late,) = packs & specs.residual
    (early,) = packs - specs.residual
    first, second = (specs.programs[f"backward {x}"] for x in ("input", "weight"))
    assert early in first.inputs and late not in first.inputs
    assert late in second.inputs and early not in second.inputs


def test_programs_add_small_gradients_to_their_sums_together() -> None:
    sums = [Bundle("small:sums", {"param:a": (2,), "param:b": ()})]
    backward = function("backward", "y tangent:0", "new_sum:param:a new_sum:param:b")
    made = functions(backward=backward, backward_input=None, backward_weight=None)
    grads = {f"param:{name}": f"new_sum:param:{name}" for name in "ab"}
    made = replace(made, parameter_grads=grads, input_grads={0: None})
    specs = stage_specs(made, Borders(), {}, 1, is_recycling=True, small_sums=sums)
    program = specs.programs["backward"]
    assert program.inputs == ("y", "tangent:0", "sum:small:sums")
    assert program.outputs == ("new_sum:small:sums",)
    assert program.donated == {"sum:small:sums"}
    assert "sum:small:sums" not in specs.kept
    (before,) = specs.sums.values()
    assert before == Bundle("sum:small:sums", {"sum:param:a": (2,), "sum:param:b": ()})


def test_programs_add_products_to_their_sums_in_one_value() -> None:
    sums = Bundle("flat:sums", {"param:a": (2, 16), "param:b": (32,)})
    names = [f"sum:param:{name}" for name in "ab"]
    backward = function(
        "backward",
        " ".join(["y", "tangent:0", *names]),
        "new_sum:param:a new_sum:param:b",
    )
    made = functions(backward=backward, backward_input=None, backward_weight=None)
    grads = {f"param:{name}": f"new_sum:param:{name}" for name in "ab"}
    made = replace(made, parameter_grads=grads, input_grads={0: None})
    rules = [lambda *_: None]
    specs = stage_specs(
        made, Borders(), {}, 1, rules, is_recycling=True, flat_sums=[sums]
    )
    program = specs.programs["backward"]
    (before,) = program.given_flat
    after = program.updated_flat["sum:flat:sums"]
    assert before.parts == {names[0]: (0, (2, 16)), names[1]: (32, (32,))}
    assert after.parts == {f"new_{name}": part for name, part in before.parts.items()}
    assert (before.name, after.name) == ("sum:flat:sums", "new_sum:flat:sums")
    assert program.donated == {"sum:flat:sums"}
    forward = specs.programs["forward"]
    assert not forward.given_flat and not forward.updated_flat
    assert [*specs.sums.values()] == [
        Bundle("sum:flat:sums", {names[0]: (2, 16), names[1]: (32,)})
    ]
