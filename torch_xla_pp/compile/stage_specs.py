"""The programs of a stage as a table of specs: who reads, receives and sends what.

Where a stage has *borders*, its programs receive and send themselves: the values of a
border are then neither passed in nor returned, but its route is passed in. Where an
output has several consumers, each sends a *part* of its gradient, under the name that
`tangent_name` returns, and the backward adds them up.
"""

from collections.abc import (
    Callable,
    Collection,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor

from torch_xla_pp import xla_compat
from torch_xla_pp.compile.border import Border, border_names
from torch_xla_pp.compile.bundles import Bundle, bundles_of, looks_of
from torch_xla_pp.compile.flat_values import FlatValue
from torch_xla_pp.compile.lowering import LoweringRule
from torch_xla_pp.compile.names import (
    TOKEN,
    accumulated,
    accumulator,
    flat_name,
    input_grad,
    input_role,
    is_route,
    output_name,
    tangent,
    tangent_part,
)
from torch_xla_pp.compile.partition import Function, StageFunctions, nothing
from torch_xla_pp.compile.program_spec import ProgramSpec

ProgramName: TypeAlias = Literal[
    "forward", "inference", "backward", "backward input", "backward weight"
]
Shardings: TypeAlias = Sequence[xla_compat.OpSharding]


class Borders(NamedTuple):
    """The values that the programs of a stage exchange with other stages themselves.

    Attributes:
        inputs: What the forward receives, by `input_role`.
        outputs: What the forward sends, by `output_name`.
        tangents: What the backward receives, by `tangent_name`.
        grads: What the backward sends, by `input_grad`.
        consumers: Output index → the stages that use it.
        returned: Names of the outputs that the forward returns, None for all.
        passed_on: Names of the received inputs that the forward returns.
    """

    inputs: Sequence[Border] = ()
    outputs: Sequence[Border] = ()
    tangents: Sequence[Border] = ()
    grads: Sequence[Border] = ()
    consumers: Mapping[int, Sequence[int]] = {}
    returned: Collection[str] | None = None
    passed_on: Collection[str] = ()

    def tangent_parts(self) -> dict[str, list[str]]:
        """Return the parts of gradients that have several."""
        return {
            tangent(index): [tangent_name(index, c, consumers) for c in consumers]
            for index, consumers in self.consumers.items()
            if len(consumers) > 1
        }


def tangent_name(index: int, consumer: int, consumers: Collection[int]) -> str:
    """Return the name of the gradient of an output that one of its users sends."""
    is_one = len(consumers) == 1
    return tangent(index) if is_one else tangent_part(index, consumer)


@dataclass(frozen=True, kw_only=True, slots=True)
class StageSpecs:
    """The programs of a stage, and the names of the values between them.

    Args:
        programs: The spec of each program, without those that would do nothing.
        outputs: Output index → name, for outputs that the forward returns.
        passed_on: Names of received inputs that the forward returns.
        kept: Names of what the backwards read of one microbatch's forward.
        residual: Names of what the second half of a backward reads.
        input_grads: Input index → name of its gradient, None for zero, for gradients
            that the backward does not send.
        updates: Names of new buffers.
        sums: Sums of gradients that pass as one, by a role that they have together.
    """

    programs: Mapping[ProgramName, ProgramSpec]
    outputs: Mapping[int, str]
    passed_on: Collection[str]
    kept: frozenset[str]
    residual: frozenset[str]
    input_grads: Mapping[int, str | None]
    updates: frozenset[str] = frozenset()
    sums: Mapping[str, Bundle] = field(default_factory=dict)

    def bundling(
        self, looks: Mapping[str, Tensor], sums: Sequence[Bundle]
    ) -> "StageSpecs":
        """Return specs by which small values between the programs pass as one.

        Those that the backward of weights reads are apart: the others are dropped
        before it.

        Args:
            looks: Name of what backwards read → a value of that shape and dtype.
            sums: Small sums of gradients by role, to which the functions do not add.
        """
        bundles = [
            bundle
            for name, names, is_late in self._passed()
            for bundle in bundles_of(f"{name}, late" if is_late else name, names, looks)
        ]
        before = {bundle.name: _renamed(bundle, accumulator) for bundle in sums}
        bundles += [
            _renamed(bundle, accumulated)._replace(total=accumulator(bundle.name))
            for bundle in sums
        ]
        bundle_of = {
            name: bundle.name
            for bundle in (*bundles, *before.values())
            for name in bundle.shapes
        }

        def bundled(names: Iterable[str]) -> frozenset[str]:
            return frozenset(bundle_of.get(name, name) for name in names)

        programs = {
            name: replace(spec, bundles=bundles, donated=bundled(spec.donated))
            for name, spec in self.programs.items()
        }
        return replace(
            self,
            programs=programs,
            kept=bundled(self.kept),
            residual=bundled(self.residual),
            sums=before,
        )

    def flattening(
        self, looks: Mapping[str, Tensor], sums: Sequence[Bundle]
    ) -> "StageSpecs":
        """Return specs by which large values between the programs may pass as one.

        Those that the backward of weights reads are apart here, too.

        Args:
            looks: As for `bundling`, which comes first.
            sums: Sums of gradients by role, to which the functions add.
        """
        made: dict[str, list[FlatValue]] = {}
        late: set[str] = set()
        for name, names, is_late in self._passed():
            fitting = [n for n in names if n in looks and _may_lie_in_another(looks[n])]
            if fitting:
                maker = f"{name}, late" if is_late else name
                value = FlatValue(name=flat_name(maker), names=fitting)
                made.setdefault(name, []).append(value)
                late.update([value.name] if is_late else [])
        before = [FlatValue.of_sums(bundle, accumulator) for bundle in sums]
        after = [FlatValue.of_sums(bundle, accumulated) for bundle in sums]
        values = [*before, *(value for own in made.values() for value in own)]
        sum_of = {name: value.name for value in before for name in value.names}
        programs = {
            name: replace(
                spec,
                made_flat=made.get(name, ()),
                given_flat=[
                    v for v in values if not {*spec.inputs}.isdisjoint(v.names)
                ],
                updated_flat={
                    old.name: new
                    for old, new in zip(before, after, strict=True)
                    if not {*spec.inputs}.isdisjoint(old.names)
                },
                donated={sum_of.get(name, name) for name in spec.donated},
            )
            for name, spec in self.programs.items()
        }
        saved = (value.name for value in made.get("forward", ()))
        return replace(
            self,
            programs=programs,
            kept=self.kept.union(saved),
            residual=self.residual | late,
            sums={**self.sums, **{b.name: _renamed(b, accumulator) for b in sums}},
        )

    def recycling(self) -> "StageSpecs":
        """Return specs by which saved values take the memory of earlier ones."""
        programs = dict(self.programs)
        for name, results in self._own_results().items():
            flat = (one.name for one in programs[name].made_flat)
            programs[name] = replace(programs[name], recycled=(*results, *flat))
        return replace(self, programs=programs)

    def _passed(self) -> Iterator[tuple[ProgramName, list[str], bool]]:
        """Yield what programs save, and whether the backward of weights reads it."""
        for name, names in self._own_results().items():
            for is_late in (False, True):
                yield (
                    name,
                    [n for n in names if (n in self.residual) == is_late],
                    is_late,
                )

    def _own_results(self) -> dict[ProgramName, tuple[str, ...]]:
        """Return what programs save for others of the stage, and nobody else gets."""
        grads = {name for name in self.input_grads.values() if name is not None}
        given = {*self.outputs.values(), *self.passed_on, *grads, *self.updates, TOKEN}
        saved: dict[ProgramName, frozenset[str]] = {
            "forward": self.kept - given,
            "backward input": self.residual - given,
        }
        return {
            name: tuple(n for n in self.programs[name].outputs if n in results)
            for name, results in saved.items()
            if name in self.programs
        }


def pins_of(
    functions: StageFunctions,
    output_shardings: Shardings,
    input_shardings: Shardings,
    fixed_shardings: Mapping[str, xla_compat.OpSharding],
    sum_shardings: Mapping[str, xla_compat.OpSharding],
) -> dict[str, xla_compat.OpSharding]:
    """Return the sharding of every output that leaves the stage's programs."""
    pins = dict(zip(functions.outputs, output_shardings, strict=True))
    for index, name in functions.input_grads.items():
        if name is not None:
            pins[name] = input_shardings[index]
    for role, name in functions.parameter_grads.items():
        pins[name] = sum_shardings[role]
    for role, name in functions.buffer_updates.items():
        pins[name] = fixed_shardings[role]
    return pins


def stage_specs(
    functions: StageFunctions,
    borders: Borders,
    pins: Mapping[str, xla_compat.OpSharding],
    num_inputs: int,
    rules: Sequence[LoweringRule] = (),
    used: Mapping[str, xla_compat.OpSharding] | None = None,
    is_recycling: bool = False,
    small_sums: Sequence[Bundle] = (),
    flat_sums: Sequence[Bundle] = (),
) -> StageSpecs:
    """Return the table of a stage's programs.

    Args:
        functions: The functions that the programs run.
        borders: What they receive and send themselves.
        pins: See `pins_of`.
        num_inputs: How many tensor inputs the stage has.
        rules: See `ProgramSpec`.
        used: See `ProgramSpec`.
        is_recycling: Whether what one program saves for another takes the memory of
            what an earlier run has saved, and small values pass as one.
        small_sums: See `StageSpecs.bundling`.
        flat_sums: See `StageSpecs.flattening`.
    """
    table = _Table(functions, borders, pins, num_inputs, rules, used or {})
    specs = table.specs()
    if not is_recycling:
        return specs
    readers = functions.backward, functions.backward_input, functions.backward_weight
    looks: dict[str, Tensor] = {}
    for reader in readers:
        looks |= {} if reader is None else looks_of(reader)
    specs = specs.bundling(looks, small_sums)
    # On one device, rules are calls of ours.
    return (specs.flattening(looks, flat_sums) if rules else specs).recycling()


def _may_lie_in_another(value: Tensor) -> bool:
    """Return whether calls of ours may write it: float32, and not empty."""
    return value.dtype == torch.float32 and value.numel() > 0


def _renamed(bundle: Bundle, name_of: Callable[[str], str]) -> Bundle:
    """Return a bundle of sums of gradients, whose values have roles."""
    shapes = {name_of(role): shape for role, shape in bundle.shapes.items()}
    return Bundle(name_of(bundle.name), shapes)


class _Table:
    """The rows of the table; each depends on what the others read."""

    def __init__(
        self,
        functions: StageFunctions,
        borders: Borders,
        pins: Mapping[str, xla_compat.OpSharding],
        num_inputs: int,
        rules: Sequence[LoweringRule],
        used: Mapping[str, xla_compat.OpSharding],
    ) -> None:
        self._functions = functions
        self._borders = borders
        self._pins = pins
        self._rules = rules
        self._used = used
        self._inputs = [input_role(i) for i in range(num_inputs)]
        self._parts = borders.tangent_parts()
        self._tangents = [tangent(i) for i in range(len(functions.outputs))]
        self._tangents += [part for names in self._parts.values() for part in names]
        self._sums = [accumulator(role) for role in functions.parameter_grads]
        grads = functions.input_grads
        outputs = {output_name(i): n for i, n in enumerate(functions.outputs)}
        self._leaving = [sent.renamed(outputs) for sent in borders.outputs]
        back = {input_grad(i): name for i, name in grads.items()}
        self._going_back = [sent.renamed(back) for sent in borders.grads]
        # The results that the caller gets, without gradients that are sent.
        sent = border_names(borders.grads)
        self._input_grads = {
            i: n for i, n in grads.items() if input_grad(i) not in sent
        }

    def specs(self) -> StageSpecs:
        functions, borders = self._functions, self._borders
        weight = self._backward_weight()
        first = self._backward_input(weight)
        full = self._backward()
        kept = self._kept(full, first, weight)
        outputs = {
            index: name
            for index, name in enumerate(functions.outputs)
            if borders.returned is None or output_name(index) in borders.returned
        }
        results = {*outputs.values(), *borders.passed_on}
        results |= {*functions.buffer_updates.values()}
        programs: dict[ProgramName, ProgramSpec] = {
            "forward": self._forward(functions.forward, results | kept),
            "inference": self._forward(functions.inference, results),
            "backward": full,
            "backward input": first,
            "backward weight": weight,
        }
        backwards = {"backward", "backward input", "backward weight"}
        return StageSpecs(
            programs={
                name: spec
                for name, spec in programs.items()
                if name not in backwards or not spec.is_empty
            },
            outputs=outputs,
            passed_on=borders.passed_on,
            kept=frozenset(kept),
            residual=frozenset(weight.inputs),
            input_grads=self._input_grads,
            updates=frozenset(functions.buffer_updates.values()),
        )

    def _forward(self, function: Function, wanted: Collection[str]) -> ProgramSpec:
        return ProgramSpec(
            function=function,
            pins=self._pins,
            checked=self._inputs,
            received=self._borders.inputs,
            sent=self._leaving,
            wanted=wanted,
            rules=self._rules,
            used=self._used,
        )

    def _backward(self) -> ProgramSpec:
        return ProgramSpec(
            function=self._functions.backward or nothing("backward"),
            pins=self._pins,
            checked=self._tangents,
            donated=self._sums,
            received=self._borders.tangents,
            sent=self._going_back,
            parts=self._parts,
            wanted=self._returned | {*self._functions.parameter_grads.values()},
            rules=self._rules,
            used=self._used,
        )

    def _backward_input(self, weight: ProgramSpec) -> ProgramSpec:
        is_first = self._has_two_backwards
        return ProgramSpec(
            function=self._functions.backward_input or nothing("backward"),
            pins=self._pins,
            checked=self._tangents,
            received=self._borders.tangents if is_first else (),
            sent=self._going_back,
            parts=self._parts,
            wanted=self._returned.union(weight.inputs),
            rules=self._rules,
            used=self._used,
        )

    def _backward_weight(self) -> ProgramSpec:
        is_second = self._has_two_backwards
        return ProgramSpec(
            function=self._functions.backward_weight or nothing("backward"),
            pins=self._pins,
            checked=self._tangents,
            donated=self._sums,
            received=() if is_second else self._borders.tangents,
            parts={} if is_second else self._parts,
            rules=self._rules,
            used=self._used,
        )

    @property
    def _has_two_backwards(self) -> bool:
        """Return whether a backward of inputs alone receives for both halves.

        Gradients that a frozen stage does not read are received, too.
        """
        functions = self._functions
        has_first = functions.backward_input is not None or bool(self._going_back)
        return has_first or functions.backward_weight is None

    @property
    def _returned(self) -> set[str]:
        """Return the gradients of inputs that the caller gets."""
        return {name for name in self._input_grads.values() if name is not None}

    def _kept(
        self, full: ProgramSpec, first: ProgramSpec, weight: ProgramSpec
    ) -> set[str]:
        """Return the names of what the backwards read beside each other's results."""
        read = {*full.inputs, *first.inputs, *self._returned}
        read |= {*weight.inputs} - {*first.outputs}
        return {name for name in read if not is_route(name)}
