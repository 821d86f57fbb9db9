"""What a function reads from outside is seen to change."""

import functools
import sys
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import torch_xla_pp
from torch_xla_pp.graph.captured import captured_by

pytestmark = pytest.mark.pure

FACTOR = 2.0


def scaled(x: Tensor) -> Tensor:
    return x * FACTOR


def loss(output: Tensor, target: Tensor) -> Tensor:
    return scaled(F.mse_loss(output, target))


class Trainer:
    def __init__(self) -> None:
        self.factor, self.unread = 1.0, 1.0

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        return F.mse_loss(output, target) * self.factor


class Called:
    factor: float = 1.0

    def __init__(self) -> None:
        self.factor = 1.0

    def __call__(self, output: Tensor, target: Tensor) -> Tensor:
        return F.mse_loss(output, target) * self.factor


def test_nothing_changes_by_itself() -> None:
    functions = [loss, Trainer().loss, Called(), nn.CrossEntropyLoss(), F.mse_loss]
    for function in functions:
        assert captured_by(function) == captured_by(function)


def test_a_global_of_a_helper_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    before = captured_by(loss)
    monkeypatch.setitem(globals(), "FACTOR", 3.0)
    assert captured_by(loss) != before


@pytest.mark.parametrize("name", ["factor", "mse_loss"])
def test_a_global_with_the_name_of_an_attribute_is_another_thing(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    functions = [Trainer().loss, Called()]
    before = [captured_by(function) for function in functions]
    monkeypatch.setitem(globals(), name, 3.0)
    assert [captured_by(function) for function in functions] == before


def by_name(x: Tensor) -> Any:
    return x * globals()["FACTOR"]


def by_text(x: Tensor) -> Any:
    return x * getattr(sys.modules[__name__], "FACTOR")  # noqa: B009  # the text counts


def with_import(x: Tensor) -> Tensor:
    from torch.nn.functional import gelu

    return gelu(x).mean()


def with_package(x: Tensor) -> Tensor:
    return torch_xla_pp.shard(x, "batch").mean()


def test_an_import_of_installed_code_reaches_no_globals(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    before = captured_by(with_import)
    monkeypatch.setitem(globals(), "mean", 1.0)
    assert captured_by(with_import) == before


def test_this_package_is_not_looked_into(monkeypatch: pytest.MonkeyPatch) -> None:
    before = captured_by(with_package)
    monkeypatch.setattr(torch_xla_pp, "mean", 1.0, raising=False)
    assert captured_by(with_package) == before


class OfPackage(nn.Module):
    """A part such as this package's own, whose attributes users may change."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = 1.0

    def forward(self, x: Tensor) -> Tensor:
        return x * self.factor


OfPackage.forward.__module__ = "torch_xla_pp.experts"


def test_attributes_of_this_package_s_parts_are_seen() -> None:
    module = OfPackage()
    before = captured_by(module)
    module.factor = 2.0
    assert captured_by(module) != before


def by_attribute(x: Tensor) -> Any:
    return x * sys.modules[__name__].FACTOR


def by_import(x: Tensor) -> Any:
    from graph import test_captured

    return x * test_captured.FACTOR


@pytest.mark.parametrize("function", [by_name, by_text, by_attribute, by_import])
def test_a_global_that_is_looked_up_otherwise_is_seen(
    monkeypatch: pytest.MonkeyPatch, function: Any
) -> None:
    before = captured_by(function)
    monkeypatch.setitem(globals(), "FACTOR", 3.0)
    assert captured_by(function) != before


def test_a_closure_is_seen_and_a_tensor_counts_by_identity() -> None:
    factor, weight = 1.0, torch.ones(2)

    def inner(output: Tensor) -> Tensor:
        return output * factor * weight

    before = captured_by(inner)
    weight.mul_(2)
    assert captured_by(inner) == before
    weight = weight.clone()
    assert captured_by(inner) != before
    before = captured_by(inner)
    factor = 2.0
    assert captured_by(inner) != before


def test_a_lambda_within_a_function_is_followed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def outer(output: Tensor) -> Any:
        return (lambda y: y * FACTOR)(output)

    before = captured_by(outer)
    monkeypatch.setitem(globals(), "FACTOR", 3.0)
    assert captured_by(outer) != before


@pytest.mark.parametrize(
    "make", [lambda t: t.loss, lambda t: functools.partial(t.loss)]
)
def test_attributes_that_a_method_names_are_seen(make: Any) -> None:
    trainer = Trainer()
    before = captured_by(make(trainer))
    trainer.unread = 2.0
    assert captured_by(make(trainer)) == before
    trainer.factor = 2.0
    assert captured_by(make(trainer)) != before


def test_attributes_of_what_is_called_are_seen() -> None:
    called, module = Called(), nn.CrossEntropyLoss()
    before = captured_by(called), captured_by(module)
    called.factor, module.label_smoothing = 2.0, 0.1
    assert captured_by(called) != before[0]
    assert captured_by(module) != before[1]


def test_defaults_and_bound_arguments_are_seen() -> None:
    def inner(output: Tensor, factor: float = 1.0, *, power: float = 1.0) -> Tensor:
        return output * factor**power

    before = captured_by(inner)
    assert inner.__kwdefaults__ is not None
    inner.__kwdefaults__["power"] = 2.0
    assert captured_by(inner) != before
    assert captured_by(functools.partial(inner, factor=1.0)) != captured_by(
        functools.partial(inner, factor=2.0)
    )
