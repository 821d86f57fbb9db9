"""Parameters that several stages have copies of, such as tied embeddings.

Terms: a *group* is a name under which stages know that a parameter of theirs is one
and the same; its *owner* is the first stage that has it. Gradients of copies are added
up once a step (see `compile.shared`), so equal optimizers keep copies equal.
"""

import hashlib
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from torch_xla_pp import xla_compat
from torch_xla_pp.compile import SharedSums, accumulator, route_in, route_out
from torch_xla_pp.plan import Wiring
from torch_xla_pp.runtime.exchange import Exchange
from torch_xla_pp.runtime.module_state import ModuleState
from torch_xla_pp.transport import Message, ShardLayout


class SharedParameters:
    """Know the shared parameters of one stage, and add up their gradients.

    Args:
        stage: Index of the stage.
        module: Its module.
        tied: Parameter name → group.
        exchange: Carries values between stages.

    Raises:
        ValueError: The module lacks a parameter, or has a group twice.
    """

    def __init__(
        self, stage: int, module: nn.Module, tied: Mapping[str, str], exchange: Exchange
    ) -> None:
        self._stage = stage
        self._exchange = exchange
        self._module = module
        self._names = _first_names(module, tied)
        self._wiring: Wiring | None = None
        self._sums: SharedSums | None = None
        self._layouts: dict[str, ShardLayout] = {}

    def __bool__(self) -> bool:
        return bool(self._names)

    def describe(self) -> dict[str, str]:
        """Return group → a text that is equal for equal copies."""
        found = {}
        for group, parameter in self._parameters().items():
            data = parameter.detach().cpu().contiguous().reshape(-1)
            digest = hashlib.blake2b(
                data.view(torch.uint8).numpy().tobytes(), digest_size=8
            )
            kind = str(parameter.dtype).removeprefix("torch.")
            found[group] = (
                f"{kind}{list(parameter.shape)}"
                f"{'' if parameter.requires_grad else ' frozen'} "
                f"with values {digest.hexdigest()}"
            )
        return found

    def copies(self, wiring: Wiring) -> set[str]:
        """Return the names of parameters that an earlier stage has, too."""
        return {
            name
            for group, name in self._names.items()
            if wiring.shared[group][0] != self._stage
        }

    def connect(self, wiring: Wiring) -> None:
        """Learn where the copies are."""
        self._wiring = wiring
        self._sums = None
        for group in self._names:
            for other in wiring.shared[group]:
                if other != self._stage:
                    message = Message("S", self._stage, 0, other)
                    self._exchange.expect(message, wiring.ranks[other])

    def give(self, state: ModuleState) -> None:
        """Send this stage's gradients, or lay them ready; at the end of a step."""
        programs = self._programs()
        sums = self._own_sums(state)
        routes = {}
        for other, groups in programs.others.items():
            message = Message("S", other, 0, self._stage)
            rank = self._wired.ranks[other]
            layouts = [self._layouts[group] for group in groups]
            if self._exchange.is_own(rank):
                given = {i: sums[group] for i, group in enumerate(groups)}
                self._exchange.give(message, given)
            elif self._exchange.is_in_graph(rank):
                routes[route_out(other)] = self._exchange.send_route(
                    message, rank, layouts
                )
            else:
                self._exchange.send(message, rank, [sums[group] for group in groups])
        programs.send(sums, routes)

    def take(self, state: ModuleState) -> None:
        """Add the gradients of the other copies; after all stages of a rank `give`."""
        programs = self._programs()
        sums = self._own_sums(state)
        routes: dict[str, Tensor] = {}
        given: dict[int, dict[str, Tensor]] = {}
        for other, groups in programs.others.items():
            message = Message("S", self._stage, 0, other)
            rank = self._wired.ranks[other]
            layouts = [self._layouts[group] for group in groups]
            if self._exchange.is_own(rank):
                values = self._exchange.take(message, range(len(groups)))
                given[other] = {group: values[i] for i, group in enumerate(groups)}
            elif self._exchange.is_in_graph(rank):
                routes[route_in(other)] = self._exchange.receive_route(
                    message, rank, layouts
                )
            else:
                received = self._exchange.receive(message, rank, layouts)
                given[other] = dict(zip(groups, received, strict=True))
        totals = programs.add(sums, given, routes)
        state.replace_sums(
            {accumulator(_role(self._names[g])): x for g, x in totals.items()}
        )

    @property
    def _wired(self) -> Wiring:
        if self._wiring is None:
            raise RuntimeError(f"stage {self._stage}: its copies are not connected")
        return self._wiring

    def _parameters(self) -> dict[str, Tensor]:
        named = dict(self._module.named_parameters())
        return {group: named[name] for group, name in self._names.items()}

    def _own_sums(self, state: ModuleState) -> dict[str, Tensor]:
        """Return group → this stage's gradient, zeros where it has none.

        Frozen parameters, which have no layout in `_programs`, are left out.
        """
        return {g: state.sum_of(_role(self._names[g])) for g in self._layouts}

    def _programs(self) -> SharedSums:
        if self._sums is not None:
            return self._sums
        wiring, parameters = self._wired, self._parameters()
        trained = {g: p for g, p in parameters.items() if p.requires_grad}
        self._layouts = {g: ShardLayout.of_tensor(p) for g, p in trained.items()}
        holders = {group: wiring.shared[group] for group in trained}
        others = {s for stages in holders.values() for s in stages}
        is_in_graph = self._exchange.is_in_graph
        self._sums = SharedSums(
            self._stage,
            holders,
            [s for s in sorted(others) if is_in_graph(wiring.ranks[s])],
            self._layouts,
            {g: xla_compat.sharding_of(p) for g, p in trained.items()},
        )
        return self._sums


def _first_names(module: nn.Module, tied: Mapping[str, str]) -> dict[str, str]:
    """Return group → name of the parameter, by which the module lists it."""
    every = dict(module.named_parameters(remove_duplicate=False))
    unknown = [name for name in tied if name not in every]
    if unknown:
        raise ValueError(
            f"tied: expected names of parameters of the stage's module, got "
            f"{', '.join(unknown)}. Use names out of: {', '.join(every)}."
        )
    first = {id(value): name for name, value in module.named_parameters()}
    found: dict[str, str] = {}
    for name, group in tied.items():
        listed = first[id(every[name])]
        if found.setdefault(group, listed) != listed:
            raise ValueError(
                f"tied: expected one parameter of a stage per group, got {listed} and "
                f"{found[group]} in {group!r}. Make them one parameter of the module."
            )
    return found


def _role(name: str) -> str:
    return f"param:{name}"
