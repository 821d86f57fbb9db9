"""A short form of `benchmarks/stress.py`: what aborted inside XLA beside other work."""

from dataclasses import replace

import pytest
import stress

from torch_xla_pp.testing import Worlds

pytestmark = pytest.mark.worlds

SHORT = {
    "eval": replace(stress.CASES["eval"], evals=40),
    "1F1B-32": replace(stress.CASES["1F1B-32"], steps=5),
    "one rank": replace(stress.CASES["one rank"], steps=10),
    "split batch": replace(stress.CASES["split batch"], steps=2, evals=3),
}


@pytest.mark.parametrize(
    ("name", "devices"), [("train", 1), *((name, 2) for name in SHORT)]
)
def test_nothing_dies_or_hangs_beside_busy_loops(
    worlds: Worlds, name: str, devices: int
) -> None:
    case = SHORT.get(name) or stress.CASES[name]
    args = (case, devices)
    with stress.busy_loops(4):
        worlds.run(stress.run_case, ranks=case.ranks, devices=devices, args=args)
