"""Models, references and steps that the cases of several files share.

A *case* is a function that runs in every rank and asserts there. `run_cases` runs
many of them in one job, since starting jobs and compiling take longest, and each is
reported on its own.
"""

import contextlib
import copy
import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import SplitPoint, pipe_split
from torch.distributed.pipelining.schedules import (
    PipelineScheduleSingle,
    get_schedule_class,
)
from torch.nn import functional as F

import torch_xla_pp as xpp
from torch_xla_pp.testing import Worlds

WIDTH, ROWS = 16, 16
SINGLE = ("GPipe", "1F1B")
LOOPED = ("Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble")
V_SHAPED = ("ZBVZeroBubble", "DualPipeV")
# What upstream compares gradients to.
GRADS = {"rtol": 1e-5, "atol": 4e-5}

Case = Callable[[], None]
Table = Mapping[str, tuple[Callable[..., None], tuple[Any, ...]]]


class Mlp(nn.Module):
    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.net1 = nn.Linear(width, width)
        self.net2 = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.net2(F.relu(self.net1(x)))


class Stack(nn.Module):
    """As many blocks as there are stages (upstream: MultiMLP)."""

    block: type[nn.Module] = Mlp

    def __init__(self, num_layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(self.block() for _ in range(num_layers))

    @property
    def split_spec(self) -> dict[str, SplitPoint]:
        names = range(1, len(self.layers))
        return {f"layers.{i}": SplitPoint.BEGINNING for i in names}

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class Branching(nn.Module):
    """A value without gradient, made from a buffer, goes with the activation.

    Upstream: ExampleCode of its models, in two parts.
    """

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.randn(2, WIDTH, WIDTH).unbind())
        self.register_buffer("shift", torch.randn(WIDTH))
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(torch.mm(x, self.weights[0]))
        constant = self.shift.clone()
        x = self.linear(x)
        pipe_split()
        return torch.mm(F.relu(x) + constant, self.weights[1])


