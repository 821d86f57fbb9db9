"""Ways to share the work of a stage between the devices of its rank.

Two mesh axes: `data` splits the rows of a microbatch, and with `fsdp` the parameters,
too; `model` splits the products, as the preset `tp` does. A work is split over `model`
if a dimension of one of its matrices can be; its other parameters are not split.

Collectives take the time of a ring: n devices move (n - 1) / n of the bytes for a
gather or a reduce-scatter, and twice that for an all-reduce.

Source of the ring's time: Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms
for clusters of workstations", JPDC 2009.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

PRESETS = ("dp", "fsdp", "tp")
DATA, MODEL = "data", "model"


@dataclass(frozen=True, kw_only=True, slots=True, order=True)
class Strategy:
    """A way in which the devices of a rank share its stages.

    Args:
        data: Devices over which rows are split.
        model: Devices over which products are split.
        has_fsdp: Whether parameters are split over `data`, too.
    """

    data: int = 1
    model: int = 1
    has_fsdp: bool = False

    def __str__(self) -> str:
        parts = [f"data {self.data}"] if self.data > 1 else []
        parts += [f"model {self.model}"] if self.model > 1 else []
        return " x ".join(parts) or "1 device"

    @property
    def text(self) -> str:
        """The sizes of both axes after what splits rows, such as fsdp:2x1."""
        before = f"{'fsdp' if self.has_fsdp else 'dp'}:" if self.data > 1 else ""
        return f"{before}{self.data}x{self.model}"

    @classmethod
    def from_text(cls, text: str) -> "Strategy":
        """Read what `text` gives.

        Raises:
            ValueError: It is something else.
        """
        match = re.fullmatch(r"(?:(dp|fsdp):)?([1-9]\d*)x([1-9]\d*)", text)
        if match is None or (match[1] == "fsdp" and match[2] == "1"):
            raise ValueError(
                "rank sharding: expected the sizes of data and model, after fsdp: or "
                "dp: if data is above 1, such as fsdp:2x1, got "
                f"{text!r}. Correct it."
            )
        return cls(data=int(match[2]), model=int(match[3]), has_fsdp=match[1] == "fsdp")

    @property
    def num_devices(self) -> int:
        """Number of devices of a rank."""
        return self.data * self.model

    @property
    def presets(self) -> tuple[str, ...]:
        """Names of the presets of rules that share work this way."""
        names = ["fsdp" if self.has_fsdp else "dp"] if self.data > 1 else []
        return (*names, *(["tp"] if self.model > 1 else []))

    @property
    def sizes(self) -> dict[str, int]:
        """Mesh axis → its size."""
        return {DATA: self.data, MODEL: self.model}


def strategies_for(
    num_devices: int, presets: Sequence[str] = PRESETS
) -> Iterator[Strategy]:
    """Yield the strategies that use so many devices, with these presets alone."""
    for model in range(1, num_devices + 1):
        data, rest = divmod(num_devices, model)
        if rest or (model > 1 and "tp" not in presets):
            continue
        if data == 1 or "dp" in presets:
            yield Strategy(data=data, model=model)
        if data > 1 and "fsdp" in presets:
            yield Strategy(data=data, model=model, has_fsdp=True)


def ring_s(
    num_bytes: float, num_devices: int, bytes_per_s: float, latency_s: float
) -> float:
    """Return the time of a gather or a reduce-scatter of so many bytes in all."""
    if num_devices == 1 or num_bytes <= 0:
        return 0.0
    share = (num_devices - 1) / num_devices
    return latency_s + share * num_bytes / bytes_per_s
