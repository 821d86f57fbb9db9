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
        sent_bytes=0,
        programs=(
            ProgramCost(name="forward", collectives=(gather,)),
            ProgramCost(name="inference", collectives=()),
        ),
        reduced_per_microbatch={"up": "flip is not cut", "down": "flip is not cut"},
        moves=("float32[8] from stage 0: 4 on 4 devices -> 2 on 2 devices",),
    )
    assert str(explanation).splitlines() == [
        "stage 1, on each device",
        "  16 bytes of 8 parameters and of buffers",
        "  32 bytes in, 0 bytes out, per microbatch",
        "    float32[8] from stage 0: 4 on 4 devices -> 2 on 2 devices",
        "  gradients reduced in every microbatch, as flip is not cut: up, down",
        "  forward:",
        "    2 all-gather over data: 64 bytes",
        "  inference:",
        "    none",
    ]


def test_without_a_dump_the_collectives_are_said_to_be_unknown() -> None:
    cost = ProgramCost(name="forward", collectives=None)
    assert str(cost).startswith("  forward: unknown: set XLA_FLAGS='--xla_dump_to=")
