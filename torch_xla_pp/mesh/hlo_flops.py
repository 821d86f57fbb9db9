"""Count the work of a compiled program in its HLO text."""

import math
import re

_RESULT = re.compile(r"%(?P<name>[\w.-]+) = \w+\[(?P<sizes>[\d,]*)\]")
_PRODUCT = re.compile(
    r"= \w+\[(?P<result>[\d,]*)\]\S* dot\(%(?P<left>[\w.-]+),.*"
    r"lhs_contracting_dims=\{(?P<summed>[\d,]*)\}"
)


def product_flops(hlo: str) -> int:
    """Count the floating-point operations of products of matrices, on one device.

    A product in the body of a loop counts once; convolutions do not count.

    Args:
        hlo: Text of the program after partitioning.
    """
    shapes = {m["name"]: _sizes(m["sizes"]) for m in _RESULT.finditer(hlo)}
    total = 0
    for match in _PRODUCT.finditer(hlo):
        left = shapes[match["left"]]
        summed = math.prod(left[dim] for dim in _sizes(match["summed"]))
        total += 2 * math.prod(_sizes(match["result"])) * summed
    return total


def _sizes(text: str) -> tuple[int, ...]:
    return tuple(int(size) for size in text.split(",") if size)
