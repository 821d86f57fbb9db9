"""Replicas of a pipeline, each of which trains on its own part of every batch.

Terms: replica r of a pipeline runs on ranks of its own; the ranks that run the same
stages make a group, in which r is the rank. Once a step the gradients of a stage are
averaged over that group (see `compile.replicas`), as `DistributedDataParallel` does.
Parameters must begin as equal ones, and stay so under equal optimizers. Buffers belong
to each replica alone.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch.distributed as dist
from torch import Tensor, nn

from torch_xla_pp.compile import ReplicaMeans
from torch_xla_pp.plan import ReplicaClaim
from torch_xla_pp.runtime.agreement import compare_replicas
from torch_xla_pp.runtime.exchange import Exchange
from torch_xla_pp.runtime.fingerprint import fingerprints
from torch_xla_pp.runtime.module_state import ModuleState
from torch_xla_pp.runtime.swap import Partner, Swap
from torch_xla_pp.transport import Message, ShardLayout, XlaPpProcessGroup, of_group


class _Sharing(NamedTuple):
    """Hold what averages gradients of one kind: which there are, and how they lie."""

    programs: ReplicaMeans
    swap: Swap


class Replicas:
    """Know the replicas of one stage, and average its gradients over them.

    At the end of a step `give`, `average` and `take` must be called; a rank with
    several stages calls each for all of them before the next.

    Args:
        stage: Index of the stage.
        module: Its module.
        group: The ranks that run this stage in each replica.

    Attributes:
        group: As given.
    """

    def __init__(self, stage: int, module: nn.Module, group: XlaPpProcessGroup) -> None:
        self.group = group
        self._module = module
        self._message = Message("S", stage, 0, stage)
        self._exchange = Exchange(group)
        self._kinds: dict[tuple[str, ...], _Sharing] = {}
        self._current: _Sharing | None = None
        self._own: Sequence[Tensor] = ()

    @property
    def index(self) -> int:
        """Return the number of this replica."""
        return self.group.rank()

    @property
    def transport_name(self) -> str:
        """Return what carries the gradients."""
        return self._exchange.transport_name

    def describe(self) -> dict[str, str]:
        """Return name → a text that is equal for equal parameters."""
        return fingerprints(dict(self._module.named_parameters()))

    def connect(self) -> None:
        """Make ready for messages of the other replicas."""
        for peer in self._peers:
            self._exchange.expect(self._message, peer)

    def give(self, state: ModuleState) -> None:
        """Send this replica's gradients; `state` has none until `take`."""
        sums = state.take_sums()
        if not sums:
            return
        self._current = self._sharing(sums)
        programs, swap = self._current
        chunks = programs.split(sums, swap.routes_out())
        swap.send(chunks)
        self._own = chunks[self.index]

    def average(self) -> None:
        """Average this replica's share of the gradients, and send it."""
        if self._current is None:
            return
        programs, swap = self._current
        parts = {self.index: self._own, **swap.receive()}
        self._own = programs.mean(parts, {**swap.routes_in(), **swap.routes_out()})
        swap.send(dict.fromkeys(self._peers, self._own))

    def take(self, state: ModuleState) -> None:
        """Receive the rest, and give `state` the averaged gradients."""
        if self._current is None:
            return
        programs, swap = self._current
        means = {self.index: self._own, **swap.receive()}
        state.replace_sums(programs.join(means, swap.routes_in()))
        self.forget()

    def settle(self) -> None:
        """Wait until all that was asked for is there.

        Raises:
            TransportError: Something did not come; what was computed from it is void.
        """
        self._exchange.settle()

    def forget(self) -> None:
        """Drop what a step has left."""
        self._current, self._own = None, ()

    @property
    def _peers(self) -> list[int]:
        return [peer for peer in range(self.group.size()) if peer != self.index]

    def _sharing(self, sums: Mapping[str, Tensor]) -> _Sharing:
        """Return what averages gradients such as these, made when new."""
        names = tuple(sorted(sums))
        if names not in self._kinds:
            programs = ReplicaMeans(
                self.index,
                self.group.size(),
                {name: ShardLayout.of_tensor(sums[name]) for name in names},
                is_in_graph=all(map(self._exchange.is_in_graph, self._peers)),
            )
            partner = Partner(0, self._message, self._message, programs.chunks)
            partners = {peer: partner._replace(rank=peer) for peer in self._peers}
            self._kinds[names] = _Sharing(programs, Swap(self._exchange, partners))
        return self._kinds[names]


def group_of_replicas(
    replicas: dist.ProcessGroup | None, pipeline: XlaPpProcessGroup
) -> XlaPpProcessGroup | None:
    """Return the group of a stage's replicas, None if there is one replica only.

    Raises:
        ValueError: The group has other ranks of the pipeline, or another backend.
    """
    if replicas is None:
        return None
    group = of_group(replicas)
    ranks = dist.get_process_group_ranks(replicas)
    own = set(dist.get_process_group_ranks(pipeline))
    if len(own.intersection(ranks)) > 1:
        raise ValueError(
            f"replicas: expected a group of ranks out of different pipelines, got "
            f"ranks {ranks}, of which {sorted(own.intersection(ranks))} are one. Pass "
            "e.g. mesh.get_group('dp') of a mesh with axes ('dp', 'pp', ...)."
        )
    return group if group.size() > 1 else None


def agree_on_replicas(replicas: Mapping[int, Replicas | None], num_stages: int) -> None:
    """Compare a rank's stages with those of the other replicas; all ranks must call it.

    Args:
        replicas: Stage of the rank → its replicas.
        num_stages: Number of stages of the pipeline.

    Raises:
        PlanError: The replicas differ; raised on every rank.
        ValueError: Stages of this rank have other groups of replicas.
    """
    found = {stage: own for stage, own in replicas.items() if own is not None}
    groups = {id(own.group) for own in found.values()}
    if len(groups) > 1 or found and len(found) < len(replicas):
        raise ValueError(
            "replicas: expected the same group for all stages of a rank, got several. "
            f"Pass the same replicas to stages {', '.join(map(str, replicas))}."
        )
    if not found:
        return
    first = next(iter(found.values()))
    claim = ReplicaClaim(
        num_stages=num_stages,
        stages={stage: own.describe() for stage, own in found.items()},
        transport=first.transport_name,
    )
    compare_replicas(first.group.rendezvous, claim)
    for own in found.values():
        own.connect()
