"""One function of a stage as one compiled XLA program.

The function is traced on XLA tensors at its first call and never again: afterwards
the program is dispatched by the hash of its graph. torch_xla checks little on that
way, so this file keeps these laws, each of which gave wrong numbers without an
exception when broken:

* Arguments are mapped to program parameters by the handle of their buffers. Mapping
  by tensor id, as torch_xla's dynamo bridge does, loses arguments under SPMD.
* A parameter that is not an argument would be a constant frozen at its first value: it
  is refused, unless it is a scalar or the random seed.
* The sharding of an argument must be the one that the program was compiled for.
* The sharding of an output is pinned where the caller relies on it.
"""

import functools
import operator
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import reduce

import torch
from torch import Tensor, fx

from torch_xla_pp import xla_compat
from torch_xla_pp.compile import border
from torch_xla_pp.compile.lowering import Lowering
from torch_xla_pp.compile.names import MARK, SEED, TOKEN, captured_scalar
from torch_xla_pp.compile.program_spec import ProgramSpec
from torch_xla_pp.errors import PipelineError
from torch_xla_pp.native import notes

_REPLICATED = "{replicated}"


class Constants:
    """Captured tensors by role, uploaded again after they were written to.

    A tensor that was captured is an operand of the programs, so that what is written
    to it in place between two calls counts, as in eager mode.
    """

    def __init__(self, sources: Mapping[str, Tensor]) -> None:
        self._sources = dict(sources)
        self._versions: dict[str, int] = {}
        self._values: dict[str, Tensor] = {}

    def values(self) -> dict[str, Tensor]:
        """Return role → value on the device."""
        for role, source in self._sources.items():
            if self._versions.get(role) != source._version:
                self._versions[role] = source._version
                self._values[role] = xla_compat.replicate(source.detach().cpu())
        return self._values


class Program:
    """A compiled program, traced at its first call.

    A call that passes a `MARK` to a program that is not marked runs its marked twin,
    which is compiled when it is first needed.

    Attributes:
        spec: What the program does.
        inputs: Names of the values that a call needs.
        outputs: Names of the values that a call returns.
        hlo: The text of the compiled program, see `xla_compat.CompiledGraph`.
        extra_bytes: What the last run takes on a device beside the arguments, zero if
            that is not known.
    """

    def __init__(self, spec: ProgramSpec) -> None:
        self.spec = spec
        self.inputs = spec.inputs
        self.outputs = spec.outputs
        pinned = (*spec.function.outputs, *spec.added)
        self._pins = {n: spec.pins[n] for n in pinned if n in spec.pins}
        self._checked = [i for i, n in enumerate(self.inputs) if n in spec.checked]
        self._donated = [i for i, n in enumerate(self.inputs) if n in spec.donated]
        self._title = f"{spec.function.name} program"
        self._expected: list[str] = []
        self._hash: xla_compat.GraphHash | None = None
        self.hlo: str | None = None
        self.extra_bytes = 0
        # Which input each parameter of the program is, and those that are not inputs.
        self._names: list[str] = []
        self._captured: dict[str, Tensor] = {}
        self._has_seed = False
        # What computes it, while it is traced.
        self._lowering: Lowering | None = None

    @functools.cached_property
    def _marked(self) -> "Program":
        return Program(replace(self.spec, is_marked=True))

    @property
    def is_compiled(self) -> bool:
        """Return whether the program has run before."""
        return self._hash is not None

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
        if MARK in values and not self.spec.is_marked:
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
        self._lowering = None
        return graph_hash

    def _compile(self, outputs: list[Tensor]) -> xla_compat.GraphHash:
        try:
            graph = xla_compat.compile_graph(outputs)
        except Exception as error:
            lowering, what = self._lowering, None
            if lowering is not None:
                what = lowering.first(lambda value: not xla_compat.is_lowered(value))
            reason = str(error).partition("\nError")[0].partition("\nFrame")[0]
            raise PipelineError(
                f"{self._title}: XLA cannot compile "
                f"{what or 'its operations'}: {reason}. Write it with other operations."
            ) from error
        self.hlo, self.extra_bytes = graph.hlo, graph.extra_bytes or 0
        return graph.hash

    def _compute(self, values: dict[str, Tensor]) -> list[Tensor]:
        """Receive, run the function and send; all of it pending."""
        tokens = [notes.begin_op(values[MARK])] if self.spec.is_marked else []
        for received in self.spec.received:
            values |= border.receive(received, values)
            tokens.append(values[TOKEN])
        for name, parts in self.spec.added.items():
            values[name] = reduce(operator.add, [values[part] for part in parts])
        results = _computed(self._run(values))
        values |= zip(self.spec.function.outputs, results, strict=True)
        for name, sharding in self._pins.items():
            xla_compat.annotate(values[name], sharding)
        tokens += [border.send(sent, values) for sent in self.spec.sent]
        if tokens:
            values[TOKEN] = reduce(operator.add, tokens)
        if self.spec.is_marked:
            values[TOKEN] = self._end(values)
        return [values[name] for name in self.outputs]

    def _end(self, values: Mapping[str, Tensor]) -> Tensor:
        """Note the end; return a token.

        It comes after all that is sent and every output whose sharding is known. The
        shardings of others are XLA's choice, but they are computed on the way to those.
        """
        done = [(values[n], self._pins[n]) for n in self.outputs if n in self._pins]
        done.append((values[TOKEN], xla_compat.replicated_sharding()))
        return notes.end_op(values[MARK], done)

    def _run(self, values: Mapping[str, Tensor]) -> Sequence[Tensor]:
        """Run the function, with its inputs sharded as it uses them."""
        function = self.spec.function
        inputs = {name: values[name] for name in function.inputs}
        module, name = function.module, function.name
        if not isinstance(module, fx.GraphModule):
            return module(*inputs.values())  # type: ignore[no-any-return]
        for used, sharding in self.spec.used.items():
            if used in inputs:
                inputs[used] = xla_compat.constrain(inputs[used], sharding)
        self._lowering = Lowering(module, name, self.spec.rules)
        return self._lowering.run(*inputs.values())  # type: ignore[no-any-return]

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
                f"{self._title}: expected every tensor that it reads "
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

        return None if self._lowering is None else self._lowering.first(is_capturing)

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
            f"{self._title}: values with another sharding than it was "
            f"compiled for. {'; '.join(wrong)}. Mark the values as in the first step."
        )


def _shardings(tensors: Sequence[Tensor]) -> list[str]:
    """Return sharding texts, no annotation counted as replicated."""
    return [text or _REPLICATED for text in xla_compat.sharding_texts(tensors)]


def _computed(results: Sequence[Tensor]) -> list[Tensor]:
    """Return results as computed values; some may be the program's operands.

    torch_xla has no program that computes nothing.
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
