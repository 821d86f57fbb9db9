"""Exchanges that come from cutting what is split are reported, with a remedy."""

import pytest

from torch_xla_pp.accelerators import (
    CompiledProgram,
    DeviceCollective,
    ProgramBytes,
)
from torch_xla_pp.fitting.surprises import surprises_in

pytestmark = pytest.mark.pure

MIB = 2**20
LINE = "aten.split.Tensor (model.py:7, in forward)"


def exchange(kind: str, origin: str, times: int = 1) -> DeviceCollective:
    return DeviceCollective(
        kind=kind,
        groups=((0, 1),),
        num_bytes=MIB,
        is_asynchronous=False,
        origin=origin,
        times=times,
    )


def surprises(*found: DeviceCollective) -> list[str]:
    none = ProgramBytes(arguments=0, outputs=0, aliased=0, temporaries=0, code=0)
    program = CompiledProgram(num_bytes=none, collectives=found)
    return [*surprises_in(program, {"op1": LINE})]


def test_permutations_of_a_cut_are_told_together_with_its_line() -> None:
    cut = exchange("collective-permute", "op1/aten__split", times=3)
    (text,) = surprises(cut, exchange("collective-permute", "op1/aten__split"))
    assert text.startswith(f"2 collective-permute, 4.0 MiB, as {LINE} cuts or joins")
    assert "a layer of its own" in text


def test_exchanges_of_the_gradient_are_told_by_the_name_that_is_known() -> None:
    (text,) = surprises(exchange("all-to-all", "op2/aten__cat"))
    assert text.startswith("1 all-to-all, 1.0 MiB, as op2/aten__cat cuts or joins")


@pytest.mark.parametrize(
    ("kind", "origin"),
    [
        ("all-gather", "op1/aten__split"),
        ("all-to-all", "op1/xla__custom_sharding"),
        ("collective-permute", ""),
    ],
)
def test_what_was_asked_for_is_no_surprise(kind: str, origin: str) -> None:
    assert surprises(exchange(kind, origin)) == []
