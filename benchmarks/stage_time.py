"""A stage on one core with PyTorch's products, with XLA's, and in eager PyTorch.

    python benchmarks/stage_time.py
    python benchmarks/stage_time.py --size large --json

Forward and backward of one microbatch by a middle stage of two layers of `gpt.py`, as
programs with PyTorch's products (ours), as programs with XLA's, and in eager PyTorch,
which take turns; medians. Columns, as the JSON names them:

ours_ms, xla_ms, eager_ms: Time of forward and backward.
ratio, xla_ratio: Time of each kind of programs by that of eager PyTorch.
"""

import argparse
import json
import os
from collections.abc import Callable
from typing import Any

import gpt
import programs
from pinning import check_pinned, pin


def measure(size_name: str, core: int) -> dict[str, Any]:
    """Measure all sides in this process."""
    pin(core)
    size = gpt.SIZES[size_name]
    module = gpt.make_part(1, 3, size | {"layers": 6})
    x, grad = programs.activations(size)
    calls: dict[str, Callable[[], Any]] = {}
    for name, products in (("ours", "torch"), ("xla", "xla")):
        calls[name] = programs.Alone(module, x, grad, products).both
        calls[name]()
    calls["eager"] = lambda: module(x).backward(grad)
    seconds = programs.medians(calls)
    check_pinned(core)
    row: dict[str, Any] = {"model": size_name}
    row |= {f"{name}_ms": s * 1e3 for name, s in seconds.items()}
    row["ratio"] = seconds["ours"] / seconds["eager"]
    row["xla_ratio"] = seconds["xla"] / seconds["eager"]
    return row


def line_of(row: dict[str, Any]) -> str:
    """Return a row as a line of text."""
    return (
        f"{row['model']}  ours {row['ours_ms']:6.1f} ms  XLA {row['xla_ms']:6.1f} ms"
        f"  eager {row['eager_ms']:6.1f} ms  ratio {row['ratio']:.2f}"
        f"  XLA's {row['xla_ratio']:.2f}"
    )


def main() -> None:
    """Measure a stage."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", choices=gpt.SIZES, default="small")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    row = measure(options.size, min(os.sched_getaffinity(0)))
    print(json.dumps(row) if options.json else line_of(row))


if __name__ == "__main__":
    main()
