"""The compiled programs of one stage for one signature of its inputs.

Values are kept by name, see `compile.names`. `fixed` values belong to the stage:
parameters, buffers, constants and gradient sums. `live` values belong to one microbatch
and die with its backward.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from torch_xla_pp import xla_compat
from torch_xla_pp.compile.bundles import MOST_SMALL_BYTES, Bundle, bundles_of
from torch_xla_pp.compile.group_sums.group_gradients import Grouping, group_gradients
from torch_xla_pp.compile.joined_program import JoinedProgram, Scored
from torch_xla_pp.compile.joint_graph import JointGraph
from torch_xla_pp.compile.loss_program import LossProgram
from torch_xla_pp.compile.lowering import LoweringRule
from torch_xla_pp.compile.names import (
    accumulated,
    accumulator,
    flat_name,
    is_route,
    storage_of,
)
from torch_xla_pp.compile.partition import Function, Remat, partition_joint
from torch_xla_pp.compile.product_rules import LibraryProducts, is_product
from torch_xla_pp.compile.program import BoundValues, Constants, Program
from torch_xla_pp.compile.sizes import Size, device_bytes
from torch_xla_pp.compile.stage_specs import (
    Borders,
    ProgramName,
    pins_of,
    stage_specs,
)

Values = dict[str, Tensor]
# Of sums of gradients as one value: of each, and together.
_MOST_COPIED_BYTES, _MOST_FLAT_BYTES = 1 << 20, 4 << 20


class Forwarded(NamedTuple):
    """The results of the forward of one microbatch.

    Attributes:
        outputs: Output index → tensor, for outputs that are returned.
        received: Name → received input, for inputs that are passed on.
        live: What the backward of this microbatch will read.
        updates: Buffer role → new value.
    """

    outputs: dict[int, Tensor]
    received: dict[str, Tensor]
    live: Values
    updates: Values


class Trained(NamedTuple):
    """The results of forward, loss and backward of one microbatch as one program.

    Attributes:
        scored: The loss and what came with it.
        grads: As `StagePrograms.backward` returns them.
        sums: The new `sum:` entries, none if the backward was that of inputs.
        residual: What `backward_weight` needs then.
        updates: Buffer role → new value.
    """

    scored: Scored
    grads: dict[int, Tensor | None]
    sums: Values
    residual: Values
    updates: Values


class SummedGrads(NamedTuple):
    """The gradients of parameters that the backwards of a stage sum up.

    Attributes:
        grads: Role → sharding of the gradient.
        sums: Role → sharding of the sum that backwards add to.
        groups: Role → number of groups of rows, for gradients with a sum per group.
        bundles: Sums that pass as one, until the end of a step.
    """

    grads: Mapping[str, xla_compat.OpSharding]
    sums: Mapping[str, xla_compat.OpSharding]
    groups: Mapping[str, int]
    bundles: Sequence[Bundle] = ()


class ValueSizes:
    """The bytes of values on one device by their names.

    Reading a value's size takes microseconds, so each name is read once: values of one
    set of programs always have the same size. Names that come together once do so
    again, so their sums are kept, too. Routes count nothing, as the transport holds
    them all the time.

    Args:
        known: Bytes by name.
    """

    def __init__(self, known: Mapping[str, int] | None = None) -> None:
        self._bytes = dict(known or {})
        self._sums: dict[tuple[frozenset[str], int], Size] = {}

    def add(self, values: Mapping[str, Tensor]) -> None:
        """Read the sizes of values whose names are new."""
        new = values.keys() - self._bytes
        if new:
            self._bytes.update(dict.fromkeys(new, 0))
            held = [name for name in new if not is_route(name)]
            found = device_bytes([values[name] for name in held])
            self._bytes.update(zip(held, found, strict=True))

    def __getitem__(self, name: str) -> int:
        """Return the bytes of a value of this name."""
        return self._bytes[name]

    def get(self, name: str) -> int | None:
        """Return the bytes of a value of this name, None if they are not known."""
        return self._bytes.get(name)

    def of(self, values: Mapping[str, Tensor]) -> int:
        """Return the bytes of values together."""
        self.add(values)
        return self.total(values, 0).num_bytes

    def total(self, names: Iterable[str], most_small: int) -> Size:
        """Return the size of values of these names together.

        Args:
            names: Their names, all of them known.
            most_small: The size of the largest that are small, zero if none are.
        """
        key = frozenset(names), most_small
        if key not in self._sums:
            found = [self._bytes[name] for name in key[0]]
            self._sums[key] = Size(sum(found), sum(x for x in found if x <= most_small))
        return self._sums[key]


class StagePrograms:
    """The programs of a stage: forward, inference, and the backwards.

    Args:
        joint: Joint graph of the stage.
        output_shardings: Sharding of each output.
        input_shardings: Sharding of each tensor input; gradients get the same.
        fixed_shardings: Role → sharding of parameters and buffers; gradient sums
            and new buffers get the same.
        borders: What the programs receive and send themselves.
        remat: Which forward values are computed again in the backward.
        rules: How operations are run, see `compile.lowering`.
        used: Role → sharding of a value in use, if that differs from how it is kept.
        grouping: Which gradients are summed up per group of rows, None for none.
        is_recycling: Whether saved values take the memory of earlier ones, see
            `recycled`, and small values pass as one: on ranks of one CPU device.
        most_joined: The most bytes that a forward saves where it may be one program
            with the loss and the backward.

    Attributes:
        summed: The gradients that backwards sum up.
        can_be_whole: Whether the backwards of inputs and of weights may be one program.
        can_join: Whether forward and full backward may be one program with a loss.
        can_split: Whether the rest of the backward may be a program of its own then.
        reduced_per_microbatch: Role of a parameter → why its gradient is reduced in
            every microbatch, although rows are in groups.
        extra: What the last forward or backward takes on a device beside its arguments,
            zero if that is not known.
    """

    def __init__(
        self,
        joint: JointGraph,
        output_shardings: Sequence[xla_compat.OpSharding],
        input_shardings: Sequence[xla_compat.OpSharding],
        fixed_shardings: Mapping[str, xla_compat.OpSharding],
        borders: Borders | None = None,
        *,
        remat: Remat = "none",
        rules: Sequence[LoweringRule] = (),
        used: Mapping[str, xla_compat.OpSharding] | None = None,
        grouping: Grouping | None = None,
        is_recycling: bool = False,
        most_joined: int = 0,
    ) -> None:
        self.reduced_per_microbatch: dict[str, str] = {}
        self.extra = xla_compat.ExtraBytes()
        groups: dict[str, int] = {}
        if grouping is not None:
            self.reduced_per_microbatch = group_gradients(joint, grouping)
            grouped = joint.parameter_grads.keys() - self.reduced_per_microbatch
            groups = dict.fromkeys(sorted(grouped), grouping.rows.size)
        small = _small_sums(joint) if is_recycling else ()
        unsummed = {role for bundle in small for role in bundle.shapes}
        functions = partition_joint(joint, remat, unsummed)
        self._functions = functions
        self.output_template = joint.output_template
        self._constants = Constants(joint.constants)
        grads = {role: fixed_shardings[role] for role in functions.parameter_grads}
        sums = {} if grouping is None else grouping.sums
        of_groups = {role: sums[role] for role in groups}
        self.summed = SummedGrads(grads, {**grads, **of_groups}, groups)
        pins = pins_of(
            functions,
            output_shardings,
            input_shardings,
            fixed_shardings,
            self.summed.sums,
        )
        specs = stage_specs(
            functions,
            borders or Borders(),
            pins,
            len(input_shardings),
            rules,
            used,
            is_recycling,
            small,
            _flat_sums(joint, rules) if is_recycling else (),
        )
        self._specs = specs
        self.summed = self.summed._replace(bundles=tuple(specs.sums.values()))
        # Name of a sum → that of the new one.
        roles = {*functions.parameter_grads, *specs.sums}
        self._sum_names = {accumulator(role): accumulated(role) for role in roles}
        self._programs = {name: Program(spec) for name, spec in specs.programs.items()}
        self._recycled = {
            name: {result: storage_of(result) for result in spec.recycled}
            for name, spec in specs.programs.items()
        }

        self._recyclable = frozenset(n for own in self._recycled.values() for n in own)
        # Programs that have shown which of their results are in flat values.
        self._known: set[ProgramName] = set()
        # Names of the gradients of inputs that are returned.
        self._input_grads = [n for n in specs.input_grads.values() if n is not None]
        self.can_be_whole = is_recycling and "backward" in specs.programs
        # What is to be computed again would be kept.
        may_join = most_joined > 0 and remat == "none" and not joint.regions
        self.can_join = (
            may_join
            and "backward" in specs.programs
            and not specs.programs["forward"].sent
            and not specs.programs["backward"].received
            and _bytes_of(functions.forward) <= most_joined
        )
        parts = {"backward input", "backward weight"}
        self.can_split = self.can_join and parts <= specs.programs.keys()
        self._joined: dict[tuple[LossProgram, ProgramName], JoinedProgram] = {}

    @property
    def compiled(self) -> dict[str, Program]:
        """Return the programs that have run so far, by what they do."""
        programs: dict[str, Program] = {n: p for n, p in self._programs.items()}
        for joined in self._joined.values():
            programs[joined.program.spec.function.name] = joined.program
        return {name: p for name, p in programs.items() if p.is_compiled}

    @property
    def all_programs(self) -> Mapping[ProgramName, Program]:
        """Return all programs, by what they do; none needs to have run."""
        return self._programs

    @property
    def kept(self) -> frozenset[str]:
        """Return the names of what backwards read that other programs made or read."""
        return self._specs.kept

    @property
    def residual(self) -> frozenset[str]:
        """Return the names of what the backward of weights alone reads."""
        return self._specs.residual

    def recycled(self, name: ProgramName) -> Mapping[str, str]:
        """Return the results of a program that take the memory of earlier ones.

        Each with the name under which the caller may pass an earlier one that nothing
        reads any more, and that is void afterwards.
        """
        return self._recycled.get(name, {})

    def recycled_in(
        self, values: Mapping[str, Tensor], read: Collection[str] = ()
    ) -> Values:
        """Return values that programs recycle once nobody reads them.

        Args:
            values: What a backward has read.
            read: Names of those that another one will read.
        """
        names = self._recyclable.intersection(values).difference(read)
        return {name: values[name] for name in names}

    @property
    def constants(self) -> Mapping[str, Tensor]:
        """Return the tensors that programs read from elsewhere, by role."""
        return self._constants.sources

    @property
    def has_backward(self) -> bool:
        """Return whether there is any gradient to compute."""
        return self._functions.backward is not None or bool(self._functions.input_grads)

    def forward(
        self, fixed: Mapping[str, Tensor], live: Values, seed: int
    ) -> Forwarded:
        """Enqueue the forward of one microbatch, and return what its backward reads.

        Args:
            fixed: The stage's values, see `BoundValues`.
            live: `input:` entries, and routes where there are borders.
            seed: Seed of the microbatch's random numbers.
        """
        return self._run_forward("forward", fixed, live, seed)

    def inference(
        self, fixed: Mapping[str, Tensor], live: Values, seed: int
    ) -> Forwarded:
        """Enqueue the forward of one microbatch that has no backward."""
        return self._run_forward("inference", fixed, live, seed)

    def backward(
        self, fixed: Mapping[str, Tensor], live: Values
    ) -> tuple[dict[int, Tensor | None], Values]:
        """Enqueue the full backward of one microbatch.

        Args:
            fixed: The stage's values.
            live: What `forward` kept, with `tangent:` entries added, and `sum:` entries
                for gradients so far, which are void afterwards.

        Returns:
            Input index → gradient (None for zero), unless the program sends it, and the
            new `sum:` entries.
        """
        results = self._run("backward", fixed, live)
        return self._returned_grads(results, live, fixed), self._sums(results)

    def backward_input(
        self, fixed: Mapping[str, Tensor], live: Values
    ) -> tuple[dict[int, Tensor | None], Values]:
        """Enqueue the part of the backward that gives the gradients of inputs.

        Returns:
            Input index → gradient, and what `backward_weight` needs as `live`.
        """
        results = self._run("backward input", fixed, live)
        residual = _chosen(self._specs.residual, results, live)
        return self._returned_grads(results, live, fixed), residual

    def backward_weight(self, fixed: Mapping[str, Tensor], live: Values) -> Values:
        """Enqueue the rest of the backward; return the new `sum:` entries.

        The `sum:` entries of `live` are void afterwards.
        """
        return self._sums(self._run("backward weight", fixed, live))

    def joined(
        self, loss: LossProgram, *, is_split: bool = False
    ) -> JoinedProgram | None:
        """Return forward, loss and backward as one program.

        Args:
            loss: The loss of the stage's outputs.
            is_split: Whether the backward is that of inputs alone.

        Returns:
            The program, None if they stay apart.
        """
        name: ProgramName = "backward input" if is_split else "backward"
        key = loss, name
        if key not in self._joined and self.can_join and loss.is_joinable:
            self._joined[key] = JoinedProgram(
                self._specs.programs["forward"],
                self._specs.programs[name],
                self._functions.outputs,
                self._specs.updates,
                loss,
            )
        return self._joined.get(key)

    def score(
        self,
        joined: JoinedProgram,
        fixed: Mapping[str, Tensor],
        live: Values,
        seed: int,
        others: Sequence[Tensor],
        scale: Tensor,
    ) -> Trained:
        """Enqueue forward, loss and backward of one microbatch.

        Args:
            joined: Their program.
            fixed: The stage's values.
            live: As for `forward` and the backward together.
            seed: As for `forward`.
            others: As for `JoinedProgram`.
            scale: See there.
        """
        values = {**self._constants.values(), **live}
        scored = joined(fixed, values, seed, others, scale)
        self.extra = joined.program.extra
        results = scored.results
        return Trained(
            scored=scored,
            grads=self._returned_grads(results, live, fixed),
            sums=self._sums(results),
            residual=_chosen(self._specs.residual, results, live),
            updates=self._updates(results),
        )

    def _run_forward(
        self,
        name: ProgramName,
        fixed: Mapping[str, Tensor],
        live: Values,
        seed: int,
    ) -> Forwarded:
        specs = self._specs
        values, results = self._results(name, fixed, live, seed)
        outputs = _chosen(specs.outputs.values(), results, values, fixed)
        return Forwarded(
            outputs={i: outputs[n] for i, n in specs.outputs.items()},
            received=_chosen(specs.passed_on, values, results),
            live=_chosen(specs.kept, results, live) if name == "forward" else {},
            updates=self._updates(results),
        )

    def _run(
        self, name: ProgramName, fixed: Mapping[str, Tensor], live: Values
    ) -> Values:
        self.extra = xla_compat.ExtraBytes()
        return self._results(name, fixed, live)[1] if name in self._programs else {}

    def _results(
        self,
        name: ProgramName,
        fixed: Mapping[str, Tensor],
        live: Values,
        seed: int = 0,
    ) -> tuple[Values, Values]:
        """Run a program; return what it has read of a microbatch, and its results."""
        program = self._programs[name]
        values = {**self._constants.values(), **live}
        results = program(values, seed, BoundValues.of(fixed))
        self.extra = program.extra
        if name not in self._known:
            self._known.add(name)
            own = self._recycled[name].items()
            self._recycled[name] = {n: s for n, s in own if n in results}
        return values, results

    def _returned_grads(
        self, *sources: Mapping[str, Tensor]
    ) -> dict[int, Tensor | None]:
        values = _chosen(self._input_grads, *sources)
        return {
            index: None if name is None else values[name]
            for index, name in self._specs.input_grads.items()
        }

    def _updates(self, results: Values) -> Values:
        updates = self._functions.buffer_updates
        return {role: results[name] for role, name in updates.items()}

    def _sums(self, results: Values) -> Values:
        return {
            name: results[new]
            for name, new in self._sum_names.items()
            if new in results
        }


def _small_sums(joint: JointGraph) -> tuple[Bundle, ...]:
    """Return the bundles of small sums of gradients, by role."""
    looks = {role: grad.meta["val"] for role, grad in joint.parameter_grads.items()}
    return bundles_of("sums", looks, looks)


def _flat_sums(joint: JointGraph, rules: Sequence[LoweringRule]) -> tuple[Bundle, ...]:
    """Return the bundle of sums to which calls add products, by role.

    At the end of a step each of them is copied to be a value of its own, and held twice
    meanwhile. So they are those of which most take few bytes.
    """
    if not any(isinstance(rule, LibraryProducts) for rule in rules):
        return ()
    looks = {
        role: grad.meta["val"]
        for role, grad in joint.parameter_grads.items()
        if is_product(grad) and _may_be_copied(grad.meta["val"])
    }
    fewest = sorted(looks, key=lambda role: looks[role].nbytes)
    totals = accumulate(looks[role].nbytes for role in fewest)
    chosen = {
        role
        for role, total in zip(fewest, totals, strict=True)
        if total <= _MOST_FLAT_BYTES
    }
    shapes = {r: tuple(look.shape) for r, look in looks.items() if r in chosen}
    return (Bundle(flat_name("sums"), shapes),) if len(shapes) > 1 else ()


def _may_be_copied(value: Tensor) -> bool:
    """Return whether a sum is not small, nor large, and fills lines of a cache."""
    is_float = value.dtype == torch.float32 and value.numel() % 16 == 0
    return is_float and MOST_SMALL_BYTES < value.nbytes <= _MOST_COPIED_BYTES


def _bytes_of(function: Function) -> int:
    """Return the bytes of the results of a function."""
    values = [node.meta["val"] for node in function.results]
    return sum(value.numel() * value.dtype.itemsize for value in values)


def _chosen(names: Collection[str], *sources: Mapping[str, Tensor]) -> Values:
    """Return the values of these names, each from the first source that has it."""
    found: Values = {}
    for name in names:
        for source in sources:
            if name in source:
                found[name] = source[name]
                break
    return found
