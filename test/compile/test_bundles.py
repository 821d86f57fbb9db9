"""Small values that pass between programs as one."""

from typing import Any

import torch
from torch import Tensor, nn

from torch_xla_pp.compile import Function, Program, ProgramSpec
from torch_xla_pp.compile.bundles import Bundle, bundles_of


def test_small_values_of_one_dtype_are_packed_and_large_ones_are_not() -> None:
    looks = {
        "bias": torch.empty(8),
        "scale": torch.empty(2, 4),
        "weight": torch.empty(256, 256),
        "index": torch.empty(3, dtype=torch.int64),
        "half": torch.empty(3, dtype=torch.bfloat16),
        "other half": torch.empty((), dtype=torch.bfloat16),
    }
    bundles = bundles_of("forward", [*looks, "unknown"], looks)
    assert bundles == (
        Bundle("small:forward:torch.float32", {"bias": (8,), "scale": (2, 4)}),
        Bundle("small:forward:torch.bfloat16", {"half": (3,), "other half": ()}),
    )


def test_a_packed_value_has_all_parts() -> None:
    values = {"a": torch.randn(2, 3), "b": torch.randn(()), "c": torch.randn(4)}
    bundle = Bundle("small", {name: tuple(x.shape) for name, x in values.items()})
    parts = bundle.parts(bundle.joined(values))
    assert parts.keys() == values.keys()
    assert all(torch.equal(parts[name], value) for name, value in values.items())


def test_a_packed_value_may_be_added_to_another() -> None:
    values = {"a": torch.randn(2, 3), "b": torch.randn(()), "before": torch.randn(7)}
    bundle = Bundle("after", {"a": (2, 3), "b": ()}, "before")
    parts = bundle.parts(bundle.joined(values))
    before = Bundle("before", bundle.shapes).parts(values["before"])
    assert all(torch.equal(parts[n], values[n] + before[n]) for n in ("a", "b"))


class _SumAndProduct(nn.Module):
    def forward(self, left: Tensor, right: Tensor) -> list[Tensor]:
        return [left + right, left - right, left * right]


def test_a_program_takes_and_returns_packs(mesh: Any) -> None:
    given = Bundle("given", {"left": (2, 3), "none": (0,), "right": (2, 3)})
    made = Bundle("made", {"sum": (2, 3), "product": (2, 3)})
    added = Bundle("added", {"difference": (2, 3)}, "before")
    function = Function(
        name="sum and product",
        module=_SumAndProduct(),
        inputs=("left", "right"),
        outputs=("sum", "difference", "product"),
    )
    program = Program(ProgramSpec(function=function, bundles=[given, made, added]))
    assert program.inputs == ("given", "before")
    assert program.outputs == ("made", "added")
    for _ in range(2):
        values = {"left": torch.randn(2, 3), "right": torch.randn(2, 3)}
        whole = given.joined({**values, "none": torch.empty(0)}).to("xla")
        before = torch.randn(6)
        results = program({"given": whole, "before": before.to("xla")})
        found = {name: x.cpu() for name, x in results.items()}
        parts = made.parts(found["made"])
        expected = _SumAndProduct()(values["left"], values["right"])
        assert torch.equal(parts["sum"], expected[0])
        assert torch.equal(found["added"], before + expected[1].flatten())
        assert torch.equal(parts["product"], expected[2])
