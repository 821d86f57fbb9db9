"""Count the work of a compiled program in its HLO text."""

import math
import re

# A call that multiplies two matrices, or a batch of such pairs (`cpu/products.py`), and
# may add the result to a sum, or a bias to it.
_OWN = re.compile(
    r'custom_call_target="torch_xla_pp\.product(?:_sum|_bias)?'
    r"\.(?P<batch>\d+)\.(?P<rows>\d+)\.(?P<depth>\d+)\.(?P<columns>\d+)\."
)
# A call of attention or of its gradients (`cpu/heads.py`), which has two products of
# matrices for each head, or five.
_ATTENTION = re.compile(
    r'custom_call_target="torch_xla_pp\.attention(?P<is_grad>_grad)?'
    r"\.(?P<sizes>\d+\.\d+\.\d+\.\d+\.\d+)\."
)
_NUM_PRODUCTS = {False: 2, True: 5}
_RESULT = re.compile(r"%(?P<name>[\w.-]+) = \w+\[(?P<sizes>[\d,]*)\]")
_PRODUCT = re.compile(
    r"= \w+\[(?P<result>[\d,]*)\]\S* dot\(%(?P<left>[\w.-]+),.*"
    r"lhs_contracting_dims=\{(?P<summed>[\d,]*)\}"
)


def product_flops(hlo: str) -> int:
    """Count the floating-point operations of products of matrices, on one device.

    Those that call a library count, too, and those in calls of attention, as if it hid
    no key. A product in the body of a loop counts once; convolutions do not count.

    Args:
        hlo: Text of the program after partitioning.
    """
    shapes = {m["name"]: _sizes(m["sizes"]) for m in _RESULT.finditer(hlo)}
    total = sum(2 * math.prod(map(int, m.groups())) for m in _OWN.finditer(hlo))
    for match in _ATTENTION.finditer(hlo):
        sizes = math.prod(map(int, match["sizes"].split(".")))
        total += 2 * sizes * _NUM_PRODUCTS[bool(match["is_grad"])]
    for match in _PRODUCT.finditer(hlo):
        left = shapes[match["left"]]
        summed = math.prod(left[dim] for dim in _sizes(match["summed"]))
        total += 2 * math.prod(_sizes(match["result"])) * summed
    return total


def _sizes(text: str) -> tuple[int, ...]:
    return tuple(int(size) for size in text.split(",") if size)
