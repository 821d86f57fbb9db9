"""Matrix products of a transformer block in XLA and in eager PyTorch, on one core.

    python benchmarks/products.py
    python benchmarks/products.py --size large --json
    XLA_FLAGS=--xla_cpu_use_xnnpack=true python benchmarks/products.py

The products of the MLP of `gpt.py`: forward, gradient of the input, gradient of the
weight. Both sides take turns; medians. The time in XLA is that of a program with one
product, from its dispatch to its end: some 0.2 ms of it are dispatch. Columns,
as the JSON names them:

xla_gflops, eager_gflops: Floating-point operations per second.
ratio: Time in XLA by time in eager PyTorch.
"""

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable
from typing import Any

import gpt
import torch
from pinning import check_pinned, pin
from torch import Tensor

ROUNDS = 30
WARM_UP = 3


def forward(x: Tensor, weight: Tensor) -> Tensor:
    """Return `(N, out)` of `(N, in)` and `(out, in)`."""
    return x @ weight.t()


def input_gradient(grad: Tensor, weight: Tensor) -> Tensor:
    """Return `(N, in)` of `(N, out)` and `(out, in)`."""
    return grad @ weight


def weight_gradient(grad: Tensor, x: Tensor) -> Tensor:
    """Return `(out, in)` of `(N, out)` and `(N, in)`."""
    return grad.t() @ x


def cases(size: dict[str, int]) -> list[tuple[str, Callable[..., Tensor], Any, Any]]:
    """Return name, function and the shapes of its arguments."""
    rows, width = gpt.ROWS * size["length"], size["width"]
    found: list[tuple[str, Callable[..., Tensor], Any, Any]] = []
    for inner, outer in ((width, 4 * width), (4 * width, width)):
        name = f"{rows} rows, {inner} -> {outer}"
        found += [
            (f"forward, {name}", forward, (rows, inner), (outer, inner)),
            (f"gradient of x, {name}", input_gradient, (rows, outer), (outer, inner)),
            (f"gradient of W, {name}", weight_gradient, (rows, outer), (rows, inner)),
        ]
    return found


def seconds(call: Callable[[], Any]) -> float:
    """Return the time that a call takes."""
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def row_of(
    name: str, function: Callable[..., Tensor], left: Any, right: Any
) -> dict[str, Any]:
    """Measure one product on both sides."""
    import torch_xla

    from torch_xla_pp import xla_compat

    arguments = torch.randn(left), torch.randn(right)
    uploaded = [argument.to(xla_compat.device()) for argument in arguments]

    def in_xla() -> None:
        result = function(*uploaded)
        torch_xla.sync()
        xla_compat.wait_device()
        del result

    times: list[tuple[float, float]] = []
    for _ in range(WARM_UP + ROUNDS):
        times.append((seconds(in_xla), seconds(lambda: function(*arguments))))
    xla_s, eager_s = map(statistics.median, zip(*times[WARM_UP:], strict=True))
    flops = (
        2
        * function(*arguments).numel()
        * (left[0] if function is weight_gradient else left[1])
    )
    return {
        "product": name,
        "xla_gflops": flops / xla_s / 1e9,
        "eager_gflops": flops / eager_s / 1e9,
        "ratio": xla_s / eager_s,
    }


def main() -> None:
    """Measure all products."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", choices=gpt.SIZES, default="small")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    core = min(os.sched_getaffinity(0))
    pin(core)
    import torch_xla_pp as xpp

    xpp.device()
    for case in cases(gpt.SIZES[options.size]):
        row = row_of(*case)
        print(
            json.dumps(row)
            if options.json
            else f"{row['product']:38} XLA {row['xla_gflops']:5.1f} GFLOP/s"
            f"  eager {row['eager_gflops']:5.1f}  ratio {row['ratio']:.2f}"
        )
    check_pinned(core)


if __name__ == "__main__":
    main()
