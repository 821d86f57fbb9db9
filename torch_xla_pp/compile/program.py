"""One function of a stage as one compiled XLA program.

The function is traced on XLA tensors at its first call and never again: afterwards
the program is dispatched by the hash of its graph. torch_xla checks little on that
way, so this file keeps these laws, each of which gave wrong numbers without an
exception when broken:

* Arguments are mapped to program parameters by the handle of their buffers. Mapping
  by tensor id, as torch_xla's dynamo bridge does, loses arguments under SPMD.
* A parameter that is no argument would be a constant frozen at its first value: it is
  refused, unless it is a scalar or the random seed.
* The sharding of an argument must be the one that the program was compiled for.
* The sharding of an output is pinned where the caller relies on it.
"""

import functools
import operator
from collections.abc import Collection, Mapping, Sequence
from functools import reduce

import torch
from torch import Tensor, fx

from torch_xla_pp import xla_compat
from torch_xla_pp.compile import border
from torch_xla_pp.compile.border import Border
from torch_xla_pp.compile.lowering import Constraints, Lowering
from torch_xla_pp.compile.names import (
    MARK,
    SEED,
    TOKEN,
    captured_scalar,
    route_in,
    route_out,
)
from torch_xla_pp.compile.partition import Function
from torch_xla_pp.compile.products import OwnProducts, has_own_products
from torch_xla_pp.compile.running import Running
from torch_xla_pp.errors import PipelineError
from torch_xla_pp.transport import recording

_REPLICATED = "{replicated}"


