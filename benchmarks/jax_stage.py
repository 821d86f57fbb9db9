"""A stage of `gpt.py`'s blocks in JAX; the child process of `stage_time.py`.

    PYTHON jax_stage.py CORE FOLDER

One program for the forward and one for the backward, which adds to donated sums, as the
programs of a rank. `FOLDER/given.npz` has the input, the gradient of the output, the
number of heads and the weights of each layer as `0.qkv`; the script writes what the
first microbatch gives to `FOLDER/found.npz` and prints a line. Then it answers each
line `count` with the processor seconds of so many microbatches.
"""

import os
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    # XLA sizes its pools of threads by the cores that it may use.
    os.sched_setaffinity(0, {int(sys.argv[1])})
    # Those that `stage_time.py` has were chosen for its own programs.
    os.environ.pop("XLA_FLAGS", None)

import jax
import jax.numpy as jnp
import numpy as np
from jax_block import Weights, block

Layers = list[Weights]


def apply(heads: int, layers: Layers, x: Any) -> Any:
    """Apply all blocks to `(B, L, width)`."""
    for weights in layers:
        x = block(heads, x, weights)
    return x


class Stage:
    """The programs of a stage, with the values that they read."""

    def __init__(self, given: dict[str, Any]) -> None:
        heads = int(given.pop("heads"))
        self.x, self.grad = (jnp.asarray(given.pop(name)) for name in ("x", "grad"))
        count = 1 + max(int(name.partition(".")[0]) for name in given)
        self.layers: Layers = [{} for _ in range(count)]
        for name, value in given.items():
            index, _, key = name.partition(".")
            self.layers[int(index)][key] = jnp.asarray(value)
        self.sums = jax.tree.map(jnp.zeros_like, self.layers)
        self._forward = jax.jit(partial(jax.vjp, partial(apply, heads)))
        self._backward = jax.jit(_backward, donate_argnums=2)

    def both(self) -> tuple[Any, Any]:
        """Run a forward and its backward; return the output and the input's gradient.

        It waits after each, as a measurement of ours does.
        """
        output, pull_back = jax.block_until_ready(self._forward(self.layers, self.x))
        x_grad, self.sums = jax.block_until_ready(
            self._backward(pull_back, self.grad, self.sums)
        )
        return output, x_grad

    def found(self) -> dict[str, Any]:
        """Return what one microbatch gives; the sums are zero before."""
        output, x_grad = self.both()
        sums = {
            f"{i}.{key}": np.asarray(value)
            for i, layer in enumerate(self.sums)
            for key, value in layer.items()
        }
        return {"output": np.asarray(output), "x": np.asarray(x_grad), **sums}


def _backward(pull_back: Any, grad: Any, sums: Layers) -> tuple[Any, Layers]:
    layer_grads, x_grad = pull_back(grad)
    return x_grad, jax.tree.map(jnp.add, sums, layer_grads)


def main() -> None:
    """Answer until the input ends."""
    folder = Path(sys.argv[2])
    stage = Stage(dict(np.load(folder / "given.npz")))
    np.savez(folder / "found.npz", **stage.found())
    print(jax.__version__, flush=True)
    for line in sys.stdin:
        start = time.process_time()
        for _ in range(int(line)):
            stage.both()
        print(time.process_time() - start, flush=True)


if __name__ == "__main__":
    main()
