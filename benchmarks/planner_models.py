"""Graphs of work for the planner's benchmarks, made from formulas alone.

No model is traced. FLOPs count two for a multiply-add; a backward for inputs and one
for weights cost as much as a forward each. Values are float32, or bfloat16 in GPT.

Sources of the sizes: MMT, DLRM and CANDLE-Uno are those of Jeon et al., "GraphPipe",
ASPLOS 2025, section 7; where it does not state a number (layers after a join), ours is
stated below.
"""

import random
from collections.abc import Sequence

from torch_xla_pp.work import Amount, Cost, Work, WorkGraph, WorkParameter, WorkValue


class WorkBuilder:
    """A graph of works that grows in program order.

    Args:
        dtype_bytes: Bytes of a number.
    """

    def __init__(self, dtype_bytes: int = 4) -> None:
        self._bytes = dtype_bytes
        self._works: list[Work] = []
        self._values: list[tuple[str, float, str | None, list[str]]] = []

    def given(self, name: str, width: int) -> str:
        """Add an input of the model with so many numbers a row."""
        self._values.append((name, float(width * self._bytes), None, []))
        return name

    def add(
        self,
        name: str,
        inputs: Sequence[str],
        width: int,
        flops: float,
        shapes: Sequence[tuple[int, ...]] = (),
        saved: float = 0.0,
        module: str = "",
    ) -> str:
        """Add a work, and return the name of its value.

        Args:
            name: Its name.
            inputs: Values that it uses.
            width: Numbers of its value a row.
            flops: FLOPs of its forward a row.
            shapes: Shapes of its parameters.
            saved: Numbers that it keeps for its backward a row, without values.
            module: Path of its module.
        """
        size = self._bytes
        parameters = tuple(
            WorkParameter(
                name=f"{name}.{number}",
                shape=shape,
                dtype="bfloat16" if size == 2 else "float32",
                bytes=_product(shape) * size,
            )
            for number, shape in enumerate(shapes)
        )
        moved = sum(v[1] for v in self._values if v[0] in inputs) + width * size
        weights = float(sum(parameter.bytes for parameter in parameters))
        cost = Cost(
            flops_per_row=flops, bytes_per_row=moved + 2 * saved * size, bytes=weights
        )
        passed = Amount(bytes_per_row=width * size if parameters else 0.0)
        self._works.append(
            Work(
                name=name,
                ops=(f"{name}_op",),
                module=module or name,
                digest=repr((flops, width, tuple(shapes), saved)),
                forward=cost,
                backward_input=cost,
                backward_weight=cost if parameters else Cost(),
                saved={"none": Amount(bytes_per_row=saved * size), "full": Amount()},
                passed=dict.fromkeys(("none", "full"), passed),
                made=dict.fromkeys(("none", "full"), passed),
                parameters=parameters,
            )
        )
        for value in self._values:
            if value[0] in inputs:
                value[3].append(name)
        self._values.append((f"{name}_out", float(width * size), name, []))
        return f"{name}_out"

    def graph(self, source: str) -> WorkGraph:
        """Return all works; the last value is the model's output."""
        values = tuple(
            WorkValue(
                name=name,
                bytes_per_row=size,
                bytes=0,
                has_gradient=producer is not None,
                producer=producer,
                users=tuple(users),
                kept_by=tuple(users),
                passed_by=tuple(users),
            )
            for name, size, producer, users in self._values
        )
        return WorkGraph(
            works=tuple(self._works),
            values=values,
            rows=1,
            outputs=(values[-1].name,),
            source=source,
        )


def gpt(
    layers: int, width: int = 1024, length: int = 1024, vocab: int = 50_304
) -> WorkGraph:
    """Return a GPT of two works a block, bfloat16."""
    build = WorkBuilder(2)
    number = length * width
    at = build.given("tokens", length)
    at = build.add("embed", [at], number, 0.0, [(vocab, width), (length, width)])
    for layer in range(layers):
        at = _attention(build, f"layers.{layer}", at, width, length)
        at = _mlp(build, f"layers.{layer}", at, width, length, 4)
    flops = 2.0 * number * vocab
    build.add("head", [at], length * vocab, flops, [(vocab, width)])
    return build.graph(f"gpt, {layers} layers of {width}")


def uneven_gpt() -> WorkGraph:
    """Return 10 blocks whose MLPs differ, and a vocabulary of 8,192."""
    build = WorkBuilder(4)
    width, length, vocab = 256, 128, 8192
    number = length * width
    at = build.given("tokens", length)
    at = build.add("embed", [at], number, 0.0, [(vocab, width)])
    for layer, factor in enumerate((1, 1, 2, 2, 4, 4, 8, 2, 1, 1)):
        at = _attention(build, f"layers.{layer}", at, width, length)
        at = _mlp(build, f"layers.{layer}", at, width, length, factor)
    build.add("head", [at], length * vocab, 2.0 * number * vocab, [(vocab, width)])
    return build.graph("uneven gpt")


def mmt(branches: int) -> WorkGraph:
    """Return branches of 8 transformer layers each, an input each, joined."""
    build = WorkBuilder(4)
    width, length = 1024, 256
    ends = []
    for branch in range(branches):
        at = build.given(f"input{branch}", width * length)
        for layer in range(8):
            name = f"branches.{branch}.{layer}"
            at = _attention(build, name, at, width, length)
            at = _mlp(build, name, at, width, length, 4)
        ends.append(at)
    total = branches * width
    at = build.add("concat", ends, total * length, 0.0)
    flops = 2.0 * length * total * width
    build.add("head", [at], width * length, flops, [(width, total)])
    return build.graph(f"mmt, {branches} branches")


