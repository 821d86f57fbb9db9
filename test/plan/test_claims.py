from dataclasses import replace

import pytest
import torch

from torch_xla_pp.errors import StageShapeError
from torch_xla_pp.mesh import TensorSpec
from torch_xla_pp.plan import StageInputs
from torch_xla_pp.plan.claims import Claim, StageClaim, claim_faults, wiring_of
from torch_xla_pp.plan.stage_plan import cast_inputs, check_fits

pytestmark = pytest.mark.pure


def claim(
    *stages: int,
    num_stages: int = 4,
    microbatches: int = 8,
    transport: str = "in_graph",
    shared: dict[str, str] | None = None,
) -> Claim:
    return Claim(
        stages=tuple(
            StageClaim(index=i, inputs=StageInputs.of(i, None), shared=shared or {})
            for i in stages
        ),
        num_stages=num_stages,
        num_microbatches=microbatches,
        schedule="Schedule1F1B",
        order="",
        transport=transport,
    )


def test_each_stage_once_has_no_faults() -> None:
    assert claim_faults([claim(0, 3), claim(1, 2)]) == []


def test_a_stage_on_two_ranks_is_named() -> None:
    faults = claim_faults([claim(0, 1), claim(1, 2), claim(3)])
    assert len(faults) == 1
    assert faults[0].startswith("stage 1: expected on one rank, got it on ranks [0, 1]")


def test_a_stage_twice_on_one_rank_is_named() -> None:
    faults = claim_faults([claim(0, 0), claim(1, 2, 3)])
    assert faults[0].startswith("stage 0: expected on one rank, got it on ranks [0]")


def test_a_missing_stage_is_named() -> None:
    assert claim_faults([claim(0, 1), claim(2)])[0].startswith("stage 3: expected")


def test_ranks_with_other_transports_are_told_what_to_set() -> None:
    (fault,) = claim_faults([claim(0, 1), claim(2, 3, transport="host")])
    assert "transport: expected the same on every rank" in fault
    assert "TORCH_XLA_PP_TRANSPORT=host" in fault


def test_ranks_with_other_plans_are_told() -> None:
    claims = [replace(claim(i, num_stages=2), plan=f"plan {i}") for i in range(2)]
    (fault,) = claim_faults(claims)
    assert fault.startswith("plan: expected the same on every rank, got ['plan 0'")


def test_claims_make_one_wiring() -> None:
    wiring, faults = wiring_of([claim(0, 3, shared={"w": "x"}), claim(1, 2)])
    assert faults == []
    assert wiring is not None
    assert wiring.edges() == [(0, 1), (1, 2), (2, 3)]
    assert tuple(wiring.ranks) == (0, 1, 1, 0)
    assert wiring.shared == {"w": (0, 3)}


def test_copies_of_a_parameter_must_be_equal() -> None:
    claims = [claim(0, 1, shared={"w": "x"}), claim(2, 3, shared={"w": "y"})]
    (fault,) = claim_faults(claims)
    assert "'w': expected equal copies, got x on stage 0, x on stage 1, y on" in fault
    (fault,) = claim_faults([claim(0, shared={"w": "x"}), claim(1, 2, 3)])
    assert "'w': expected on several stages, got x on stage 0 only" in fault


def test_unequal_arguments_are_named() -> None:
    faults = claim_faults([claim(0, 1), claim(2, 3, microbatches=4)])
    assert faults[0].startswith("num_microbatches: expected the same on every rank")


def test_ranks_of_several_replicas_are_told() -> None:
    (fault,) = claim_faults([claim(0, 1), replace(claim(2, 3), replica=(0, 2))])
    assert fault.startswith("replica: expected the same on every rank, got [(0, 1), (0")


def test_offers_that_do_not_fit_name_both_sides() -> None:
    spec = TensorSpec(shape=(2, 3), dtype=torch.float32, partition=(None, None))
    check_fits(1, "stage 0", [spec], ["float32[2, 3]"])
    text = r"stage 1: expected inputs float32\[2, 4\], got float32\[2, 3\] from stage 0"
    with pytest.raises(StageShapeError, match=text):
        check_fits(1, "stage 0", [spec], ["float32[2, 4]"])


def test_autocast_changes_the_floats_that_a_stage_expects() -> None:
    half, whole, index = (
        TensorSpec(shape=(2, 3), dtype=dtype, partition=(None, None))
        for dtype in (torch.bfloat16, torch.float32, torch.int64)
    )
    own = ["float32[2, 3]", "float32[2, 3]", "int64[2, 3]"]
    found = cast_inputs(own, [half, whole, index], torch.bfloat16)
    assert found == ["bfloat16[2, 3]", *own[1:]]
    # Not where it is off, nor other shapes, dtypes or numbers of inputs.
    assert cast_inputs(own, [half, whole, index], None) == own
    other = ["float32[2, 4]", "float64[2, 3]", "int64[2, 3]"]
    assert cast_inputs(other, [half, half, half], torch.bfloat16) == other
    assert cast_inputs(own, [half], torch.bfloat16) == own
