"""Exchanges between devices, and what each device sends for them.

Devices are a line or a ring: each one has links to two neighbours. All counts are for
links that carry as much each way at once.

Sources: for gathers and sums Patarasuk and Yuan, "Bandwidth optimal all-reduce
algorithms for clusters of workstations", JPDC 2009; for all-to-all "How to Scale Your
Model", part 3: a quarter of a gather, as values are sent both ways, each over half of
the distance.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

BOUNDARY = "boundary"
"""Kind of what goes from a stage to another."""

# Of n devices: what one sends for each byte of the whole value.
_SENT: Mapping[str, Callable[[int], float]] = {
    "all-gather": lambda n: (n - 1) / n,
    "reduce-scatter": lambda n: (n - 1) / n,
    "all-reduce": lambda n: 2 * (n - 1) / n,
    "all-to-all": lambda n: n / 4,
    "collective-permute": lambda n: 1.0,
    "collective-broadcast": lambda n: 1.0,
    BOUNDARY: lambda n: 1.0,
}
# Operands and results of these are shards; the others have a whole value on one side.
_OF_SHARDS = ("all-to-all", "collective-permute", BOUNDARY)


@dataclass(frozen=True, kw_only=True, slots=True)
class Exchange:
    """What a device exchanges with others in one action of a stage.

    Args:
        when: "F", "B", "I" or "W" of each microbatch, or "step" for once a step.
        kind: Its name in HLO, or "boundary".
        axis: Mesh axes along which devices exchange, joined by "+"; "pp" between
            stages and "replicas" between pipelines.
        num_devices: How many exchange with each other.
        count: How many exchanges there are.
        num_bytes: On one device, the larger one of what goes in and what comes out, of
            all of them together.
        num_asynchronous: During how many of them the device computes, None if that is
            not known.

    Raises:
        ValueError: There is no such kind.
    """

    when: str
    kind: str
    axis: str
    num_devices: int
    count: int
    num_bytes: float
    num_asynchronous: int | None = None

    def __post_init__(self) -> None:
        if self.kind not in _SENT:
            raise ValueError(
                f"exchange: expected one of {', '.join(_SENT)}, got {self.kind!r}. "
                "Correct it."
            )

    @property
    def moved_bytes(self) -> float:
        """What a device sends."""
        return moved_bytes(self.kind, self.num_bytes, self.num_devices)

    def among(self, num_devices: int) -> "Exchange":
        """Return an exchange of the same whole values on another number of devices."""
        factor = self.num_devices / num_devices if self.kind in _OF_SHARDS else 1.0
        return replace(self, num_devices=num_devices, num_bytes=factor * self.num_bytes)


def moved_bytes(kind: str, num_bytes: float, num_devices: int) -> float:
    """Return the bytes that the busiest device sends over a link.

    Args:
        kind: The exchange, by its name in HLO.
        num_bytes: Of what goes in or what comes out on one device, the larger.
        num_devices: How many exchange with each other.

    Example:
        >>> moved_bytes("all-reduce", 1024, 4)
        1536.0
    """
    if num_devices < 2 and kind != BOUNDARY:
        return 0.0
    return num_bytes * _SENT[kind](num_devices)


def whole_bytes(kind: str, result_bytes: int, num_devices: int) -> int:
    """Return the larger one of operand and result of an exchange, from its result."""
    return result_bytes * (num_devices if kind == "reduce-scatter" else 1)
