"""What is held on a device is counted as programs are enqueued."""

import pytest
import torch
from torch import Tensor

from torch_xla_pp.compile import ValueSizes
from torch_xla_pp.state import SavedValues, StageMemory
from torch_xla_pp.xla_compat import ExtraBytes

pytestmark = pytest.mark.pure

# Bytes of each value, on a device where those of at most 100 bytes are small.
BYTES = {"a": 100, "b": 60, "large": 1000, "made": 10, "logits": 80, "grad": 80}
SIZES = ValueSizes(BYTES)


def saved_values() -> SavedValues:
    return SavedValues(most_small=100)


def values(*names: str) -> dict[str, Tensor]:
    return {name: torch.zeros(0) for name in names}


def test_what_is_passed_to_a_backward_of_weights_is_told_apart() -> None:
    saved = saved_values()
    for microbatch in (0, 1):
        saved.put("saved", microbatch, values("a", "b"), SIZES)
    saved.take("saved", 0)
    saved.note_run(ExtraBytes())
    saved.put("residual", 0, values("b", "made"), SIZES)
    saved.put("saved", 2, values("a", "b"), SIZES)
    held = saved.own
    assert (held.most_saved, held.most_passed, held.most_held) == (320, 70, 390)
    assert held.most_live == 2


def test_small_values_are_there_when_the_next_program_begins() -> None:
    saved = saved_values()
    saved.put("saved", 0, values("a", "b", "large"), SIZES)
    saved.take("saved", 0)
    saved.note_run(ExtraBytes(7))
    assert saved.own.most_active == 1160 + 7
    # It makes others before those of the program before are freed.
    saved.note_run(ExtraBytes(70))
    saved.put("saved", 1, values("b", "made"), SIZES)
    assert saved.own.most_active == (160 + 70) + 1007


def test_places_of_small_values_are_not_there_for_large_ones() -> None:
    saved = saved_values()
    saved.put("saved", 0, values("a", "b"), SIZES)
    saved.take("saved", 0)
    saved.note_run(ExtraBytes())
    saved.note_run(ExtraBytes())
    saved.note_run(ExtraBytes(2000))
    assert saved.own.most_active == 160 + 2000
    saved.put("output", 0, values("large"), SIZES)
    assert saved.own.most_active == 160 + 2000


def test_temporary_values_are_there_when_the_next_program_begins() -> None:
    saved = SavedValues(most_small=50)
    saved.note_run(ExtraBytes(results=5, temporary=50))
    assert saved.own.most_active == 55
    saved.note_run(ExtraBytes(temporary=51))
    assert saved.own.most_active == 50 + 51
    # These were large: their memory is not there before it is written.
    saved.note_run(ExtraBytes(temporary=40), given_bytes=3)
    assert saved.own.most_active == 50 + 51
    saved.note_run(ExtraBytes(temporary=30))
    assert saved.own.most_active == 40 + 30 + 51


def test_what_a_program_reads_and_leaves_is_counted_once() -> None:
    saved = saved_values()
    saved.put("saved", 0, values("a", "b"), SIZES)
    saved.take("saved", 0)
    saved.note_run(ExtraBytes())
    saved.put("residual", 0, values("b", "made"), SIZES)
    saved.note_run(ExtraBytes(500))
    assert saved.own.most_active == 500 + BYTES["a"] + BYTES["b"] + BYTES["made"]


def test_the_gradient_of_a_loss_is_counted_beside_the_output() -> None:
    saved = saved_values()
    saved.put("output", 0, values("logits"), SIZES)
    saved.take("output", 0)
    saved.note_run(ExtraBytes(BYTES["grad"]))
    saved.put("loss", 0, values("grad"), SIZES)
    saved.note_run(ExtraBytes(500))
    assert saved.own.most_active == 500 + BYTES["grad"] + BYTES["logits"]


def names_of(*results: str) -> dict[str, str]:
    return {name: f"storage of {name}" for name in results}


def test_free_values_go_to_results_of_their_size() -> None:
    saved, maker = saved_values(), object()
    assert saved.storages(maker, names_of("a", "b"), SIZES) == {}
    free = values("a", "b", "logits")
    saved.free(free, SIZES)
    assert saved.free_bytes == 240
    found = saved.storages(maker, names_of("large", "grad", "b"), SIZES)
    assert found == {"storage of grad": free["logits"], "storage of b": free["b"]}
    assert saved.storages(maker, names_of("grad", "unknown"), SIZES) == {}
    assert saved.free_bytes == 100


