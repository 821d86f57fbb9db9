"""The inputs and outputs of a stage in one kind of step.

A stage waits for the *offers* of earlier stages, which describe their outputs, plans
its own kind of step from them, and makes an offer to later ones. Planning is pure:
offers and arguments in, a frozen plan out.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from torch_xla_pp.errors import StageShapeError
from torch_xla_pp.graph import Template
from torch_xla_pp.mesh import RankLayout, TensorSpec, Tiling
from torch_xla_pp.plan.consumers import Consumers, Value
from torch_xla_pp.plan.step_kind import Arguments
from torch_xla_pp.plan.wiring import Wiring

Tilings = Mapping[int, Mapping[Value, Tiling]]
"""Stage → tilings of its inputs and outputs over its rank's devices."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Offer:
    """The outputs that a stage makes for every microbatch.

    Args:
        output: The structure of its output.
        values: The tensors of the output, with partitions over the stage's own rank.
        rows: Size of the batch dimension of a microbatch.
        num_random: Number of random operations of the stages up to this one.
    """

    output: Template
    values: tuple[TensorSpec, ...]
    rows: int
    num_random: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class StagePlan:
    """The inputs of a stage in one kind of step.

    Args:
        stage: Index of the stage.
        num_microbatches: Microbatches per step.
        rows: Rows of a microbatch.
        arguments: Structure of the arguments from other stages.
        values: Their values, by slot of `arguments`.
        received: Specs of these values.
        parameters: Names of the keyword arguments that the schedule may pass in, None
            for any.
        consumers: How the values of each producer reach their consumers.
        random_before: Number of random operations of earlier stages.
        given: Tensors that the schedule passes in.
        given_arguments: Description of the arguments that the schedule must pass in.
    """

    stage: int
    num_microbatches: int
    rows: int
    arguments: Template
    values: tuple[Value, ...]
    received: tuple[TensorSpec, ...]
    parameters: frozenset[str] | None
    consumers: Mapping[int, Consumers]
    random_before: int
    given: tuple[TensorSpec, ...]
    given_arguments: Arguments

    @property
    def inputs(self) -> tuple[TensorSpec, ...]:
        """Return all tensor inputs, received ones first."""
        return self.received + self.given

    @property
    def is_given(self) -> bool:
        """Return whether the schedule passes in any argument."""
        return bool(self.given_arguments.template.leaves)

    def held(self, outputs: Sequence[TensorSpec]) -> dict[Value, TensorSpec]:
        """Return the values that the stage takes from others and makes."""
        made = {Value(self.stage, slot): spec for slot, spec in enumerate(outputs)}
        return {**dict(zip(self.values, self.received, strict=True)), **made}

    def is_like(self, other: "StagePlan") -> bool:
        """Return whether the same programs can run another kind of step."""
        return replace(self, random_before=other.random_before) == other

    def takes(self, name: str) -> bool:
        """Return whether the schedule may pass in a keyword argument."""
        return self.parameters is None or name in self.parameters


@dataclass(frozen=True, kw_only=True, slots=True)
class StagePlanner:
    """The facts about a stage, known before the first step, that determine its plans.

    Args:
        stage: Index of the stage.
        layout: How values are partitioned over its rank's devices.
        free_parameters: Takes the number of positional arguments and the names of
            keyword arguments that come from other stages; returns the names of those
            that the schedule may pass in, None for any.
        expected_inputs: Texts of the positional inputs that the stage requires, None
            for any.
        autocast: The dtype of autocast, None where it is off.
    """

    stage: int
    layout: RankLayout
    free_parameters: Callable[[int, Sequence[str]], frozenset[str] | None]
    expected_inputs: tuple[str, ...] | None = None
    autocast: torch.dtype | None = None

    def needed(self, wiring: Wiring) -> list[int]:
        """Return the stages whose offers a plan is made from.

        The offer of the previous stage has the counts that go from stage to stage.
        """
        previous = {self.stage - 1} if self.stage else set()
        return sorted(previous.union(wiring.producers(self.stage)))

    def plan(
        self,
        wiring: Wiring,
        offers: Mapping[int, Offer],
        num_microbatches: int,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
    ) -> StagePlan:
        """Return the plan of the stage in a kind of step.

        Args:
            wiring: The inputs of each stage from others.
            offers: The offers of the stages that are `needed`.
            num_microbatches: Microbatches of a step.
            args: Positional arguments that the schedule passes in for a microbatch.
            kwargs: Keyword arguments for all stages of the rank.

        Raises:
            StageShapeError: The stage cannot take the outputs of the others.
            ValueError: The schedule's arguments do not fit.
        """
        templates = {p: offers[p].output for p in wiring.producers(self.stage)}
        arguments, values = wiring.arguments(self.stage, templates)
        taken_args, taken_kwargs = arguments.fill([None] * arguments.num_slots)
        parameters = self.free_parameters(len(taken_args), list(taken_kwargs))
        own = {k: v for k, v in kwargs.items() if parameters is None or k in parameters}
        given_arguments, outside = Arguments.of(args, own)
        check_no_grad(self.stage, outside)
        previous = offers.get(self.stage - 1)
        rows = _first_rows(outside) if previous is None else previous.rows
        self.layout.check_batch(rows)
        received = self._arriving(
            [offers[v.stage].values[v.slot] for v in values], rows
        )
        given = tuple(self._given_spec(value, rows) for value in outside)
        if not own:
            self._check_inputs(tuple(templates), received + given)
        return StagePlan(
            stage=self.stage,
            num_microbatches=num_microbatches,
            rows=rows,
            arguments=arguments,
            values=tuple(values),
            received=received,
            parameters=parameters,
            consumers={
                p: wiring.consumers_of_values(p, output)
                for p, output in templates.items()
            },
            random_before=0 if previous is None else previous.num_random,
            given=given,
            given_arguments=given_arguments,
        )

    def _arriving(
        self, offered: Sequence[TensorSpec], rows: int
    ) -> tuple[TensorSpec, ...]:
        """Return the partitions of offered values here, by this rank's rules.

        With the sender's mesh and rules they arrive sharded as they were sent.
        """
        faults = self.layout.constraint_faults(
            (spec.axes, spec.shape) for spec in offered if spec.axes is not None
        )
        if faults:
            raise ValueError(
                f"stage {self.stage}: expected a mesh and axis rules that fit what it "
                "takes from other stages, got:\n  " + "\n  ".join(faults) + "\nAdd the "
                "names to AxisRules.axes on this rank, or change its mesh."
            )
        partition_of = self.layout.partition_of
        return tuple(
            replace(spec, partition=partition_of(spec.axes, spec.shape, rows))
            for spec in offered
        )

    def _given_spec(self, value: Tensor, rows: int) -> TensorSpec:
        partition = self.layout.batch_partition(tuple(value.shape), rows)
        return TensorSpec.of(value, partition, False)

    def _check_inputs(
        self, producers: Sequence[int], inputs: Sequence[TensorSpec]
    ) -> None:
        if self.expected_inputs is not None:
            source = names_of_stages(producers) if producers else "the batch"
            own = cast_inputs(self.expected_inputs, inputs, self.autocast)
            check_fits(self.stage, source, inputs, own)


