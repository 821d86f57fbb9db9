"""Models of Hugging Face's transformers train as pipelines as they do unsplit.

Tolerance 2e-5 of the largest value, float32: sums in another order than in eager, as in
test_parity, through attention. After an AdamW step the parameters' signs of gradients
count, so that those near zero may differ by more: 1e-3.
"""

import pytest
from integration.language_models import Job, Report, train
from llama_tp import RULES

from torch_xla_pp.testing import Worlds

pytestmark = pytest.mark.worlds


def run(worlds: Worlds, job: Job) -> list[Report]:
    """Return the report of each rank."""
    reports = worlds.run(
        train, ranks=job.ranks, devices=job.devices, args=(job,), timeout_s=280
    )
    for report in reports:
        wrong = {
            what: error
            for what, error in report.errors.items()
            if error > (1e-3 if what.startswith("new ") else 2e-5)
        }
        assert not wrong
    return reports


@pytest.mark.parametrize(
    ("model", "shared"),
    [
        ("gpt2", [(0, 1)]),
        ("bert", [(0, 1)]),
        ("t5", [(0, 1)]),
        ("mixtral", []),
    ],
)
def test_two_ranks(worlds: Worlds, model: str, shared: list[tuple[int, ...]]) -> None:
    assert run(worlds, Job(model=model))[0].shared == shared


def test_tensor_parallelism_with_grouped_queries(worlds: Worlds) -> None:
    for report in run(worlds, Job(model="llama", devices=2, rules=RULES)):
        held = report.explanation.parameter_bytes
        assert held < 0.6 * 4 * report.explanation.num_parameters


def test_a_llama_cut_by_hand(worlds: Worlds) -> None:
    run(worlds, Job(model="llama", is_manual=True))


def test_the_encoder_skips_to_all_stages_of_the_decoder(worlds: Worlds) -> None:
    report = run(worlds, Job(model="t5", ranks=4))[0]
    assert {"12", "13"} <= set(report.edges.split())
    assert report.shared == [(0, 1, 3)]
