"""A few lengths for batches of all lengths, so that few programs are compiled."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional


@dataclass(frozen=True, slots=True)
class LengthBuckets:
    """The lengths that batches are filled up to.

    XLA compiles programs for each length. With buckets there are at most as many kinds
    of steps as `sizes`, for each number of rows and each mode.

    The filling comes after the tokens. Where a token sees only those before it, it
    changes no other output; elsewhere give the model `mask`. With a target filled up by
    the loss's `ignore_index`, losses and gradients are those of the original batch: all
    rows are filled up alike, so each microbatch is still the mean over equally many
    tokens.

    Args:
        sizes: The lengths, rising.

    Raises:
        ValueError: They are not rising, or not positive.

    Example:
        >>> buckets = LengthBuckets((128, 256, 512))
        >>> for x, y in loader:
        ...     x, y = buckets.fill(x, 0), buckets.fill(y, -100)
    """

    sizes: tuple[int, ...]

    def __post_init__(self) -> None:
        ordered = sorted({size for size in self.sizes if size > 0})
        if not ordered or list(self.sizes) != ordered:
            raise ValueError(
                "LengthBuckets: expected positive lengths, the shortest first, got "
                f"{self.sizes}. Sort them and leave out what is there twice."
            )

    @classmethod
    def fitting(
        cls, lengths: Iterable[int], count: int, *, multiple_of: int = 1
    ) -> "LengthBuckets":
        """Return the sizes that need the least filling for batches of some lengths.

        Args:
            lengths: The length of each batch, or of a sample of them. The longest of
                them is the longest that can be filled up.
            count: The most sizes.
            multiple_of: A number that divides all sizes, such as the number of devices
                that the length is split over.

        Raises:
            ValueError: There is no length, or one that is not positive, or no size.
        """
        found = Counter(-(-length // multiple_of) * multiple_of for length in lengths)
        if count < 1 or not found or min(found) < 1:
            raise ValueError(
                "LengthBuckets: expected positive lengths and at least one size, got "
                f"{len(found)} lengths from {min(found, default=0)} and {count} sizes. "
                "Pass the length of each batch of the loader."
            )
        known = sorted(found)
        ends = _least_filling(known, [found[length] for length in known], count)
        return cls(tuple(known[end] for end in ends))

    def size(self, length: int) -> int:
        """Return the size that a batch of some length is filled up to.

        Raises:
            ValueError: It is longer than all of them.
        """
        for size in self.sizes:
            if size >= length:
                return size
        raise ValueError(
            f"LengthBuckets: expected a length of at most {self.sizes[-1]}, got "
            f"{length}. Cut the batch, or add a size."
        )

    def fill(self, tensor: Tensor, value: float, *, dim: int = 1) -> Tensor:
        """Fill a tensor up to the smallest size that suffices.

        Args:
            tensor: Of any shape that has `dim`.
            value: The filling: any token for inputs, the loss's `ignore_index` (-100 by
                default) for targets.
            dim: The dimension of the length.
        """
        missing = self.size(tensor.shape[dim]) - tensor.shape[dim]
        behind = tensor.dim() - 1 - dim % tensor.dim()
        return functional.pad(tensor, [0, 0] * behind + [0, missing], value=value)

    def mask(self, tensor: Tensor, *, dim: int = 1) -> Tensor:
        """Return where the filled `tensor` will have its own items, `(rows, size)`.

        Args:
            tensor: The tensor before it is filled up; its rows are dimension 0.
            dim: The dimension of the length.
        """
        length = tensor.shape[dim]
        own = torch.arange(self.size(length), device=tensor.device) < length
        return own.expand(tensor.shape[0], -1)


def _least_filling(lengths: list[int], counts: list[int], most: int) -> list[int]:
    """Return the lengths to fill up to, by dynamic programming.

    Args:
        lengths: All lengths, rising.
        counts: The number of batches of each.
        most: The most that may be chosen.

    Returns:
        Their indices, rising; the last one is among them.
    """
    size, weight = np.array(lengths), np.array(counts)
    before = np.concatenate([[0], np.cumsum(weight)])
    tokens = np.concatenate([[0], np.cumsum(weight * size)])
    # Least filling of the first `end` lengths, by the numbers of sizes.
    best = np.full(len(lengths) + 1, np.inf)
    best[0] = 0
    origins = []
    for _ in range(min(most, len(lengths))):
        origin, following = np.zeros(len(best), dtype=int), best.copy()
        for end in range(1, len(best)):
            filled = size[end - 1] * (before[end] - before[:end])
            cost = best[:end] + filled - (tokens[end] - tokens[:end])
            origin[end] = int(cost.argmin())
            following[end] = cost.min()
        best = following
        origins.append(origin)
    ends, end = [], len(lengths)
    for origin in reversed(origins):
        if end:
            ends.append(end - 1)
            end = int(origin[end])
    return ends[::-1]
