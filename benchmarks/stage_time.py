"""A stage on one core: with a library's products, with XLA's, in eager PyTorch, in JAX.

    python benchmarks/stage_time.py
    python benchmarks/stage_time.py --size large --json
    python benchmarks/stage_time.py --jax /tmp/with_jax/bin/python

Forward and backward of one microbatch by a middle stage of two layers of `gpt.py`, as
programs as a rank has them (ours), as programs with XLA's products, in eager PyTorch,
and as programs of JAX, which run in a process of their own on the same core. All add
gradients to sums. First all must give the same numbers; then they take turns of a few
microbatches each. Counted is processor time, of all threads of the process that works.

JAX is no dependency: `--jax` takes a Python that has it, made for example by

    python -m venv /tmp/with_jax && /tmp/with_jax/bin/pip install jax

Columns, as the JSON names them:

ours_ms, xla_ms, eager_ms, jax_ms: Time of a microbatch; median of the turns.
to_eager, xla_to_eager, jax_to_eager, to_jax: Ratio of times in the same turn; median.
    The first is ours to eager PyTorch, the last ours to JAX.
spread: The same ratios' first and third quartiles.
error: Largest difference of a value from eager PyTorch's, as norms, of all sides.
"""

import argparse
import json
import os
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gpt
import numpy as np
import programs
import torch
from pinning import check_pinned, pin
from spread import medians_of, ratios
from torch import Tensor, nn

ROUNDS = 15
WARM_UP = 2
MICROBATCHES = 4
LARGEST_ERROR = 1e-5
# JAX's name of a weight of a layer → PyTorch's.
NAMES = {
    "qkv": "qkv.weight",
    "qkv_bias": "qkv.bias",
    "out": "out.weight",
    "out_bias": "out.bias",
    "up": "up.weight",
    "up_bias": "up.bias",
    "down": "down.weight",
    "down_bias": "down.bias",
    "scale_1": "norm_1.weight",
    "shift_1": "norm_1.bias",
    "scale_2": "norm_2.weight",
    "shift_2": "norm_2.bias",
}
# Ratio → which side by which.
RATIOS = {
    "to_eager": ("ours", "eager"),
    "xla_to_eager": ("xla", "eager"),
    "jax_to_eager": ("jax", "eager"),
    "to_jax": ("ours", "jax"),
}

Values = dict[str, Tensor]
Turn = Callable[[int], float]
"""Takes a number of microbatches, runs them and returns the processor seconds."""


