"""The compiled programs of one stage for one signature of its inputs.

Values are kept by name (see `compile.export` for the roles). `fixed` values belong to
the stage: parameters, buffers, constants and gradient sums. `live` values belong to
one microbatch and die with its backward.

Where a stage has *borders*, its programs receive and send themselves: the values of a
border are then neither passed in nor returned, but its route is passed in. Where an
output has several consumers, each gives a *part* of its gradient, under the name
that `tangent_name` tells, and the backward adds them up.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import NamedTuple

from torch import Tensor

from torch_xla_pp import xla_compat
from torch_xla_pp.compile import border
from torch_xla_pp.compile.border import Border
from torch_xla_pp.compile.captured_tensors import Constants
from torch_xla_pp.compile.export import JointGraph
from torch_xla_pp.compile.group_sums.group_gradients import Grouping, group_gradients
from torch_xla_pp.compile.lowering import Constraints
from torch_xla_pp.compile.names import (
    accumulated,
    accumulator,
    given_grad,
    input_role,
    is_route,
    tangent,
    tangent_part,
)
from torch_xla_pp.compile.partition import (
    Function,
    Remat,
    StageFunctions,
    nothing,
    partition_joint,
)
from torch_xla_pp.compile.program import Program
from torch_xla_pp.compile.sums import reduced_sums, starting_sums
from torch_xla_pp.transport import ShardLayout

Values = dict[str, Tensor]
Layouts = Mapping[int, ShardLayout]


class Borders(NamedTuple):
    """Say which values the programs of a stage exchange with other stages.

    The first four are messages that the programs receive and send themselves: stage on
    the other side → index of an input or output → its layout, in the order of the
    message.

    Attributes:
        inputs: Inputs that the forward receives.
        outputs: Outputs that the forward sends.
        tangents: Outputs whose gradients the backward receives.
        grads: Inputs whose gradients the backward sends.
        consumers: Output index → the stages that use it.
        returned: Outputs that the forward returns, None for all.
        handed_on: Received inputs that the forward returns.
    """

    inputs: Mapping[int, Layouts] = {}
    outputs: Mapping[int, Layouts] = {}
    tangents: Mapping[int, Layouts] = {}
    grads: Mapping[int, Layouts] = {}
    consumers: Mapping[int, Sequence[int]] = {}
    returned: Collection[int] | None = None
    handed_on: Collection[int] = ()

    def tangent_name(self, index: int, consumer: int) -> str:
        """Return the name of the gradient of an output that a consumer gives."""
        is_one = len(self.consumers[index]) == 1
        return tangent(index) if is_one else tangent_part(index, consumer)

    def tangent_parts(self) -> dict[str, list[str]]:
        """Return what gradients are the sum of, where there are several parts."""
        return {
            tangent(index): [self.tangent_name(index, c) for c in consumers]
            for index, consumers in self.consumers.items()
            if len(consumers) > 1
        }


class Forwarded(NamedTuple):
    """Hold what the forward of one microbatch gives.

    Attributes:
        outputs: Output index → tensor, of those that are returned.
        received: Input index → tensor, of those that are handed on.
        live: What the backward of this microbatch will read.
        updates: Buffer role → new value.
    """

    outputs: dict[int, Tensor]
    received: dict[int, Tensor]
    live: Values
    updates: Values


class StagePrograms:
    """Hold the programs of a stage: forward, inference, and the backwards.

    Args:
        joint: Joint graph of the stage.
        output_shardings: Sharding of each output.
        input_shardings: Sharding of each tensor input; gradients get the same.
        fixed_shardings: Role → sharding of parameters and buffers; gradient sums
            and new buffers get the same.
        borders: What the programs receive and send themselves.
        remat: Which forward values are computed again in the backward.
        constraints: How values lie while programs run, None to leave that to XLA.
        grouping: Which gradients are summed up per group of rows, None for none;
            `reduce_sums` adds up the groups.

    Attributes:
        reduced_per_microbatch: Role of a parameter → why its gradient is reduced in
            every microbatch, although rows are in groups.
        extra_bytes: What the last forward or backward takes on a device beside its
            arguments, zero if that is not known.
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
        constraints: Constraints | None = None,
        grouping: Grouping | None = None,
    ) -> None:
        borders = borders or Borders()
        self.reduced_per_microbatch: dict[str, str] = {}
        self.extra_bytes = 0
        self._groups: dict[str, int] = {}
        if grouping is not None:
            self.reduced_per_microbatch = group_gradients(joint, grouping)
            grouped = joint.parameter_grads.keys() - self.reduced_per_microbatch
            self._groups = dict.fromkeys(sorted(grouped), grouping.rows.size)
        functions = partition_joint(joint, remat)
        self._functions = functions
        self.output_template = joint.output_template
        self._constants = Constants(joint.constants)
        self._grad_pins = {
            role: fixed_shardings[role] for role in functions.parameter_grads
        }
        sum_pins = dict(self._grad_pins)
        if grouping is not None:
            sum_pins |= {role: grouping.sums[role] for role in self._groups}
        pins = _pins(
            functions, output_shardings, input_shardings, fixed_shardings, sum_pins
        )
        inputs = [input_role(i) for i in range(len(input_shardings))]
        parts = borders.tangent_parts()
        tangents = [tangent(i) for i in range(len(output_shardings))]
        tangents += [part for names in parts.values() for part in names]
        arriving = _borders(borders.inputs, lambda i, _: input_role(i))
        leaving = _borders(borders.outputs, lambda i, _: functions.outputs[i])
        coming_back = _borders(borders.tangents, borders.tangent_name)
        going_back = _borders(borders.grads, lambda i, _: functions.input_grads.get(i))
        # What the caller gets; gradients that are sent are not among it.
        sent = {index for layouts in borders.grads.values() for index in layouts}
        self._input_grads = {
            i: name for i, name in functions.input_grads.items() if i not in sent
        }
        grads = {*self._input_grads.values()}
        sums = {*functions.parameter_grads.values()}
        # A backward of inputs alone receives for the rest of the backward, too.
        # What no backward reads, as the stage is frozen, is received all the same.
        has_first = functions.backward_input is not None or bool(going_back)
        has_first |= functions.backward_weight is None
        donated = [accumulator(role) for role in functions.parameter_grads]
        self._backward_weight = _program(
            functions.backward_weight,
            pins,
            tangents,
            donated=donated,
            received=() if has_first else coming_back,
            parts={} if has_first else parts,
            constraints=constraints,
        )
        self._backward_input = _program(
            functions.backward_input,
            pins,
            tangents,
            received=coming_back if has_first else (),
            sent=going_back,
            parts=parts,
            wanted=grads | _reads(self._backward_weight),
            constraints=constraints,
        )
        self._backward = _program(
            functions.backward,
            pins,
            tangents,
            donated=donated,
            received=coming_back,
            sent=going_back,
            parts=parts,
            wanted=grads | sums,
            constraints=constraints,
        )
        kept = _reads(self._backward) | _reads(self._backward_input)
        first = self._backward_input
        made = set() if first is None else set(first.outputs)
        kept |= _reads(self._backward_weight) - made
        kept |= {n for n in self._input_grads.values() if n is not None}
        self._kept = {name for name in kept if not is_route(name)}
        returned = borders.returned
        self._outputs = {
            index: name
            for index, name in enumerate(functions.outputs)
            if returned is None or index in returned
        }
        self._handed_on = {index: input_role(index) for index in borders.handed_on}
        results = {*self._outputs.values(), *self._handed_on.values()}
        results |= set(functions.buffer_updates.values())
        self._forward = Program(
            functions.forward,
            pins,
            inputs,
            received=arriving,
            sent=leaving,
            wanted=results | kept,
            constraints=constraints,
        )
        self._inference = Program(
            functions.inference,
            pins,
            inputs,
            received=arriving,
            sent=leaving,
            wanted=results,
            constraints=constraints,
        )
        self._sum_pins = {accumulator(r): pin for r, pin in sum_pins.items()}
        self._starts: dict[tuple[str, ...], Program] = {}
        self._ends: dict[tuple[str, ...], Program] = {}

    @property
    def compiled(self) -> dict[str, Program]:
        """Return the programs that have run so far, by what they do."""
        programs = {
            "forward": self._forward,
            "inference": self._inference,
            "backward": self._backward,
            "backward input": self._backward_input,
            "backward weight": self._backward_weight,
            # The last one that was made is as good as the others.
            "gradient reduction": next(reversed(self._ends.values()), None),
        }
        return {n: p for n, p in programs.items() if p is not None and p.is_compiled}

    @property
    def has_backward(self) -> bool:
        """Return whether there is any gradient to compute."""
        return self._functions.backward is not None or bool(self._functions.input_grads)

    def forward(
        self, fixed: Mapping[str, Tensor], live: Values, seed: int
    ) -> Forwarded:
        """Enqueue the forward of one microbatch and keep what its backward reads.

        Args:
            fixed: The stage's values.
            live: `input:` entries, and routes where there are borders.
            seed: Seed of the microbatch's random numbers.
        """
        return self._run_forward(self._forward, fixed, live, seed, is_kept=True)

    def inference(
        self, fixed: Mapping[str, Tensor], live: Values, seed: int
    ) -> Forwarded:
        """Enqueue the forward of one microbatch that has no backward."""
        return self._run_forward(self._inference, fixed, live, seed, is_kept=False)

    def start_sums(
        self, fixed: Mapping[str, Tensor], grads: Mapping[str, Tensor]
    ) -> Values:
        """Enqueue the making of a step's first gradient sums.

        Args:
            fixed: The stage's values.
            grads: Role → gradient that a parameter has already, laid out like it.

        Returns:
            A `sum:` entry for each parameter that gets a gradient.
        """
        roles = self._functions.parameter_grads
        is_single = {role for role in roles if role not in self._groups}
        given = tuple(role for role in roles if role in grads and role in is_single)
        if not roles:
            return {}
        if given not in self._starts:
            parameters = {role: fixed[role] for role in roles}
            function = starting_sums(parameters, given, self._groups)
            self._starts[given] = Program(function, self._sum_pins, function.inputs)
        return self._starts[given]({given_grad(role): grads[role] for role in given})

    @property
    def has_groups(self) -> bool:
        """Return whether sums are kept per group of rows, so must be added up."""
        return bool(self._groups)

    def reduce_sums(
        self, sums: Mapping[str, Tensor], grads: Mapping[str, Tensor]
    ) -> Values:
        """Enqueue the adding up of sums per group, at the end of a step.

        Args:
            sums: `sum:` entries; those per group are void afterwards.
            grads: Role → gradient that a parameter has already, laid out like it.

        Returns:
            The `sum:` entries that were per group, laid out like their parameters.
        """
        if not self._groups or not sums:
            return {}
        given = tuple(role for role in self._groups if role in grads)
        if given not in self._ends:
            self._ends[given] = Program(
                reduced_sums(self._groups, given),
                {accumulated(role): pin for role, pin in self._grad_pins.items()},
                [given_grad(role) for role in given],
                donated=[accumulator(role) for role in self._groups],
            )
        values = {**sums, **{given_grad(role): grads[role] for role in given}}
        results = self._ends[given](values)
        return {accumulator(role): results[accumulated(role)] for role in self._groups}

    def backward(
        self, fixed: Mapping[str, Tensor], live: Values
    ) -> tuple[dict[int, Tensor | None], Values]:
        """Enqueue the full backward of one microbatch.

        Args:
            fixed: The stage's values, with `sum:` entries for gradients so far, which
                are void afterwards.
            live: What `forward` kept, with `tangent:` entries added.

        Returns:
            Input index → gradient (None for zero) of those that the program does not
            send, and the new `sum:` entries.
        """
        results = self._run(self._backward, fixed, live)
        return self._returned_grads({**live, **results}), self._sums(results)

    def backward_input(
        self, fixed: Mapping[str, Tensor], live: Values
    ) -> tuple[dict[int, Tensor | None], Values]:
        """Enqueue the part of the backward that gives the gradients of inputs.

        Returns:
            Input index → gradient, and what `backward_weight` needs as `live`.
        """
        results = self._run(self._backward_input, fixed, live)
        everything = {**live, **results}
        reads = _reads(self._backward_weight)
        residual = {n: v for n, v in everything.items() if n in reads}
        return self._returned_grads(everything), residual

    def backward_weight(self, fixed: Mapping[str, Tensor], live: Values) -> Values:
        """Enqueue the rest of the backward; return the new `sum:` entries.

        The `sum:` entries of `fixed` are void afterwards.
        """
        return self._sums(self._run(self._backward_weight, fixed, live))

    def _run_forward(
        self,
        program: Program,
        fixed: Mapping[str, Tensor],
        live: Values,
        seed: int,
        *,
        is_kept: bool,
    ) -> Forwarded:
        values = {**fixed, **self._constants.values(), **live}
        results = program(values, seed)
        self.extra_bytes = program.extra_bytes
        everything = {**values, **results}
        kept = {**live, **results} if is_kept else {}
        return Forwarded(
            outputs={i: everything[n] for i, n in self._outputs.items()},
            received={i: everything[n] for i, n in self._handed_on.items()},
            live={name: value for name, value in kept.items() if name in self._kept},
            updates={
                role: results[name]
                for role, name in self._functions.buffer_updates.items()
            },
        )

    def _run(
        self, program: Program | None, fixed: Mapping[str, Tensor], live: Values
    ) -> Values:
        self.extra_bytes = 0
        if program is None:
            return {}
        results = program({**fixed, **self._constants.values(), **live})
        self.extra_bytes = program.extra_bytes
        return results

    def _returned_grads(self, values: Values) -> dict[int, Tensor | None]:
        return {
            index: None if name is None else values[name]
            for index, name in self._input_grads.items()
        }

    def _sums(self, results: Values) -> Values:
        return {
            accumulator(role): results[name]
            for role, name in self._functions.parameter_grads.items()
            if name in results
        }