def case_study() -> WorkGraph:
    """Return two branches of four blocks, joined by nothing but a concatenation."""
    build = WorkBuilder(4)
    width, length = 1024, 256
    ends = []
    for branch in range(2):
        at = build.given(f"input{branch}", width * length)
        for layer in range(4):
            name = f"branches.{branch}.{layer}"
            at = _attention(build, name, at, width, length)
            at = _mlp(build, name, at, width, length, 4)
        ends.append(at)
    build.add("concat", ends, 2 * width * length, 0.0)
    return build.graph("case study")


def three_branches() -> WorkGraph:
    """Return three equal works beside each other, and one that joins them."""
    build = WorkBuilder(4)
    ends = [
        _linear(build, f"branch{n}", build.given(f"input{n}", 4096), 4096)
        for n in range(3)
    ]
    build.add("join", ends, 4096, 2.0 * 4096 * 4096, [(4096, 4096)])
    return build.graph("three branches")


def sequential(layers: int = 32) -> WorkGraph:
    """Return transformer layers of MMT's size, one after the other."""
    build = WorkBuilder(4)
    width, length = 1024, 256
    at = build.given("input", width * length)
    for layer in range(layers):
        at = _attention(build, f"layers.{layer}", at, width, length)
        at = _mlp(build, f"layers.{layer}", at, width, length, 4)
    return build.graph(f"sequential, {layers} layers")


def dlrm() -> WorkGraph:
    """Return 7 dense branches, 7 of embeddings, and 4 layers after the join."""
    build = WorkBuilder(4)
    ends = [_linears(build, f"dense{branch}", 4) for branch in range(7)]
    for branch in range(7):
        at = build.given(f"bag{branch}", 100)
        ends.append(build.add(f"embed{branch}", [at], 6400, 0.0, [(10**6, 64)]))
    at = build.add("concat", ends, 7 * 4096 + 7 * 6400, 0.0)
    _tail(build, at, 7 * 4096 + 7 * 6400, 4)
    return build.graph("dlrm")


def candle(branches: int = 7) -> WorkGraph:
    """Return branches of 4 dense layers each, and 3 layers after the join."""
    build = WorkBuilder(4)
    ends = [_linears(build, f"branch{branch}", 4) for branch in range(branches)]
    at = build.add("concat", ends, branches * 4096, 0.0)
    _tail(build, at, branches * 4096, 3)
    return build.graph(f"candle-uno, {branches} branches")


def random_graph(draw: random.Random, num_works: int) -> WorkGraph:
    """Return works of 1 to 20 ms on a CPU device that use one or two others."""
    build = WorkBuilder(4)
    ends: list[str] = []
    for number in range(num_works):
        inputs = draw.sample(ends, min(len(ends), draw.choice([0, 1, 1, 1, 2, 2])))
        ends.append(
            build.add(
                f"w{number}",
                inputs,
                draw.choice([1, 1000, 100_000]),
                draw.uniform(1, 20) * 1e-3 * 67e9 / 3,
                [(draw.randint(1, 4000), 1000)],
                saved=draw.choice([0.0, 1e5, 1e6, 4e6]),
            )
        )
    return build.graph(f"random, {num_works} works")


def _attention(build: WorkBuilder, name: str, at: str, width: int, length: int) -> str:
    """Add attention with its norm and sum; probabilities are not kept."""
    flops = length * (8.0 * width * width + 4.0 * length * width)
    shapes = [(3 * width, width), (width, width)]
    kept = 5.0 * length * width
    module = f"{name}.attention"
    return build.add(module, [at], length * width, flops, shapes, kept, module)


def _mlp(
    build: WorkBuilder, name: str, at: str, width: int, length: int, factor: int
) -> str:
    flops = 4.0 * length * width * width * factor
    shapes = [(factor * width, width), (width, factor * width)]
    kept = (1.0 + 2 * factor) * length * width
    return build.add(
        f"{name}.mlp", [at], length * width, flops, shapes, kept, f"{name}.mlp"
    )


def _linears(build: WorkBuilder, name: str, count: int) -> str:
    at = build.given(f"{name}_input", 4096)
    for layer in range(count):
        at = _linear(build, f"{name}.{layer}", at, 4096)
    return at


def _tail(build: WorkBuilder, at: str, width: int, count: int) -> None:
    for layer in range(count):
        at = _linear(build, f"tail.{layer}", at, width)
        width = 4096


def _linear(build: WorkBuilder, name: str, at: str, width: int) -> str:
    return build.add(name, [at], 4096, 2.0 * width * 4096, [(4096, width)])


def _product(shape: Sequence[int]) -> int:
    found = 1
    for size in shape:
        found *= size
    return found


def joined_branches() -> WorkGraph:
    """Two equal branches of two works, and a small work that joins them."""
    build = WorkBuilder(4)
    ends = []
    for branch in range(2):
        at = build.given(f"x{branch}", 1)
        for number in range(2):
            name = f"b{branch}.{number}"
            at = build.add(name, [at], 1, 5e-3 * 67e9, [(1000, 10)])
        ends.append(at)
    build.add("join", ends, 1, 1e-3 * 67e9, [(1000, 10)])
    return build.graph("two branches")