class JaxSide:
    """The process that runs the stage in JAX.

    Args:
        python: A Python that has JAX.
        core: Where it runs.
        module: The stage, whose weights it gets.
        x: The input.
        grad: The gradient of the output.

    Raises:
        RuntimeError: The process ended.
    """

    def __init__(
        self, python: str, core: int, module: gpt.Part, x: Tensor, grad: Tensor
    ) -> None:
        script = Path(__file__).with_name("jax_stage.py")
        with tempfile.TemporaryDirectory() as folder:
            given = {"x": x, "grad": grad} | to_jax(dict(module.named_parameters()))
            heads = x.shape[-1] // module.get_submodule("blocks.0").head_width
            arrays = {name: value.detach().numpy() for name, value in given.items()}
            np.savez(f"{folder}/given.npz", heads=np.asarray(heads), **arrays)
            self._process = subprocess.Popen(
                [python, str(script), str(core), folder],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            self.version = self._line()
            with np.load(f"{folder}/found.npz") as found:
                results = {n: torch.from_numpy(found[n].copy()) for n in found.files}
        first = {name: results.pop(name) for name in ("output", "x")}
        self.results = first | from_jax(results)

    def turn(self, count: int) -> float:
        """Let it run microbatches."""
        assert self._process.stdin is not None
        print(count, file=self._process.stdin, flush=True)
        return float(self._line())

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()

    def _line(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(
                "--jax: expected a Python that has JAX, got a process that ended with "
                f"{self._process.wait()}. Install JAX there, see above."
            )
        return line.strip()


def to_jax(named: Mapping[str, Tensor]) -> Values:
    """Return weights, or gradients of them, in JAX's names and order of dimensions."""
    count = len({name.split(".")[1] for name in named})
    return {
        f"{index}.{key}": named[f"blocks.{index}.{name}"].detach().t().contiguous()
        for index in range(count)
        for key, name in NAMES.items()
    }


def from_jax(values: Mapping[str, Tensor]) -> Values:
    """Return the same in PyTorch's."""
    found = {}
    for name, value in values.items():
        index, key = name.split(".")
        found[f"blocks.{index}.{NAMES[key]}"] = value.t()
    return found


def results_of_programs(alone: programs.Alone) -> Values:
    """Return what the first microbatch gives: output and gradients."""
    alone.both()
    output, x_grad = alone.outputs[0], alone.input_grads[0]
    assert x_grad is not None
    sums = {name: value.cpu() for name, value in alone.gradients().items()}
    return {"output": output.cpu(), "x": x_grad.cpu(), **sums}


def results_of_eager(module: nn.Module, x: Tensor, grad: Tensor) -> Values:
    """Return the same; gradients are added to from then on."""
    output = module(x)
    output.backward(grad)
    grads = {
        n: p.grad.clone() for n, p in module.named_parameters() if p.grad is not None
    }
    assert x.grad is not None
    return {"output": output.detach(), "x": x.grad.clone(), **grads}


def largest_error(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> float:
    """Return the largest difference of a value by the norm of what is expected.

    Raises:
        RuntimeError: It is too large, or values are missing.
    """
    if found.keys() != expected.keys():
        raise RuntimeError(
            f"results: expected {sorted(expected)}, got {sorted(found)}."
        )
    errors = {
        name: float((found[name] - value).norm() / value.norm())
        for name, value in expected.items()
    }
    worst = max(errors, key=errors.__getitem__)
    if not errors[worst] <= LARGEST_ERROR:
        raise RuntimeError(
            f"{worst}: expected eager PyTorch's values within {LARGEST_ERROR}, got a "
            f"difference of {errors[worst]}."
        )
    return errors[worst]


def turn_of(call: Callable[[], Any]) -> Turn:
    """Return what runs `call` and counts this process's time."""

    def turn(count: int) -> float:
        start = time.process_time()
        for _ in range(count):
            call()
        return time.process_time() - start

    return turn


def in_turns(turns: Mapping[str, Turn], rounds: int) -> dict[str, list[float]]:
    """Let the sides take turns; return each one's seconds of a microbatch."""
    seconds: dict[str, list[float]] = {name: [] for name in turns}
    for attempt in range(WARM_UP + rounds):
        for name, turn in turns.items():
            taken = turn(MICROBATCHES) / MICROBATCHES
            if attempt >= WARM_UP:
                seconds[name].append(taken)
    return seconds


def measure(
    size_name: str, core: int, python: str | None, rounds: int
) -> dict[str, Any]:
    """Measure all sides, ours in this process."""
    pin(core)
    size = gpt.SIZES[size_name]
    module = gpt.make_part(1, 3, size | {"layers": 6})
    x, grad = programs.activations(size)
    expected = results_of_eager(module, x, grad)
    turns: dict[str, Turn] = {}
    row: dict[str, Any] = {"model": size_name}
    errors = []
    for name, products in (("ours", "best"), ("xla", "xla")):
        alone = programs.Alone(module, x, grad, products)
        errors.append(largest_error(results_of_programs(alone), expected))
        turns[name] = turn_of(alone.both)
    turns["eager"] = turn_of(lambda: module(x).backward(grad))
    if python is None:
        seconds = in_turns(turns, rounds)
    else:
        jax = JaxSide(python, core, module, x, grad)
        row["jax"] = jax.version
        errors.append(largest_error(jax.results, expected))
        seconds = in_turns(turns | {"jax": jax.turn}, rounds)
        jax.close()
    check_pinned(core)
    return row | columns(seconds) | {"error": max(errors)}


def columns(seconds: Mapping[str, list[float]]) -> dict[str, Any]:
    """Return times and ratios of sides that took turns."""
    row: dict[str, Any] = {
        f"{name}_ms": statistics.median(taken) * 1e3 for name, taken in seconds.items()
    }
    spread = {}
    for name, (left, right) in RATIOS.items():
        if {left, right} <= seconds.keys():
            found = medians_of({name: ratios(seconds[left], seconds[right])})
            row[name], spread[name] = found[name], found[f"{name}_spread"]
    return row | {"spread": spread}


def line_of(row: dict[str, Any]) -> str:
    """Return a row as lines of text."""
    sides = [n.removesuffix("_ms") for n in row if n.endswith("_ms")]
    times = "  ".join(f"{side} {row[f'{side}_ms']:.1f} ms" for side in sides)
    compared = "  ".join(
        f"{name} {row[name]:.2f} ({first:.2f} to {third:.2f})"
        for name, (first, third) in row["spread"].items()
    )
    return f"{row['model']}  {times}\n{compared}\nlargest error {row['error']:.1e}"


def main() -> None:
    """Measure a stage."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", choices=gpt.SIZES, default="small")
    parser.add_argument("--jax", metavar="PYTHON", help="a Python that has JAX")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    core = min(os.sched_getaffinity(0))
    row = measure(options.size, core, options.jax, options.rounds)
    print(json.dumps(row) if options.json else line_of(row))


if __name__ == "__main__":
    main()
