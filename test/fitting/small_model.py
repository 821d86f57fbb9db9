"""A small model of two stages, and a compiler that knows none."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

import torch_xla_pp as xpp
from torch_xla_pp.accelerators import (
    CompiledProgram,
    CompilerLibrary,
    ProgramBytes,
    Slice,
)
from torch_xla_pp.fitting import Fit
from torch_xla_pp.schedule import one_f_one_b

TOPOLOGY = "v5e:2x1"
ROWS = 16


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(x).relu())


class Model(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.second = Block(width), Block(width)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(xpp.pipeline_yield(self.first(x)))


class Recorder:
    """A compiler that finds everything good, and keeps every result whole."""

    library = CompilerLibrary(path=Path("none"), version="0")

    def __init__(self, topology: str = TOPOLOGY) -> None:
        self.topology = Slice.parse(topology)
        self.asked: list[tuple[bytes, list[str], list[int]]] = []

    def compile(
        self, hlo: bytes, *, shardings: Sequence[str], donated: Sequence[int]
    ) -> CompiledProgram:
        self.asked.append((hlo, [*shardings], [*donated]))
        num_bytes = ProgramBytes(
            arguments=0, outputs=0, aliased=0, temporaries=0, code=0
        )
        return CompiledProgram(num_bytes=num_bytes)


def fit_model(compiler: Any, width: int = 64, **options: Any) -> Fit:
    with torch.device("meta"):
        model, x = Model(width), torch.zeros(ROWS, width)
    given: dict[str, Any] = {"topology": TOPOLOGY, "schedule": one_f_one_b(2, 4)}
    given |= {"loss_fn": mse_loss, "target": x, **options}
    return xpp.fit(model, (x,), compiler=compiler, **given)
