"""Whether a stage computes what eager does for one case.

Programs run twice, on other values first: what a trace took for a constant shows in the
second run. Tolerances: a value may differ from eager's by

* 100 units in the last place of the largest value, as sums are added up in another
  order, and XLA's `exp`, `log` and the like are good to some units;
* ten times the error that eager itself makes, measured against float64, for what is
  sensitive to rounding, such as inverses and products of many numbers.

Random operations draw other numbers than eager. Of those, the means over many seeds
are compared, and gradients with differences of outputs under one seed.
"""

import logging
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal
from unittest import mock

import torch
from compile.stages import Compiled
from torch import Tensor, nn

_ULPS = 100
_OWN_ERRORS = 10
_SEEDS = 200
_SIGMAS = 6  # one wrong alarm in a billion values

Kind = Literal["right", "random", "refused", "wrong"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """A module and inputs on the host, with their name."""

    module: nn.Module
    inputs: tuple[Tensor, ...]
    text: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """The verdict on a case.

    Args:
        kind: "right" equals eager; "random" does in the mean; "refused" raised.
        text: What is wrong, or the error.
        decomposed: Operations that other ones stood in for.
    """

    kind: Kind
    text: str = ""
    decomposed: tuple[str, ...] = ()


class Whole(Compiled):
    """A stage every value of which is whole on each device."""

    def rows(self, value: Tensor) -> Any:
        return self.whole


@dataclass(frozen=True, kw_only=True, slots=True)
class Results:
    """Outputs, and a gradient for each input."""

    outputs: list[Tensor]
    grads: list[Tensor]


def judge(case: Case) -> Verdict:
    """Run a case as a stage, and compare with eager.

    Raises:
        Exception: Eager cannot run it.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        eager = _Eager(case)
        with _decomposed() as names:
            try:
                stage = Whole(case.module, case.inputs, None)
                run = _Stage(stage, eager.tangents)
                run(_scaled(case.inputs))
                got = run(case.inputs)
            except Exception as error:
                notes = " ".join(getattr(error, "__notes__", ()))
                text = f"{type(error).__name__} {notes}: {error}"
                return Verdict(kind="refused", text=text, decomposed=tuple(names))
        if stage.joint.num_random:
            faults, kind = _random_faults(case, run, eager), "random"
        else:
            faults, kind = _faults(got, eager), "right"
    return Verdict(
        kind="wrong" if faults else kind,  # type: ignore[arg-type]
        text="; ".join(faults),
        decomposed=tuple(names),
    )


@contextmanager
def _decomposed() -> Iterator[dict[str, None]]:
    """Collect the operations that others stand in for."""
    names: dict[str, None] = {}
    logger = logging.getLogger("torch_xla_pp.compile.decompositions")

    def note(record: logging.LogRecord) -> bool:
        names[str(record.args[0])] = None  # type: ignore[index]
        return False

    with mock.patch.object(logger, "level", logging.DEBUG):
        logger.addFilter(note)
        logger.manager._clear_cache()  # type: ignore[attr-defined]
        try:
            yield names
        finally:
            logger.removeFilter(note)
    logger.manager._clear_cache()  # type: ignore[attr-defined]


def _scaled(inputs: Sequence[Tensor]) -> list[Tensor]:
    """Return inputs of other values, within the domain of most operators."""
    return [
        (x * 0.75).detach().requires_grad_(x.requires_grad)
        if x.is_floating_point()
        else x
        for x in inputs
    ]


class _Eager:
    """What eager gives on the host, in float32 and, where it can, in float64."""

    def __init__(self, case: Case) -> None:
        self.tangents: list[Tensor | None] = []
        self.results = self._run(case, case.inputs)
        try:
            self.exact = self._run(case, [_double(x) for x in case.inputs])
        except Exception:
            self.exact = self.results

    def _run(self, case: Case, inputs: Sequence[Tensor]) -> Results:
        inputs = [x.detach().clone().requires_grad_(x.requires_grad) for x in inputs]
        outputs = case.module(*inputs)
        if not self.tangents:
            generator = torch.Generator().manual_seed(0)
            self.tangents = [
                torch.rand(y.shape, generator=generator) + 0.5
                if y.requires_grad
                else None
                for y in outputs
            ]
        pairs = [
            (y, t.to(y.dtype))
            for y, t in zip(outputs, self.tangents, strict=True)
            if t is not None
        ]
        trained = [x for x in inputs if x.requires_grad]
        if pairs and trained:
            torch.autograd.backward(*map(list, zip(*pairs, strict=True)))  # type: ignore[arg-type]
        grads = [torch.zeros_like(x) if x.grad is None else x.grad for x in inputs]
        return Results(outputs=[y.detach() for y in outputs], grads=grads)


def _double(value: Tensor) -> Tensor:
    if value.dtype != torch.float32:
        return value
    return value.detach().double().requires_grad_(value.requires_grad)


class _Stage:
    """The programs of a stage, run forward and backward."""

    def __init__(self, stage: Whole, tangents: Sequence[Tensor | None]) -> None:
        self._stage = stage
        self.tangents = tangents

    def __call__(self, inputs: Sequence[Tensor], seed: int = 0) -> Results:
        stage = self._stage
        result = stage.forward([stage.upload(x) for x in inputs], seed)
        for index, needs_grad in enumerate(stage.joint.outputs_need_grad):
            tangent = self.tangents[index]
            if needs_grad and tangent is not None:
                dtype = result.outputs[index].dtype
                result.live[f"tangent:{index}"] = stage.upload(tangent.to(dtype))
        grads: dict[int, Tensor | None] = {}
        if stage.programs.has_backward:
            grads, _ = stage.programs.backward(stage.fixed, result.live)
        by_input = [grads.get(index) for index in range(len(inputs))]
        return Results(
            outputs=[value.cpu() for value in result.outputs.values()],
            grads=[
                torch.zeros_like(x) if grad is None else grad.cpu()
                for x, grad in zip(inputs, by_input, strict=True)
            ],
        )


def _faults(got: Results, eager: _Eager) -> list[str]:
    """Return what differs."""
    faults = []
    for kind in ("outputs", "grads"):
        values = [getattr(x, kind) for x in (got, eager.results, eager.exact)]
        for index, (value, wanted, exact) in enumerate(zip(*values, strict=True)):
            fault = _difference(value.detach(), wanted.detach(), exact.detach())
            if fault is not None:
                faults.append(f"{kind.removesuffix('s')} {index}: {fault}")
    return faults


def _difference(got: Tensor, wanted: Tensor, exact: Tensor) -> str | None:
    if got.shape != wanted.shape or got.dtype != wanted.dtype:
        return f"{got.dtype}{list(got.shape)} for {wanted.dtype}{list(wanted.shape)}"
    if not wanted.is_floating_point():
        count = int((got != wanted).sum())
        return f"{count} of {got.numel()} values" if count else None
    finite = wanted.isfinite()
    if not torch.equal(got[~finite].nan_to_num(), wanted[~finite].nan_to_num()):
        return "another infinity, or a number in its place"
    if not bool(finite.any()):
        return None
    number, own, true = (x[finite].double() for x in (got, wanted, exact))
    true = torch.where(true.isfinite(), true, own)
    scale = own.abs().max().clamp_min(0.1)
    allowed = _ULPS * torch.finfo(wanted.dtype).eps * scale
    allowed += _OWN_ERRORS * (own - true).abs().max()
    error = torch.minimum((number - own).abs(), (number - true).abs())
    error = error.nan_to_num(torch.inf)
    if error.max() <= allowed:
        return None
    worst = int(error.argmax())
    return f"{number[worst]:.6g} for {own[worst]:.6g}"


def _random_faults(case: Case, run: _Stage, eager: _Eager) -> list[str]:
    """Compare means over seeds, and a gradient with a difference of outputs."""
    return [*_mean_faults(case, run), *_slope_faults(case, run, eager)]


def _mean_faults(case: Case, run: _Stage) -> list[str]:
    ours = [run(case.inputs, seed).outputs for seed in range(_SEEDS)]
    seeded = torch.manual_seed
    theirs = []
    for seed in range(_SEEDS):
        with mock.patch.object(torch, "manual_seed", lambda _, seed=seed: seeded(seed)):
            seeded(seed)
            theirs.append([y.detach() for y in case.module(*case.inputs)])
    faults = []
    for index in range(len(ours[0])):
        left, right = (
            torch.stack([outputs[index] for outputs in runs]).double()
            for runs in (ours, theirs)
        )
        gap = (left.mean(0) - right.mean(0)).abs()
        noise = ((left.var(0) + right.var(0)) / _SEEDS).sqrt()
        scale = right.abs().max().clamp_min(0.1) if right.numel() else 0.1
        if bool((gap > _SIGMAS * noise + 1e-4 * scale).any()):
            faults.append(f"output {index}: another mean over {_SEEDS} seeds")
    return faults


def _slope_faults(case: Case, run: _Stage, eager: _Eager) -> list[str]:
    """Check the gradient along one direction; random numbers stay the same."""
    trained = [i for i, x in enumerate(case.inputs) if x.requires_grad]
    generator = torch.Generator().manual_seed(1)
    ways = {i: torch.rand(case.inputs[i].shape, generator=generator) for i in trained}
    step = 1e-2

    def total(distance: float) -> float:
        inputs = [
            (x + distance * ways[i]).detach().requires_grad_() if i in ways else x
            for i, x in enumerate(case.inputs)
        ]
        outputs = zip(run(inputs, 7).outputs, run.tangents, strict=True)
        return sum(float((y * t).double().sum()) for y, t in outputs if t is not None)

    grads = run(case.inputs, 7).grads
    slope = sum(float((grads[i] * ways[i]).double().sum()) for i in trained)
    if slope == 0.0 and not any(bool(x.any()) for x in eager.results.grads):
        return []
    found = (total(step) - total(-step)) / (2 * step)
    # Sums of float32 over a step of 1e-2, and a second-order term.
    allowed = 2e-2 * max(abs(slope), abs(found), 1.0)
    if abs(slope - found) <= allowed:
        return []
    return [f"gradient: {slope:.4g} along a line where outputs change by {found:.4g}"]
