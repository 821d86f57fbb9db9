"""Sums, softmax and layer norm of rows of matrices, in programs for CPU devices.

XLA cuts a long sum into loops over 32 elements (its `tree_reduction_rewriter`), each of
which is compiled on its own and cannot be joined with what is around; a softmax or a
layer norm becomes nine loops. A loop takes XLA some 10 ms to compile, whatever it does,
so most of the time that it took to compile a stage went into these. Here they are calls
of `csrc/`, which are as accurate: what is added up one after another is short.
"""

import math

from torch import Tensor

from torch_xla_pp.cpu.handlers import bits_of, call_handler


def total(value: Tensor, count: int, *, is_of_columns: bool) -> Tensor:
    """Add up a float32 value along its first or its last dimensions.

    Args:
        value: The value, not empty.
        count: Of how many elements each sum is.
        is_of_columns: Whether they are those of the first dimensions.

    Returns:
        The sums, of one dimension.
    """
    others = value.numel() // count
    rows, columns = (count, others) if is_of_columns else (others, count)
    fields = {"rows": rows, "columns": columns, "is_of_columns": int(is_of_columns)}
    return call_handler("sum", [value], [[others]], fields)[0]


def softmax(value: Tensor, *, is_safe: bool, is_log: bool = False) -> Tensor:
    """Return the softmax of a float32 value along its last dimension.

    Args:
        value: The value, not empty.
        is_safe: Whether a row of minus infinity alone gives zeros; else it gives NaN.
        is_log: Whether to return its logarithm, where such a row gives NaN.
    """
    fields = {**_rows_of(value), "is_safe": int(is_safe), "is_log": int(is_log)}
    return call_handler("softmax", [value], [value.shape], fields)[0]


def softmax_grad(grad: Tensor, output: Tensor, *, is_log: bool = False) -> Tensor:
    """Return the gradient of the input of a softmax, from that of its output.

    Args:
        grad: The gradient of the output. For the logarithm the result takes its memory:
            that is of logits, which may be the largest values of all.
        output: The output.
        is_log: Whether it is the logarithm.
    """
    fields = {**_rows_of(grad), "is_log": int(is_log)}
    (result,) = call_handler(
        "softmax_grad", [output, grad], [grad.shape], fields, is_in_place=is_log
    )
    return result


def norm(
    value: Tensor,
    count: int,
    epsilon: float,
    factor: Tensor | None,
    shift: Tensor | None,
) -> list[Tensor]:
    """Return the layer norm of a float32 value along its last dimensions.

    Args:
        value: The value, not empty.
        count: How many elements these dimensions have.
        epsilon: What is added to variances.
        factor: What each place is multiplied with, of `count` elements.
        shift: What is added to it then.

    Returns:
        The layer norm, and of each row its mean and one by its standard deviation.
    """
    rows = value.numel() // count
    fields = {
        "rows": rows,
        "columns": count,
        "epsilon": bits_of(epsilon),
        "has_factor": int(factor is not None),
        "has_shift": int(shift is not None),
    }
    given = [x for x in (value, factor, shift) if x is not None]
    return call_handler("norm", given, [value.shape, [rows], [rows]], fields)


def norm_grad(
    grad: Tensor,
    value: Tensor,
    mean: Tensor,
    scale: Tensor,
    factor: Tensor | None,
    added: Tensor | None = None,
) -> Tensor:
    """Return the gradient of the input of a layer norm.

    Args:
        grad: That of the layer norm.
        value: The input.
        mean: Of each row its mean.
        scale: One by its standard deviation.
        factor: As in `norm`.
        added: What is added to it, of the same shape.
    """
    fields = {
        **_norm_fields(value, mean),
        "has_factor": int(factor is not None),
        "has_added": int(added is not None),
    }
    given = [x for x in (grad, value, mean, scale, factor, added) if x is not None]
    return call_handler("norm_grad", given, [value.shape], fields)[0]


def norm_factor_grad(
    grad: Tensor, value: Tensor, mean: Tensor, scale: Tensor
) -> Tensor:
    """Return the gradient of the factor of a layer norm, of one dimension."""
    fields = _norm_fields(value, mean)
    given = [grad, value, mean, scale]
    return call_handler("norm_factor_grad", given, [[fields["columns"]]], fields)[0]


def _norm_fields(value: Tensor, mean: Tensor) -> dict[str, int]:
    return {"rows": mean.numel(), "columns": value.numel() // mean.numel()}


def _rows_of(value: Tensor) -> dict[str, int]:
    return {"rows": math.prod(value.shape[:-1]), "columns": value.shape[-1]}
