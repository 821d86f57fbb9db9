"""Replicas of a pipeline, each of which trains on its own part of every batch.

Terms: replica r of a pipeline runs on ranks of its own; the ranks that run the same
stages are a process group, in which r is the rank. Once a step the gradients of a stage
are averaged over that group, as `DistributedDataParallel` does. Parameters must begin
equal, and stay so under equal optimizers. Buffers belong to each replica alone.

A *bucket* is all gradients of one dtype that are sharded alike over a rank's devices,
concatenated on each device. It is cut into one *chunk* for each replica, which averages
that chunk for all: a reduce-scatter, then an all-gather. With R replicas a
rank sends 2 (R-1)/R of its bytes, each device's part to the same device.

Laws:

* A mean is computed once, in the order of replicas, and sent to the others. So the
  gradients of all replicas are equal to the bit.
* Three programs run one after the other: `split` sends, `mean` receives and sends,
  `join` receives. Each receives messages that the peers' earlier programs sent, so none
  waits for a later program of its own device.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from functools import reduce
from operator import add
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from torch_xla_pp import xla_compat
from torch_xla_pp.channels import (
    Channel,
    Edge,
    Endpoint,
    borders_of,
    returned_for,
    run_with,
)
from torch_xla_pp.compile import BucketKind, Function, Program, ProgramSpec, bucket_name
from torch_xla_pp.hlo import OpShardingArgs
from torch_xla_pp.plan import ReplicaClaim
from torch_xla_pp.runtime.agreement import compare_replicas
from torch_xla_pp.runtime.gradients.fingerprint import fingerprints
from torch_xla_pp.runtime.gradients.sums import GradientSums
from torch_xla_pp.transport import Message, ShardLayout, XlaPpProcessGroup, of_group

_NARROW = (torch.float16, torch.bfloat16)


class Replicas:
    """The replicas of one stage, over which its gradients are averaged.

    At the end of a step `send`, `average` and `receive` must be called; a rank with
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
        self._means: dict[tuple[str, ...], ReplicaMeans] = {}
        self._current: ReplicaMeans | None = None
        self._own: Mapping[str, Tensor] = {}

    @property
    def index(self) -> int:
        """Return the number of this replica."""
        return self.group.rank()

    def describe(self) -> dict[str, str]:
        """Return name → a text that is equal for equal parameters."""
        return fingerprints(dict(self._module.named_parameters()))

    def connect(self) -> None:
        """Prepare for messages of the other replicas."""
        for peer in set(range(self.group.size())) - {self.index}:
            self.group.transport.expect(self._message, peer)

    def send(self, sums: GradientSums) -> None:
        """Send this replica's gradients; `sums` has none until `receive`."""
        grads = sums.take()
        if grads:
            self._current = self._means_of(grads)
            self._own = self._current.split(grads)

    def average(self) -> None:
        """Average this replica's share of the gradients, and send it."""
        if self._current is not None:
            self._own = self._current.mean(self._own)

    def receive(self, sums: GradientSums) -> None:
        """Receive the rest, and give `sums` the averaged gradients."""
        if self._current is not None:
            sums.update(self._current.join(self._own))
            self.forget()

    def forget(self) -> None:
        """Drop the leftovers of a step."""
        self._current, self._own = None, {}

    def _means_of(self, grads: Mapping[str, Tensor]) -> "ReplicaMeans":
        """Return the programs that average such gradients, made when needed first."""
        names = tuple(sorted(grads))
        if names not in self._means:
            layouts = {name: ShardLayout.of_tensor(grads[name]) for name in names}
            open_channel = Endpoint(self.group).open
            self._means[names] = ReplicaMeans(
                self.index, self.group.size(), layouts, self._message, open_channel
            )
        return self._means[names]


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
        transport=first.group.transport.name,
    )
    compare_replicas(first.group.rendezvous, claim)
    for own in found.values():
        own.connect()


