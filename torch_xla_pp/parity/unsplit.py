"""The unsplit model on one rank's host, beside a pipeline of its stages."""

import contextlib
import copy
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from torch_xla_pp.compile import split_loss
from torch_xla_pp.deferred import places_of
from torch_xla_pp.plan import autocast_dtype

Call = tuple[tuple[Any, ...], dict[str, Any], Any]


class UnsplitModel:
    """A copy of a model on the host, to be run as in any script.

    Args:
        model: The model; not changed.
        values: Values of parameters and buffers that replace its own.
        compared: Names of the parameters that get gradients.
        loss_fn: Computes the loss from output and target, None for no loss.
        training: The mode that it runs in.
        ties: Name → tie, for parameters that are one: making stages by hand separates
            them in the model that they are made of.

    Raises:
        ValueError: A parameter or buffer of the model has no value anywhere.
    """

    def __init__(
        self,
        model: nn.Module,
        values: Mapping[str, Tensor],
        compared: Collection[str],
        loss_fn: Callable[[Any, Any], Any] | None,
        *,
        training: bool,
        ties: Mapping[str, str],
    ) -> None:
        self._loss_fn = loss_fn
        self._module = _copied(model, values)
        one: dict[str, Tensor] = {}
        for place in places_of(self._module):
            if place.name in ties:
                place.put(one.setdefault(ties[place.name], place.tensor))
        if self._module.training != training:
            self._module.train(training)
        for name, parameter in named_values(self._module).items():
            if isinstance(parameter, nn.Parameter) and name not in compared:
                parameter.requires_grad_(False)

    def named(self) -> dict[str, Tensor]:
        """Return parameters and buffers by all their names."""
        return named_values(self._module)

    def run(self, call: Call, factor: float) -> tuple[list[Tensor], Tensor | None]:
        """Run a batch forward, and backward if there is a loss.

        Args:
            call: Positional and keyword arguments, and the target.
            factor: Factor of the gradient.

        Returns:
            The tensors of the output, and the loss.
        """
        args, kwargs, target = call
        with torch.set_grad_enabled(self._loss_fn is not None), _autocast():
            output = self._module(*args, **kwargs)
            loss = None
            if self._loss_fn is not None:
                loss, _ = split_loss(self._loss_fn(output, target))
        if loss is not None and loss.requires_grad:
            (loss * factor).backward()
        return tensors_of(output), None if loss is None else loss.detach()

    def add_gradients(self, other: "UnsplitModel") -> None:
        """Add the gradients of the same model for another batch."""
        theirs = other.named()
        for name, own in self._module.named_parameters():
            more = theirs[name].grad
            if more is not None:
                own.grad = more if own.grad is None else own.grad + more

    def draws_random_numbers(self, call: Call) -> bool:
        """Return whether a forward gives different values each time; runs it twice."""
        args, kwargs, _ = call
        found = []
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            for seed in (1, 2):
                torch.manual_seed(seed)
                module = copy.deepcopy(self._module)
                found.append(tensors_of(module(*args, **kwargs)))
        pairs = zip(*found, strict=True)
        return not all(torch.equal(one, other) for one, other in pairs)


def named_values(module: nn.Module) -> dict[str, Tensor]:
    """Return parameters and buffers of a module by all their names."""
    return {place.name: place.tensor for place in places_of(module)}


def precisions() -> set[torch.dtype]:
    """Return the dtype of autocast, if it is on."""
    dtype = autocast_dtype()
    return set() if dtype is None else {dtype}


def host_copy(tree: Any) -> Any:
    """Return a tree of values with its tensors on the host."""
    return pytree.tree_map_only(Tensor, lambda value: value.detach().cpu(), tree)


def _copied(model: nn.Module, values: Mapping[str, Tensor]) -> nn.Module:
    """Return a copy of a model on the host, with some other values."""
    memo: dict[int, Any] = {}
    missing = []
    for name, own in named_values(model).items():
        value = values.get(name)
        if value is None and own.device.type == "meta":
            missing += [] if id(own) in memo else [name]
        elif id(own) not in memo:
            # A copy: `cpu` returns a value that is on the host itself.
            value = (own if value is None else value).detach().cpu().clone()
            if isinstance(own, nn.Parameter):
                value = nn.Parameter(value, requires_grad=own.requires_grad)
            memo[id(own)] = value
    if missing:
        raise ValueError(
            f"verify: expected a model with values, got none for {', '.join(missing)}. "
            "Name the stages' parameters as in the model, or pass it with weights."
        )
    return copy.deepcopy(model, memo)


@contextlib.contextmanager
def _autocast() -> Iterator[None]:
    """Compute on the host in the precision of autocast on the devices."""
    dtype = autocast_dtype()
    if dtype is None:
        yield
    else:
        with torch.autocast("cpu", dtype=dtype):
            yield


def tensors_of(output: Any) -> list[Tensor]:
    """Return the tensors of a tree."""
    leaves = pytree.tree_leaves(output)
    return [leaf.detach() for leaf in leaves if isinstance(leaf, Tensor)]
