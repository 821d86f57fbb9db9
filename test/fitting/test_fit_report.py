"""What a rank holds is added up action by action."""

from dataclasses import replace

import pytest

from torch_xla_pp.accelerators import CompiledProgram, ProgramBytes
from torch_xla_pp.fitting import Fit, FitCollective, ProgramFit, StageFit
from torch_xla_pp.schedule import Schedule, gpipe, one_f_one_b

pytestmark = pytest.mark.pure


def program(name: str, received: int, extra: int) -> ProgramFit:
    num_bytes = ProgramBytes(
        arguments=0, outputs=extra + 5, aliased=5, temporaries=0, code=0
    )
    compiled = CompiledProgram(num_bytes=num_bytes)
    return ProgramFit(name=name, compiled=compiled, received_bytes=received)


def stage(
    index: int, *programs: ProgramFit, saved: int = 10, passed: int = 0
) -> StageFit:
    return StageFit(
        index=index,
        parameter_bytes=100,
        buffer_bytes=1,
        gradient_bytes=100,
        optimizer_bytes=200,
        saved_bytes=saved,
        passed_bytes=passed,
        programs=programs,
    )


def fit_of(schedule: object, *stages: StageFit, limit: int = 1000) -> Fit:
    return Fit.of(
        schedule,  # type: ignore[arg-type]
        stages,
        topology="v5e:2x2",
        compiler="1",
        mesh={"data": 2},
        limit_bytes=limit,
    )


FORWARD, BACKWARD = program("forward", 2, 30), program("backward", 3, 4)


def test_a_forward_comes_on_top_of_what_is_live_before_it() -> None:
    found = fit_of(gpipe(1, 4), stage(0, FORWARD, BACKWARD))
    (rank,) = found.ranks
    # Three microbatches are saved, the fourth is among what the forward makes.
    assert rank.peak_bytes == 401 + 3 * 10 + 2 + 30
    assert (rank.peak_action, rank.num_live, rank.state_bytes) == ("0F3", 3, 401)


def test_a_backward_reads_what_was_saved() -> None:
    large = program("backward", 3, 100)
    (rank,) = fit_of(gpipe(1, 4), stage(0, FORWARD, large)).ranks
    assert rank.peak_bytes == 401 + 4 * 10 + 3 + 100
    assert (rank.peak_action, rank.num_live) == ("0B0", 4)


def test_the_schedule_decides_how_many_are_live() -> None:
    stages = [stage(i, FORWARD, BACKWARD, saved=1000) for i in range(3)]
    found = fit_of(one_f_one_b(3, 8), *stages)
    # At a backward, as many as there are ranks behind, and its own.
    assert [r.peak_bytes - 401 - 3 - 4 for r in found.ranks] == [3000, 2000, 1000]


def test_a_split_backward_keeps_something_else_from_i_to_w() -> None:
    parts = program("backward input", 0, 1), program("backward weight", 0, 0)
    one = stage(0, program("forward", 0, 0), *parts, saved=7, passed=100)
    order = Schedule.from_cells(["0F0 0I0 0F1 0I1 0W0 0W1".split()])
    (rank,) = fit_of(order, one).ranks
    # What the first I has left, what the second F has saved, what the second I makes.
    assert rank.peak_bytes == 401 + 100 + 100
    assert (rank.peak_action, rank.num_live) == ("0W0", 2)
    (rank,) = fit_of(order, replace(one, passed_bytes=3)).ranks
    assert rank.peak_bytes == 401 + 3 + 7 + 1
    assert rank.peak_action == "0I1"


def test_the_loss_runs_beside_what_the_forward_has_made() -> None:
    last = stage(0, FORWARD, program("loss", 1, 50), BACKWARD)
    (rank,) = fit_of(gpipe(1, 1), last).ranks
    assert rank.peak_bytes == 401 + 30 + 1 + 50
    assert rank.peak_action == "0F0"


def test_gathered_weights_are_there_all_the_time_and_the_reduction_alone() -> None:
    gathering = program("gathering of weights", 0, 1000)
    reduction = program("gradient reduction", 0, 5000)
    (rank,) = fit_of(gpipe(1, 1), stage(0, gathering, FORWARD, reduction)).ranks
    assert rank.peak_bytes == 401 + 1000 + 5000
    assert rank.peak_action == "gradient reduction"


def test_a_rank_that_holds_more_than_there_is_does_not_fit() -> None:
    one = stage(0, FORWARD, BACKWARD)
    assert fit_of(gpipe(1, 1), one, limit=433).fits
    found = fit_of(gpipe(1, 1), one, limit=432)
    assert not found.fits and found.compiles
    assert "rank 0, stages 0: DOES NOT FIT: 0.0 MiB of 0.0 MiB" in str(found)


def test_what_does_not_compile_is_told_in_the_compilers_own_words() -> None:
    broken = ProgramFit(name="backward", compiled=CompiledProgram(error="no\nway"))
    found = fit_of(gpipe(1, 1), stage(0, FORWARD, broken))
    assert not found.compiles and not found.fits
    text = str(found)
    assert "1 of 2 programs compile" in text
    assert "rank 0, stages 0: UNKNOWN, as not all of its programs compile" in text
    assert "  backward: DOES NOT COMPILE\n    no\n    way" in text
    assert "Nothing ran on a device" in text


def test_a_result_is_written_and_read() -> None:
    collective = FitCollective(
        kind="all-reduce", axes=("data",), count=2, num_bytes=2**20, num_asynchronous=1
    )
    assert str(collective) == "2 all-reduce over data, 1.0 MiB, 1 asynchronous"
    compiled = FORWARD.compiled
    full = ProgramFit(name="forward", compiled=compiled, collectives=(collective,))
    found = fit_of(gpipe(1, 1), stage(0, full))
    assert Fit.from_json(found.to_json()) == found
    assert str(collective) in str(found)
