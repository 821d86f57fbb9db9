"""Pipeline stages that run as compiled XLA programs under torch's own schedules.

A schedule calls `forward_one_chunk`, `backward_one_chunk` and
`backward_weight_one_chunk` in its order; each call enqueues one program, which begins
by receiving what it needs and ends by sending what others need. With the host
transport, and between stages of one rank, the call itself does both.

Law: gradients are scaled once. The derivative of the loss is divided by the number of
microbatches before it enters the last stage's backward.
"""

import contextlib
import hashlib
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor, nn

from torch_xla_pp import xla_compat
from torch_xla_pp.compile import Remat, StagePrograms, check_remat, tangent
from torch_xla_pp.dump import dump
from torch_xla_pp.errors import PipelineError, StageShapeError
from torch_xla_pp.graph import Template, follow_mode
from torch_xla_pp.mesh import (
    AxisRules,
    LogicalAxes,
    Sharding,
    TensorSpec,
    Tiling,
)
from torch_xla_pp.plan import InputsFrom, StageInputs, Value, Wiring
from torch_xla_pp.runtime import handshake
from torch_xla_pp.runtime.captured import Baked, Captured
from torch_xla_pp.runtime.checks import (
    check_batch,
    check_device,
    check_index,
    check_kwargs,
    check_plain_module,
    matched_patterns,
)
from torch_xla_pp.runtime.exchange import Exchange
from torch_xla_pp.runtime.explanation import Explanation, bytes_of, costs_of
from torch_xla_pp.runtime.gradients import StageGradients, combine
from torch_xla_pp.runtime.groups import Groups
from torch_xla_pp.runtime.handshake import Claim, StageClaim
from torch_xla_pp.runtime.links import Ends, Links
from torch_xla_pp.runtime.loss import StageLoss
from torch_xla_pp.runtime.memory import (
    Shelf,
    StageMemory,
    device_bytes,
    optimizer_bytes,
)
from torch_xla_pp.runtime.module_state import ModuleState
from torch_xla_pp.runtime.orders import order_of
from torch_xla_pp.runtime.outlet import Outlet
from torch_xla_pp.runtime.placement import AUTO, BatchAxis, Placement
from torch_xla_pp.runtime.plan import (
    Mode,
    Signature,
    StagePlan,
    Variant,
)
from torch_xla_pp.runtime.planning import StagePlanning
from torch_xla_pp.runtime.recorder import StepRecorder, recorded, shown_as
from torch_xla_pp.runtime.replicas import (
    Replicas,
    agree_on_replicas,
    group_of_replicas,
)
from torch_xla_pp.runtime.shared import (
    SharedParameters,
    check_separate,
    separated,
)
from torch_xla_pp.runtime.silent_stage import SilentStage
from torch_xla_pp.runtime.step_kinds import StepKinds
from torch_xla_pp.runtime.steps_ahead import StepsAhead
from torch_xla_pp.runtime.torch_compat import (
    Schedule,
    batch_of_step,
    calling_schedule,
    drop_outputs,
    grad_scale,
    guard_step,
    local_stages,
    loss_function,
    merge_outputs_as,
    merge_outputs_by,
    merge_spec,
    num_microbatches,
    set_loss_function,
    wants_outputs,
)
from torch_xla_pp.schedule import Action, Kind, verify
from torch_xla_pp.transport import Message, of_group

_MANY_PLANS = 8

_logger = logging.getLogger(__name__)


@dataclass(eq=False, slots=True)
class _Drive:
    """Hold what a stage knows about one schedule that drives it."""

    kinds: StepKinds
    ahead: StepsAhead
    wiring: Wiring
    given_merge_spec: Any
    loss: StageLoss | None = None
    plans: dict[int, StagePlan] = field(default_factory=dict)
    num_variants: int = 0


