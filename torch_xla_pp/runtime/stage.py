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
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from torch_xla_pp import xla_compat
from torch_xla_pp.compile import (
    ROUTE_IN,
    ROUTE_OUT,
    Borders,
    Forwarded,
    Remat,
    StagePrograms,
    check_remat,
)
from torch_xla_pp.errors import PipelineError, StageShapeError
from torch_xla_pp.mesh import Partition, TensorSpec
from torch_xla_pp.runtime import handshake
from torch_xla_pp.runtime.exchange import Exchange
from torch_xla_pp.runtime.handshake import Claim, Offer
from torch_xla_pp.runtime.loss import StageLoss
from torch_xla_pp.runtime.memory import Shelf, StageMemory
from torch_xla_pp.runtime.module_state import ModuleState
from torch_xla_pp.runtime.placement import AUTO, BatchAxis, Placement
from torch_xla_pp.runtime.plan import (
    Mode,
    Signature,
    StagePlan,
    Variant,
    describe_all,
    spec_of,
)
from torch_xla_pp.runtime.silent_stage import SilentStage
from torch_xla_pp.runtime.step_kinds import StepKinds
from torch_xla_pp.runtime.torch_compat import (
    Schedule,
    calling_schedule,
    grad_scale,
    local_stages,
    loss_function,
    num_microbatches,
    set_loss_function,
)
from torch_xla_pp.transport import Direction, Message, of_group

T = TypeVar("T")

_MANY_PLANS = 8

_logger = logging.getLogger(__name__)