class Program:
    """Run a function as a compiled program, traced at the first call.

    Args:
        function: What to run.
        pins: Output name → the sharding that the output must have.
        checked: Names of the inputs whose sharding is compared at every call; they
            come from outside of the stage's own programs.
        donated: Names of the inputs whose buffers the program may reuse; they are void
            after a call.
        received: Inputs that the program receives from other ranks.
        sent: Values that the program sends to other ranks.
        parts: Name of an input → names of inputs that it is the sum of.
        wanted: Names to return, of outputs, received values and sums; None for the
            function's outputs.
        constraints: How values lie while it runs, None to leave that to XLA.
        is_marked: Whether it notes when it begins and ends. A call that passes a
            `MARK` to a program that is not runs its marked twin, which is compiled
            when it is first needed.

    Attributes:
        inputs: Names of the values that a call needs.
        outputs: Names of the values that a call returns.
        hlo: The text of the compiled program, see `xla_compat.CompiledGraph`.
        extra_bytes: What the last run takes on a device beside the arguments, zero if
            that is not known.
    """

    def __init__(
        self,
        function: Function,
        pins: Mapping[str, xla_compat.OpSharding],
        checked: Sequence[str] = (),
        *,
        donated: Collection[str] = (),
        received: Sequence[Border] = (),
        sent: Sequence[Border] = (),
        parts: Mapping[str, Sequence[str]] | None = None,
        wanted: Collection[str] | None = None,
        constraints: Constraints | None = None,
        is_marked: bool = False,
    ) -> None:
        self._make_marked = functools.partial(
            Program,
            function,
            pins,
            checked,
            donated=donated,
            received=received,
            sent=sent,
            parts=parts,
            wanted=wanted,
            constraints=constraints,
            is_marked=True,
        )
        self._is_marked = is_marked
        self.function = function
        self._constraints = constraints
        self._received = received
        self._sent = sent
        used = {*function.inputs, *border.names_of(sent), *(wanted or ())}
        self._parts = {n: p for n, p in (parts or {}).items() if n in used}
        arriving = [*border.names_of(received), *self._parts]
        self.inputs = self._needed(arriving)
        made = (*function.outputs, *arriving)
        kept = function.outputs if wanted is None else made
        outputs = [n for n in dict.fromkeys(kept) if wanted is None or n in wanted]
        has_token = bool(received or sent or is_marked)
        self.outputs = (*outputs, TOKEN) if has_token else tuple(outputs)
        pinned = (*function.outputs, *self._parts)
        self._pins = {n: pins[n] for n in pinned if n in pins}
        self._checked = [i for i, n in enumerate(self.inputs) if n in checked]
        self._donated = [i for i, n in enumerate(self.inputs) if n in donated]
        self._expected: list[str] = []
        self._hash: xla_compat.GraphHash | None = None
        self.hlo: str | None = None
        self.extra_bytes = 0
        # Which input each parameter of the program is, and those that are none.
        self._names: list[str] = []
        self._captured: dict[str, Tensor] = {}
        self._has_seed = False
        # What computes it, while it is traced.
        self._running: Running | None = None

    @functools.cached_property
    def _marked(self) -> "Program":
        return self._make_marked()

    @property
    def is_compiled(self) -> bool:
        """Return whether the program has run before."""
        return self._hash is not None

    def _needed(self, arriving: Collection[str]) -> tuple[str, ...]:
        """Return the names of what a call must pass in."""
        made = {*self.function.outputs, *arriving}
        sent = [n for n in border.names_of(self._sent) if n not in made]
        parts = [part for parts in self._parts.values() for part in parts]
        read = (*self.function.inputs, *sent, *parts)
        routes = [route_in(b.stage) for b in self._received]
        routes += [route_out(b.stage) for b in self._sent]
        needed = [n for n in read if n not in arriving]
        marks = [MARK] if self._is_marked else []
        return tuple(dict.fromkeys([*needed, *routes, *marks]))

    def __call__(
        self, values: Mapping[str, Tensor], seed: int = 0
    ) -> dict[str, Tensor]:
        """Enqueue the program.

        Args:
            values: Value of every input, by name; must be on the device.
            seed: Seed of the program's random numbers.

        Returns:
            Value of every output, by name.

        Raises:
            PipelineError: The sharding of a value differs from the one that the
                program was compiled for.
        """
        if MARK in values and not self._is_marked:
            marked = self._marked(values, seed)
            self.extra_bytes = self._marked.extra_bytes
            return marked
        if self._hash is None:
            self._hash = self._trace([values[name] for name in self.inputs])
        elif self._checked:
            self._check_shardings(values)
        if self._captured:
            values = {**values, **self._captured}
        if self._has_seed:
            values = {**values, SEED: xla_compat.seed_tensor(seed)}
        parameters = list(map(values.__getitem__, self._names))
        outputs = xla_compat.run_graph(self._hash, parameters)
        return dict(zip(self.outputs, outputs, strict=True))

    def _trace(self, args: list[Tensor]) -> xla_compat.GraphHash:
        """Trace and compile the function for arguments such as `args`.

        Buffers have handles only once the programs that make them have run.
        """
        xla_compat.wait_device()
        args = _distinct(args)
        self._expected = _shardings([args[i] for i in self._checked])
        with torch.no_grad(), xla_compat.fixed_seed(0):
            outputs = self._compute(dict(zip(self.inputs, args, strict=True)))
        self._map_parameters(args, outputs)
        with xla_compat.donating([args[i] for i in self._donated]):
            graph_hash = self._compile(outputs)
        self._running = None
        return graph_hash

    def _compile(self, outputs: list[Tensor]) -> xla_compat.GraphHash:
        try:
            graph = xla_compat.compile_graph(outputs)
        except Exception as error:
            running, what = self._running, None
            if running is not None:
                what = running.first(lambda value: not xla_compat.is_lowered(value))
            reason = str(error).partition("\nError")[0].partition("\nFrame")[0]
            raise PipelineError(
                f"{self.function.name} program: XLA cannot compile "
                f"{what or 'its operations'}: {reason}. Write it with other operations."
            ) from error
        self.hlo, self.extra_bytes = graph.hlo, graph.extra_bytes or 0
        return graph.hash

    def _compute(self, values: dict[str, Tensor]) -> list[Tensor]:
        """Receive, run the function and send; all of it pending."""
        tokens = [recording.begin_op(values[MARK])] if self._is_marked else []
        for received in self._received:
            values |= border.receive(received, values)
            tokens.append(values[TOKEN])
        for name, parts in self._parts.items():
            values[name] = reduce(operator.add, [values[part] for part in parts])
        results = _computed(self._run(values))
        values |= zip(self.function.outputs, results, strict=True)
        for name, sharding in self._pins.items():
            xla_compat.annotate(values[name], sharding)
        tokens += [border.send(sent, values) for sent in self._sent]
        if tokens:
            values[TOKEN] = reduce(operator.add, tokens)
        if self._is_marked:
            values[TOKEN] = self._end(values)
        return [values[name] for name in self.outputs]

    def _end(self, values: Mapping[str, Tensor]) -> Tensor:
        """Note the end; return a token.

        It comes after all that is sent and every output whose sharding is known. How
        XLA lays others out is not known here, but they are by-products of those.
        """
        done = [(values[n], self._pins[n]) for n in self.outputs if n in self._pins]
        done.append((values[TOKEN], xla_compat.replicated_sharding()))
        return recording.end_op(values[MARK], done)

    def _run(self, values: Mapping[str, Tensor]) -> Sequence[Tensor]:
        """Run the function, with its inputs as they lie where they are used."""
        inputs = {name: values[name] for name in self.function.inputs}
        module = self.function.module
        name = self.function.name
        if not isinstance(module, fx.GraphModule):
            return module(*inputs.values())  # type: ignore[no-any-return]
        if has_own_products():
            # One device has all of every value, so constraints say nothing.
            self._running = OwnProducts(module, name)
            return self._running.run(*inputs.values())  # type: ignore[no-any-return]
        if self._constraints is None:
            self._running = Running(module, name)
            return self._running.run(*inputs.values())  # type: ignore[no-any-return]
        for name, sharding in self._constraints.used.items():
            if name in inputs:
                inputs[name] = xla_compat.constrain(inputs[name], sharding)
        self._running = Lowering(module, self.function.name, self._constraints)
        return self._running.run(*inputs.values())  # type: ignore[no-any-return]

    def _map_parameters(self, args: list[Tensor], outputs: list[Tensor]) -> None:
        """Find out which argument each parameter of the program is."""
        position = {h: i for i, h in enumerate(xla_compat.data_handles(args))}
        ids, values = xla_compat.graph_parameters(outputs)
        seed_id = xla_compat.seed_id()
        captured = []
        for slot, (data_id, value) in enumerate(zip(ids, values, strict=True)):
            index = position.get(xla_compat.data_handles([value])[0])
            if index is not None:
                self._names.append(self.inputs[index])
                continue
            if data_id == seed_id:
                self._names.append(SEED)
                self._has_seed = True
                continue
            self._names.append(captured_scalar(slot))
            self._captured[self._names[slot]] = value
            if value.numel() != 1:
                captured.append(f"{value.dtype} {list(value.shape)}")
        if captured:
            what = self._capturing(position)
            raise PipelineError(
                f"{self.function.name} program: expected every tensor that it reads "
                f"to be an argument, got captured constants: {', '.join(captured)}. "
                f"They are of {what or 'an operation in the stage'}; write it with "
                "operations that XLA supports, or keep the tensor in a buffer."
            )

    def _capturing(self, known: Mapping[int, int]) -> str | None:
        """Return the first operation that reads more than arguments and scalars."""

        def is_capturing(value: Tensor) -> bool:
            _, values = xla_compat.graph_parameters([value])
            large = [x for x in values if x.numel() != 1]
            return not known.keys() >= {*xla_compat.data_handles(large)}

        return None if self._running is None else self._running.first(is_capturing)

    def _check_shardings(self, values: Mapping[str, Tensor]) -> None:
        found = _shardings([values[self.inputs[i]] for i in self._checked])
        if found == self._expected:
            return
        wrong = [
            f"{self.inputs[i]}: expected {expected}, got {got}"
            for i, expected, got in zip(
                self._checked, self._expected, found, strict=True
            )
            if expected != got
        ]
        raise PipelineError(
            f"{self.function.name} program: values with another sharding than it was "
            f"compiled for. {'; '.join(wrong)}. Mark the values as in the first step."
        )


def _shardings(tensors: Sequence[Tensor]) -> list[str]:
    """Return sharding texts, no annotation counted as replicated."""
    return [text or _REPLICATED for text in xla_compat.sharding_texts(tensors)]


def _computed(results: Sequence[Tensor]) -> list[Tensor]:
    """Return results as what a program computes; some may be its operands as they are.

    A program that computes nothing is none for torch_xla.
    """
    pending = xla_compat.are_pending(results)
    return [
        value
        if is_pending
        else xla_compat.constrain(value, xla_compat.sharding_of(value))
        for value, is_pending in zip(results, pending, strict=True)
    ]


def _distinct(args: list[Tensor]) -> list[Tensor]:
    """Copy arguments that share a buffer with an earlier one.

    The trace tells arguments apart by their buffers; two arguments that happen to be
    the same value at the first call need not be so later.
    """
    seen: set[int] = set()
    copies = []
    for i, handle in enumerate(xla_compat.data_handles(args)):
        if handle in seen:
            args = [*args[:i], args[i].detach().clone(), *args[i + 1 :]]
            copies.append(args[i])
        seen.add(handle)
    xla_compat.materialize(copies)
    xla_compat.wait_device()
    return args