class ReplicaMeans:
    """The programs that average gradients of a stage, and their channels.

    Values have names: `chunk:0@2` is this replica's part of the chunk of bucket 0 that
    replica 2 averages, `part:0@2` is replica 2's part of the chunk that this one
    averages, and `mean:0@2` is the average by replica 2.

    Args:
        replica: Number of this replica.
        num_replicas: How many there are.
        layouts: Name of a gradient → its layout on this rank's devices.
        message: Name of all messages between replicas.
        open_channel: Returns the channel of an edge, whose peer is a replica.

    Attributes:
        chunks: Layout of a chunk of each bucket.
    """

    def __init__(
        self,
        replica: int,
        num_replicas: int,
        layouts: Mapping[str, ShardLayout],
        message: Message,
        open_channel: Callable[[Edge], Channel],
    ) -> None:
        buckets = _buckets(layouts, num_replicas)
        self.chunks = [bucket.chunk for bucket in buckets]
        everyone = range(num_replicas)

        def names(kind: BucketKind, *replicas: int) -> tuple[str, ...]:
            numbers = range(len(buckets))
            return tuple(bucket_name(kind, i, r) for r in replicas for i in numbers)

        def channel(peer: int, names: tuple[str, ...], sent: bool) -> Channel:
            return open_channel(
                Edge(
                    message=message,
                    is_sent=sent,
                    peer=peer,
                    rank=peer,
                    names=names,
                    layouts=tuple(self.chunks),
                )
            )

        def pins(kind: BucketKind) -> dict[str, xla_compat.OpSharding]:
            shardings = [chunk.sharding for chunk in self.chunks] * num_replicas
            return dict(zip(names(kind, *everyone), shardings, strict=True))

        own = names("mean", replica)
        self._own_chunks = names("chunk", replica)
        self._own_parts = names("part", replica)
        peers = [peer for peer in everyone if peer != replica]
        self._chunks_sent = [channel(p, names("chunk", p), sent=True) for p in peers]
        self._parts_received = [channel(p, names("part", p), sent=False) for p in peers]
        self._means_sent = [channel(p, own, sent=True) for p in peers]
        self._means_received = [channel(p, names("mean", p), sent=False) for p in peers]
        gradients = [name for bucket in buckets for name in bucket.layouts]
        split = ProgramSpec(
            function=Function(
                name="split of gradients",
                module=_Split(buckets, num_replicas),
                inputs=tuple(gradients),
                outputs=names("chunk", *everyone),
            ),
            pins=pins("chunk"),
            sent=borders_of(self._chunks_sent),
            wanted={*self._own_chunks, *returned_for(self._chunks_sent)},
        )
        mean = ProgramSpec(
            function=Function(
                name="mean of gradients",
                module=_Mean(num_replicas),
                inputs=names("part", *everyone),
                outputs=own,
            ),
            pins=pins("mean"),
            received=borders_of(self._parts_received),
            sent=borders_of(self._means_sent),
            wanted=own,
        )
        join = ProgramSpec(
            function=Function(
                name="join of gradients",
                module=_Join(buckets),
                inputs=names("mean", *everyone),
                outputs=tuple(gradients),
            ),
            pins={name: layout.sharding for name, layout in layouts.items()},
            received=borders_of(self._means_received),
            wanted=gradients,
        )
        self._split, self._mean, self._join = map(Program, (split, mean, join))

    def split(self, grads: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Enqueue the cutting and sending of gradients; return this replica's part."""
        made = run_with(self._split, grads, sent=self._chunks_sent)
        named = zip(self._own_parts, self._own_chunks, strict=True)
        return {part: made[chunk] for part, chunk in named}

    def mean(self, part: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Enqueue the averaging and sending of this replica's chunks."""
        received, sent = self._parts_received, self._means_sent
        made = run_with(self._mean, part, received=received, sent=sent)
        return {name: made[name] for name in self._mean.spec.function.outputs}

    def join(self, mean: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Enqueue the putting together of all averages; return those of gradients.

        They have the layouts of this replica's gradients.
        """
        made = run_with(self._join, mean, received=self._means_received)
        return {name: made[name] for name in self._join.spec.function.outputs}


class _Bucket(NamedTuple):
    """Gradients of one dtype that are tiled alike.

    Attributes:
        layouts: Name of a gradient → its layout.
        chunk: The layout of a chunk.
    """

    layouts: Mapping[str, ShardLayout]
    chunk: ShardLayout


class _Split(nn.Module):
    """A cut of gradients, bucket by bucket, into the chunks of each replica."""

    def __init__(self, buckets: Sequence[_Bucket], num_replicas: int) -> None:
        super().__init__()
        self._buckets = buckets
        self._num_replicas = num_replicas

    def forward(self, *grads: Tensor) -> list[Tensor]:
        left = iter(grads)
        by_bucket = []
        for layouts, chunk in self._buckets:
            values = [next(left) for _ in layouts]
            shardings = [layout.sharding for layout in layouts.values()]
            flat = xla_compat.flatten_shards(values, shardings)
            shapes = [chunk.shard_shape] * self._num_replicas
            shards = xla_compat.split_shards(flat, shapes)
            by_bucket.append([_whole(shard, chunk) for shard in shards])
        return [value for chunks in zip(*by_bucket, strict=True) for value in chunks]


class _Mean(nn.Module):
    """The average of the parts of each chunk."""

    def __init__(self, num_replicas: int) -> None:
        super().__init__()
        self._num_replicas = num_replicas

    def forward(self, *parts: Tensor) -> list[Tensor]:
        count = len(parts) // self._num_replicas
        return [_mean(parts[i::count]) for i in range(count)]


class _Join(nn.Module):
    """The chunks of all replicas put together, and gradients cut out of them."""

    def __init__(self, buckets: Sequence[_Bucket]) -> None:
        super().__init__()
        self._buckets = buckets

    def forward(self, *means: Tensor) -> list[Tensor]:
        count = len(self._buckets)
        grads: list[Tensor] = []
        for i, (layouts, chunk) in enumerate(self._buckets):
            chunks = means[i::count]
            flat = xla_compat.flatten_shards(chunks, [chunk.sharding] * len(chunks))
            shapes = [layout.shard_shape for layout in layouts.values()]
            shards = xla_compat.split_shards(flat, shapes)
            grads += map(_whole, shards, layouts.values())
        return grads


def _whole(shards: Tensor, layout: ShardLayout) -> Tensor:
    return xla_compat.from_shards(shards, layout.sharding, layout.shape, layout.dtype)


def _mean(parts: Sequence[Tensor]) -> Tensor:
    """Return the mean; in half precision it is rounded once."""
    dtype = parts[0].dtype
    wide = torch.float32 if dtype in _NARROW else dtype
    return (reduce(add, [part.to(wide) for part in parts]) / len(parts)).to(dtype)


def _buckets(layouts: Mapping[str, ShardLayout], num_replicas: int) -> list[_Bucket]:
    """Put gradients into buckets, in the order of their names' first."""
    found: dict[tuple[torch.dtype, tuple[int, ...]], dict[str, ShardLayout]] = {}
    for name, layout in layouts.items():
        found.setdefault((layout.dtype, layout.tiling.tiles), {})[name] = layout
    return [
        _Bucket(alike, _chunk(list(alike.values()), num_replicas))
        for alike in found.values()
    ]


def _chunk(layouts: Sequence[ShardLayout], num_replicas: int) -> ShardLayout:
    """Return the layout of a chunk: of one dimension, split as gradients are."""
    tiles = layouts[0].tiling.tiles
    num_tiles = max(tiles) + 1
    size = sum(math.prod(layout.shard_shape) for layout in layouts)
    shape = (num_tiles * -(-size // num_replicas),)
    args = OpShardingArgs.of_tiles(tiles)
    return ShardLayout.of_sharding(shape, layouts[0].dtype, args)
