"""What `benchmarks/overhead.py` simulates, without its measurements."""

import overhead
import pytest
from torch_xla import _XLAC

from torch_xla_pp.schedule import one_f_one_b
from torch_xla_pp.state import DonatedValues


def test_without_costs_the_bubble_is_all_that_is_lost() -> None:
    found = overhead.efficiency(8, 0.02, overhead.Overhead())
    assert found == pytest.approx(8 / (8 + 8 - 1))


def test_every_cost_slows_a_pipeline_down() -> None:
    for row in overhead.pipeline_rows(600e-6, 0.02):
        shares = [row[name] for name in ("free", "action", "message", "control")]
        assert shares == sorted(shares, reverse=True)
        assert len(set(shares)) == 4
        if row["ranks"] == 8:
            break


def test_messages_of_a_warm_pipeline_cost_their_way_there_and_back() -> None:
    link = overhead.MESSAGES
    free, real = overhead.Overhead(), overhead.Overhead(link=link)
    one = one_f_one_b(2, 1)
    size = round(link.bytes_per_s * 1e-6)
    more_s = real.step_s(one, 2, 0.02, size) - free.step_s(one, 2, 0.02, size)
    assert more_s == pytest.approx(2 * (link.latency_s + 1e-6))


@pytest.mark.parametrize(
    ("ranks", "hops"), [(1, 0), (2, 1), (33, 1), (34, 2), (1024, 2), (1057, 2)]
)
def test_a_word_goes_down_the_tree_of_connections(ranks: int, hops: int) -> None:
    assert overhead.num_hops(ranks) == hops


def test_replicas_pay_for_their_gradients_and_for_more_ranks_to_tell() -> None:
    rows = list(overhead.replica_rows(600e-6))
    assert [row["gpus"] for row in rows] == [64, 128, 256, 512, 1024]
    shares = [row["share"] for row in rows]
    assert shares[0] == 1.0
    assert shares == sorted(shares, reverse=True)
    hops_s = overhead.HOP_S * (overhead.num_hops(128) - overhead.num_hops(8))
    assert rows[-1]["step_s"] - rows[0]["step_s"] > hops_s


def test_calls_of_torch_xla_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(overhead, "CALLS", {"count": "_xla_counter_value"})
    before = _XLAC._xla_counter_value
    with overhead.timed_calls() as spent:
        assert spent == {"count": 0.0, "drop": 0.0}
        assert _XLAC._xla_counter_value("none") is None
        assert spent["count"] > spent["drop"] == 0
        DonatedValues().add([])
        assert spent["drop"] > 0
    assert _XLAC._xla_counter_value is before


def test_a_line_gives_what_is_left_beside_the_calls() -> None:
    times = {"main_s": 500e-6, "run_s": 200e-6, "launch_s": 50e-6, "upload_s": 60e-6}
    row = {"what": "calls", "rank": 1, "drop_s": 40e-6} | times
    parts = "200 us run, 50 us launch, 60 us upload, 40 us drop, 150 us else"
    assert overhead.line_of(row) == f"  rank 1: {parts}"