def cast_inputs(
    own: Sequence[str], offered: Sequence[TensorSpec], autocast: torch.dtype | None
) -> list[str]:
    """Return what a stage expects where autocast has changed what it is offered.

    Args:
        own: The inputs that the stage expects without autocast, as texts.
        offered: The offered values.
        autocast: The dtype of autocast, None where it is off.
    """
    if len(own) != len(offered):
        return list(own)
    return [
        str(spec)
        if spec.dtype == autocast and text == str(replace(spec, dtype=torch.float32))
        else text
        for text, spec in zip(own, offered, strict=True)
    ]


def check_no_grad(stage: int, values: Sequence[Tensor]) -> None:
    """Refuse arguments of a step that need a gradient.

    Args:
        stage: The stage that takes them.
        values: The tensors among them.

    Raises:
        ValueError: One does.
    """
    if any(value.requires_grad for value in values):
        raise ValueError(
            f"stage {stage}: expected inputs that need no gradient, got one with "
            "requires_grad=True. Detach it; gradients of a pipeline's inputs are not "
            "computed."
        )


def check_fits(
    stage: int, source: str, offered: Sequence[TensorSpec], own: Sequence[str]
) -> None:
    """Refuse values that differ from the inputs that a stage declares.

    Args:
        stage: The stage that takes them.
        source: Name of the stage that offers them.
        offered: The offered values.
        own: The inputs that the stage expects, as texts of `TensorSpec`.

    Raises:
        StageShapeError: Some differ; all of them are named.
    """
    got = [str(spec) for spec in offered]
    if got == list(own):
        return
    raise StageShapeError(
        f"stage {stage}: expected inputs {', '.join(own)}, got {', '.join(got)} from "
        f"{source}. Make shapes and dtypes equal: check the batch size, the number of "
        "microbatches, the model's split, and autocast on all ranks."
    )


def check_kwargs(kwargs: Mapping[str, Any], plans: Sequence[StagePlan]) -> None:
    """Refuse keyword arguments that no stage of the rank takes."""
    unknown = [name for name in kwargs if not any(plan.takes(name) for plan in plans)]
    if unknown:
        stages = names_of_stages([plan.stage for plan in plans])
        raise ValueError(
            f"step: expected keyword arguments that {stages} of this rank takes, got "
            f"{', '.join(unknown)}. Pass them on the rank of the stage that takes them."
        )


def names_of_stages(stages: Sequence[int]) -> str:
    """Return e.g. "stages 0, 2"."""
    return f"stage{'s' * (len(stages) > 1)} {', '.join(map(str, stages))}"


def describe_all(values: Sequence[Tensor]) -> tuple[str, ...]:
    """Return the texts that specs of `values` have."""
    return tuple(str(TensorSpec.of(x, (None,) * x.dim(), False)) for x in values)


def _first_rows(values: Sequence[Tensor]) -> int:
    """Return the rows of a microbatch, by its first tensor."""
    return values[0].shape[0] if values and values[0].dim() else 1
