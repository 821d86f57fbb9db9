"""Devices and their links, as a plan takes them.

Figures of vendors are peaks; `efficiency` is the share of the peak FLOP/s that the
products of a model reach, and is a guess wherever `is_verified` is false.
`DeviceSpec.to_json` writes a file for figures of one's own.
"""

import dataclasses
import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from torch_xla_pp import record
from torch_xla_pp.accelerators import CHIPS
from torch_xla_pp.simulate import Link, Network

_FORMAT = "torch_xla_pp device 1"
_GB, _GIB = 10**9, 2**30


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceSpec:
    """The figures of one device: computing, memory and links.

    Args:
        name: Its name.
        flops_per_s: Peak of products of matrices.
        sends_inside: Whether programs send what they make for other ranks as soon as
            it is there, rather than at their end.
        dtype: The dtype of these products, such as "bfloat16"; "" for any.
        efficiency: Share of the peak that models reach.
        bytes_per_s: Bandwidth of its memory.
        memory_bytes: Size of its memory.
        action_s: Time to start a program, whatever it does.
        link_bytes_per_s: Bandwidth to the next device of the same rank, one way.
        link_latency_s: Time of a collective of no bytes.
        is_verified: Whether the figures were measured.
        source: The source of the figures.

    Raises:
        ValueError: A figure makes no sense; all such are named.
    """

    name: str
    flops_per_s: float
    efficiency: float
    bytes_per_s: float
    memory_bytes: int
    action_s: float
    link_bytes_per_s: float
    link_latency_s: float
    sends_inside: bool = False
    dtype: str = ""
    is_verified: bool = False
    source: str = ""

    def __post_init__(self) -> None:
        rates = ("flops_per_s", "bytes_per_s", "memory_bytes", "link_bytes_per_s")
        faults = [
            f"{name} above 0, got {getattr(self, name)}"
            for name in rates
            if not 0 < getattr(self, name) < math.inf
        ]
        faults += [
            f"{name} of at least 0, got {getattr(self, name)}"
            for name in ("action_s", "link_latency_s")
            if not 0 <= getattr(self, name) < math.inf
        ]
        if not 0 < self.efficiency <= 1:
            faults.append(f"efficiency above 0 and up to 1, got {self.efficiency}")
        if faults:
            raise ValueError(
                "\n".join(
                    f"device {self.name}: expected {fault}. Correct it."
                    for fault in faults
                )
            )

    def to_json(self, path: str | Path | None = None) -> str:
        """Return it as JSON.

        Args:
            path: A file to write as well.
        """
        return record.to_json(self, _FORMAT, path)

    @classmethod
    def from_json(cls, source: str | Path) -> "DeviceSpec":
        """Read what `to_json` wrote.

        Args:
            source: A file, or the text itself, which is known by its line ends.

        Raises:
            ValueError: Figures are missing, unknown or faulty; all are named.
        """
        return record.from_json(cls, source, _FORMAT)

    @classmethod
    def named(cls, name: str) -> "DeviceSpec":
        """Return a known device, or the one in a file.

        Raises:
            ValueError: It is neither.
        """
        if name in DEVICES:
            return DEVICES[name]
        if not Path(name).is_file():
            raise ValueError(
                f"device: expected one of {', '.join(DEVICES)}, or a file with a "
                f"device's figures, got {name!r}. To write such a file, change what "
                'DeviceSpec.named("cpu").to_json() gives.'
            )
        return cls.from_json(Path(name))


