"""Models that are split, run stage by stage, and compared with the whole."""

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import torch_xla_pp as xpp

SIZE = 4


class Net(nn.Module):
    """Some layers, and a forward that a test writes."""

    def __init__(self, run: Callable[..., Any], num_layers: int = 4) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(SIZE, SIZE) for _ in range(num_layers))
        self.norm = nn.BatchNorm1d(SIZE)
        self.register_buffer("count", torch.zeros(SIZE))
        self.run = run

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        return self.run(self, x, *args, **kwargs)


def example() -> Tensor:
    return torch.linspace(-1, 1, 3 * SIZE).reshape(3, SIZE)


def run_stages(pipe: xpp.Pipe, *args: Any, **kwargs: Any) -> Any:
    """Run each stage on what `sources` says; return what the last one returns."""
    results = [pipe.get_stage_module(0)(*args, **kwargs)]
    for stage in range(1, pipe.num_stages):
        inputs = []
        for source in pipe.stage_graph.sources(stage):
            inputs.append(source.of(results[source.stage]))
        results.append(pipe.get_stage_module(stage)(*inputs))
    return results[-1]


def split(run: Callable[..., Any] | nn.Module, *args: Any, **options: Any) -> xpp.Pipe:
    """Split a model and check that its stages compute what it computes.

    Compares what is returned, its structure, gradients, and buffers.

    Args:
        run: The model, or the forward of one.
        args: Its positional arguments, by default one tensor.
        options: `kwargs` are its keyword arguments; others are for `pipeline`.
    """
    model = run if isinstance(run, nn.Module) else Net(run)
    args = args or (example(),)
    kwargs = options.pop("kwargs", {})
    pipe = xpp.pipeline(model, mb_args=args, mb_kwargs=kwargs or None, **options)
    whole = copy.deepcopy(model)
    model.zero_grad()
    whole.zero_grad()
    given = copy.deepcopy((args, kwargs))
    expected = whole(*given[0], **given[1])
    got = run_stages(pipe, *args, **kwargs)
    torch.testing.assert_close(got, expected)
    assert pytree.tree_structure(got) == pytree.tree_structure(expected)
    _check_grads(pipe, got, whole, expected)
    _check_buffers(pipe, whole)
    return pipe


def _check_grads(pipe: xpp.Pipe, got: Any, whole: nn.Module, expected: Any) -> None:
    for result in (got, expected):
        leaves = [x for x in pytree.tree_leaves(result) if isinstance(x, Tensor)]
        start = torch.zeros((), requires_grad=True)
        sum((x.square().sum() for x in leaves if x.requires_grad), start).backward()
    # Stages that share a parameter have the model's own, so its gradient is the sum.
    grads: dict[str, Tensor] = {}
    for stage in range(pipe.num_stages):
        groups = pipe.stage_graph.shared_of(stage)
        for name, value in pipe.get_stage_module(stage).named_parameters():
            if value.grad is not None:
                grads[groups.get(name, name)] = value.grad
    wanted = {n: p.grad for n, p in whole.named_parameters() if p.grad is not None}
    torch.testing.assert_close(grads, wanted)


def _check_buffers(pipe: xpp.Pipe, whole: nn.Module) -> None:
    buffers = dict(whole.named_buffers(remove_duplicate=False))
    for stage in range(pipe.num_stages):
        for name, value in pipe.get_stage_module(stage).named_buffers():
            if name in buffers:
                torch.testing.assert_close(value, buffers[name])


def pairs(pipe: xpp.Pipe) -> str:
    """Return the edges between stages as text, e.g. `01 12`."""
    return " ".join(f"{a}{b}" for a, b in sorted(pipe.stage_graph.pairs))


def holders(pipe: xpp.Pipe) -> list[set[str]]:
    """Return the first parts of the names of each stage's parameters and buffers."""
    return [
        {name.rpartition(".")[0] or name for name in module.state_dict()}
        for module in map(pipe.get_stage_module, range(pipe.num_stages))
    ]
