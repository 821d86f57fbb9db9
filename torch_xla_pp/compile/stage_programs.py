"""The compiled programs of one stage for one signature of its inputs.

Values are kept by name, see `compile.names`. `fixed` values belong to the stage:
parameters, buffers, constants and gradient sums. `live` values belong to one microbatch
and die with its backward.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from torch import Tensor

from torch_xla_pp import xla_compat
from torch_xla_pp.compile.group_sums.group_gradients import Grouping, group_gradients
from torch_xla_pp.compile.joint_graph import JointGraph
from torch_xla_pp.compile.lowering import LoweringRule
from torch_xla_pp.compile.names import accumulator
from torch_xla_pp.compile.partition import Remat, partition_joint
from torch_xla_pp.compile.program import Constants, Program
from torch_xla_pp.compile.stage_specs import (
    Borders,
    ProgramName,
    pins_of,
    stage_specs,
)

Values = dict[str, Tensor]


class Forwarded(NamedTuple):
    """The results of the forward of one microbatch.

    Attributes:
        outputs: Output index → tensor, of those that are returned.
        received: Name → received input, of those that are passed on.
        live: What the backward of this microbatch will read.
        updates: Buffer role → new value.
    """

    outputs: dict[int, Tensor]
    received: dict[str, Tensor]
    live: Values
    updates: Values


class SummedGrads(NamedTuple):
    """The gradients of parameters that the backwards of a stage sum up.

    Attributes:
        grads: Role → sharding of the gradient.
        sums: Role → sharding of the sum that backwards add to.
        groups: Role → number of groups of rows, of those with a sum for each.
    """

    grads: Mapping[str, xla_compat.OpSharding]
    sums: Mapping[str, xla_compat.OpSharding]
    groups: Mapping[str, int]


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
        used: Role → sharding of a value where it is used, if not as it is kept.
        grouping: Which gradients are summed up per group of rows, None for none.

    Attributes:
        summed: The gradients that backwards sum up.
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
        rules: Sequence[LoweringRule] = (),
        used: Mapping[str, xla_compat.OpSharding] | None = None,
        grouping: Grouping | None = None,
    ) -> None:
        self.reduced_per_microbatch: dict[str, str] = {}
        self.extra_bytes = 0
        groups: dict[str, int] = {}
        if grouping is not None:
            self.reduced_per_microbatch = group_gradients(joint, grouping)
            grouped = joint.parameter_grads.keys() - self.reduced_per_microbatch
            groups = dict.fromkeys(sorted(grouped), grouping.rows.size)
        functions = partition_joint(joint, remat)
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
        count = len(input_shardings)
        specs = stage_specs(functions, borders or Borders(), pins, count, rules, used)
        self._specs = specs
        self._programs = {name: Program(spec) for name, spec in specs.programs.items()}

    @property
    def compiled(self) -> dict[str, Program]:
        """Return the programs that have run so far, by what they do."""
        return {name: p for name, p in self._programs.items() if p.is_compiled}

    @property
    def has_backward(self) -> bool:
        """Return whether there is any gradient to compute."""
        return self._functions.backward is not None or bool(self._functions.input_grads)

    def forward(
        self, fixed: Mapping[str, Tensor], live: Values, seed: int
    ) -> Forwarded:
        """Enqueue the forward of one microbatch, and return what its backward reads.

        Args:
            fixed: The stage's values.
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
            fixed: The stage's values, with `sum:` entries for gradients so far, which
                are void afterwards.
            live: What `forward` kept, with `tangent:` entries added.

        Returns:
            Input index → gradient (None for zero) of those that the program does not
            send, and the new `sum:` entries.
        """
        results = self._run("backward", fixed, live)
        return self._returned_grads({**live, **results}), self._sums(results)

    def backward_input(
        self, fixed: Mapping[str, Tensor], live: Values
    ) -> tuple[dict[int, Tensor | None], Values]:
        """Enqueue the part of the backward that gives the gradients of inputs.

        Returns:
            Input index → gradient, and what `backward_weight` needs as `live`.
        """
        results = self._run("backward input", fixed, live)
        everything = {**live, **results}
        reads = self._specs.residual
        residual = {n: v for n, v in everything.items() if n in reads}
        return self._returned_grads(everything), residual

    def backward_weight(self, fixed: Mapping[str, Tensor], live: Values) -> Values:
        """Enqueue the rest of the backward; return the new `sum:` entries.

        The `sum:` entries of `fixed` are void afterwards.
        """
        return self._sums(self._run("backward weight", fixed, live))

    def _run_forward(
        self,
        name: ProgramName,
        fixed: Mapping[str, Tensor],
        live: Values,
        seed: int,
    ) -> Forwarded:
        program, specs = self._programs[name], self._specs
        values = {**fixed, **self._constants.values(), **live}
        results = program(values, seed)
        self.extra_bytes = program.extra_bytes
        everything = {**values, **results}
        kept = {**live, **results} if name == "forward" else {}
        return Forwarded(
            outputs={i: everything[n] for i, n in specs.outputs.items()},
            received={name: everything[name] for name in specs.passed_on},
            live={n: value for n, value in kept.items() if n in specs.kept},
            updates={
                role: results[name]
                for role, name in self._functions.buffer_updates.items()
            },
        )

    def _run(
        self, name: ProgramName, fixed: Mapping[str, Tensor], live: Values
    ) -> Values:
        self.extra_bytes = 0
        program = self._programs.get(name)
        if program is None:
            return {}
        results = program({**fixed, **self._constants.values(), **live})
        self.extra_bytes = program.extra_bytes
        return results

    def _returned_grads(self, values: Values) -> dict[int, Tensor | None]:
        return {
            index: None if name is None else values[name]
            for index, name in self._specs.input_grads.items()
        }

    def _sums(self, results: Values) -> Values:
        return {
            accumulator(role): results[name]
            for role, name in self._functions.parameter_grads.items()
            if name in results
        }