class XlaPipelineStage(SilentStage):
    """Run one stage of a pipeline as compiled XLA programs.

    Made by `Pipe.build_stage` or as `PipelineStage`. All ranks of `group` must make
    their stages and drive them with equal schedules.

    Args:
        submodule: The stage's module; moved to the device in place.
        stage_index: Index of this stage.
        num_stages: Number of stages of the pipeline.
        device: `xpp.device()`.
        group: Group of the pipeline's ranks, of backend "xla_pp".
        mesh: SPMD mesh of this rank's devices, e.g. `mesh["data", "model"]`.
        sharding: `AxisRules`, or glob pattern on parameter names → mesh axis per
            dimension.
        batch_axis: Mesh axis that splits the batch; "auto" takes what axis rules say of
            "batch", or else the axis called "data" if there is one.
        remat: Which forward values the backward computes again: "none" for those under
            `torch.utils.checkpoint` only, "full" for all, or the ops whose results
            are kept, e.g. `[torch.ops.aten.mm.default]`.
        inputs_from: Which stages make the first arguments, see `InputsFrom`; None for
            the previous stage, whose output's items are taken one by one.
        tied: Parameter name → group, for parameters of which other stages have copies:
            equal groups are one parameter.
        replicas: Group of the ranks that run this stage in each replica of the
            pipeline, e.g. `mesh.get_group("dp")`; None if there is one.
        expected_inputs: What the positional inputs must look like, None if anything
            the module takes is right.
        expected_outputs: What the outputs must look like, likewise.
        whole_model: Name → shape of what all stages have, None if that is not known.
        baked: What the module, which is a trace, has built in; None if it is no trace.

    Raises:
        ValueError: An argument does not fit; raised on every rank in its first step
            at the latest.
    """

    def __init__(
        self,
        submodule: nn.Module,
        stage_index: int,
        num_stages: int,
        device: torch.device,
        group: dist.ProcessGroup | None = None,
        *,
        mesh: Any | None = None,
        sharding: Sharding | None = None,
        batch_axis: BatchAxis = AUTO,
        remat: Remat = "none",
        inputs_from: InputsFrom | None = None,
        tied: Mapping[str, str] | None = None,
        replicas: dist.ProcessGroup | None = None,
        expected_inputs: Sequence[Tensor] | None = None,
        expected_outputs: Sequence[Tensor] | None = None,
        whole_model: Mapping[str, tuple[int, ...]] | None = None,
        baked: Baked | None = None,
    ) -> None:
        self._pg = of_group(group)
        with self._pg.rendezvous.reporting():
            others = group_of_replicas(replicas, self._pg)
        self._groups = Groups(self._pg, others)
        with self._groups.reporting():
            check_plain_module("stage", submodule)
            check_index(stage_index, num_stages)
            activity = self._groups.activity
            activity.stages = tuple(sorted({*activity.stages, stage_index}))
            check_device(device)
            check_remat(remat)
            self._inputs_from = StageInputs.of(stage_index, inputs_from)
            super().__init__(submodule, stage_index, num_stages, device, group)
            rules = sharding if isinstance(sharding, AxisRules) else None
            self._placement = Placement(mesh, batch_axis, rules)
            # Before parameters have a new life on the device.
            self._patterns = matched_patterns(rules, submodule, whole_model)
            mirrors = separated(submodule, tied or {})
            self._state = ModuleState(
                submodule,
                self._placement,
                {} if sharding is None else sharding,
                whole_model,
            )
            self._mirrors = mirrors
            self._exchange = Exchange(self._pg)
            self._shared = SharedParameters(
                stage_index, submodule, tied or {}, self._exchange
            )
            self._replicas = (
                None if others is None else Replicas(stage_index, submodule, others)
            )
        self._gradients = StageGradients(
            state=self._state,
            exchange=self._exchange,
            shared=self._shared,
            replicas=self._replicas,
        )
        self._planning = StagePlanning(
            stage_index,
            submodule,
            self._placement,
            self._pg.rendezvous,
            remat,
            expected_inputs,
            expected_outputs,
        )
        self._drives: WeakKeyDictionary[Schedule, _Drive] = WeakKeyDictionary()
        self._schedule: Schedule | None = None
        self._current: StagePlan | None = None
        self._captured = Captured(submodule)
        self._mode = Mode.of(self._captured)
        own = Baked(self._captured, has_hooks=True)
        self._baked = [] if baked is None else [baked, own]
        self._shelf = Shelf()
        self._outlet = Outlet(self._placement, self._shelf)
        self._recorder: StepRecorder | None = None
        self._last_forward = 0
        self._num_done = 0
        self._num_steps = 0

    def peak_memory(self) -> StageMemory:
        """Return what the stage held at most on one device in the last step.

        Optimizers are looked for among all objects of the process, which takes a tenth
        of a second.
        """
        return StageMemory(
            num_live=self._shelf.most_live,
            saved_bytes=self._shelf.most_bytes,
            state_bytes=self._state.num_bytes,
            active_bytes=self._shelf.most_active_bytes,
            optimizer_bytes=optimizer_bytes(self.submod.parameters()),
        )

    def explain(self) -> Explanation:
        """Return what the stage costs on each device; print it to read it.

        Programs are those of the last step, known once it has begun. Their collectives
        and products are counted in what XLA dumps, if `XLA_FLAGS` ask for that.

        Raises:
            PipelineError: No step has begun yet.
        """
        plan = self._plan()
        variant = self._variant(plan)
        mesh = self._placement.local
        programs = {**self._state.programs, **variant.programs.compiled}
        return Explanation(
            stage=self.stage_index,
            num_parameters=sum(p.numel() for p in self.submod.parameters()),
            parameter_bytes=sum(device_bytes([*self._state.fixed.values()])),
            received_bytes=bytes_of(plan.received, mesh),
            sent_bytes=bytes_of(variant.outputs, mesh),
            programs=costs_of(programs, mesh),
            reduced_per_microbatch={
                role.removeprefix("param:"): reason
                for role, reason in variant.programs.reduced_per_microbatch.items()
            },
            moves=tuple(variant.links.moves()),
        )

    @property
    def shelf(self) -> Shelf:
        """Return where microbatches wait for their backward."""
        return self._shelf

    def record(self, recorder: StepRecorder | None) -> None:
        """Let `recorder` note what the stage does from now on, None for nobody."""
        self._recorder = self._exchange.recorder = recorder

    @property
    def num_steps(self) -> int:
        """How many steps the stage has begun; random numbers depend on it.

        Equal on all ranks of a pipeline. To go on where another run was, set it to
        what it was there.
        """
        return self._num_steps

    @num_steps.setter
    def num_steps(self, count: int) -> None:
        self._num_steps = count

    @property
    def tied(self) -> dict[str, str]:
        """Return the group of each parameter that other stages have copies of."""
        return self._shared.groups()

    @property
    def replica(self) -> tuple[int, int]:
        """Return which replica of the pipeline this is, and of how many."""
        found = self._replicas
        return (0, 1) if found is None else (found.index, found.group.size())

    def owned_parameters(self) -> dict[str, nn.Parameter]:
        """Return the parameters by name, without copies that an earlier stage owns.

        Which those are is known once a schedule has begun its first step.
        """
        named = self.submod.named_parameters()
        copies = self._state.copies
        return {name: p for name, p in named if f"param:{name}" not in copies}

    def state_dict(self) -> dict[str, Any]:
        """Return the module's state, without copies that an earlier stage owns.

        The states of all stages together are that of the model, each value once;
        known once a schedule has begun its first step.
        """
        copies = {role.removeprefix("param:") for role in self._state.copies}
        state = self.submod.state_dict()
        return {name: value for name, value in state.items() if name not in copies}

    def sharding_text(
        self, shape: tuple[int, ...], rows: int, logical: LogicalAxes | None = None
    ) -> str:
        """Return how this rank holds an activation, an axis or None per dimension.

        Args:
            shape: Shape of the value.
            rows: Rows of a microbatch.
            logical: What `shard` called its dimensions, None if nothing.
        """
        axes = self._placement.layout_of(logical, shape, rows)
        return f"({', '.join(map(str, axes))})"

    # Called by a schedule at the start of every step.

    def clear_runtime_states(self) -> None:
        """Start a step: bring parameters onto the device, drop leftovers.

        Called from elsewhere than a schedule, it only drops.
        """
        schedule = calling_schedule()
        if schedule is None:
            self._drop_leftovers()
            return
        self._schedule = schedule
        guard_step(schedule, self._reporting)
        self._groups.activity.begin_step(self._num_steps + 1)
        with self._groups.reporting():
            self._groups.check()
        with self._reporting():
            check_batch(batch_of_step(schedule))
            self._drop_leftovers()
            self._num_done = 0
            self._num_steps += 1
            self._current = None
            stages = local_stages(schedule)
            if stages[0] is self:
                is_wanted = wants_outputs(schedule)
                for stage in stages:
                    stage._outlet.is_wanted = is_wanted
                if schedule in self._drives:
                    self._drives[schedule].kinds.begin_step()
                    self._drives[schedule].ahead.begin_step()
            self._exchange.settle()
            for mirror in self._mirrors:
                mirror.follow()
            self._state.begin_step()

    def _drop_leftovers(self) -> None:
        self._shelf.clear()
        self._outlet.clear()
        self.output_chunks.clear()
        self._exchange.forget(self.stage_index)
        if self._replicas is not None:
            self._replicas.forget()

    # Called by a schedule before its first step.

    def _prepare_forward_infra(
        self,
        num_microbatches: int,
        args: tuple[Any, ...],
        kwargs: dict[str, Any] | None = None,
    ) -> tuple[Any, ...]:
        """Agree with the other ranks on the stages and where they are.

        What will be sent is agreed on at the first forward of each kind of step, see
        `_begin_step`: it needs the arguments of all stages.

        Raises:
            PlanError: The ranks do not build one pipeline.
            ScheduleError: The order of actions cannot run, see `schedule.verify`.
        """
        self.chunks = num_microbatches
        schedule = self._driver()
        stages = local_stages(schedule)
        if stages[0] is self:
            with self._reporting():
                self._claim(schedule, stages)
        return ()

    def _claim(self, schedule: Schedule, stages: Sequence[Any]) -> None:
        check_separate({stage.stage_index: stage.submod for stage in stages})
        order = order_of(schedule)
        claim = Claim(
            stages=tuple(stage._claim_of_stage() for stage in stages),
            num_stages=self.num_stages,
            num_microbatches=num_microbatches(schedule),
            schedule=type(schedule).__name__,
            order="" if order is None else order.digest(),
            transport=self._exchange.transport_name,
            replica=self.replica,
        )
        key, wiring = handshake.agree_on_stages(self._pg.rendezvous, claim)
        self._pg.rendezvous.name_ranks(wiring.titles())
        dump("plan.txt", wiring.__str__)
        if order is not None:
            dump("schedule.csv", order.to_csv)
            verify(
                order,
                wiring.edges(),
                placement=dict(enumerate(wiring.ranks)),
                num_microbatches=num_microbatches(schedule),
                carriers=wiring.carriers(),
            )
        agree_on_replicas({s.stage_index: s._replicas for s in stages}, self.num_stages)
        kinds = StepKinds(self._pg.rendezvous, key, wiring.ranks[0])
        kinds.begin_step()
        mine = [stage.stage_index for stage in stages]
        ahead = StepsAhead(
            self._pg,
            key,
            sources=[wiring.ranks[p] for s in mine for p in wiring.producers(s)],
            takers=[wiring.ranks[c] for s in mine for c in wiring.consumers(s)],
        )
        for stage in stages:
            known = stage._drives.get(schedule)
            loss = stage._take_loss(schedule) if known is None else known.loss
            given = merge_spec(schedule) if known is None else known.given_merge_spec
            stage._drives[schedule] = _Drive(kinds, ahead, wiring, given, loss)
            stage._expect_messages(wiring)

    def _claim_of_stage(self) -> StageClaim:
        return StageClaim(
            index=self.stage_index,
            inputs=self._inputs_from,
            shared=self._shared.describe(),
            tilings=self._shared.tilings(),
            patterns=self._patterns,
        )

    def _expect_messages(self, wiring: Wiring) -> None:
        me = self.stage_index
        for producer in wiring.producers(me):
            message = Message("F", me, 0, producer)
            self._exchange.expect(message, wiring.ranks[producer])
        for consumer in wiring.consumers(me):
            message = Message("B", me, 0, consumer)
            self._exchange.expect(message, wiring.ranks[consumer])
        self._shared.connect(wiring)
        self._state.copies = {f"param:{name}" for name in self._shared.copies(wiring)}

    def _take_loss(self, schedule: Schedule) -> StageLoss | None:
        """Let the schedule call this stage for the loss, if it is the last one."""
        function = loss_function(schedule)
        if function is None or not self.is_last:
            return None
        loss = StageLoss(function, self._placement, grad_scale(schedule))

        def compute(output: Any, target: Any) -> Any:
            with self._reporting():
                return self._compute_loss(loss, output, target)

        set_loss_function(schedule, compute)
        return loss

    def _compute_loss(self, loss: StageLoss, output: Any, target: Any) -> Any:
        """Compute the loss of the microbatch whose forward was the last."""
        plan = self._plan()
        variant = self._variant(plan)
        microbatch, specs = self._last_forward, variant.outputs
        if not self.has_backward:
            specs = tuple(replace(spec, requires_grad=False) for spec in specs)
        action = Action(stage=self.stage_index, kind="F", microbatch=microbatch)
        with recorded(self._recorder, action, is_rest=True) as marks:
            value, grads = loss(output, specs, target, plan.rows, marks)
        self._shelf.note_run(loss.extra_bytes)
        if grads is None:
            driver = self._driver()
            return self._outlet.differentiate(variant, microbatch, value, driver)
        self._outlet.put_grads(variant, microbatch, grads)
        return value

    def _begin_step(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Find the plans of this rank's stages for a step, at its first forward.

        All stages of a rank do so at once and in their order, whichever runs first: a
        stage waits for what earlier ones offer. Nothing of a new kind is run before
        all ranks have their plans.
        """
        stages = sorted(local_stages(self._driver()), key=lambda x: x.stage_index)
        drive = self._drives[self._driver()]
        first_args = [args, *[()] * (len(stages) - 1)]
        plans = [
            stage._plan_of_step(own, kwargs)
            for stage, own in zip(stages, first_args, strict=True)
        ]
        check_kwargs(kwargs, plans)
        number = drive.kinds.current()
        if number not in drive.plans:
            own = [s._tilings(p) for s, p in zip(stages, plans, strict=True)]
            for told in self._pg.rendezvous.exchange("ready", own):
                for plan in plans:
                    plan.tilings.update(told)
        for stage, plan in zip(stages, plans, strict=True):
            stage._follow(number, plan)

    def _tilings(self, plan: StagePlan) -> tuple[int, dict[Value, Tiling]]:
        """Return the stage, and how what it takes and makes lies on this rank."""
        held = plan.held(self._variant(plan).outputs)
        layout = self._placement.layout
        return plan.stage, {value: layout(x).tiling for value, x in held.items()}

    def _plan_of_step(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> StagePlan:
        """Return the plan for this step; a new kind of step makes a new one."""
        drive = self._drives[self._driver()]
        if drive.loss is not None:
            drive.loss.begin_step()
        follow_mode(self.submod)
        for baked in self._baked:
            baked.check()
        self._mode = Mode.of(self._captured)
        if self.is_first:
            signature, _ = Signature.of(args, kwargs)
            drive.kinds.announce((signature, self._mode))
        number = drive.kinds.current()
        if number in drive.plans:
            return drive.plans[number]
        return self._agree(f"{drive.kinds.key}/{number}", args, kwargs)

    def _follow(self, number: int, plan: StagePlan) -> None:
        """Take up the plan for a kind of step."""
        drive = self._drives[self._driver()]
        self._current = plan
        if self._variant(plan).lacking and self.has_backward:
            raise PipelineError(
                f"stage {self.stage_index}: its outputs need gradients now, but later "
                "stages were told that they do not. Make a new schedule on every rank "
                "after requires_grad was changed."
            )
        if self.is_last:
            self._choose_merge(self._driver(), drive.given_merge_spec, plan)
        drive.plans[number] = plan
        variants = [known for p in drive.plans.values() for known in p.variants]
        count = len(set(map(id, variants)))
        if count > max(_MANY_PLANS, drive.num_variants):
            _logger.warning(
                "stage %d: programs for %d kinds of steps (shapes, other arguments, "
                "autocast, and training mode, hooks, requires_grad, numbers and all "
                "else that forward reads) are compiled and kept. Each new one costs a "
                "compilation: pad batches to few shapes, and keep what changes often "
                "in buffers.",
                self.stage_index,
                count,
            )
        drive.num_variants = count

    def _choose_merge(self, schedule: Schedule, given: Any, plan: StagePlan) -> None:
        """Let the schedule return the outputs of this step as it is to."""
        if not self._outlet.is_wanted:
            drop_outputs(schedule)
        elif given is not None:
            merge_outputs_by(schedule, given)
        else:
            variant = self._variant(plan)
            shapes = [spec.shape for spec in variant.outputs]
            merge_outputs_as(schedule, variant.programs.output_template, shapes)

    def _agree(
        self, key: str, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> StagePlan:
        """Take the offers of earlier stages, and make one to later ones."""
        count = num_microbatches(self._driver())
        plan = self._planning.plan(key, self._wiring, count, args, kwargs)
        for known in self._drives[self._driver()].plans.values():
            if plan.is_like(known):
                plan.share(known)
                break
        variant = self._variant(plan)
        if not self.is_last:
            self._planning.offer(key, plan, variant)
        return plan

    def _variant(self, plan: StagePlan) -> Variant:
        def link(outputs: tuple[TensorSpec, ...], output: Template) -> Links:
            me = self.stage_index
            fans = {**plan.fans, me: self._wiring.fan(me, output)}
            ends = Ends(me, plan.values, plan.received, outputs, fans, plan.tilings)
            return Links(ends, self._exchange, self._placement)

        return plan.variant(
            self._mode, self._captured, self.submod, self._placement, self._state, link
        )

    # Actions.

    def forward_one_chunk(
        self,
        fwd_chunk_id: int,
        args: tuple[Any, ...],
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Receive, enqueue the forward of one microbatch, and send.

        Returns:
            The output of the last stage, None of others. Its tensors are leaves that a
            loss may be computed from, and empty when the compiled one has been.
        """
        with self._action("F", fwd_chunk_id) as marks:
            if self._current is None:
                self._begin_step(args, kwargs or {})
            plan = self._plan()
            variant = self._variant(plan)
            self._last_forward = fwd_chunk_id
            live = self._given_inputs(plan, fwd_chunk_id, args, kwargs or {})
            live |= {**variant.links.take_inputs(fwd_chunk_id), **marks}
            seed = self._seed(plan, fwd_chunk_id)
            programs = variant.programs
            run = programs.forward if self.has_backward else programs.inference
            result = run(self._state.values(), live, seed)
            given_bytes = variant.sizes.total(live)
            self._shelf.note_run(given_bytes + programs.extra_bytes)
            self._state.update_buffers(result.updates)
            if self.has_backward:
                self._shelf.put("saved", fwd_chunk_id, result.live, variant.sizes)
            variant.links.give_outputs(fwd_chunk_id, result)
            output = self._keep_output(variant, fwd_chunk_id, result.outputs)
            if not self.has_backward:
                self._count_done(plan)
            return output

    def backward_one_chunk(
        self,
        bwd_chunk_id: int,
        loss: Tensor | None = None,
        full_backward: bool = True,
        last_backward: bool = False,
    ) -> None:
        """Receive gradients, enqueue the backward of one microbatch, and send.

        With `full_backward=False` only the gradients of inputs are computed;
        `backward_weight_one_chunk` does the rest.
        """
        if not self.has_backward:
            return
        with self._action("B" if full_backward else "I", bwd_chunk_id) as marks:
            plan = self._plan()
            variant = self._variant(plan)
            live = {**self._shelf.take("saved", bwd_chunk_id), **marks}
            live |= self._tangents(variant, bwd_chunk_id, loss)
            live |= variant.links.take_grads(bwd_chunk_id)
            programs = variant.programs
            if full_backward:
                grads, sums = programs.backward(self._fixed(programs), live)
                self._shelf.note_run(programs.extra_bytes)
                self._state.set_sums(sums)
            else:
                grads, residual = programs.backward_input(self._state.values(), live)
                self._shelf.note_run(programs.extra_bytes)
                self._shelf.put("residual", bwd_chunk_id, residual, variant.sizes)
            variant.links.give_grads(bwd_chunk_id, grads)
            if full_backward:
                self._count_done(plan)

    def backward_weight_one_chunk(
        self, bwd_chunk_id: int, last_backward: bool = False
    ) -> None:
        """Enqueue the rest of a backward that computed gradients of inputs alone."""
        if not self.has_backward:
            return
        with self._action("W", bwd_chunk_id) as marks:
            plan = self._plan()
            variant = self._variant(plan)
            residual = {**self._shelf.take("residual", bwd_chunk_id), **marks}
            programs = variant.programs
            sums = programs.backward_weight(self._fixed(programs), residual)
            self._shelf.note_run(programs.extra_bytes)
            self._state.set_sums(sums)
            self._count_done(plan)

    def _given_inputs(
        self,
        plan: StagePlan,
        microbatch: int,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> dict[str, Tensor]:
        """Collect what the schedule passes in for one microbatch, as device data."""
        stages = local_stages(self._driver())
        is_lowest = self.stage_index == min(stage.stage_index for stage in stages)
        own = {k: v for k, v in kwargs.items() if plan.takes(k)}
        signature, outside = Signature.of(args if is_lowest else (), own)
        if signature != plan.signature:
            raise StageShapeError(
                f"stage {self.stage_index}, microbatch {microbatch}: expected "
                f"arguments {plan.signature}, got {signature}. "
                "Use a batch that divides into equal microbatches; arguments of a "
                "later stage may change only when the first stage's do."
            )
        given = [
            self._placement.pin(value, spec.partition)
            for value, spec in zip(outside, plan.given, strict=True)
        ]
        xla_compat.materialize(given)
        first = len(plan.received)
        return {f"input:{i}": value for i, value in enumerate(given, first)}

    def _keep_output(
        self, variant: Variant, microbatch: int, outputs: Mapping[int, Tensor]
    ) -> Any:
        """Keep the output of the last stage, and return it to the schedule."""
        if not self.is_last:
            return None
        kept, given = self._outlet.keep(
            variant,
            microbatch,
            outputs,
            is_scored=self._drives[self._driver()].loss is not None,
            is_trained=self.has_backward,
        )
        if self._outlet.is_wanted:
            self.output_chunks.append(kept)
        return given

    def _tangents(
        self, variant: Variant, microbatch: int, loss: Tensor | None
    ) -> dict[str, Tensor]:
        """Return the gradients of outputs that no other stage uses."""
        schedule = self._driver()
        found = self._outlet.take_grads(variant, microbatch, loss, schedule)
        for index in variant.links.unused:
            name = tangent(index)
            if name not in found:
                found[name] = self._placement.zeros(variant.outputs[index])
        return found

    def _fixed(self, programs: StagePrograms) -> dict[str, Tensor]:
        return {
            **self._state.values(),
            **self._state.sums(programs),
        }

    def _count_done(self, plan: StagePlan) -> None:
        """End the step of this rank after the last microbatch of its last stage.

        Gradients are published only once it is known that nothing went wrong.
        """
        self._num_done += 1
        if self._num_done == plan.num_microbatches and self.has_backward:
            variant = self._variant(plan)
            self._gradients.end_backwards(variant.programs, variant.sizes)
        stages = local_stages(self._driver())
        if all(stage._num_done == plan.num_microbatches for stage in stages):
            if any(stage.has_backward for stage in stages):
                combine([stage._gradients for stage in stages])
            self._exchange.settle()
            for stage in stages:
                stage._state.publish_grads()
                stage._describe_once()
            first = stages[0]
            first._drives[self._driver()].ahead.end_step()
            self._groups.activity.end_step()

    def _describe_once(self) -> None:
        """Write down what each kind of step costs, when the first one is done."""
        plan = self._plan()
        if not plan.is_described:
            plan.is_described = True
            dump(f"stage{self.stage_index}.txt", lambda: str(self.explain()))

    def _plan(self) -> StagePlan:
        if self._current is None:
            raise PipelineError(
                f"stage {self.stage_index}: expected a forward before a backward of a "
                "step. Correct the schedule's order."
            )
        return self._current

    def _driver(self) -> Schedule:
        if self._schedule is None:
            raise PipelineError(
                f"stage {self.stage_index}: expected a schedule to have started a "
                "step. Call the schedule's step or eval."
            )
        return self._schedule

    @property
    def _wiring(self) -> Wiring:
        return self._drives[self._driver()].wiring

    def _seed(self, plan: StagePlan, microbatch: int) -> int:
        """Return the seed of this stage's random numbers for one microbatch.

        All stages draw from one sequence per microbatch, each where the stages before
        it end, so that the numbers do not depend on where the model is split. Those
        of replicas differ, as if their batches were parts of one.
        """
        replica, _ = self.replica
        number = replica * plan.num_microbatches + microbatch
        key = (torch.initial_seed(), self._num_steps, number)
        digest = hashlib.blake2b(repr(key).encode(), digest_size=8).digest()
        seed = int.from_bytes(digest, "big")
        return xla_compat.advanced_seed(seed, plan.random_before)

    @contextlib.contextmanager
    def _action(self, kind: Kind, microbatch: int) -> Iterator[Mapping[str, Tensor]]:
        """Run an action, with the marks that its programs get if it is recorded."""
        action = Action(stage=self.stage_index, kind=kind, microbatch=microbatch)
        with (
            self._reporting(),
            self._groups.activity.within(f"{action}, microbatch {microbatch}"),
            shown_as(f"PP:{action}"),
            recorded(self._recorder, action) as marks,
        ):
            yield marks

    @contextlib.contextmanager
    def _reporting(self) -> Iterator[None]:
        """Let the other ranks know of an error that stops this one."""
        try:
            with self._groups.reporting():
                yield
        except BaseException:
            schedule = self._schedule
            for stage in [self] if schedule is None else local_stages(schedule):
                stage._state.roll_back()
            raise