class Shifted(nn.Module):
    """A first stage with a keyword argument (upstream: ModelWithKwargs)."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.randn(2, WIDTH, WIDTH).unbind())
        self.linears = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x = F.relu(self.linears[0](torch.mm(x, self.weights[0]) + y))
        pipe_split()
        return F.relu(self.linears[1](torch.mm(x, self.weights[1])))


@dataclass(frozen=True, kw_only=True)
class Reference:
    """The unsplit model with its gradients, and what it was trained on."""

    model: nn.Module
    x: Tensor
    target: Tensor
    output: Tensor
    loss: Tensor

    def check_grads(
        self, stages: Sequence[Any], rtol: float = 1e-5, atol: float = 4e-5
    ) -> None:
        """Compare all gradients of stages that are layers of the model."""
        for stage in stages:
            layer = self.model.get_submodule(f"layers.{stage.stage_index}")
            self._check(stage, dict(layer.named_parameters()), rtol, atol)

    def check_grads_by_name(self, stage: Any) -> None:
        """Compare all gradients of a traced stage."""
        self._check(stage, dict(self.model.named_parameters()), **GRADS)

    def _check(
        self, stage: Any, expected: dict[str, Any], rtol: float, atol: float
    ) -> None:
        for name, parameter in stage.submod.named_parameters():
            torch.testing.assert_close(
                parameter.grad.cpu(),
                expected[name].grad,
                rtol=rtol,
                atol=atol,
                msg=lambda text, name=name: f"{name}: {text}",
            )

    def check_result(self, output: Tensor | None, losses: Sequence[Tensor]) -> None:
        """Compare the output and the sum of the losses; None on other ranks."""
        if output is None:
            return
        torch.testing.assert_close(output.cpu(), self.output)
        torch.testing.assert_close(sum(loss.cpu() for loss in losses), self.loss)


def summed_loss(output: Tensor, target: Tensor) -> Tensor:
    return F.mse_loss(output, target, reduction="sum")


def train_unsplit(
    model: nn.Module,
    loss_fn: Callable[[Tensor, Tensor], Tensor] = summed_loss,
    *,
    num_backwards: int = 1,
    **kwargs: Any,
) -> Reference:
    """Train a copy on one batch, whose target is the output with noise."""
    model = copy.deepcopy(model)
    x = torch.randn(ROWS, WIDTH)
    with torch.no_grad():
        target = model(x, **kwargs) + torch.randn(ROWS, WIDTH)
    for _ in range(num_backwards):
        output = model(x, **kwargs)
        loss = loss_fn(output, target)
        loss.backward()
    return Reference(
        model=model, x=x, target=target, output=output.detach(), loss=loss.detach()
    )


def stages_of(schedule: str, rank: int, ranks: int) -> list[int]:
    """Return which stages a rank has: one, two in turn, or two in a V."""
    if schedule in SINGLE:
        return [rank]
    if schedule in V_SHAPED:
        return [rank, 2 * ranks - 1 - rank]
    return [rank, rank + ranks]


def build(model: nn.Module, indices: Sequence[int]) -> list[Any]:
    """Make stages by hand, each one layer of the model."""
    count = len(model.layers)
    return [xpp.PipelineStage(model.layers[i], i, count, xpp.device()) for i in indices]


def trace(model: nn.Module, num_microbatches: int, **kwargs: Tensor) -> Any:
    """Make this rank's stage by tracing."""
    count = num_microbatches
    pipe = xpp.pipeline(
        model,
        mb_args=(torch.zeros(ROWS // count, WIDTH),),
        mb_kwargs={name: value.chunk(count)[0] for name, value in kwargs.items()},
        split_spec=getattr(model, "split_spec", None),
    )
    return pipe.build_stage(dist.get_rank(), xpp.device())


def make_schedule(name: str, stages: Sequence[Any], count: int, **options: Any) -> Any:
    """Make torch's schedule of that name for one stage or several."""
    cls = get_schedule_class(name)
    first = stages[0] if issubclass(cls, PipelineScheduleSingle) else stages
    return cls(first, count, **options)


def feed(
    call: Callable[..., Any],
    stages: Sequence[Any],
    x: Tensor,
    target: Tensor,
    losses: list[Tensor],
    **kwargs: Any,
) -> Any:
    """Call a schedule's `step` or `eval` with what this rank's stages take."""
    args, options = (), {}
    if any(stage.is_first for stage in stages):
        args, options = (x,), kwargs
    if any(stage.is_last for stage in stages):
        options |= {"target": target, "losses": losses}
    return call(*args, **options)


def train(
    schedule: Any,
    stages: Sequence[Any],
    reference: Reference,
    num_steps: int = 2,
    **kwargs: Any,
) -> tuple[Tensor | None, list[Tensor]]:
    """Run steps from zero gradients each; return output and losses of the last."""
    for _ in range(num_steps):
        losses: list[Tensor] = []
        for stage in stages:
            stage.submod.zero_grad()
        args = (reference.x, reference.target, losses)
        output = feed(schedule.step, stages, *args, **kwargs)
    return output, losses


@contextlib.contextmanager
def nothing_leaks() -> Iterator[None]:
    """Assert that no tensor made meanwhile is left to the garbage collector."""
    flags = gc.get_debug()
    # What is older needs no look, which saves a second.
    gc.freeze()
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        yield
        gc.collect()
        leaked = [value.shape for value in gc.garbage if isinstance(value, Tensor)]
    finally:
        gc.set_debug(flags)
        gc.unfreeze()
        gc.garbage.clear()
    assert not leaked, leaked


def run_cases(cases: Table) -> dict[str, str]:
    """Run cases in this rank; return for each what did not hold, "" if all did."""
    dist.init_process_group("xla_pp")
    found = {}
    for number, (name, (case, args)) in enumerate(cases.items()):
        torch.manual_seed(number)
        try:
            case(*args)
            found[name] = ""
        except AssertionError as error:
            found[name] = str(error) or repr(error)
    return found


def outcomes(
    worlds: Worlds, cases: Table, *, ranks: int = 2, devices: int = 1
) -> dict[str, list[str]]:
    """Run cases in one job; return by case what did not hold in its ranks."""
    reports = worlds.run(
        run_cases, ranks=ranks, devices=devices, args=(cases,), timeout_s=200
    )
    return {
        name: [f"rank {rank}: {r[name]}" for rank, r in enumerate(reports) if r[name]]
        for name in cases
    }
