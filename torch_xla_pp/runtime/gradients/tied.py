"""Parameters that several stages have copies of, such as tied embeddings.

Terms: a *tie* is the name that stages give to one parameter of which each has a copy;
its *owner* is the first stage that has it. Gradients of copies are added up once a
step, so that equal optimizers keep copies equal.

Laws:

* Each copy gets the same sum: the parts are added in the order of the stages, on every
  rank alike, so that copies that began as equal stay equal to the bit. Every stage
  that has a copy sends its part to every other one.
* All stages of a rank send before they receive, each all of its parts at once: a
program that received first could wait for a rank that waits for this one.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn

from torch_xla_pp import xla_compat
from torch_xla_pp.channels import (
    Channel,
    Edge,
    Endpoint,
    borders_of,
    run_with,
)
from torch_xla_pp.compile import (
    Program,
    ProgramSpec,
    accumulator,
    nothing,
    parameter_role,
    shared_part,
    shared_total,
)
from torch_xla_pp.errors import PipelineError
from torch_xla_pp.mesh import Tiling
from torch_xla_pp.plan import Wiring
from torch_xla_pp.runtime.gradients.fingerprint import fingerprint
from torch_xla_pp.runtime.gradients.sums import GradientSums
from torch_xla_pp.transport import Message, ShardLayout

# An attribute of parameters.
_HOLDER = "_torch_xla_pp_holder"


class Mirror:
    """A parameter that is kept equal to one of another stage of this rank.

    Two stages of a rank have an object each for what is one parameter of the model.
    Optimizers of the stages' parameters train both alike; one of the model's parameters
    trains the first alone.

    Args:
        copy: Follows writes to `source`, unless it was itself written to.
        source: The parameter of the other stage.
    """

    def __init__(self, copy: nn.Parameter, source: nn.Parameter) -> None:
        self._copy = copy
        self._source = source
        self._versions = self._now()

    def follow(self) -> None:
        """Follow the writes since the last call; nothing is computed yet.

        Both have the same gradient after a step, also if that is changed later.
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
    """The stage's module that has a parameter; kept by the parameter itself."""

    def __init__(self, module: nn.Module | None = None) -> None:
        self.module = (lambda: None) if module is None else ref(module)

    def __reduce__(self) -> tuple[Any, ...]:
        return _Holder, ()


def separated(module: nn.Module, tied: Mapping[str, str]) -> list[Mirror]:
    """Give a stage copies of the shared parameters that another stage of the rank has.

    Args:
        module: The stage's module, whose parameters are replaced.
        tied: Parameter name → tie.
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
    """Refuse one parameter object in several stages of a rank; given by stage.

    Raises:
        PipelineError: There are some; all of them are named.
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


@dataclass(frozen=True, kw_only=True, slots=True)
class _Exchange:
    """The programs that send and add the gradients of some ties, and their channels.

    Args:
        wiring: Where the copies are.
        layouts: Tie → layout of the parameter on this rank.
        sent: Channels to the other stages that have a copy.
        received: Channels from them.
        send: Sends the parts of channels through the program.
        add: Receives the parts of such channels, and adds all parts up.
    """

    wiring: Wiring
    layouts: Mapping[str, ShardLayout]
    sent: Sequence[Channel]
    received: Sequence[Channel]
    send: Program
    add: Program


