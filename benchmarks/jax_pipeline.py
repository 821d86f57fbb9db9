"""The pipeline of `spmd_pipeline.py` in JAX; prints the seconds of its steps as JSON.

    PYTHON jax_pipeline.py SIZE 8 2      size, microbatches, repeats

The size is as in `gpt.py`, as JSON, with the rows of a microbatch.
Each of two CPU devices has the weights of its stage; `ppermute` hands activations on.
"""

import json
import os
import sys
import time
from functools import partial
from typing import Any

NUM_STAGES = 2
os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={NUM_STAGES}"

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
from jax import lax  # noqa: E402
from jax.sharding import NamedSharding, PartitionSpec  # noqa: E402
from jax_block import Weights, block  # noqa: E402

STEPS = 5
WARM_UP = 3
RATE = 0.01


def run_stage(heads: int, repeats: int, weights: Weights, inputs: Any) -> Any:
    """Pass all microbatches through the pipeline, as one device sees it.

    Args:
        heads: Number of heads.
        repeats: How often a microbatch passes all stages.
        weights: Of this stage, `(1, repeats, layers, …)`.
        inputs: The batch, `(M, B, L, width)`.
    """
    stage = lax.axis_index("stage")
    count = inputs.shape[0]
    rounds = count * repeats
    ring = [(i, (i + 1) % NUM_STAGES) for i in range(NUM_STAGES)]

    def layer(x: Any, weights: Weights) -> tuple[Any, None]:
        return block(heads, x, weights), None

    def tick(carry: Any, now: Any) -> tuple[Any, Any]:
        state, waiting = carry
        index = now % count
        entry = jnp.where(now < count, inputs[index], waiting[index])
        state = jnp.where(stage == 0, entry, state)
        repeat = jnp.clip((now - stage) // count, 0, repeats - 1)
        own = jax.tree.map(lambda w: w[0, repeat], weights)
        output, _ = lax.scan(layer, state, own)
        state = lax.ppermute(output, "stage", ring)
        # What comes around again is microbatch `now - (stages - 1)`.
        place = (now - NUM_STAGES + 1) % count
        return (state, waiting.at[place].set(state)), output

    start = inputs[0], jnp.zeros_like(inputs)
    times = jnp.arange(rounds + NUM_STAGES - 1)
    varying = lax.pcast(start, ("stage",), to="varying")
    _, outputs = lax.scan(tick, varying, times)
    outputs = jnp.where(stage == NUM_STAGES - 1, outputs[-count:], 0)
    return lax.psum(outputs, "stage")


def make_weights(key: Any, width: int, shape: tuple[int, ...]) -> Weights:
    """Return the weights of all layers, `(stages, repeats, layers, …)`."""
    sizes = {
        "qkv": (width, 3 * width),
        "out": (width, width),
        "up": (width, 4 * width),
        "down": (4 * width, width),
    }
    keys = dict(zip(sizes, jax.random.split(key, len(sizes)), strict=True))
    weights = {
        name: jax.random.normal(keys[name], (*shape, *size)) / size[0] ** 0.5
        for name, size in sizes.items()
    }
    weights |= {
        f"{name}_bias": jnp.zeros((*shape, size[1])) for name, size in sizes.items()
    }
    for index in (1, 2):
        weights[f"scale_{index}"] = jnp.ones((*shape, width))
        weights[f"shift_{index}"] = jnp.zeros((*shape, width))
    return weights


def time_steps(size: dict[str, int], count: int, repeats: int) -> list[float]:
    """Train and return the seconds of each step after the first ones."""
    mesh = jax.make_mesh((NUM_STAGES,), ("stage",))
    split, whole = PartitionSpec("stage"), PartitionSpec()
    pipeline = jax.shard_map(
        partial(run_stage, size["heads"], repeats),
        mesh=mesh,
        in_specs=(split, whole),
        out_specs=whole,
    )

    def loss(weights: Weights, inputs: Any, targets: Any) -> Any:
        return ((pipeline(weights, inputs) - targets) ** 2).mean()

    @partial(jax.jit, donate_argnums=0)
    def step(weights: Weights, inputs: Any, targets: Any) -> Weights:
        grads = jax.grad(loss)(weights, inputs, targets)
        return jax.tree.map(lambda w, g: w - RATE * g, weights, grads)

    shape = (NUM_STAGES, repeats, size["layers"] // NUM_STAGES // repeats)
    keys = jax.random.split(jax.random.key(0), 3)
    weights = make_weights(keys[0], size["width"], shape)
    weights = jax.device_put(weights, NamedSharding(mesh, split))
    rows = (count, size["rows"], size["length"], size["width"])
    inputs, targets = (jax.random.normal(key, rows) for key in keys[1:])
    seconds = []
    for _ in range(WARM_UP + STEPS):
        start = time.perf_counter()
        weights = jax.block_until_ready(step(weights, inputs, targets))
        seconds.append(time.perf_counter() - start)
    return seconds[WARM_UP:]


if __name__ == "__main__":
    given, microbatches, repeats = sys.argv[1:]
    print(json.dumps(time_steps(json.loads(given), int(microbatches), int(repeats))))
