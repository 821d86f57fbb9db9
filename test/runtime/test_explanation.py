import pytest

from torch_xla_pp.mesh import Collective
from torch_xla_pp.runtime.explanation import Explanation, ProgramCost

pytestmark = pytest.mark.pure


def test_an_explanation_reads_like_this() -> None:
    gather = Collective(kind="all-gather", axes=("data",), count=2, num_bytes=64)
    explanation = Explanation(
        stage=1,
        num_parameters=8,
        parameter_bytes=16,
        received_bytes=32,
        sent_bytes=20,
        programs=(
            ProgramCost(name="forward", collectives=(gather,), flops=160),
            ProgramCost(name="inference", collectives=()),
        ),
        reduced_per_microbatch={"up": "flip is not cut", "down": "flip is not cut"},
        moves=("float32[8] from stage 0: 4 on 4 devices -> 2 on 2 devices",),
    )
    assert str(explanation).splitlines() == [
        "stage 1, on each device",
        "  16 bytes of 8 parameters and of buffers",
        "  32 bytes in, 20 bytes out, per microbatch, 8 FLOP per byte out",
        "    float32[8] from stage 0: 4 on 4 devices -> 2 on 2 devices",
        "  gradients reduced in every microbatch, as flip is not cut: up, down",
        "  forward: 160 FLOP",
        "    2 all-gather over data: 64 bytes, 2.5 FLOP per byte",
        "  inference: 0 FLOP",
        "    no collectives",
    ]


def test_without_a_dump_the_collectives_are_said_to_be_unknown() -> None:
    cost = ProgramCost(name="forward", collectives=None)
    assert str(cost).startswith("  forward: unknown: set XLA_FLAGS='--xla_dump_to=")