@dataclass(frozen=True, kw_only=True, slots=True)
class RankDevices:
    """The devices of one rank of a job whose ranks differ.

    Args:
        device: Their kind.
        count: Their number.
    """

    device: DeviceSpec
    count: int

    def __str__(self) -> str:
        return f"{self.count} {self.device.name}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Cluster:
    """The devices of a job.

    Args:
        device: The kind of all devices; of the first rank's if ranks differ.
        num_devices: Number of devices in all.
        memory_bytes: The part of a device's memory that a plan may use, None for all.
        reserve: Share of it that is left free.
        network: Links between the ranks of a pipeline.
        replica_link: The link from a rank to that of the next replica, with which it
            sums gradients; None if it is as fast as those of a pipeline.
        ranks: The devices of each rank, those of all replicas, if ranks differ; () if
            all have equal ones.

    Raises:
        ValueError: There are no devices, or the reserve is no share.
    """

    device: DeviceSpec
    num_devices: int
    memory_bytes: int | None = None
    reserve: float = 0.08
    network: Network = field(default_factory=Network)
    replica_link: Link | None = None
    ranks: tuple[RankDevices, ...] = ()

    def __post_init__(self) -> None:
        faults = []
        if self.num_devices < 1:
            faults.append(f"at least one device, got {self.num_devices}")
        if not 0 <= self.reserve < 1:
            faults.append(f"a reserve of at least 0 and below 1, got {self.reserve}")
        if self.memory_bytes is not None and self.memory_bytes < 1:
            faults.append(f"memory above 0 bytes, got {self.memory_bytes}")
        if faults:
            raise ValueError(
                "\n".join(f"cluster: expected {f}. Correct it." for f in faults)
            )

    @property
    def capacity_bytes(self) -> int:
        """The memory of a device that stages may use."""
        memory = self.memory_bytes or self.device.memory_bytes
        return math.floor(memory * (1 - self.reserve))

    def capacities(self, num_ranks: int) -> tuple[int, ...]:
        """Return the memory of a device that stages may use on each rank.

        Args:
            num_ranks: Ranks of a pipeline.
        """
        if not self.ranks:
            return (self.capacity_bytes,) * num_ranks
        kinds = (rank.device for rank in self.ranks[:num_ranks])
        return tuple(self.of_device(kind).capacity_bytes for kind in kinds)

    def of_device(self, device: DeviceSpec) -> "Cluster":
        """Return the cluster as if all devices were of one kind."""
        return dataclasses.replace(self, device=device, ranks=())

    @property
    def sends_inside(self) -> bool:
        """Whether programs of all devices send values once they are there."""
        kinds = [rank.device for rank in self.ranks] or [self.device]
        return all(kind.sends_inside for kind in kinds)

    @property
    def link_of_replicas(self) -> Link:
        """The link from a rank to that of the next replica."""
        return self.replica_link or self.network.default


def link_between_ranks(
    *devices: DeviceSpec, latency_s: float | None = None, gb_per_s: float | None = None
) -> Network:
    """Return equal links between ranks, by default as fast as the slowest within one.

    Args:
        devices: The kinds of devices.
        latency_s: The latency, None for that of the devices.
        gb_per_s: The bandwidth in GB/s, None for that of the devices.
    """
    if latency_s is None:
        latency_s = max(device.link_latency_s for device in devices)
    rate = min(device.link_bytes_per_s for device in devices)
    bytes_per_s = gb_per_s * _GB if gb_per_s else rate
    return Network(default=Link(latency_s=latency_s, bytes_per_s=bytes_per_s))


def _known(specs: Iterable[DeviceSpec]) -> dict[str, DeviceSpec]:
    return {spec.name: spec for spec in specs}


# The link is one of a chip's links in `CHIPS`: a collective along one axis of a mesh
# cannot use the others.
DEVICES = _known(
    (
        DeviceSpec(
            name="cpu",
            flops_per_s=84e9,
            efficiency=0.8,
            bytes_per_s=10e9,
            memory_bytes=4 * _GIB,
            action_s=1e-3,
            link_bytes_per_s=2e9,
            link_latency_s=1e-4,
            sends_inside=True,
            dtype="float32",
            is_verified=True,
            source="docs/performance/step.md: float32 products of one core; the other "
            "figures are guesses, and memory is what you allow of the host's",
        ),
        DeviceSpec(
            name="v5e",
            flops_per_s=197e12,
            efficiency=0.5,
            bytes_per_s=819e9,
            memory_bytes=16 * _GB,
            action_s=5e-5,
            link_bytes_per_s=CHIPS["v5e"].link_bytes_per_s,
            link_latency_s=1e-6,
            dtype="bfloat16",
            source="https://docs.cloud.google.com/tpu/docs/v5e (bf16); efficiency, "
            "action_s and latency are guesses",
        ),
        DeviceSpec(
            name="v5p",
            flops_per_s=459e12,
            efficiency=0.5,
            bytes_per_s=2765e9,
            memory_bytes=95 * _GIB,
            action_s=5e-5,
            link_bytes_per_s=CHIPS["v5p"].link_bytes_per_s,
            link_latency_s=1e-6,
            dtype="bfloat16",
            source="https://docs.cloud.google.com/tpu/docs/v5p-training (bf16); "
            "efficiency, action_s and latency are guesses",
        ),
        DeviceSpec(
            name="v6e",
            flops_per_s=918e12,
            efficiency=0.5,
            bytes_per_s=1638e9,
            memory_bytes=32 * _GB,
            action_s=5e-5,
            link_bytes_per_s=CHIPS["v6e"].link_bytes_per_s,
            link_latency_s=1e-6,
            dtype="bfloat16",
            source="https://docs.cloud.google.com/tpu/docs/v6e (bf16); efficiency, "
            "action_s and latency are guesses",
        ),
    )
)
