"""One function of a stage as one compiled XLA program.

The function is traced on XLA tensors at its first call and never again: afterwards
the program is dispatched by the hash of its graph. torch_xla checks little in that
case, so this file keeps these laws. Breaking any of them gave wrong numbers without an
exception:

* Arguments are mapped to program parameters by the handle of their buffers. Mapping
  by tensor id, as torch_xla's dynamo bridge does, loses arguments under SPMD.
* A parameter that is not an argument would be a constant frozen at its first value: it
  is refused, unless it is a scalar or the random seed.
* The sharding of an argument must be the one that the program was compiled for.
* The sharding of an output is pinned where the caller relies on it.
* A value whose memory an output is to take is an operand that nothing reads. An output
  must depend on it, or it would be none; a barrier does that, which XLA removes.
* Two functions whose graphs have the same hash, but are not the same, would run as one
  of them: the later one is traced again with copies of its arguments.
* Values that are pending when a trace fails are dropped: torch_xla computes all pending
values of the process together, and a receive among them would wait for ever.
"""

import functools
import math
import operator
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import reduce
from typing import NamedTuple

import torch
from torch import Tensor, fx

from torch_xla_pp import cpu, xla_compat
from torch_xla_pp.compile import border
from torch_xla_pp.compile.flat_values import FlatValue, flatten
from torch_xla_pp.compile.lowering import Lowering
from torch_xla_pp.compile.names import MARK, SEED, TOKEN, captured_scalar, storage_of
from torch_xla_pp.compile.program_spec import ProgramSpec
from torch_xla_pp.errors import PipelineError
from torch_xla_pp.hlo import REPLICATED, OpShardingArgs
from torch_xla_pp.native import notes
from torch_xla_pp.phases import phase

_REPLICATED = "{replicated}"
# Graphs that torch_xla takes for others are rare; several for one program are rarer.
_MOST_MISTAKEN = 8


class Constants:
    """Captured tensors by role, uploaded again after they were written to.

    A tensor that was captured is an operand of the programs, so that in-place writes to
    it between two calls count, as in eager mode.
    """

    def __init__(self, sources: Mapping[str, Tensor]) -> None:
        self._sources = dict(sources)
        self._versions: dict[str, int] = {}
        self._values: dict[str, Tensor] = {}

    @property
    def sources(self) -> Mapping[str, Tensor]:
        """Return role → tensor, wherever it is."""
        return self._sources

    def values(self) -> dict[str, Tensor]:
        """Return role → value on the device."""
        for role, source in self._sources.items():
            if self._versions.get(role) != source._version:
                self._versions[role] = source._version
                self._values[role] = xla_compat.replicate(source.detach().cpu())
        return self._values


class AbstractValue(NamedTuple):
    """The metadata of a value.

    Attributes:
        shape: Its shape.
        dtype: Its dtype.
        sharding: Its sharding.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    sharding: OpShardingArgs

    @property
    def num_bytes(self) -> int:
        """Return its bytes on one device, without padding of the device's own."""
        shape = self.sharding.shard_shape(self.shape)
        return math.prod(shape) * self.dtype.itemsize


class LoweredProgram(NamedTuple):
    """A program that was traced for a compiler for other devices.

    Attributes:
        hlo: An `HloModuleProto`, whose parameters have no shardings yet.
        parameters: The input that each parameter is, empty for scalars that are built
            in and the seed.
        shardings: HLO text of the sharding of each parameter.
        donated: Numbers of the parameters whose buffers results may reuse.
        outputs: Name of each result → its shape and dtype.
        origins: Beginning of the names that operations have in the module → the
            operation of the model and its line.
    """

    hlo: bytes
    parameters: tuple[str, ...]
    shardings: tuple[str, ...]
    donated: tuple[int, ...]
    outputs: dict[str, tuple[tuple[int, ...], torch.dtype]]
    origins: dict[str, str]


class BoundParameters(NamedTuple):
    """The parameters of a program, some of which have their values.

    Attributes:
        parameters: A value for each, or None.
        others: The place and the name of those that have none.
    """

    parameters: list[Tensor | None]
    others: list[tuple[int, str]]

    @classmethod
    def of(
        cls, names: Sequence[str], values: Mapping[str, Tensor]
    ) -> "BoundParameters":
        """Return the parameters of these names, with what values there are."""
        others = [(i, name) for i, name in enumerate(names) if name not in values]
        return cls([values.get(name) for name in names], others)

    def complete(self, values: Mapping[str, Tensor]) -> list[Tensor]:
        """Return all parameters; the others are found by name."""
        parameters = self.parameters.copy()
        for place, name in self.others:
            parameters[place] = values[name]
        return parameters  # type: ignore[return-value]