class TiedParameters:
    """The parameters of a stage that other stages have copies of.

    Args:
        stage: Index of the stage.
        module: Its module.
        tied: Parameter name → tie.
        endpoint: The stage's access to the others.

    Raises:
        ValueError: The module lacks a parameter, or has a tie twice.
    """

    def __init__(
        self, stage: int, module: nn.Module, tied: Mapping[str, str], endpoint: Endpoint
    ) -> None:
        self._stage = stage
        self._endpoint = endpoint
        self._module = module
        self._names = _first_names(module, tied)
        self._wiring: Wiring | None = None
        self._exchange: _Exchange | None = None

    def __bool__(self) -> bool:
        return bool(self._names)

    def describe(self) -> dict[str, str]:
        """Return tie → a text that is equal for equal copies."""
        return {
            tie: fingerprint(parameter, [parameter.cpu()])
            for tie, parameter in self._parameters().items()
        }

    def groups(self) -> dict[str, str]:
        """Return name of the parameter → group."""
        return {name: group for group, name in self._names.items()}

    def tilings(self) -> dict[str, Tiling]:
        """Return tie → tiling of the parameter on this rank."""
        parameters = self._parameters()
        return {t: ShardLayout.of_tensor(p).tiling for t, p in parameters.items()}

    def copies(self, wiring: Wiring) -> set[str]:
        """Return the names of parameters that an earlier stage has, too."""
        return {
            name
            for tie, name in self._names.items()
            if wiring.shared[tie][0] != self._stage
        }

    def connect(self, wiring: Wiring) -> None:
        """Open the channels to the stages with copies."""
        self._wiring = wiring
        self._exchange = None
        for other in self._others(wiring):
            message = Message("S", self._stage, 0, other)
            self._endpoint.group.transport.expect(message, wiring.ranks[other])

    def send(self, sums: GradientSums) -> None:
        """Send this stage's gradients; at the end of a step."""
        found = self._current_exchange()
        run_with(found.send, self._own_parts(sums, found), sent=found.sent)
        for other in self._others(found.wiring):
            key = ("frozen", self._stage, other)
            wire = self._endpoint.group.wire
            wire.send(found.wiring.ranks[other], key, self._frozen(), [])

    def add(self, sums: GradientSums) -> None:
        """Add the gradients of the other copies; after all stages of a rank `send`.

        Raises:
            PipelineError: A parameter is frozen in some of its stages only.
        """
        found = self._current_exchange()
        self._compare_frozen(found.wiring)
        parts = self._own_parts(sums, found)
        totals = run_with(found.add, parts, received=found.received)
        sums.update(
            {
                accumulator(parameter_role(self._names[tie])): totals[shared_total(tie)]
                for tie in found.layouts
            }
        )

    def _others(self, wiring: Wiring) -> list[int]:
        """Return the other stages that have copies."""
        every = {s for tie in self._names for s in wiring.shared[tie]}
        return sorted(every - {self._stage})

    def _frozen(self) -> set[str]:
        """Return the ties whose parameter is frozen here."""
        return {t for t, p in self._parameters().items() if not p.requires_grad}

    def _compare_frozen(self, wiring: Wiring) -> None:
        """Refuse a parameter that only some of its stages train."""
        here, wire = self._frozen(), self._endpoint.group.wire
        for other in self._others(wiring):
            ticket = wire.expect(wiring.ranks[other], ("frozen", other, self._stage))
            there = wire.receive(ticket).header
            common = {t for t in self._names if other in wiring.shared[t]}
            if differing := sorted(common & (here ^ there)):
                names = ", ".join(self._names[tie] for tie in differing)
                raise PipelineError(
                    f"stage {self._stage}: expected {names} to be frozen in stage "
                    f"{other}, too, or in neither, as it is one parameter of the "
                    "model. Set requires_grad of all copies."
                )

    def _own_parts(self, sums: GradientSums, found: _Exchange) -> dict[str, Tensor]:
        """Return this stage's gradients, zeros where it has none.

        Parameters that were always frozen, which have no layout, are left out.
        """
        roles = {tie: parameter_role(self._names[tie]) for tie in found.layouts}
        return {shared_part(t, self._stage): sums.of(role) for t, role in roles.items()}

    def _parameters(self) -> dict[str, Tensor]:
        named = dict(self._module.named_parameters())
        return {tie: named[name] for tie, name in self._names.items()}

    def _current_exchange(self) -> _Exchange:
        """Return the exchange of the present gradients, made when needed first.

        A parameter that is frozen later is still exchanged: all copies need not be
        frozen in the same step.
        """
        if self._wiring is None:
            raise RuntimeError(f"stage {self._stage}: its copies are not connected")
        parameters = self._parameters()
        known = set() if self._exchange is None else {*self._exchange.layouts}
        now = {tie for tie, p in parameters.items() if p.requires_grad}
        if self._exchange is None or not now <= known:
            now |= known
            trained = {tie: p for tie, p in parameters.items() if tie in now}
            self._exchange = self._make_exchange(self._wiring, trained)
        return self._exchange

    def _make_exchange(
        self, wiring: Wiring, trained: Mapping[str, Tensor]
    ) -> _Exchange:
        me = self._stage
        layouts = {tie: ShardLayout.of_tensor(p) for tie, p in trained.items()}
        holders = {tie: wiring.shared[tie] for tie in trained}
        others = sorted({s for stages in holders.values() for s in stages} - {me})

        def channel(sender: int, receiver: int) -> Channel:
            other = receiver if sender == me else sender
            ties = [tie for tie, stages in holders.items() if other in stages]
            return self._endpoint.open(
                Edge(
                    message=Message("S", receiver, 0, sender),
                    is_sent=sender == me,
                    peer=other,
                    rank=wiring.ranks[other],
                    names=tuple(shared_part(tie, sender) for tie in ties),
                    layouts=tuple(layouts[tie] for tie in ties),
                    slots=tuple(range(len(ties))),
                    there=lambda: [wiring.tilings[tie][other] for tie in ties],
                )
            )

        sent = [channel(me, other) for other in others]
        received = [channel(other, me) for other in others]
        parts = {
            shared_total(t): [shared_part(t, s) for s in found]
            for t, found in holders.items()
        }
        pins = {shared_total(t): xla_compat.sharding_of(p) for t, p in trained.items()}
        function = nothing("shared gradients")
        return _Exchange(
            wiring=wiring,
            layouts=layouts,
            sent=sent,
            received=received,
            send=Program(ProgramSpec(function=function, sent=borders_of(sent))),
            add=Program(
                ProgramSpec(
                    function=function,
                    pins=pins,
                    received=borders_of(received),
                    parts=parts,
                    wanted=set(parts),
                )
            ),
        )


def _first_names(module: nn.Module, tied: Mapping[str, str]) -> dict[str, str]:
    """Return tie → the parameter's name in the module's list."""
    every = dict(module.named_parameters(remove_duplicate=False))
    unknown = [name for name in tied if name not in every]
    if unknown:
        raise ValueError(
            f"tied: expected names of parameters of the stage's module, got "
            f"{', '.join(unknown)}. Use names out of: {', '.join(every)}."
        )
    first = {id(value): name for name, value in module.named_parameters()}
    found: dict[str, str] = {}
    for name, tie in tied.items():
        listed = first[id(every[name])]
        if found.setdefault(tie, listed) != listed:
            raise ValueError(
                f"tied: expected one parameter of a stage per group, got {listed} and "
                f"{found[tie]} in {tie!r}. Make them one parameter of the module."
            )
    return found
