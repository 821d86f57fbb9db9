"""Attention by calls of ours is what its plain operations are, however operands lie."""

import functools
import itertools
import math

import torch
from compile.own_calls import check
from pytest import mark
from torch import Tensor

from torch_xla_pp import xla_compat
from torch_xla_pp.graph import ATTENTION, ATTENTION_BACKWARD
from torch_xla_pp.testing import Worlds

pytestmark = mark.worlds

BATCH, HEADS = 2, 3
# Of queries, of keys, and the width: less and more than a block of each, and than two.
SIZES = (
    (1, 1, 1),
    (5, 5, 4),
    (64, 64, 16),
    (65, 70, 3),
    (150, 20, 8),
    (20, 150, 8),
    (300, 600, 4),
)


def drawn(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def run(
    is_causal: bool,
    scale: float,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    of: Tensor,
    mask: Tensor | None = None,
) -> tuple[Tensor, ...]:
    """Return all results of a forward and a backward; `of` is the gradient."""
    options = is_causal, scale, list[str]()
    kept = ATTENTION(query, key, value, mask, *options)
    return *kept, *ATTENTION_BACKWARD(of, query, key, value, mask, *kept, *options)


def run_shown(is_causal: bool, scale: float, *given: Tensor) -> tuple[Tensor, ...]:
    """Return the result and, if all rows see all keys, its gradients."""
    result, _, _, *grads = run(is_causal, scale, *given)  # type: ignore[call-arg, arg-type]
    return (result,) if is_causal else (result, *grads)


def run_large(*given: Tensor) -> tuple[Tensor, ...]:
    """Return the result and gradients, but for those of what is multiplied by 1e30.

    There, a difference of two roundings is.
    """
    result, _, _, of_query, of_key, of_value = run(False, 1.0, *given)  # type: ignore[arg-type]
    return result, of_query, of_key[..., 1:], of_value


def alike(rows: int, keys: int, width: int) -> list[Tensor]:
    """Return queries, keys, values and the gradient of a result."""
    return [
        drawn(BATCH, HEADS, rows, width, seed=0),
        drawn(BATCH, HEADS, keys, width, seed=1),
        drawn(BATCH, HEADS, keys, width, seed=2),
        drawn(BATCH, rows, HEADS, width, seed=3),
    ]


def sizes() -> None:
    xla_compat.enable_spmd()
    for size, is_causal in itertools.product(SIZES, (False, True)):
        call = functools.partial(run, is_causal, 0.3)
        check(call, *alike(*size), num_calls=2, atol=2e-5)


def test_every_size_gives_what_plain_operations_do(worlds: Worlds) -> None:
    worlds.run(sizes, ranks=1)


def strange_numbers() -> None:
    xla_compat.enable_spmd()
    for number, is_causal in itertools.product((math.nan, math.inf), (False, True)):
        query, key, value, of = alike(150, 150, 4)
        query[0, 1, 70, 2] = number
        call = functools.partial(run_shown, is_causal, 0.3)
        num_calls = 1 if is_causal else 2
        check(call, query, key, value, of, num_calls=num_calls, atol=2e-5)
    # Rows whose first keys do not count, as their scores are infinite.
    query, key, value, of = alike(70, 600, 4)
    query[..., 0], key[..., :300, 0] = 1e30, -1e30
    call = functools.partial(run_shown, True, 1.0)
    check(call, query, key, value, of, num_calls=1, atol=2e-5)
    check(run_large, query, key, value, of, num_calls=2, atol=2e-5)
    # No score is so large that its exponential is not finite.
    query, key, value, of = alike(70, 600, 4)
    call = functools.partial(run, False, 1.0)
    check(call, query * 40, key * 40, value, of, num_calls=2, atol=2e-2)


def test_nothing_is_lost_but_what_is_no_number(worlds: Worlds) -> None:
    worlds.run(strange_numbers, ranks=1)


MASKS = {
    "of keys": (BATCH, 1, 1, 600),
    "of the batch": (BATCH, 1, 300, 600),
    "of heads": (1, HEADS, 300, 600),
    "one": (1, 1, 300, 600),
    "each": (BATCH, HEADS, 300, 600),
}


def run_masked(is_causal: bool, *given: Tensor) -> tuple[Tensor, ...]:
    return run(is_causal, 0.3, *given)  # type: ignore[arg-type]


def masks() -> None:
    xla_compat.enable_spmd()
    for number, shape in enumerate(MASKS.values()):
        mask = drawn(*shape, seed=number) > 0
        # All of a block of rows and keys, and all of a row.
        mask[..., 256:512] &= drawn(*shape[:3], 1, seed=9) > 5
        mask[..., -1, :] &= shape[2] == 1
        for is_causal in (False, True):
            call = functools.partial(run_masked, is_causal)
            check(call, *alike(300, 600, 4), mask, num_calls=2, atol=2e-5)


def test_masks_hide_keys_and_rows_without_keys_have_zeros(worlds: Worlds) -> None:
    worlds.run(masks, ranks=1)


ROWS, WIDTH = 70, 8


def by_head(x: Tensor, of: Tensor) -> tuple[Tensor, ...]:
    """Take what lies head by head in one value, and put gradients together so."""
    heads = x.unflatten(-1, (HEADS, 3 * WIDTH)).transpose(1, 2)
    result, _, _, *grads = run(True, 0.3, *heads.chunk(3, -1), of)
    joined = torch.cat(grads, -1).transpose(1, 2)
    return result, joined.contiguous().flatten(2) * 2


def by_kind(x: Tensor, of: Tensor) -> tuple[Tensor, ...]:
    """Take queries of all heads, then keys, then values, from one value."""
    parts = [part.unflatten(-1, (HEADS, WIDTH)) for part in x.chunk(3, -1)]
    heads = [part.transpose(1, 2) for part in parts]
    result, _, _, *grads = run(False, 0.3, *heads, of)
    flat = [grad.transpose(1, 2).contiguous().flatten(2) for grad in grads]
    return result, torch.cat(flat, -1) * 2


def of_three(x: Tensor, of: Tensor) -> tuple[Tensor, ...]:
    """Take each from a value of its own."""
    parts = [x[..., : HEADS * WIDTH] + i for i in range(3)]
    heads = [part.unflatten(-1, (HEADS, WIDTH)).transpose(1, 2) for part in parts]
    result, _, _, *grads = run(False, 0.3, *heads, of)
    return result, *(x.transpose(1, 2).contiguous().flatten(2) for x in grads)


def of_one_head(x: Tensor, of: Tensor) -> tuple[Tensor, ...]:
    """Let all heads have the same keys and values."""
    parts = [x[..., i * WIDTH : (i + 1) * WIDTH].unsqueeze(1) for i in range(2)]
    key, value = (part.expand(-1, HEADS, -1, -1) for part in parts)
    query = x[..., : HEADS * WIDTH].unflatten(-1, (HEADS, WIDTH)).transpose(1, 2)
    return run(True, 0.3, query, key, value, of)


def turned(x: Tensor, of: Tensor) -> tuple[Tensor, ...]:
    """Take values whose rows do not lie in memory, which are copied."""
    parts = [x[..., i : i + HEADS * WIDTH] for i in range(3)]
    heads = [p.unflatten(-1, (WIDTH, HEADS)).permute(0, 3, 1, 2) for p in parts]
    return run(True, 0.3, *heads, of)


def layouts() -> None:
    xla_compat.enable_spmd()
    x = drawn(BATCH, ROWS, 3 * HEADS * WIDTH, seed=0)
    of = drawn(BATCH, ROWS, HEADS, WIDTH, seed=1)
    for call in (by_head, by_kind, of_three, of_one_head, turned):
        # Nothing is copied by a call besides.
        check(call, x, of, num_calls=2, atol=2e-5)


def test_operands_are_read_where_they_lie_and_gradients_lie_alike(
    worlds: Worlds,
) -> None:
    worlds.run(layouts, ranks=1)
