"""Parameters that several stages have copies of, such as tied embeddings.

Terms: a *group* is a name under which stages know that a parameter of theirs is one
and the same; its *owner* is the first stage that has it. Gradients of copies are added
up once a step (see `compile.shared`), so equal optimizers keep copies equal.
"""

from collections.abc import Mapping, Sequence
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn

from torch_xla_pp import xla_compat
from torch_xla_pp.compile import SharedSums, accumulator
from torch_xla_pp.errors import PipelineError
from torch_xla_pp.mesh import Tiling
from torch_xla_pp.plan import Wiring
from torch_xla_pp.runtime.exchange import Exchange
from torch_xla_pp.runtime.fingerprint import fingerprint
from torch_xla_pp.runtime.module_state import ModuleState
from torch_xla_pp.runtime.swap import Partner, Swap
from torch_xla_pp.transport import Message, ShardLayout

# An attribute of parameters.
_HOLDER = "_torch_xla_pp_holder"


class Mirror:
    """Keep a parameter equal to one of another stage of this rank.

    Two stages of a rank have an object each for what is one parameter of the model.
    Optimizers of the stages' parameters train both alike; one of the model's parameters
    trains the first alone.

    Args:
        copy: Takes over what is written to `source`, unless it was written to itself.
        source: The parameter of the other stage.
    """

    def __init__(self, copy: nn.Parameter, source: nn.Parameter) -> None:
        self._copy = copy
        self._source = source
        self._versions = self._now()

    def follow(self) -> None:
        """Take over what was written since the last call; nothing is computed yet.

        Both have the same gradient after a step; what became of it counts, too.
        """
        source, copy = self._now()
        if source != self._versions[0] and copy == self._versions[1]:
            sharding = xla_compat.sharding_of(self._copy)
            with torch.no_grad():
                self._copy.copy_(self._source)
            xla_compat.annotate(self._copy, sharding)
        self._versions = self._now()
        self._copy.grad = self._source.grad

    def _now(self) -> tuple[int, int]:
        return self._source._version, self._copy._version


class _Holder:
    """Say which stage's module has a parameter; kept by the parameter itself."""

    def __init__(self, module: nn.Module | None = None) -> None:
        self.module = (lambda: None) if module is None else ref(module)

    def __reduce__(self) -> tuple[Any, ...]:
        return _Holder, ()


def separated(module: nn.Module, tied: Mapping[str, str]) -> list[Mirror]:
    """Give a stage copies of the shared parameters that another stage of the rank has.

    Args:
        module: The stage's module, whose parameters are replaced.
        tied: Parameter name → group.
    """
    every = dict(module.named_parameters(remove_duplicate=False))
    copies: dict[nn.Parameter, nn.Parameter] = {}
    for name in tied.keys() & every.keys():
        source = every[name]
        holder = getattr(source, _HOLDER, None)
        if holder is None or holder.module() in (None, module):
            setattr(source, _HOLDER, _Holder(module))
        elif source not in copies:
            data = source.detach().cpu()
            copies[source] = nn.Parameter(data, source.requires_grad)
    for part in module.modules():
        for key, value in part._parameters.items():
            if value is not None and value in copies:
                part._parameters[key] = copies[value]
    return [Mirror(copy, source) for source, copy in copies.items()]


