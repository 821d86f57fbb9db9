"""Every example runs to its last line."""

import re

import pytest
from scripts import run_script
from torchrun import ROOT, torchrun

from torch_xla_pp.testing import Worlds

pytestmark = pytest.mark.worlds

SMALL = ("--steps", "6", "--batch", "16", "--microbatches", "4")


def test_train_gpt_learns_and_ends_with_its_loss() -> None:
    script = ROOT / "examples" / "train_gpt.py"
    schedule = ("--schedule", "ScheduleZBVZeroBubble")
    printed = torchrun(script, *SMALL, *schedule, ranks=2, devices=2)
    last = printed.strip().splitlines()[-1]
    assert re.fullmatch(r"final val loss \d\.\d{3}", last), printed
    # Untrained, the loss is that of 100 equally likely characters: 4.6.
    assert float(last.split()[-1]) < 4.2
    assert "sample: " in printed


@pytest.mark.parametrize(
    ("name", "held"),
    [
        ("llama_tp", r"a device holds \d+ of \d+ KiB of weights"),
        ("fsdp_deferred", r"a device holds 132 of 519 KiB of weights"),
        ("moe_experts", r"a device holds 2 of 4 experts of a layer"),
    ],
)
def test_examples_of_shardings_learn(worlds: Worlds, name: str, held: str) -> None:
    if name.startswith("llama"):
        pytest.importorskip("transformers")
    script = ROOT / "examples" / f"{name}.py"
    printed = run_script(worlds, script, ranks=2, devices=2)
    last = printed.strip().splitlines()[-1]
    found = re.fullmatch(rf"loss (\d+\.\d+) -> (\d+\.\d+), {held}", last)
    assert found, printed
    assert float(found[2]) < 0.6 * float(found[1])
