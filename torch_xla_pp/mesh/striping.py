"""Balance causal attention over devices that split the sequence."""

import torch
from torch import Tensor


def striped_positions(length: int, num_shards: int) -> Tensor:
    """Return an order of a sequence in which equal parts have equal work.

    Under a causal mask a position attends to those before it, so that the last of
    several devices that split a sequence has most work. In this order each device has
    one chunk from the front and one from the back. Put inputs and targets in this
    order, and pass the positions to the model: its masks and positional encodings
    depend on them. Time is saved if the attention kernel skips masked blocks.

    Args:
        length: Length of the sequence.
        num_shards: Number of devices that split it.

    Returns:
        The position of each place, int64, `(length,)`.

    Raises:
        ValueError: The sequence cannot be cut into `2 * num_shards` equal chunks.

    Source: Llama Team, The Llama 3 Herd of Models (2024), section 3.3.2; MaxText's
    load-balanced context parallelism.

    Example:
        >>> positions = striped_positions(8, 2)
        >>> positions
        tensor([0, 1, 6, 7, 2, 3, 4, 5])
        >>> x, target = x[:, positions], target[:, positions]
        >>> mask = positions[:, None] >= positions
    """
    if num_shards < 1 or length % (2 * num_shards):
        raise ValueError(
            f"striped_positions: expected a length that {2 * num_shards} divides, for "
            f"{num_shards} shards, got {length}. Pad the sequence."
        )
    chunks = torch.arange(length).reshape(2, num_shards, -1)
    front, back = chunks[0], chunks[1].flip(0)
    return torch.stack([front, back], 1).flatten()
