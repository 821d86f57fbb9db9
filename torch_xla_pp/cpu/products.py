"""Products of matrices by a library in programs for CPU devices.

On a CPU, libraries multiply several times as fast as XLA does (`blas` chooses one). So
a program of a rank with CPU devices calls it for its products of float32 matrices; XLA
computes everything else. The threads are XLA's, too: the library computes each part of
a product on the thread that XLA calls it on.

XLA cannot split a call over devices. So programs for several devices call it on each
device's parts of the factors, where these are known; XLA computes their other products,
those of ranks on other kinds of devices or without such a library, and all under
`TORCH_XLA_PP_PRODUCTS=xla`.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol, TypeAlias

import torch
from torch import Tensor

from torch_xla_pp import env, xla_compat
from torch_xla_pp.cpu.blas import find_blas
from torch_xla_pp.cpu.handlers import call_handler, calling_on_parts, find_handlers

Product: TypeAlias = Callable[[Tensor, Tensor, bool, bool], Tensor | None]
"""A product of two matrices, given as they are stored and whether each is transposed.

Both may be batches of matrices, with the number of them in front. It returns None for
what it cannot multiply.
"""

ProductSum: TypeAlias = Callable[[Tensor, Tensor, Tensor, bool, bool], Tensor | None]
"""A sum of a value and a product, given as for `Product`; in the value's memory."""


BiasedProduct: TypeAlias = Callable[
    [Tensor, Tensor, Tensor, bool, bool, Tensor | None], Tensor | None
]
"""A product of two matrices, given as for `Product` behind a bias that is added to it.

The bias has a number for each column of the product. What is behind them is added, too,
if it is not None: a value with as many elements, whose shape the result has.
"""


class ProductSides(NamedTuple):
    """What a product computes: `(batch, rows, depth)` by `(batch, depth, columns)`.

    Attributes:
        batch: How many matrices there are of each factor.
        rows: Rows of the left ones, and of the result.
        depth: What is summed over.
        columns: Columns of the right ones, and of the result.
        is_left_turned: Whether the left ones are stored as `(depth, rows)`.
        is_right_turned: Whether the right ones are stored as `(columns, depth)`.
    """

    batch: int
    rows: int
    depth: int
    columns: int
    is_left_turned: bool
    is_right_turned: bool


class PartProduct(Protocol):
    """A product of one device's parts of two factors, within `to_shards`."""

    def __call__(
        self,
        left: Tensor,
        right: Tensor,
        sides: ProductSides,
        shape: Sequence[int],
        whole: str,
        added: "Addend | None" = None,
        /,
    ) -> Tensor | None:
        """Multiply.

        Args:
            left: The part of the left factor.
            right: That of the right one.
            sides: What is computed.
            shape: The shape of the result's part.
            whole: What tells products apart whose whole results differ, but not the
                parts.
            added: What is added to the product.

        Returns:
            The result's part, None for what cannot be multiplied.
        """


class Addend(NamedTuple):
    """What is added to a product.

    Attributes:
        value: A value like the product, whose memory the sum takes; or a number for
            each column.
        is_bias: Whether it is the latter.
    """

    value: Tensor
    is_bias: bool


_MAX_SIDE = (1 << 31) - 1  # of the libraries' integers


@functools.cache
def library_product() -> Product | None:
    """Return the product of a library, None where XLA computes products.

    Chosen at the first call, when the rank's devices are known, and kept.
    """
    is_one = env.device_kind() == "CPU" and xla_compat.num_local_devices() == 1
    return multiply if is_one and _can_multiply() else None


@functools.cache
def library_product_of_parts() -> PartProduct | None:
    """Return the product of a library for ranks of several devices, None for XLA's.

    Decided and kept as that of one device.
    """
    is_one = env.device_kind() != "CPU" or xla_compat.num_local_devices() == 1
    return None if is_one or not _can_multiply() else multiply_parts


def _can_multiply() -> bool:
    """Pass the library to the handlers; return whether there is one."""
    handlers = find_handlers()
    if handlers is None:
        return False
    blas = find_blas()
    if blas is not None:
        handlers.xpp_use_blas(*blas)
    return blas is not None


def multiply(
    left: Tensor, right: Tensor, is_left_turned: bool, is_right_turned: bool
) -> Tensor | None:
    """Multiply matrices that are stored as they are or transposed."""
    sides = _sides(left, right, is_left_turned, is_right_turned)
    if not _is_taken(left, right, sides):
        return None
    shape = (*left.shape[:-2], sides.rows, sides.columns)
    return call_handler("product", [left, right], [shape], _fields(sides))[0]


def add_product(
    total: Tensor,
    left: Tensor,
    right: Tensor,
    is_left_turned: bool,
    is_right_turned: bool,
) -> Tensor | None:
    """Return `total` plus the product of matrices, see `multiply`, in its memory."""
    sides = _sides(left, right, is_left_turned, is_right_turned)
    if not _is_taken(left, right, sides) or total.dtype != torch.float32:
        return None
    given, shapes = [left, right, total], [total.shape]
    (result,) = call_handler(
        "product_sum", given, shapes, _fields(sides), is_in_place=True
    )
    return result


def multiply_biased(
    bias: Tensor,
    left: Tensor,
    right: Tensor,
    is_left_turned: bool,
    is_right_turned: bool,
    added: Tensor | None = None,
) -> Tensor | None:
    """Return the product of two matrices and what is added, see `BiasedProduct`."""
    sides = _sides(left, right, is_left_turned, is_right_turned)
    is_bias = bias.dtype == torch.float32 and bias.shape == (sides.columns,)
    if not is_bias or left.dim() != 2 or not _is_taken(left, right, sides):
        return None
    given, shape = [left, right, bias], torch.Size((sides.rows, sides.columns))
    if added is not None:
        if added.dtype != torch.float32 or added.numel() != shape.numel():
            return None
        given, shape = [*given, added], added.shape
    (result,) = call_handler("product_bias", given, [shape], _fields(sides))
    return result


def multiply_parts(
    left: Tensor,
    right: Tensor,
    sides: ProductSides,
    shape: Sequence[int],
    whole: str,
    added: Addend | None = None,
) -> Tensor | None:
    """Multiply one device's parts of factors, see `PartProduct`."""
    if not _is_taken(left, right, sides):
        return None
    given, fields = [left, right], _fields(sides)
    with calling_on_parts(whole):
        if added is None:
            return call_handler("product", given, [shape], fields)[0]
        if added.value.dtype != torch.float32:
            return None
        given.append(added.value)
        if added.is_bias:
            return call_handler("product_bias", given, [shape], fields)[0]
        return call_handler("product_sum", given, [shape], fields, is_in_place=True)[0]


def _sides(
    left: Tensor, right: Tensor, is_left_turned: bool, is_right_turned: bool
) -> ProductSides:
    return ProductSides(
        batch=math.prod(left.shape[:-2]),
        rows=left.shape[-1 if is_left_turned else -2],
        depth=left.shape[-2 if is_left_turned else -1],
        columns=right.shape[-2 if is_right_turned else -1],
        is_left_turned=is_left_turned,
        is_right_turned=is_right_turned,
    )


def _is_taken(left: Tensor, right: Tensor, sides: ProductSides) -> bool:
    counts = sides[:4]
    is_float = left.dtype == right.dtype == torch.float32
    return is_float and all(0 < side <= _MAX_SIDE for side in counts)


def _fields(sides: ProductSides) -> dict[str, int]:
    return {name: int(value) for name, value in sides._asdict().items()}