def _borders(
    messages: Mapping[int, Layouts], name_of: Callable[[int, int], str | None]
) -> list[Border]:
    """Return the borders of messages; `name_of` takes an index and a stage."""
    return [
        Border(
            stage,
            tuple(name_of(index, stage) for index in layouts),
            tuple(layouts.values()),
        )
        for stage, layouts in messages.items()
    ]


def _program(
    function: Function | None,
    pins: Mapping[str, xla_compat.OpSharding],
    checked: Sequence[str],
    *,
    donated: Sequence[str] = (),
    received: Sequence[Border],
    parts: Mapping[str, Sequence[str]],
    sent: Sequence[Border] = (),
    wanted: set[str | None] | None = None,
    constraints: Constraints | None,
) -> Program | None:
    """Make a program unless there is nothing for it to do."""
    has_passing = not {*border.names_of(received), *parts}.isdisjoint(wanted or ())
    if function is None and not sent and not received and not has_passing:
        return None
    return Program(
        function or nothing("backward"),
        pins,
        checked,
        donated=donated,
        received=received,
        sent=sent,
        parts=parts,
        wanted=None if wanted is None else {n for n in wanted if n is not None},
        constraints=constraints,
    )


def _reads(program: Program | None) -> set[str]:
    return set() if program is None else set(program.inputs)


def _pins(
    functions: StageFunctions,
    output_shardings: Sequence[xla_compat.OpSharding],
    input_shardings: Sequence[xla_compat.OpSharding],
    fixed_shardings: Mapping[str, xla_compat.OpSharding],
    sum_shardings: Mapping[str, xla_compat.OpSharding],
) -> dict[str, xla_compat.OpSharding]:
    """Return the sharding of every output that crosses the stage's border."""
    pins = dict(zip(functions.outputs, output_shardings, strict=True))
    for index, name in functions.input_grads.items():
        if name is not None:
            pins[name] = input_shardings[index]
    for role, name in functions.parameter_grads.items():
        pins[name] = sum_shardings[role]
    for role, name in functions.buffer_updates.items():
        pins[name] = fixed_shardings[role]
    return pins