@dataclass(eq=False, slots=True)
class _Drive:
    """Hold what a stage knows about one schedule that drives it."""

    kinds: StepKinds
    loss: StageLoss | None = None
    plans: dict[int, StagePlan] = field(default_factory=dict)


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
        sharding: Glob pattern on parameter names → mesh axis per dimension.
        batch_axis: Mesh axis that splits the batch; "auto" takes the axis called
            "data" if there is one.
        remat: Which forward values the backward computes again: "none" for those under
            `torch.utils.checkpoint` only, "full" for all, or the ops whose results
            are kept, e.g. `[torch.ops.aten.mm.default]`.
        outputs_sent: Which outputs the next stage takes, in its order; None for all.
        expected_inputs: What the positional inputs must look like, None if anything
            the module takes is right.
        expected_outputs: What the outputs must look like, likewise.

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
        sharding: Mapping[str, Partition] | None = None,
        batch_axis: BatchAxis = AUTO,
        remat: Remat = "none",
        outputs_sent: Sequence[int] | None = None,
        expected_inputs: Sequence[Tensor] | None = None,
        expected_outputs: Sequence[Tensor] | None = None,
    ) -> None:
        self._pg = of_group(group)
        with self._pg.rendezvous.reporting():
            _check_index(stage_index, num_stages)
            _check_device(device)
            check_remat(remat)
            super().__init__(submodule, stage_index, num_stages, device, group)
            self._placement = Placement(mesh, batch_axis)
            self._state = ModuleState(submodule, self._placement, sharding or {})
        self._exchange = Exchange(self._pg)
        self._remat = remat
        self._outputs_sent = outputs_sent
        self._expected_inputs = expected_inputs
        self._expected_outputs = expected_outputs
        self._drives: WeakKeyDictionary[Schedule, _Drive] = WeakKeyDictionary()
        self._schedule: Schedule | None = None
        self._current: StagePlan | None = None
        self._shelf = Shelf()
        self._leaves: dict[int, list[Tensor]] = {}
        self._zeros: dict[TensorSpec, Tensor] = {}
        self._last_forward = 0
        self._num_done = 0
        self._num_steps = 0

    def peak_memory(self) -> StageMemory:
        """Return what the stage held at most on one device in the last step."""
        return StageMemory(
            num_live=self._shelf.most_live,
            saved_bytes=self._shelf.most_bytes,
            state_bytes=self._state.num_bytes,
        )

    # Called by a schedule at the start of every step.

    def clear_runtime_states(self) -> None:
        """Start a step: bring parameters onto the device, drop leftovers."""
        schedule = calling_schedule()
        if schedule is None:
            raise PipelineError(
                f"stage {self.stage_index}: expected to be driven by a schedule of "
                "torch.distributed.pipelining, got a call from elsewhere. Call the "
                "schedule's step or eval."
            )
        self._schedule = schedule
        self._pg.rendezvous.check()
        with self._reporting():
            self._shelf.clear()
            self._leaves.clear()
            self.output_chunks.clear()
            self._exchange.forget(self.stage_index)
            self._num_done = 0
            self._num_steps += 1
            self._current = None
            if schedule in self._drives and local_stages(schedule)[0] is self:
                self._drives[schedule].kinds.begin_step()
            self._exchange.settle()
            self._state.begin_step()

    # Called by a schedule before its first step.

    def _prepare_forward_infra(
        self,
        num_microbatches: int,
        args: tuple[Any, ...],
        kwargs: dict[str, Any] | None = None,
    ) -> tuple[Any, ...]:
        """Agree with the other ranks and stages on what will be sent.

        Steps of other kinds agree on theirs when they come, see `_begin_step`.

        Raises:
            PlanError: The ranks do not build one pipeline.
            StageShapeError: This stage cannot take what the previous one makes.
        """
        schedule = self._driver()
        stages = local_stages(schedule)
        if stages[0] is self:
            self._claim(schedule, stages)
        with self._reporting():
            self.chunks = num_microbatches
            if not self.is_first:
                self._exchange.expect("F", self.stage_index, self._rank_of(-1))
            if not self.is_last:
                self._exchange.expect("B", self.stage_index, self._rank_of(1))
            self._current = self._begin_step(args, kwargs)
        if stages[-1] is self:
            self._pg.rendezvous.exchange("ready", None)
        return ()

    def _claim(self, schedule: Schedule, stages: Sequence[Any]) -> None:
        claim = Claim(
            stages=tuple(stage.stage_index for stage in stages),
            num_stages=self.num_stages,
            num_microbatches=num_microbatches(schedule),
            schedule=type(schedule).__name__,
            transport=self._exchange.transport_name,
        )
        key = handshake.agree_on_stages(self._pg.rendezvous, claim)
        kinds = StepKinds(self._pg.rendezvous, key, self._rank_of(-self.stage_index))
        kinds.begin_step()
        for stage in stages:
            known = stage._drives.get(schedule)
            loss = stage._take_loss(schedule) if known is None else known.loss
            stage._drives[schedule] = _Drive(kinds, loss)

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
        value, grads = loss(output, specs, target, plan.rows)
        if grads is not None and self.has_backward:
            tangents = {_tangent(i): grad for i, grad in grads.items()}
            self._shelf.put("loss", microbatch, tangents, variant.sizes)
            del self._leaves[microbatch]
        return value

    def _begin_step(
        self, args: tuple[Any, ...], kwargs: dict[str, Any] | None
    ) -> StagePlan:
        """Return the plan for this step; a new kind of step makes a new one."""
        drive = self._drives[self._driver()]
        if drive.loss is not None:
            drive.loss.begin_step()
        if self.is_first:
            signature, _ = Signature.of(args, kwargs)
            number = drive.kinds.announce((signature, Mode.of(self.submod)))
        else:
            number = drive.kinds.current()
        if number not in drive.plans:
            key = f"{drive.kinds.key}/{number}"
            drive.plans[number] = self._agree(key, args, kwargs)
            if len(drive.plans) > _MANY_PLANS:
                _logger.warning(
                    "stage %d: programs for %d kinds of steps (shapes, other arguments,"
                    " training mode, autocast) are compiled and kept. Each new one "
                    "costs a compilation: pad batches to few shapes.",
                    self.stage_index,
                    len(drive.plans),
                )
        return drive.plans[number]

    def _agree(
        self, key: str, args: tuple[Any, ...], kwargs: dict[str, Any] | None
    ) -> StagePlan:
        """Take the previous stage's offer, and make one to the next."""
        plan = self._plan_for(key, args, kwargs)
        variant = self._variant(plan)
        if not self.is_last:
            offer = Offer(
                values=tuple(self._sent_of(variant.outputs)),
                rows=plan.rows,
                num_random=plan.random_before + variant.num_random,
            )
            handshake.offer(self._pg.rendezvous, key, self.stage_index + 1, offer)
        return plan

    def _plan_for(
        self,
        key: str,
        args: tuple[Any, ...],
        kwargs: dict[str, Any] | None,
    ) -> StagePlan:
        """Find out what goes into this stage."""
        signature, outside = Signature.of(args if self.is_first else (), kwargs)
        if self.is_first:
            rows = outside[0].shape[0] if outside and outside[0].dim() else 1
            offered = Offer(values=(), rows=rows)
            self._placement.check_batch(rows)
        else:
            offered = handshake.await_offer(
                self._pg.rendezvous, key, self.stage_index, self._rank_of(-1)
            )
        rows = offered.rows
        given = tuple(self._given_spec(value, rows) for value in outside)
        if self._expected_inputs is not None and not kwargs:
            expected = describe_all(self._expected_inputs)
            got = offered.values or given
            handshake.check_fits(self.stage_index, got, expected)
        return StagePlan(
            stage=self.stage_index,
            num_microbatches=num_microbatches(self._driver()),
            rows=rows,
            received=offered.values,
            random_before=offered.num_random,
            remat=self._remat,
            given=given,
            signature=signature,
            expected_outputs=self._expected_outputs,
        )

    def _given_spec(self, value: Tensor, rows: int) -> TensorSpec:
        if value.requires_grad:
            raise ValueError(
                f"stage {self.stage_index}: expected inputs that need no gradient, "
                "got one with requires_grad=True. Detach it; gradients of a "
                "pipeline's inputs are not computed."
            )
        partition = self._placement.batch_partition(tuple(value.shape), rows)
        return spec_of(value, partition, False)

    def _variant(self, plan: StagePlan) -> Variant:
        def borders(outputs: tuple[TensorSpec, ...]) -> Borders:
            return self._borders(plan, outputs)

        return plan.variant(self.submod, self._placement, self._state, borders)

    def _borders(self, plan: StagePlan, outputs: tuple[TensorSpec, ...]) -> Borders:
        """Say which messages are ops of this stage's programs."""
        layout = self._placement.layout
        received, sent = {}, {}
        if not self.is_first and self._exchange.is_in_graph(self._rank_of(-1)):
            received = dict(enumerate(plan.received))
        if not self.is_last and self._exchange.is_in_graph(self._rank_of(1)):
            sent = {i: outputs[i] for i in self._sent_of(range(len(outputs)))}
        return Borders(
            inputs={i: layout(spec) for i, spec in received.items()},
            outputs={i: layout(spec) for i, spec in sent.items()},
            tangents={i: layout(v) for i, v in sent.items() if v.requires_grad},
            grads={i: layout(v) for i, v in received.items() if v.requires_grad},
        )

    def _sent_of(self, outputs: Sequence[T]) -> Sequence[T]:
        """Return those of a list of all outputs that the next stage takes."""
        if self._outputs_sent is None:
            return outputs
        return [outputs[index] for index in self._outputs_sent]

    # Actions.

    def forward_one_chunk(
        self,
        fwd_chunk_id: int,
        args: tuple[Any, ...],
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Receive, enqueue the forward of one microbatch, and send.

        Returns:
            The stage's output, None if its program has sent it; on the last stage of a
            training step its tensors are leaves that a loss may be computed from.
        """
        with self._reporting():
            if self._current is None:
                self._current = self._begin_step(args, kwargs)
            plan = self._plan()
            variant = self._variant(plan)
            self._last_forward = fwd_chunk_id
            live = self._inputs(plan, fwd_chunk_id, args, kwargs)
            self._add_routes(live, "F", fwd_chunk_id, variant.borders)
            seed = self._seed(plan, fwd_chunk_id)
            programs = variant.programs
            run = programs.forward if self.has_backward else programs.inference
            result = run(self._state.fixed, live, seed)
            self._state.update_buffers(result.updates)
            if self.has_backward:
                self._shelf.put("saved", fwd_chunk_id, result.live, variant.sizes)
            output = self._pass_on(variant, fwd_chunk_id, result)
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
        with self._reporting():
            plan = self._plan()
            variant = self._variant(plan)
            live = self._shelf.take("saved", bwd_chunk_id)
            live |= self._tangents(variant, bwd_chunk_id, loss)
            self._add_routes(live, "B", bwd_chunk_id, variant.borders)
            programs = variant.programs
            if full_backward:
                grads, sums = programs.backward(self._fixed(programs), live)
                self._state.set_sums(sums)
            else:
                grads, residual = programs.backward_input(self._state.fixed, live)
                self._shelf.put("residual", bwd_chunk_id, residual, variant.sizes)
            if not self.is_first and not variant.borders.grads:
                self._send_grads(plan, bwd_chunk_id, grads)
            if full_backward:
                self._count_done(plan)

    def backward_weight_one_chunk(
        self, bwd_chunk_id: int, last_backward: bool = False
    ) -> None:
        """Enqueue the rest of a backward that computed gradients of inputs alone."""
        if not self.has_backward:
            return
        with self._reporting():
            plan = self._plan()
            variant = self._variant(plan)
            residual = self._shelf.take("residual", bwd_chunk_id)
            programs = variant.programs
            sums = programs.backward_weight(self._fixed(programs), residual)
            self._state.set_sums(sums)
            self._count_done(plan)

    def _inputs(
        self,
        plan: StagePlan,
        microbatch: int,
        args: tuple[Any, ...],
        kwargs: dict[str, Any] | None,
    ) -> dict[str, Tensor]:
        """Collect the inputs of one microbatch as device data."""
        signature, outside = Signature.of(args if self.is_first else (), kwargs)
        if signature != plan.signature:
            raise StageShapeError(
                f"stage {self.stage_index}, microbatch {microbatch}: expected "
                f"arguments {plan.signature}, got {signature}. "
                "Use a batch that divides into equal microbatches; arguments of a "
                "later stage may change only when the first stage's do."
            )
        received = []
        if plan.received and not self._exchange.is_in_graph(self._rank_of(-1)):
            layouts = [self._placement.layout(spec) for spec in plan.received]
            message = Message("F", self.stage_index, microbatch)
            received = self._exchange.receive(message, self._rank_of(-1), layouts)
        given = [
            self._placement.pin(value, spec.partition)
            for value, spec in zip(outside, plan.given, strict=True)
        ]
        xla_compat.materialize(given)
        first = len(plan.received)
        return {
            **{f"input:{i}": value for i, value in enumerate(received)},
            **{f"input:{i}": value for i, value in enumerate(given, first)},
        }

    def _add_routes(
        self,
        live: dict[str, Tensor],
        direction: Direction,
        microbatch: int,
        borders: Borders,
    ) -> None:
        """Tell a program what to receive and where to send, if it does so itself."""
        ahead = 1 if direction == "F" else -1
        arriving, leaving = borders.inputs, borders.outputs
        if direction == "B":
            arriving, leaving = borders.tangents, borders.grads
        if arriving:
            live[ROUTE_IN] = self._exchange.receive_route(
                Message(direction, self.stage_index, microbatch),
                self._rank_of(-ahead),
                list(arriving.values()),
            )
        if leaving:
            live[ROUTE_OUT] = self._exchange.send_route(
                Message(direction, self.stage_index + ahead, microbatch),
                self._rank_of(ahead),
                list(leaving.values()),
            )

    def _pass_on(self, variant: Variant, microbatch: int, result: Forwarded) -> Any:
        """Send outputs to the next stage, or give them to the schedule."""
        if variant.borders.outputs:
            return None
        structure = variant.programs.output_spec
        outputs = [value.detach() for value in result.outputs]
        if not self.is_last:
            sent = self._sent_of(outputs)
            message = Message("F", self.stage_index + 1, microbatch)
            self._exchange.send(message, self._rank_of(1), sent)
            return pytree.tree_unflatten(outputs, structure)
        self.output_chunks.append(pytree.tree_unflatten(outputs, structure))
        named = {f"output:{i}": value for i, value in enumerate(outputs)}
        self._shelf.put("output", microbatch, named, variant.sizes)
        if not self.has_backward:
            return self.output_chunks[-1]
        self._leaves[microbatch] = [
            value.detach().requires_grad_(spec.requires_grad)
            for value, spec in zip(outputs, variant.outputs, strict=True)
        ]
        return pytree.tree_unflatten(self._leaves[microbatch], structure)

    def _tangents(
        self, variant: Variant, microbatch: int, loss: Tensor | None
    ) -> dict[str, Tensor]:
        """Return the gradient of each output that has one, unless a program gets it."""
        specs = variant.outputs
        found: dict[str, Tensor] = {}
        if self._shelf.has("loss", microbatch):
            found = self._shelf.take("loss", microbatch)
        elif self.is_last:
            found = self._eager_loss_grads(specs, microbatch, loss)
        elif not variant.borders.tangents:
            found = self._received_grads(specs, microbatch)
        return {
            _tangent(index): self._or_zeros(found.get(_tangent(index)), spec)
            for index, spec in enumerate(specs)
            if spec.requires_grad and index not in variant.borders.tangents
        }

    def _eager_loss_grads(
        self, specs: Sequence[TensorSpec], microbatch: int, loss: Tensor | None
    ) -> dict[str, Tensor]:
        """Differentiate a loss that could not be compiled by the outputs."""
        leaves = self._leaves.pop(microbatch)
        wanted = [i for i, leaf in enumerate(leaves) if leaf.requires_grad]
        if loss is None or not wanted:
            return {}
        scaled = loss * grad_scale(self._driver())
        grads = torch.autograd.grad(
            scaled, [leaves[i] for i in wanted], allow_unused=True
        )
        found = {
            _tangent(i): self._placement.pin(grad, specs[i].partition)
            for i, grad in zip(wanted, grads, strict=True)
            if grad is not None
        }
        xla_compat.materialize([loss, *found.values()])
        return found

    def _received_grads(
        self, specs: Sequence[TensorSpec], microbatch: int
    ) -> dict[str, Tensor]:
        """Receive the gradients of the outputs that were sent."""
        indices = self._sent_of(range(len(specs)))
        wanted = [(i, specs[i]) for i in indices if specs[i].requires_grad]
        if not wanted:
            return {}
        values = self._exchange.receive(
            Message("B", self.stage_index, microbatch),
            self._rank_of(1),
            [self._placement.layout(spec) for _, spec in wanted],
        )
        names = [_tangent(i) for i, _ in wanted]
        return dict(zip(names, values, strict=True))

    def _send_grads(
        self, plan: StagePlan, microbatch: int, grads: Mapping[int, Tensor | None]
    ) -> None:
        """Send the gradients of the received inputs to the previous stage."""
        values = [
            self._or_zeros(grads.get(index), spec)
            for index, spec in enumerate(plan.received)
            if spec.requires_grad
        ]
        if values:
            message = Message("B", self.stage_index - 1, microbatch)
            self._exchange.send(message, self._rank_of(-1), values)

    def _or_zeros(self, value: Tensor | None, spec: TensorSpec) -> Tensor:
        if value is not None:
            return value
        if spec not in self._zeros:
            self._zeros[spec] = self._placement.zeros(spec)
        return self._zeros[spec]

    def _fixed(self, programs: StagePrograms) -> dict[str, Tensor]:
        return {
            **self._state.fixed,
            **self._state.sums(programs),
        }

    def _count_done(self, plan: StagePlan) -> None:
        """End the step of this rank after the last microbatch of its last stage.

        Gradients are published only once it is known that nothing went wrong.
        """
        self._num_done += 1
        stages = local_stages(self._driver())
        if all(stage._num_done == plan.num_microbatches for stage in stages):
            self._exchange.settle()
            for stage in stages:
                stage._state.publish_grads()
            first = stages[0]
            if first.has_backward and self._variant(plan).programs.has_backward:
                first._drives[self._driver()].kinds.forget_announced()

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

    def _rank_of(self, distance: int) -> int:
        return int(self.stage_index_to_group_rank[self.stage_index + distance])

    def _seed(self, plan: StagePlan, microbatch: int) -> int:
        """Return the seed of this stage's random numbers for one microbatch.

        All stages draw from one sequence per microbatch, each where the stages before
        it end, so that the numbers do not depend on where the model is split.
        """
        key = (torch.initial_seed(), self._num_steps, microbatch)
        digest = hashlib.blake2b(repr(key).encode(), digest_size=8).digest()
        seed = int.from_bytes(digest, "big")
        return xla_compat.advanced_seed(seed, plan.random_before)

    @contextlib.contextmanager
    def _reporting(self) -> Iterator[None]:
        """Let the other ranks know of an error that stops this one."""
        try:
            with self._pg.rendezvous.reporting():
                yield
        except BaseException:
            for stage in local_stages(self._driver()):
                stage._state.roll_back()
            raise


def _tangent(index: int) -> str:
    """Return the name of the gradient of an output."""
    return f"tangent:{index}"


def _check_index(stage_index: int, num_stages: int) -> None:
    if not 0 <= stage_index < num_stages:
        raise ValueError(
            f"stage_index: expected one of 0..{num_stages - 1}, got {stage_index}. "
            "Use e.g. the rank in the pipeline's group."
        )


def _check_device(device: torch.device) -> None:
    if torch.device(device).type != "xla":
        raise ValueError(
            f"device: expected the XLA device, got {device}. Pass xpp.device()."
        )
