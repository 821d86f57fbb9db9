"""Matrix products of a transformer block in programs and in eager PyTorch, on one core.

    python benchmarks/products.py
    python benchmarks/products.py --size large --json
    XLA_FLAGS=--xla_cpu_use_xnnpack=true python benchmarks/products.py

The products of the MLP of `gpt.py`: forward, gradient of the input, gradient of the
weight. All sides take turns; medians. The time of a program with one product is that
from its dispatch to its end: some 0.2 ms of it are dispatch. Columns, as the JSON names
them:

ours_gflops: Floating-point operations per second in a program as stages have it.
xla_gflops: The same with XLA's products, as under `TORCH_XLA_PP_PRODUCTS=xla`.
eager_gflops: The same in eager PyTorch.
ratio, xla_ratio: Time in each program by time in eager PyTorch.
"""

import argparse
import json
import os
from collections.abc import Callable
from typing import Any

import gpt
import programs
import torch
from pinning import check_pinned, pin
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

ROUNDS = 30


def forward(x: Tensor, weight: Tensor) -> tuple[Tensor]:
    """Return `(N, out)` of `(N, in)` and `(out, in)`."""
    return (x @ weight.t(),)


def input_gradient(grad: Tensor, weight: Tensor) -> tuple[Tensor]:
    """Return `(N, in)` of `(N, out)` and `(out, in)`."""
    return (grad @ weight,)


def weight_gradient(grad: Tensor, x: Tensor) -> tuple[Tensor]:
    """Return `(out, in)` of `(N, out)` and `(N, in)`."""
    return (grad.t() @ x,)


def cases(size: dict[str, int]) -> list[tuple[str, Callable[..., Any], Any, Any]]:
    """Return name, function and the shapes of its arguments."""
    rows, width = gpt.ROWS * size["length"], size["width"]
    found: list[tuple[str, Callable[..., Any], Any, Any]] = []
    for inner, outer in ((width, 4 * width), (4 * width, width)):
        name = f"{rows} rows, {inner} -> {outer}"
        found += [
            (f"forward, {name}", forward, (rows, inner), (outer, inner)),
            (f"gradient of x, {name}", input_gradient, (rows, outer), (outer, inner)),
            (f"gradient of W, {name}", weight_gradient, (rows, outer), (rows, inner)),
        ]
    return found


def program(
    call: Callable[..., Any], arguments: list[Tensor], products: str
) -> Callable[[], None]:
    """Return what runs `call` as a program that has run before, and waits for it."""
    from torch_xla_pp import xla_compat
    from torch_xla_pp.compile import Function, Program, ProgramSpec

    module = make_fx(call)(*arguments)
    names = ("left", "right")
    function = Function(
        name="product", module=module, inputs=names, outputs=("result",)
    )
    compiled = Program(
        ProgramSpec(function=function, rules=programs.rules_of(products))
    )
    device = xla_compat.device()
    values = {n: a.to(device) for n, a in zip(names, arguments, strict=True)}

    def run() -> None:
        compiled(values)
        xla_compat.wait_device()

    run()
    return run


def row_of(
    name: str, call: Callable[..., Any], left: Any, right: Any
) -> dict[str, Any]:
    """Measure one product on all sides."""
    arguments = [torch.randn(left), torch.randn(right)]
    sides: dict[str, Callable[[], Any]] = {
        "ours": program(call, arguments, "best"),
        "xla": program(call, arguments, "xla"),
        "eager": lambda: call(*arguments),
    }
    seconds = programs.medians(sides, ROUNDS)
    depth = left[0] if call is weight_gradient else left[1]
    flops = 2 * call(*arguments)[0].numel() * depth
    row: dict[str, Any] = {"product": name}
    row |= {f"{side}_gflops": flops / s / 1e9 for side, s in seconds.items()}
    row["ratio"] = seconds["ours"] / seconds["eager"]
    row["xla_ratio"] = seconds["xla"] / seconds["eager"]
    return row


def line_of(row: dict[str, Any]) -> str:
    """Return a row as a line of text."""
    return (
        f"{row['product']:38} ours {row['ours_gflops']:5.1f} GFLOP/s"
        f"  XLA {row['xla_gflops']:5.1f}  eager {row['eager_gflops']:5.1f}"
        f"  ratio {row['ratio']:.2f}  XLA's {row['xla_ratio']:.2f}"
    )


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
        print(json.dumps(row) if options.json else line_of(row))
    check_pinned(core)


if __name__ == "__main__":
    main()