def test_free_values_go_when_the_programs_change() -> None:
    saved, maker = saved_values(), object()
    saved.storages(maker, names_of("a"), SIZES)
    saved.free(values("a"), SIZES)
    assert saved.storages(object(), names_of("a"), SIZES) == {}
    assert saved.storages(maker, names_of("a"), SIZES) == {}


def test_what_takes_the_memory_of_free_values_is_counted_once() -> None:
    saved, maker = saved_values(), object()
    saved.storages(maker, names_of("a"), SIZES)
    for microbatch in range(4):
        saved.storages(maker, names_of("a", "large"), SIZES)
        # What the program makes beside its arguments: the first one, all of it.
        saved.note_run(ExtraBytes(0 if microbatch else 1100))
        saved.put("saved", microbatch, values("a", "large"), SIZES)
        read = saved.take("saved", microbatch)
        saved.note_run(ExtraBytes())
        saved.free(read, SIZES)
    held = saved.own
    assert (held.most_saved, held.most_held, held.most_active) == (1100, 1100, 1100)


def test_free_values_stay_from_step_to_step_and_count() -> None:
    saved, maker = saved_values(), object()
    saved.storages(maker, {}, SIZES)
    saved.free(values("a", "b"), SIZES)
    saved.clear()
    saved.share(saved, 1)
    for held in (saved.own, saved.of_rank):
        assert (held.num_bytes, held.most_held, held.most_saved) == (160, 160, 0)
    saved.drop_free()
    assert saved.num_bytes == saved.of_rank.num_bytes == 0
    assert saved.storages(maker, names_of("a"), SIZES) == {}


def test_stages_of_a_rank_take_the_memory_of_each_other() -> None:
    first, second = saved_values(), saved_values()
    for saved in (first, second):
        saved.share(first, 2)
    rank = first.of_rank
    for saved, num_made in ((first, 2), (second, 0), (first, 0), (second, 0)):
        storages = saved.storages(saved, names_of("a", "b"), SIZES)
        assert len(storages) == 2 - num_made
        saved.note_run(ExtraBytes(80 * num_made))
        saved.put("saved", 0, values("a", "b"), SIZES)
        # Only the rank counts what is free.
        assert (first.own.num_bytes, second.own.num_bytes) in ((160, 0), (0, 160))
        read = saved.take("saved", 0)
        saved.note_run(ExtraBytes())
        saved.free(read, SIZES)
        assert (saved.own.num_bytes, rank.num_bytes) == (0, 160)
        assert first.free_bytes == second.free_bytes == 160
        assert (rank.most_held, rank.most_active) == (160, 160)
        assert (saved.own.most_held, saved.own.most_active) == (160, 160)


def test_nothing_is_late_where_the_device_frees_in_time() -> None:
    saved = SavedValues()
    saved.put("saved", 0, values("a"), SIZES)
    saved.take("saved", 0)
    saved.note_run(ExtraBytes())
    saved.note_run(ExtraBytes(150))
    assert saved.own.most_active == 150


def test_stages_of_a_rank_are_counted_at_the_same_time() -> None:
    first, second = saved_values(), saved_values()
    for saved in (first, second):
        saved.share(first, 2)
    first.put("saved", 0, values("large"), SIZES)
    first.take("saved", 0)
    first.note_run(ExtraBytes())
    second.put("saved", 0, values("a", "b"), SIZES)
    rank = second.of_rank
    assert rank is first.of_rank
    assert rank.most_held == BYTES["large"]
    assert first.own.most_held + second.own.most_held > rank.most_held
    first.share(first, 2)
    assert first.of_rank.most_held == 0


def test_the_report_names_what_is_passed_on_if_there_is_something() -> None:
    report = StageMemory(num_live=2, saved_bytes=1 << 20, state_bytes=0)
    assert "2 microbatches saved 1.0" in str(report)
    assert "for W" not in str(report)
    report = StageMemory(
        num_live=2,
        saved_bytes=1 << 20,
        passed_bytes=1 << 19,
        held_bytes=3 << 19,
        state_bytes=0,
    )
    assert "and I left up to 0.5 for W" in str(report)
    assert report.peak_bytes == 3 << 19