class BoundValues(dict[str, Tensor]):
    """Values that are the same for many calls of programs; never written to.

    Attributes:
        programs: The parameters of the programs that were called with them.
    """

    def __init__(self, values: Mapping[str, Tensor]) -> None:
        super().__init__(values)
        self.programs: dict[Program, BoundParameters] = {}

    @classmethod
    def of(cls, values: Mapping[str, Tensor]) -> "BoundValues":
        """Return `values` if programs can bind them, else a copy of that kind."""
        return values if isinstance(values, cls) else cls(values)


class Program:
    """A compiled program, traced at its first call.

    A call that passes a `MARK` to a program that is not marked runs its marked twin,
    which is compiled when it is first needed.

    Attributes:
        spec: What the program does.
        inputs: Names of the values that a call needs.
        outputs: Names of the values that a call returns.
        hlo: The text of the compiled program, see `xla_compat.CompiledGraph`.
        extra: What the last run takes on a device beside the arguments, zero if that is
            not known.
    """

    def __init__(self, spec: ProgramSpec) -> None:
        self.spec = spec
        self.inputs = spec.inputs
        self.outputs = spec.outputs
        pinned = (*spec.function.outputs, *spec.added)
        bundled = {name for bundle in spec.bundles for name in bundle.shapes}
        self._pins = {
            n: spec.pins[n] for n in pinned if n in spec.pins.keys() - bundled
        }
        self._given: tuple[FlatValue, ...] = ()
        self._take(())
        self._title = f"{spec.function.name} program"
        self._expected: list[str] = []
        self._hash: xla_compat.GraphHash | None = None
        self.hlo: str | None = None
        self._own = self.extra = xla_compat.ExtraBytes()
        # The input that each parameter is, and parameters that are no inputs.
        self._names: list[str] = []
        self._captured: dict[str, Tensor] = {}
        # The handle of the seed that it was traced with; it is no longer listed under
        # its id once it is an operand of a call.
        self._seed: int | None = None
        self._bound: BoundParameters | None = None
        # Shapes and dtypes of values whose memory outputs take, and those values that
        # the trace has made, until the first run.
        self._storages: dict[str, tuple[torch.Size, torch.dtype]] = {}
        self._first_storages: dict[str, Tensor] = {}
        # Programs for values that come in other flat ones.
        self._others: dict[tuple[FlatValue, ...], Program] = {}
        # Its computation, while it is traced.
        self._lowering: Lowering | None = None

    def _take(self, given: tuple[FlatValue, ...]) -> None:
        """Take values from flat ones where they are in these."""
        self._given = given
        flat_of = {name: flat.name for flat in given for name in flat.parts}
        needed = (flat_of.get(name, name) for name in self.spec.inputs)
        self.inputs = tuple(dict.fromkeys(needed))
        spec = self.spec
        self._checked = [i for i, n in enumerate(self.inputs) if n in spec.checked]
        self._donated = [i for i, n in enumerate(self.inputs) if n in spec.donated]

    @functools.cached_property
    def _marked(self) -> "Program":
        return Program(replace(self.spec, is_marked=True))

    @property
    def is_compiled(self) -> bool:
        """Return whether the program has run before."""
        return self._hash is not None

    def __call__(
        self,
        values: Mapping[str, Tensor],
        seed: int = 0,
        fixed: BoundValues | None = None,
    ) -> dict[str, Tensor]:
        """Enqueue the program.

        Args:
            values: Value of every input, by name; must be on the device. Those of
                storages, which are made where they are missing, are void afterwards.
            seed: Seed of the program's random numbers.
            fixed: More inputs, none of them in `values`.

        Returns:
            Value of every output, by name.

        Raises:
            PipelineError: The sharding of a value differs from the one that the
                program was compiled for.
        """
        if MARK in values and not self.spec.is_marked:
            marked = self._marked(values, seed, fixed)
            self.extra = self._marked.extra
            return marked
        flats, sums = self.spec.given_flat, self.spec.updated_flat
        given = tuple(x for x in flats if x.name in values or x.name in sums)
        if self._hash is None:
            self._take(given)
            everything = {**values, **(fixed or {})}
            self._hash = self._trace([everything[name] for name in self.inputs])
        elif given != self._given:
            other = self._others.setdefault(given, Program(self.spec))
            results = other(values, seed, fixed)
            self.extra = other.extra
            return results
        elif self._checked:
            self._check_shardings(values)
        self.extra = self._own
        if self._storages and not values.keys() >= self._storages.keys():
            values = {**self._new_storages(values), **values}
        if self._seed is not None:
            values = {**values, SEED: xla_compat.seed_tensor(seed)}
        parameters = self._bound_to(fixed).complete(values)
        outputs = xla_compat.run_graph(self._hash, parameters)
        return dict(zip(self.outputs, outputs, strict=True))

    def _bound_to(self, fixed: BoundValues | None) -> BoundParameters:
        """Return the parameters, with those values that are the same at every call."""
        found = self._bound if fixed is None else fixed.programs.get(self)
        if found is None:
            found = BoundParameters.of(self._names, {**(fixed or {}), **self._captured})
            if fixed is None:
                self._bound = found
            else:
                fixed.programs[self] = found
        return found

    def lowered(self, values: Mapping[str, AbstractValue]) -> LoweredProgram:
        """Trace the program without values; nothing is compiled or run.

        Args:
            values: Metadata of each of its inputs.

        Raises:
            PipelineError: It has an operation that XLA does not have.
        """
        other = Program(self.spec)
        given = [values[name] for name in self.inputs]
        args = [xla_compat.placeholder(value.shape, value.dtype) for value in given]
        held = [_held_as(x, v.sharding) for x, v in zip(args, given, strict=True)]
        noting = xla_compat.noting_origins()
        with torch.no_grad(), xla_compat.fixed_seed(0), noting:
            outputs = other._compute(dict(zip(self.inputs, held, strict=True)))
        other._map_parameters(args, outputs)
        names = [name if name in values else "" for name in other._names]
        shardings = [values[n].sharding.text if n else _REPLICATED for n in names]
        donated = {self.inputs[i] for i in self._donated}
        with xla_compat.noting_origins():
            hlo = xla_compat.hlo_module(outputs)
        return LoweredProgram(
            hlo=hlo,
            parameters=tuple(names),
            shardings=tuple(shardings),
            donated=tuple(i for i, name in enumerate(names) if name in donated),
            outputs={
                name: (tuple(value.shape), value.dtype)
                for name, value in zip(self.outputs, outputs, strict=True)
            },
            origins={} if other._lowering is None else other._lowering.origins(),
        )

    @phase("lowering")
    def _trace(self, args: list[Tensor]) -> xla_compat.GraphHash:
        """Trace and compile the function for arguments such as `args`.

        Buffers have handles only once the programs that make them have run.
        """
        with phase("device"):
            xla_compat.wait_device()
        args = _distinct(args)
        self._expected = _shardings([args[i] for i in self._checked])
        shardings = [xla_compat.sharding_of(value) for value in args]
        given = args
        try:
            for _ in range(_MOST_MISTAKEN):
                self.outputs = self.spec.outputs
                self._storages, self._first_storages, self._seed = {}, {}, None
                with torch.no_grad(), xla_compat.fixed_seed(0):
                    outputs = self._compute(dict(zip(self.inputs, given, strict=True)))
                    outputs = self._recycle(self._flatten(args, outputs))
                self._map_parameters(args, outputs)
                donated = [args[i] for i in self._donated]
                with xla_compat.donating([*donated, *self._first_storages.values()]):
                    graph_hash = self._compile(outputs)
                if graph_hash is not None:
                    return graph_hash
                given = list(map(xla_compat.constrain, given, shardings))
        except Exception as error:
            _drop_locals(error)
            raise
        finally:
            self._lowering = None
        raise PipelineError(
            f"{self._title}: expected a graph that torch_xla distinguishes, got "
            f"{_MOST_MISTAKEN} with hashes of others. Write it with other operations."
        )

    def _compile(self, outputs: list[Tensor]) -> xla_compat.GraphHash | None:
        """Compile a graph; returns None if torch_xla would run another one for it."""
        try:
            if xla_compat.is_mistaken(outputs):
                return None
            with phase("XLA"):
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
        self.hlo, self._own = graph.hlo, graph.extra
        return graph.hash

    def _compute(self, values: dict[str, Tensor]) -> list[Tensor]:
        """Receive, run the function and send; all of it pending."""
        bundles = self.spec.bundles
        for flat in self._given:
            values |= flat.taken_apart(values[flat.name])
        for bundle in bundles:
            values |= bundle.parts(values[bundle.name]) if bundle.name in values else {}
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
            values[TOKEN] = cpu.launched_apart(reduce(operator.add, tokens))
        made = [bundle for bundle in bundles if bundle.name in self.outputs]
        values |= {bundle.name: bundle.joined(values) for bundle in made}
        if self.spec.is_marked:
            values[TOKEN] = self._end(values)
        return [values[name] for name in self.outputs]

    def _flatten(self, args: list[Tensor], outputs: list[Tensor]) -> list[Tensor]:
        """Let calls write and read pending values in flat ones."""
        made = self.spec.made_flat
        if not made and not self._given:
            return outputs
        parameters = self._map_parameters(args, outputs)
        given = {flat.name for flat in self._given}
        names = [*enumerate(self._names)]
        read = [i for i, name in names if name in given]
        new = self.spec.updated_flat
        updated = {i: new[name] for i, name in names if name in new}
        named = dict(zip(self.outputs, outputs, strict=True))
        found = flatten(named, made, parameters, read, updated)
        if found is None:
            return outputs
        self.outputs = tuple(found.values)
        self._add_storages(found.storages)
        for name in found.values.keys() & self._pins.keys():
            xla_compat.annotate(found.values[name], self._pins[name])
        return [*found.values.values()]

    def _recycle(self, outputs: list[Tensor]) -> list[Tensor]:
        """Let pending results take the memory of values made for the first run.

        Flat ones do already. One of the others becomes another one in which the program
        reads these values.
        """
        named = dict(zip(self.outputs, outputs, strict=True))
        missing = [
            name
            for name in self.spec.recycled
            if name in named and storage_of(name) not in self._storages
        ]
        if not missing:
            return outputs
        looks = [(named[name].shape, named[name].dtype) for name in missing]
        made = xla_compat.new_values(looks)
        self._add_storages(dict(zip(missing, made, strict=True)))
        smallest = min(missing, key=lambda name: named[name].numel())
        named[smallest] = xla_compat.tie(named[smallest], made)
        return [*named.values()]

    def _add_storages(self, made: Mapping[str, Tensor]) -> None:
        """Note values whose memory results take in the first run, by their names."""
        for name, value in made.items():
            self._storages[storage_of(name)] = value.shape, value.dtype
            self._first_storages[storage_of(name)] = value

    def _new_storages(self, given: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return values whose memory outputs take, where none are given."""
        found, self._first_storages = self._first_storages, {}
        if not found:
            made = xla_compat.new_values([*self._storages.values()])
            found = dict(zip(self._storages, made, strict=True))
        found = {name: value for name, value in found.items() if name not in given}
        looks = map(self._storages.__getitem__, found)
        made_bytes = sum(math.prod(shape) * dtype.itemsize for shape, dtype in looks)
        self.extra = self.extra._replace(results=self.extra.results + made_bytes)
        return found

    def _end(self, values: Mapping[str, Tensor]) -> Tensor:
        """Note the end; return a token.

        It comes after all sends, all bundles and every output whose sharding is known.
        The shardings of other outputs are XLA's choice, but they are computed on the
        way to those.
        """
        whole = [TOKEN, *(bundle.name for bundle in self.spec.bundles)]
        known = {**self._pins, **dict.fromkeys(whole, xla_compat.replicated_sharding())}
        done = [(values[n], known[n]) for n in self.outputs if n in known]
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

    def _map_parameters(
        self, args: list[Tensor], outputs: list[Tensor]
    ) -> list[Tensor]:
        """Find out which argument each parameter of the program is; return them all."""
        names = [*self.inputs, *self._storages]
        given = [*args, *self._first_storages.values()]
        handles = xla_compat.data_handles(given)
        position = {handle: i for i, handle in enumerate(handles)}
        ids, values = xla_compat.graph_parameters(outputs)
        seed_id = xla_compat.seed_id()
        self._names, self._captured = [], {}
        parameters, captured = [], []
        for slot, (data_id, value) in enumerate(zip(ids, values, strict=True)):
            (handle,) = xla_compat.data_handles([value])
            index = position.get(handle)
            if index is not None:
                self._names.append(names[index])
                parameters.append(given[index])
                continue
            parameters.append(value)
            if data_id == seed_id or handle == self._seed:
                self._names.append(SEED)
                self._seed = handle
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
        return parameters

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


def _drop_locals(error: BaseException) -> None:
    """Drop the local variables of the calls that an error and its causes have ended."""
    found: BaseException | None = error
    while found is not None:
        traceback.clear_frames(found.__traceback__)
        found = found.__cause__ or found.__context__


def _held_as(value: Tensor, sharding: OpShardingArgs) -> Tensor:
    """Return a value without a buffer, annotated with its sharding."""
    if sharding == REPLICATED:
        return value
    return xla_compat.constrain(value, xla_compat.sharding_from_args(*sharding))


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

    The trace distinguishes arguments by their buffers; two arguments that happen to be
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
