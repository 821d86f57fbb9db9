"""What goes into a stage and comes out of it, agreed on with the other stages.

A stage waits for the *offers* of earlier stages, which say what these make, plans its
own kind of step by them, and makes an offer to later ones.
"""

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from torch_xla_pp.compile import Remat
from torch_xla_pp.graph import Template
from torch_xla_pp.mesh import TensorSpec
from torch_xla_pp.plan import Wiring
from torch_xla_pp.runtime import handshake
from torch_xla_pp.runtime.handshake import Offer
from torch_xla_pp.runtime.plan import (
    Signature,
    StagePlan,
    Variant,
    describe_all,
    spec_of,
)
from torch_xla_pp.runtime.world import World
from torch_xla_pp.transport import Rendezvous


class StagePlanning:
    """Plan the kinds of steps of one stage.

    Args:
        stage: Index of the stage.
        module: Its module.
        world: The devices of this rank.
        rendezvous: What the ranks agree by.
        remat: Which forward values the backward computes again.
        expected_inputs: What the positional inputs must look like, None if anything
            goes.
        expected_outputs: What the outputs must look like, likewise.
    """

    def __init__(
        self,
        stage: int,
        module: nn.Module,
        world: World,
        rendezvous: Rendezvous,
        remat: Remat,
        expected_inputs: Sequence[Tensor] | None,
        expected_outputs: Sequence[Tensor] | None,
    ) -> None:
        self._stage = stage
        self._module = module
        self._world = world
        self._rendezvous = rendezvous
        self._remat = remat
        self._expected_inputs = expected_inputs
        self._expected_outputs = expected_outputs

    def plan(
        self,
        key: str,
        wiring: Wiring,
        num_microbatches: int,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
    ) -> StagePlan:
        """Find out what goes into the stage; waits for the offers of earlier ones.

        Args:
            key: Name of the kind of step, equal on all ranks.
            wiring: What each stage takes from others.
            num_microbatches: Microbatches of a step.
            args: Positional arguments that the schedule passes in for a microbatch.
            kwargs: Keyword arguments for all stages of the rank.

        Raises:
            StageShapeError: The stage cannot take what the others make.
            ValueError: The schedule's arguments do not fit.
        """
        offers = self._offers(key, wiring)
        templates = {p: offers[p].output for p in wiring.producers(self._stage)}
        arguments, values = wiring.arguments(self._stage, templates)
        parameters = _free_parameters(self._module, arguments)
        own = {k: v for k, v in kwargs.items() if parameters is None or k in parameters}
        signature, outside = Signature.of(args, own)
        previous = offers.get(self._stage - 1)
        rows = _first_rows(outside) if previous is None else previous.rows
        self._world.check_batch(rows)
        received = self._arriving(
            [offers[v.stage].values[v.slot] for v in values], rows
        )
        given = tuple(self._given_spec(value, rows) for value in outside)
        if not own:
            self._check_inputs(tuple(templates), received + given)
        return StagePlan(
            stage=self._stage,
            num_microbatches=num_microbatches,
            rows=rows,
            arguments=arguments,
            values=tuple(values),
            received=received,
            parameters=parameters,
            fans={p: wiring.fan(p, output) for p, output in templates.items()},
            random_before=0 if previous is None else previous.num_random,
            remat=self._remat,
            given=given,
            signature=signature,
            is_last=self._stage == len(wiring.ranks) - 1,
            expected_outputs=self._expected_outputs,
        )

    def offer(self, key: str, plan: StagePlan, variant: Variant) -> None:
        """Tell later stages what this one makes."""
        offer = Offer(
            output=variant.programs.output_template,
            values=variant.outputs,
            rows=plan.rows,
            num_random=plan.random_before + variant.num_random,
        )
        handshake.offer(self._rendezvous, key, self._stage, offer)

    def _offers(self, key: str, wiring: Wiring) -> dict[int, Offer]:
        """Wait for the offers of the stages whose values this one takes.

        The offer of the previous stage tells what is counted from stage to stage.
        """
        needed = set(wiring.producers(self._stage))
        needed |= {self._stage - 1} if self._stage else set()
        return {
            stage: handshake.await_offer(
                self._rendezvous, key, stage, wiring.ranks[stage]
            )
            for stage in sorted(needed)
        }

    def _arriving(
        self, offered: Sequence[TensorSpec], rows: int
    ) -> tuple[TensorSpec, ...]:
        """Return how offered values are to lie here, by this rank's mesh and rules.

        With the sender's mesh and rules that is as they leave.
        """
        faults = self._world.constraint_faults(
            (spec.axes, spec.shape) for spec in offered if spec.axes is not None
        )
        if faults:
            raise ValueError(
                f"stage {self._stage}: expected a mesh and axis rules that fit what it "
                "takes from other stages, got:\n  " + "\n  ".join(faults) + "\nAdd the "
                "names to AxisRules.axes on this rank, or change its mesh."
            )
        layout_of = self._world.layout_of
        return tuple(
            replace(spec, partition=layout_of(spec.axes, spec.shape, rows))
            for spec in offered
        )

    def _given_spec(self, value: Tensor, rows: int) -> TensorSpec:
        if value.requires_grad:
            raise ValueError(
                f"stage {self._stage}: expected inputs that need no gradient, "
                "got one with requires_grad=True. Detach it; gradients of a "
                "pipeline's inputs are not computed."
            )
        partition = self._world.batch_partition(tuple(value.shape), rows)
        return spec_of(value, partition, False)

    def _check_inputs(
        self, producers: Sequence[int], inputs: Sequence[TensorSpec]
    ) -> None:
        if self._expected_inputs is not None:
            source = names_of_stages(producers) if producers else "the batch"
            expected = describe_all(self._expected_inputs)
            handshake.check_fits(self._stage, source, inputs, expected)


def _first_rows(values: Sequence[Tensor]) -> int:
    """Return the rows of a microbatch, by its first tensor."""
    return values[0].shape[0] if values and values[0].dim() else 1


def names_of_stages(stages: Sequence[int]) -> str:
    """Return e.g. "stages 0, 2"."""
    return f"stage{'s' * (len(stages) > 1)} {', '.join(map(str, stages))}"


def _free_parameters(module: nn.Module, taken: Template) -> frozenset[str] | None:
    """Return the parameters of a module's forward that no other stage fills.

    Args:
        module: The module of a stage.
        taken: The arguments that other stages give.

    Returns:
        Their names, None if the module takes any.
    """
    args, kwargs = taken.fill([None] * taken.num_slots)
    parameters = list(inspect.signature(module.forward).parameters.values())
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return None
    return frozenset(p.name for p in parameters[len(args) :]) - set(kwargs)
