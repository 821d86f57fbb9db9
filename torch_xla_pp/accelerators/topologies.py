"""Slices of accelerators, by the names that their compilers have for them."""

import math
import re
from dataclasses import dataclass

from torch_xla_pp.accelerators.chips import CHIPS, Chip

_NAME = re.compile(r"(?P<kind>\w+):(?P<shape>\d+(?:x\d+)*)")
_HOST_SHAPE = (2, 2, 1)


@dataclass(frozen=True, kw_only=True, slots=True)
class Slice:
    """Chips of one kind in a mesh, such as those of one rank.

    Args:
        kind: A name of `CHIPS`.
        shape: Chips along each dimension.

    Raises:
        ValueError: There are no such chips.
    """

    kind: str
    shape: tuple[int, ...]

    def __post_init__(self) -> None:
        if self.kind not in CHIPS:
            raise ValueError(
                f"topology: expected one of {', '.join(CHIPS)}, got "
                f"{self.kind!r}. Write e.g. v5e:2x2."
            )
        num_dims = self.chip.num_dims
        if len(self.shape) != num_dims or min(self.shape) < 1:
            raise ValueError(
                f"topology {self}: expected {num_dims} sizes from 1, got "
                f"{'x'.join(map(str, self.shape))}. Write e.g. "
                f"{self.kind}:{'x'.join(['2'] * num_dims)}."
            )

    @classmethod
    def parse(cls, text: str) -> "Slice":
        """Read a name such as `v5e:2x2` or `v5p:2x2x1`.

        Raises:
            ValueError: It is no such name.
        """
        match = _NAME.fullmatch(text.strip())
        if match is None:
            raise ValueError(
                f"topology: expected a kind and a shape, got {text!r}. Write e.g. "
                "v5e:2x2."
            )
        shape = tuple(int(size) for size in match["shape"].split("x"))
        return cls(kind=match["kind"], shape=shape)

    def __str__(self) -> str:
        return f"{self.kind}:{'x'.join(map(str, self.shape))}"

    @property
    def chip(self) -> Chip:
        """Return what one of its devices is."""
        return CHIPS[self.kind]

    @property
    def num_devices(self) -> int:
        """Return how many devices it has, one a chip."""
        return math.prod(self.shape)

    @property
    def compiler_options(self) -> dict[str, str | tuple[int, ...]]:
        """Return the options that the compiler needs beside its name.

        By default the compiler assumes hosts of 2x2 chips, which do not divide a
        smaller slice, and two devices on each chip of v4.
        """
        options: dict[str, str | tuple[int, ...]] = {}
        host = tuple(
            min(have, usual)
            for have, usual in zip((*self.shape, 1)[:3], _HOST_SHAPE, strict=True)
        )
        if host != _HOST_SHAPE:
            options["chips_per_host_bounds"] = host
        if self.kind == "v4":
            options["chip_config_name"] = "megacore"
        return options
