"""The gradients of one stage, averaged over the replicas of its pipeline.

Terms: a *bucket* is all gradients of one dtype whose parts lie on the devices of a rank
alike, put one after another on each device. It is cut into one *chunk* for each
replica, which averages that chunk for all: a reduce-scatter, then an all-gather. With
R replicas a rank sends 2 (R-1)/R of its bytes, each device's part to the same device.

Laws:

* A mean is computed once, in the order of replicas, and sent to the others. So the
  gradients of all replicas are equal to the bit.
* Three programs run one after the other: `split` sends, `mean` receives and sends,
  `join` receives. What one receives was sent by the peers' programs before it, so none
  waits for what its own device does later.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from functools import reduce
from operator import add
from typing import NamedTuple

import torch
from torch import Tensor, nn

from torch_xla_pp import xla_compat
from torch_xla_pp.compile.border import Border
from torch_xla_pp.compile.names import BucketKind, bucket_name
from torch_xla_pp.compile.partition import Function
from torch_xla_pp.compile.program import Program
from torch_xla_pp.compile.program_spec import ProgramSpec
from torch_xla_pp.hlo import OpShardingArgs
from torch_xla_pp.transport import ShardLayout

_NARROW = (torch.float16, torch.bfloat16)
_Chunks = Mapping[int, Sequence[Tensor]]


class ReplicaMeans:
    """Hold the programs that average the gradients of one stage.

    Args:
        replica: Number of this replica.
        num_replicas: How many there are.
        layouts: Name of a gradient → how it lies on this rank's devices.
        is_in_graph: Whether the programs send and receive themselves.

    Attributes:
        chunks: How a chunk of each bucket lies.
    """

    def __init__(
        self,
        replica: int,
        num_replicas: int,
        layouts: Mapping[str, ShardLayout],
        *,
        is_in_graph: bool,
    ) -> None:
        everyone = range(num_replicas)
        self._replicas = everyone if not is_in_graph else [replica]
        buckets = _buckets(layouts, num_replicas)
        self.chunks = [bucket.chunk for bucket in buckets]
        self._num_buckets = len(buckets)

        def borders(kind: BucketKind, numbers: Mapping[int, int]) -> list[Border]:
            """Return one border for each peer, with chunks of the replica given."""
            return [
                Border(peer, self._names(kind, [number]), tuple(self.chunks))
                for peer, number in numbers.items()
                if peer != replica and is_in_graph
            ]

        def pins(kind: BucketKind) -> dict[str, xla_compat.OpSharding]:
            names = self._names(kind, everyone)
            shardings = [chunk.sharding for chunk in self.chunks] * num_replicas
            return dict(zip(names, shardings, strict=True))

        theirs = {peer: peer for peer in everyone}
        mine = dict.fromkeys(everyone, replica)
        self._split = Program(
            ProgramSpec(
                function=Function(
                    name="split of gradients",
                    module=_Split(buckets, num_replicas),
                    inputs=tuple(name for bucket in buckets for name in bucket.layouts),
                    outputs=self._names("chunk", everyone),
                ),
                pins=pins("chunk"),
                sent=borders("chunk", theirs),
                wanted=self._names("chunk", self._replicas),
            )
        )
        self._mean = Program(
            ProgramSpec(
                function=Function(
                    name="mean of gradients",
                    module=_Mean(num_replicas),
                    inputs=self._names("part", everyone),
                    outputs=self._names("mean", [replica]),
                ),
                pins=pins("mean"),
                received=borders("part", theirs),
                sent=borders("mean", mine),
                wanted=self._names("mean", [replica]),
            )
        )
        self._join = Program(
            ProgramSpec(
                function=Function(
                    name="join of gradients",
                    module=_Join(buckets),
                    inputs=self._names("mean", everyone),
                    outputs=self._split.spec.function.inputs,
                ),
                pins={name: layout.sharding for name, layout in layouts.items()},
                received=borders("mean", theirs),
                wanted=self._split.spec.function.inputs,
            )
        )

    def split(
        self, grads: Mapping[str, Tensor], routes: Mapping[str, Tensor]
    ) -> dict[int, list[Tensor]]:
        """Enqueue the cutting and sending of this replica's gradients.

        Args:
            grads: Name → gradient.
            routes: Where to, see `compile.border`.

        Returns:
            Replica → its chunks, of those that the program does not send.
        """
        results = self._split({**grads, **routes})
        return {
            replica: [results[name] for name in self._names("chunk", [replica])]
            for replica in self._replicas
        }

    def mean(self, parts: _Chunks, routes: Mapping[str, Tensor]) -> list[Tensor]:
        """Enqueue the averaging and sending of this replica's chunks.

        Args:
            parts: Replica → its part of these chunks, of those that the program does
                not receive.
            routes: Where from and where to.
        """
        results = self._mean({**self._named("part", parts), **routes})
        return [results[name] for name in self._mean.spec.function.outputs]

    def join(self, means: _Chunks, routes: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Enqueue the putting together of all averaged chunks.

        Args:
            means: Replica → the chunks that it has averaged, of those that the program
                does not receive.
            routes: Where from.

        Returns:
            Name → gradient, laid out as this replica's own.
        """
        results = self._join({**self._named("mean", means), **routes})
        return {name: results[name] for name in self._join.spec.function.outputs}

    def _names(self, kind: BucketKind, replicas: Iterable[int]) -> tuple[str, ...]:
        numbers = range(self._num_buckets)
        return tuple(bucket_name(kind, i, r) for r in replicas for i in numbers)

    def _named(self, kind: BucketKind, chunks: _Chunks) -> dict[str, Tensor]:
        names = self._names(kind, chunks)
        values = [value for found in chunks.values() for value in found]
        return dict(zip(names, values, strict=True))


class _Bucket(NamedTuple):
    """List gradients of one dtype that lie alike.

    Attributes:
        layouts: Name of a gradient → how it lies.
        chunk: How a chunk lies.
    """

    layouts: Mapping[str, ShardLayout]
    chunk: ShardLayout


class _Split(nn.Module):
    """Cut gradients, bucket by bucket, into the chunks of each replica."""

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
    """Average the parts of each chunk."""

    def __init__(self, num_replicas: int) -> None:
        super().__init__()
        self._num_replicas = num_replicas

    def forward(self, *parts: Tensor) -> list[Tensor]:
        count = len(parts) // self._num_replicas
        return [_mean(parts[i::count]) for i in range(count)]


class _Join(nn.Module):
    """Put the chunks of all replicas together, and cut gradients out of them."""

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
    """Return the mean; of half precision, it is rounded once."""
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
    """Return how a chunk of gradients lies: of one dimension, split as they are."""
    tiles = layouts[0].tiling.tiles
    num_tiles = max(tiles) + 1
    size = sum(math.prod(layout.shard_shape) for layout in layouts)
    shape = (num_tiles * -(-size // num_replicas),)
    args = OpShardingArgs.of_tiles(tiles)
    return ShardLayout.of_sharding(shape, layouts[0].dtype, args)
