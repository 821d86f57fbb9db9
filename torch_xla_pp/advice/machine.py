"""What a device computes, and what its links carry."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from torch_xla_pp.accelerators import CHIPS, Chip

REPLICAS, PIPELINE = "replicas", "pp"


@dataclass(frozen=True, kw_only=True, slots=True)
class Machine:
    """What bounds the programs of one device.

    Axes within a rank are fast (ICI), those between ranks are slow where they leave a
    slice or a host (DCN). `links` says so axis by axis.

    Args:
        name: Its name.
        flops_per_s: Peak of products of matrices.
        memory_bytes_per_s: Bandwidth of its memory.
        link_bytes_per_s: What it sends along an axis that `links` does not have.
        links: Axis → what it sends along it; "pp" between stages, "replicas" between
            pipelines.

    Raises:
        ValueError: A figure is not above 0.
    """

    name: str
    flops_per_s: float
    memory_bytes_per_s: float
    link_bytes_per_s: float
    links: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        rates = {
            "flops_per_s": self.flops_per_s,
            "memory_bytes_per_s": self.memory_bytes_per_s,
            "link_bytes_per_s": self.link_bytes_per_s,
            **{f"links[{axis!r}]": rate for axis, rate in self.links.items()},
        }
        faults = [f"{name} of {rate}" for name, rate in rates.items() if not rate > 0]
        if faults:
            raise ValueError(
                f"machine {self.name}: expected figures above 0, got "
                f"{', '.join(faults)}. Correct them."
            )

    @classmethod
    def of_chip(
        cls, chip: Chip, mesh: Mapping[str, int], links: Mapping[str, float]
    ) -> "Machine":
        """Return a chip whose ranks are slices of their own.

        An axis is a line of chips, one way round, or a ring if it is long enough to
        wrap around. Between ranks values go through the host and, as ranks may be on
        several hosts, the network.

        Args:
            chip: The chip.
            mesh: Axes of a rank's devices → their sizes.
            links: Axes of which another bandwidth is known.
        """
        between = min(chip.host_bytes_per_s, chip.network_bytes_per_s)
        found = {PIPELINE: between, REPLICAS: between}
        for axis, size in mesh.items():
            ways = 1 if size % chip.wraps_at else 2
            found[axis] = ways * chip.link_bytes_per_s
        return cls(
            name=chip.name,
            flops_per_s=chip.flops_per_s,
            memory_bytes_per_s=chip.memory_bytes_per_s,
            link_bytes_per_s=chip.link_bytes_per_s,
            links={**found, **links},
        )

    @classmethod
    def named(
        cls, name: str, mesh: Mapping[str, int], links: Mapping[str, float]
    ) -> "Machine":
        """Return a known chip.

        Raises:
            ValueError: It is not known.
        """
        if name not in CHIPS:
            raise ValueError(
                f"advise: expected a device of {', '.join(CHIPS)}, got {name!r}. Pass "
                "one of these, or a Machine with your own figures."
            )
        return cls.of_chip(CHIPS[name], mesh, links)

    def with_links(self, links: Mapping[str, float]) -> "Machine":
        """Return it with other bandwidths of some axes."""
        return replace(self, links={**self.links, **links})

    def bytes_per_s(self, axis: str) -> float:
        """Return what a device sends along an axis, or the slowest of several."""
        parts = axis.split("+")
        return min(self.links.get(part, self.link_bytes_per_s) for part in parts)

    def intensity(self, axis: str) -> float:
        """Return the FLOP that it does while it sends a byte along an axis."""
        return self.flops_per_s / self.bytes_per_s(axis)

    def line_intensity(self, axis: str) -> float:
        """Return the same of a shorter axis, which may not wrap around any more."""
        rate = min(self.bytes_per_s(axis), self.link_bytes_per_s)
        return self.flops_per_s / rate

    @property
    def memory_intensity(self) -> float:
        """Return the FLOP that it does while it reads a byte from its memory."""
        return self.flops_per_s / self.memory_bytes_per_s