def check_separate(modules: Mapping[int, nn.Module]) -> None:
    """Refuse a parameter that several stages of a rank have, by stage.

    Raises:
        PipelineError: Names them.
    """
    found: dict[nn.Parameter, list[str]] = {}
    for stage, module in modules.items():
        for name, parameter in module.named_parameters():
            found.setdefault(parameter, []).append(f"{name} of stage {stage}")
    twice = [" and ".join(names) for names in found.values() if len(names) > 1]
    if twice:
        raise PipelineError(
            f"stages: expected parameters of their own, got one object for "
            f"{'; '.join(twice)}. Name them in tied, e.g. tied={{name: 'shared'}}."
        )


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
        self._sums: tuple[SharedSums, Swap] | None = None
        self._layouts: dict[str, ShardLayout] = {}

    def __bool__(self) -> bool:
        return bool(self._names)

    def describe(self) -> dict[str, str]:
        """Return group → a text that is equal for equal copies."""
        return {
            group: fingerprint(parameter, [parameter.cpu()])
            for group, parameter in self._parameters().items()
        }

    def groups(self) -> dict[str, str]:
        """Return name of the parameter → group."""
        return {name: group for group, name in self._names.items()}

    def tilings(self) -> dict[str, Tiling]:
        """Return group → how the parameter lies on this rank."""
        parameters = self._parameters()
        return {g: ShardLayout.of_tensor(p).tiling for g, p in parameters.items()}

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
                    message = self._message_from(other)
                    self._exchange.expect(message, wiring.ranks[other])

    def give(self, state: ModuleState) -> None:
        """Send this stage's gradients, or lay them ready; at the end of a step."""
        programs, swap = self._programs()
        sums = self._own_sums(state)
        values = {
            other: [sums[group] for group in groups]
            for other, groups in programs.others.items()
        }
        for other in self._near(programs):
            message = Message("S", other, 0, self._stage)
            self._exchange.give(message, dict(enumerate(values[other])))
        swap.send(values)
        programs.send(sums, swap.routes_out())

    def take(self, state: ModuleState) -> None:
        """Add the gradients of the other copies; after all stages of a rank `give`."""
        programs, swap = self._programs()
        values = swap.receive()
        for other in self._near(programs):
            slots = range(len(programs.others[other]))
            found = self._exchange.take(self._message_from(other), slots)
            values[other] = [found[slot] for slot in slots]
        given = {
            other: dict(zip(programs.others[other], found, strict=True))
            for other, found in values.items()
        }
        totals = programs.add(self._own_sums(state), given, swap.routes_in())
        state.replace_sums(
            {accumulator(_role(self._names[g])): x for g, x in totals.items()}
        )

    def _near(self, programs: SharedSums) -> list[int]:
        """Return the stages on this rank that have one of the parameters."""
        ranks = self._wired.ranks
        return [o for o in programs.others if self._exchange.is_own(ranks[o])]

    def _message_from(self, other: int) -> Message:
        return Message("S", self._stage, 0, other)

    def _there(self, stage: int, groups: Sequence[str]) -> list[Tiling]:
        """Return how copies lie on the rank of another stage."""
        return [self._wired.tilings[group][stage] for group in groups]

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

        Parameters that were always frozen, which have no layout, are left out.
        """
        return {g: state.sum_of(_role(self._names[g])) for g in self._layouts}

    def _programs(self) -> tuple[SharedSums, Swap]:
        wiring, parameters = self._wired, self._parameters()
        now = {group for group, p in parameters.items() if p.requires_grad}
        # One that is frozen later is still exchanged: all copies need not be frozen
        # in the same step.
        if self._sums is not None and now <= self._layouts.keys():
            return self._sums
        now |= self._layouts.keys()
        trained = {g: p for g, p in parameters.items() if g in now}
        self._layouts = {g: ShardLayout.of_tensor(p) for g, p in trained.items()}
        holders = {group: wiring.shared[group] for group in trained}
        others = {s for stages in holders.values() for s in stages}
        is_in_graph = self._exchange.is_in_graph
        programs = SharedSums(
            self._stage,
            holders,
            [s for s in sorted(others) if is_in_graph(wiring.ranks[s])],
            self._layouts,
            {g: xla_compat.sharding_of(p) for g, p in trained.items()},
        )
        partners = {
            other: Partner(
                wiring.ranks[other],
                Message("S", other, 0, self._stage),
                self._message_from(other),
                [self._layouts[group] for group in groups],
                self._there(other, groups),
            )
            for other, groups in programs.others.items()
            if not self._exchange.is_own(wiring.ranks[other])
        }
        self._sums = programs, Swap(self._exchange, partners)
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
