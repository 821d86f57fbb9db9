"""A program of calls alone runs beside the thread that launches the next one."""

import time
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

from torch_xla_pp import xla_compat
from torch_xla_pp.compile import MARK, Function, Program, ProgramSpec
from torch_xla_pp.native import Event, notes
from torch_xla_pp.testing import Worlds, pause

pytestmark = pytest.mark.worlds

PAUSE_S = 1.0


class Pause(nn.Module):
    """A call that takes its time."""

    def forward(self, x: Tensor) -> tuple[Tensor]:
        return (pause(x, PAUSE_S, 0.0),)


fx.wrap("pause")


def launch_twice() -> tuple[int, list[int]]:
    """Return when two programs were launched, and when each of them has ended."""
    xla_compat.enable_spmd()
    module = fx.symbolic_trace(Pause())
    function = Function(name="test", module=module, inputs=("x",), outputs=("out",))
    program = Program(ProgramSpec(function=function))
    values: dict[str, Any] = {"x": xla_compat.replicate(torch.randn(3))}
    marked = {**values, MARK: notes.mark("F", 0, 0)}
    program(marked)
    xla_compat.flush()
    notes.start()
    results = [program(marked)["out"] for _ in range(2)]
    launched_ns = time.monotonic_ns()
    xla_compat.flush()
    for result in results:
        assert torch.equal(result.cpu(), values["x"].cpu())
    ends = [note.time_ns for note in notes.stop() if note.event is Event.ENDED]
    return launched_ns, ends


def test_a_launch_does_not_wait_for_a_program_of_calls(worlds: Worlds) -> None:
    ((launched_ns, ends),) = worlds.run(launch_twice, ranks=1, timeout_s=120)
    assert len(ends) == 2
    assert launched_ns < min(ends)
