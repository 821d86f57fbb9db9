"""A rank's stages under a schedule, by the names of the unsplit model."""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import NamedTuple

from torch import Tensor, nn
from torch.utils import _pytree as pytree

from torch_xla_pp.deferred import PARAMETER, places_of
from torch_xla_pp.parity.unsplit import (
    Call,
    host_copy,
    named_values,
    tensors_of,
)
from torch_xla_pp.runtime import RankPipeline
from torch_xla_pp.torch_compat import TorchSchedule, has_backward
from torch_xla_pp.transport import XlaPpProcessGroup, from_bytes, to_bytes

_KEY = ("verify",)


@dataclass(frozen=True, kw_only=True, slots=True)
class StepResult:
    """The results of a step of the pipeline on this rank."""

    outputs: list[Tensor]
    losses: list[Tensor]
    grads: dict[str, Tensor]
    buffers: dict[str, Tensor]


class _Named(NamedTuple):
    """A parameter or buffer of a stage, by its name there and in the model."""

    stage: int
    name: str
    in_model: str
    value: Tensor


class ComparedPipeline:
    """A rank's stages under a schedule, by the names of the unsplit model."""

    def __init__(
        self, schedule: TorchSchedule, model: nn.Module, patterns: Sequence[str]
    ) -> None:
        self.schedule = schedule
        self.rank = RankPipeline.of(schedule)
        self.group: XlaPpProcessGroup = self.rank.stages[0].process_group
        self.model = model
        self.is_trained = has_backward(schedule)
        named = named_values(model)
        chosen = {id(v) for name, v in named.items() if _matches(name, patterns)}
        self.compared = {name for name, value in named.items() if id(value) in chosen}
        self._names = {id(value): name for name, value in named.items()}
        stages = self.rank.stages
        self.training = stages[0].submod.training
        own = [v for s in stages for v in s.submod.parameters()]
        self._is_cut_out = any(id(value) in self._names for value in own)
        self.is_cut_from_model = False
        self.ties: dict[str, str] = {}

    @property
    def title(self) -> str:
        """Return a description of the pipeline."""
        replica, count = self.rank.stages[0].model.replica
        return (
            f"{type(self.schedule).__name__}: {self.rank.stages[0].num_stages} stages "
            f"on {self.group.size()} ranks, {self.rank.num_microbatches} microbatches"
            + (f", replica {replica} of {count}" if count > 1 else "")
        )

    def agree(self, call: Call) -> int:
        """Return the rank of the last stage.

        Raises:
            ValueError: The ranks differ, or names of stages are not in the model.
        """
        is_last = any(stage.is_last for stage in self.rank.stages)
        own = (is_last, self._is_cut_out, _digest(call), self._unknown(), self._ties())
        exchanged = self.group.rendezvous.exchange("verify", own)
        last, cut_out, digests, unknown, ties = zip(*exchanged, strict=True)
        if len(set(digests)) > 1:
            raise ValueError(
                "verify: expected the same batch on every rank, got batches with the "
                f"digests {', '.join(digests)}. Seed all ranks alike, or broadcast it."
            )
        if any(unknown):
            names = ", ".join(name for own in unknown for name in own)
            raise ValueError(
                "verify: expected stages whose parameters are the model's or have "
                f"their names, got {names}. Rename them in the stage's module."
            )
        self.is_cut_from_model = any(cut_out)
        self.ties = {name: tie for own in ties for name, tie in own.items()}
        return last.index(True)

    def calls_of_replicas(self, call: Call) -> list[Call]:
        """Return the batches of all replicas on the host, first this one's.

        The ranks of the last stage must call it in all replicas.
        """
        (last,) = [stage.model for stage in self.rank.stages if stage.is_last]
        own: Call = host_copy(call)
        if last.replicas is None:
            return [own]
        rendezvous = last.replicas.group.rendezvous
        exchanged: list[Call] = rendezvous.exchange("batch to verify", own)
        index = last.replicas.index
        return [exchanged[index], *exchanged[:index], *exchanged[index + 1 :]]

    def values(self) -> dict[str, Tensor]:
        """Return parameters and buffers, by the model's names."""
        return {named.in_model: named.value for named in self._named()}

    def bring(self, root: int, named: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Gather values of all ranks on the root's host; returns none elsewhere."""
        if self.group.rank() != root:
            self._send(root, named)
            return {}
        found = {name: value.detach().cpu() for name, value in named.items()}
        for peer in range(self.group.size()):
            if peer != root:
                found |= self._receive(peer)
        return found

    def _send(self, root: int, named: Mapping[str, Tensor]) -> None:
        wire = self.group.wire
        wire.send(root, _KEY, len(named), [])
        for name, value in named.items():
            data = value.detach().cpu()
            header = (name, data.shape, data.dtype)
            wire.send(root, _KEY, header, [to_bytes(data)])

    def _receive(self, peer: int) -> dict[str, Tensor]:
        wire = self.group.wire
        found = {}
        for _ in range(wire.receive(wire.expect(peer, _KEY)).header):
            parcel = wire.receive(wire.expect(peer, _KEY))
            name, shape, dtype = parcel.header
            found[name] = from_bytes(parcel.parts[0], shape, dtype)
        return found

    def step(self, call: Call) -> StepResult:
        """Run one step, and undo its effects."""
        parameters = [v for s in self.rank.stages for v in s.submod.parameters()]
        # A step replaces the tensors of buffers.
        places = [p for s in self.rank.stages for p in places_of(s.submod)]
        buffers = [(p, p.tensor) for p in places if p.holding != PARAMETER]
        grads = [parameter.grad for parameter in parameters]
        numbers = [stage.num_steps for stage in self.rank.stages]
        for parameter in parameters:
            parameter.grad = None
        try:
            return self._run(call)
        finally:
            for parameter, grad in zip(parameters, grads, strict=True):
                parameter.grad = grad
            for place, buffer in buffers:
                place.put(buffer)
            for stage, number in zip(self.rank.stages, numbers, strict=True):
                stage.num_steps = number

    def _run(self, call: Call) -> StepResult:
        args, kwargs, target = call
        losses: list[Tensor] = []
        stages = self.rank.stages
        given = any(stage.stage_index == 0 for stage in stages)
        inputs, options = (args, kwargs) if given else ((), {})
        if self.is_trained:
            last = any(stage.is_last for stage in stages)
            more = {"target": target, "losses": losses} if last else {}
            output = self.schedule.step(*inputs, **options, **more)
        else:
            output = self.schedule.eval(*inputs, **options)
        every = self._named()
        return StepResult(
            outputs=tensors_of(host_copy(output)),
            losses=host_copy(losses),
            grads={
                named.in_model: named.value.grad
                for named in every
                if named.value.grad is not None and named.in_model in self.compared
            },
            buffers={
                named.in_model: named.value.detach().cpu()
                for named in every
                if not isinstance(named.value, nn.Parameter)
            },
        )

    def _named(self) -> list[_Named]:
        """Return all parameters and buffers that both stages and model have."""
        known = named_values(self.model)
        found = [
            _Named(stage.stage_index, name, self._names.get(id(value), name), value)
            for stage in self.rank.stages
            for name, value in named_values(stage.submod).items()
        ]
        return [named for named in found if named.in_model in known]

    def _ties(self) -> dict[str, str]:
        """Return name in the model → tie, of parameters that several stages have."""
        ties = {stage.stage_index: stage.model.tied for stage in self.rank.stages}
        return {
            named.in_model: ties[named.stage][named.name]
            for named in self._named()
            if named.name in ties[named.stage]
        }

    def _unknown(self) -> list[str]:
        """Return the stages' parameters that the model does not have."""
        known = {(named.stage, named.name) for named in self._named()}
        return [
            f"{name} of stage {stage.stage_index}"
            for stage in self.rank.stages
            for name, _ in stage.submod.named_parameters()
            if (stage.stage_index, name) not in known
        ]


def _matches(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def _digest(call: Call) -> str:
    """Return a digest of a batch."""
    found = hashlib.sha256()
    for leaf in pytree.tree_leaves(host_copy(call)):
        if isinstance(leaf, Tensor):
            found.update(f"{leaf.dtype}{[*leaf.shape]}".encode())
            found.update(to_bytes(leaf).numpy().tobytes())
        else:
            found.update(repr(leaf).encode())
    return found.hexdigest()[:8]
