"""Every example runs to its last line."""

import re
from pathlib import Path

import pytest
import torch
from scripts import run_script
from torch import nn
from torchrun import ROOT, torchrun

from torch_xla_pp.checkpoint import latest
from torch_xla_pp.testing import Worlds

pytestmark = pytest.mark.worlds

SMALL = ("--steps", "6", "--batch", "16", "--microbatches", "4")
TRAIN_GPT = ROOT / "examples" / "train_gpt.py"


@pytest.fixture(scope="module")
def printed() -> str:
    """What train_gpt prints under ZBV."""
    schedule = ("--schedule", "ScheduleZBVZeroBubble")
    with pytest.MonkeyPatch.context() as patch:
        # torchrun would warn that it sets it.
        patch.setenv("OMP_NUM_THREADS", "1")
        return torchrun(TRAIN_GPT, *SMALL, *schedule, ranks=2, devices=2)


def test_train_gpt_learns_and_says_what_it_does_and_nothing_else(printed: str) -> None:
    begin, *lines = re.split(r"[\r\n]+", printed.strip())
    assert begin == "ZBVZeroBubble on 2 ranks of 2 devices: tracing the model"
    assert lines[0].startswith("compiling: ")
    speed, sample, unigrams, last = [
        line for line in lines if not re.match("compiling: |training: ", line)
    ]
    size = r"[\d.]+"
    assert re.fullmatch(
        rf"[\d,]+ tokens/s, bubble {size}%, {size} \+ {size} MiB on a device", speed
    )
    assert sample.startswith("sample: ")
    assert unigrams.startswith("unigram entropy ")
    assert re.fullmatch(r"final val loss \d\.\d{3}", last), printed
    # Untrained, the loss is that of 100 equally likely characters: 4.6.
    assert float(last.split()[-1]) < 4.2


def test_train_gpt_goes_on_from_its_checkpoint(printed: str, tmp_path: Path) -> None:
    """At another schedule, and ends as if there had been no break."""
    small = (*SMALL, "--checkpoint", str(tmp_path))
    torchrun(TRAIN_GPT, *small, "--steps", "3", ranks=2, devices=2)
    assert latest(tmp_path) == tmp_path / "step-3"
    more = ("--schedule", "ZBVZeroBubble")
    resumed = torchrun(TRAIN_GPT, *small, *more, ranks=2, devices=2)
    assert latest(tmp_path) == tmp_path / "step-6"
    found, expected = (text.strip().split()[-1] for text in (resumed, printed))
    assert float(found) == pytest.approx(float(expected), abs=2e-3)


@pytest.mark.parametrize(("rows", "count"), [("64", "6"), ("64", "0"), ("0", "8")])
def test_train_gpt_refuses_microbatches_that_do_not_fit(rows: str, count: str) -> None:
    given = ("--batch", rows, "--microbatches", count)
    expected = (
        f"--microbatches {count}: expected a divisor of {rows}, the rows of --batch"
    )
    with pytest.raises(AssertionError, match=expected):
        torchrun(TRAIN_GPT, *given, ranks=1, devices=2)


def test_the_proposals_example_trains_as_one_process_in_eager() -> None:
    script = ROOT / "examples" / "rfc_simple_linear.py"
    printed = torchrun(script, ranks=2, devices=2)
    found = re.fullmatch(r"loss (.*) -> (.*)", printed.strip().splitlines()[-1])
    assert found, printed
    torch.manual_seed(42)
    model = nn.Sequential(
        nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 3), nn.Linear(3, 3)
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    x = torch.randn(250, 64)
    means = []
    for _ in range(8):
        losses = []
        for part, y in zip(x.split(64), x[:, :3].argmax(1).split(64), strict=True):
            loss = nn.functional.cross_entropy(model(part), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        means.append(sum(losses) / len(losses))
    expected = (means[0], means[-1])
    assert [float(x) for x in found.groups()] == pytest.approx(expected, abs=2e-3)


@pytest.mark.parametrize(
    ("name", "held"),
    [
        ("llama_tp", r"a device holds \d+ of \d+ KiB of weights"),
        ("fsdp_deferred", r"a device holds 132 of 519 KiB of weights"),
        ("moe_experts", r"a device holds 2 of 4 experts of a layer"),
        ("mixtral_experts", r"a device holds 2 of 4 experts of a layer"),
    ],
)
def test_examples_of_shardings_learn(worlds: Worlds, name: str, held: str) -> None:
    if name.startswith(("llama", "mixtral")):
        pytest.importorskip("transformers")
    script = ROOT / "examples" / f"{name}.py"
    printed = run_script(worlds, script, ranks=2, devices=2)
    last = printed.strip().splitlines()[-1]
    found = re.fullmatch(rf"loss (\d+\.\d+) -> (\d+\.\d+), {held}", last)
    assert found, printed
    assert float(found[2]) < 0.6 * float(found[1])
