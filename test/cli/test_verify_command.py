"""The command compares the pipeline that a script's function makes."""

import contextlib
import io
from pathlib import Path

import pytest

from torch_xla_pp.cli import main
from torch_xla_pp.testing import Worlds

pytestmark = pytest.mark.worlds

SCRIPT = """
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import Schedule1F1B

import torch_xla_pp as xpp

def right(scale_grads=True):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    rank = dist.get_rank()
    stage = xpp.PipelineStage(model[rank], rank, 2, xpp.device())
    loss = nn.functional.mse_loss
    schedule = Schedule1F1B(stage, 2, loss_fn=loss, scale_grads=scale_grads)
    return model, schedule, torch.randn(4, 4), torch.zeros(4, 4)

def wrong():
    return right(scale_grads=False)

def nothing():
    pass
"""


def run(words: list[str]) -> tuple[int, str]:
    """Run a command in a rank, as if torchrun had started it."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
        code = main(words)
    return code, printed.getvalue()


@pytest.mark.parametrize(
    ("name", "code", "text"),
    [
        ("right", 0, "equal: nothing differs by more than 1e-04"),
        ("wrong", 1, "gradient 1.weight"),
        ("nothing", 1, "expected a function that returns a model, a schedule"),
    ],
)
def test_a_scripts_pipeline_is_verified(
    worlds: Worlds, tmp_path: Path, name: str, code: int, text: str
) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    words = ["verify", f"{script}:{name}"]
    found = worlds.run(run, ranks=2, args=(words,))
    assert [rank_code for rank_code, _ in found] == [code, code]
    assert text in found[0][1]
