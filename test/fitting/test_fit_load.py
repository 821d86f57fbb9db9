"""What compiled stages compute and exchange is reported, and what bounds them."""

from dataclasses import replace

import pytest

from torch_xla_pp.accelerators import CompiledProgram, ProgramBytes
from torch_xla_pp.advice import advise
from torch_xla_pp.fitting import Fit, FitCollective, ProgramFit, StageFit
from torch_xla_pp.schedule import one_f_one_b

pytestmark = pytest.mark.pure

BYTES = ProgramBytes(arguments=0, outputs=0, aliased=0, temporaries=0, code=0)


def program(
    name: str, flops: float, received: int, *found: FitCollective
) -> ProgramFit:
    compiled = CompiledProgram(num_bytes=BYTES, flops=flops, accessed_bytes=flops / 10)
    return ProgramFit(
        name=name, compiled=compiled, received_bytes=received, collectives=found
    )


def collective(kind: str, num_bytes: int, *axes: str) -> FitCollective:
    return FitCollective(
        kind=kind, axes=axes or None, count=2, num_bytes=num_bytes, num_asynchronous=1
    )


def fit_of(num_stages: int = 2) -> Fit:
    stages = [
        StageFit(
            index=index,
            parameter_bytes=0,
            buffer_bytes=0,
            gradient_bytes=0,
            optimizer_bytes=0,
            saved_bytes=0,
            passed_bytes=0,
            programs=(
                program("forward", 1e9, 100, collective("all-gather", 800, "data")),
                program("inference", 7e9, 100, collective("all-gather", 800, "data")),
                program("loss", 1e8, 5),
                program(
                    "backward",
                    2e9,
                    200,
                    collective("reduce-scatter", 100, "data"),
                    collective("all-reduce", 50),
                ),
                program(
                    "gradient reduction", 3, 0, collective("all-reduce", 64, "model")
                ),
            ),
        )
        for index in range(num_stages)
    ]
    return Fit.of(
        one_f_one_b(num_stages, 4),
        stages,
        topology="v5e:4x4",
        compiler="1",
        mesh={"data": 8, "model": 2},
        limit_bytes=1,
        strategies={"data": "fsdp", "model": "dp"},
    )


def test_a_microbatch_has_its_programs_and_a_step_the_others() -> None:
    first, last = fit_of().load().stages
    assert first.flops == {"F": 1.1e9, "B": 2e9}
    assert first.accessed_bytes == {"F": 1.1e8, "B": 2e8}
    gather, scatter = first.over("data")
    # A device has an eighth of what is scattered.
    assert (gather.num_bytes, scatter.num_bytes) == (800, 800)
    assert gather.moved_bytes == scatter.moved_bytes == 700
    (summed,) = first.over("model")
    assert (summed.when, summed.moved_bytes) == ("step", 64)
    assert summed.num_asynchronous == 1
    # A first stage receives gradients alone, and a last one values alone.
    assert [(e.when, e.num_bytes) for e in first.over("pp")] == [("B", 200)]
    assert [(e.when, e.num_bytes) for e in last.over("pp")] == [("F", 100)]


def test_a_fit_says_what_bounds_it_if_it_compiles() -> None:
    found = fit_of()
    advice = advise(found)
    assert advice.machine.name == "v5e"
    # 64 bytes of a step, beside two gigaflops for each of four microbatches.
    (model,) = [bound for bound in advice.bounds if bound.axis == "model"]
    assert model.intensity == pytest.approx(4 * 2e9 / 64)
    assert "fsdp over data (8 devices), stages 0..1" in str(found)
    assert "products wait for 2 of its exchanges" in str(found)
    broken = replace(
        found.stages[0].programs[0], compiled=CompiledProgram(error="no way")
    )
    stage = replace(found.stages[0], programs=(broken,))
    assert "fsdp over" not in str(replace(found, stages=(stage, found.stages[1])))
    assert Fit.from_json(found.to_json()) == found
