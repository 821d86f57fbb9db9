"""A stage of a pipeline, which runs as compiled XLA programs.

A schedule calls `forward_one_chunk`, `backward_one_chunk` and
`backward_weight_one_chunk` in its order; each call enqueues one program, which first
receives its inputs from other stages and finally sends its results to others. With the
host transport, and between stages of one rank, the call itself receives, and sends or
lets a thread do so. `RankPipeline` has what happens once a step, `StageModel` the parts
of a stage.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple, final

import torch
import torch.distributed as dist
from torch import Tensor, nn

from torch_xla_pp import cpu
from torch_xla_pp.compile import (
    Explanation,
    ProgramName,
    Remat,
    StageLoss,
    name_in_module,
    parameter_role,
    tangent,
)
from torch_xla_pp.errors import PipelineError
from torch_xla_pp.mesh import AUTO, BatchAxis, Sharding
from torch_xla_pp.plan import InputsFrom
from torch_xla_pp.runtime.outputs import StageOutputs
from torch_xla_pp.runtime.rank import LocalStage, RankPipeline, Run
from torch_xla_pp.runtime.stage_model import (
    StageModel,
    StageOptions,
    TracedModel,
    linked_groups,
)
from torch_xla_pp.runtime.wrong_input import (
    check_device,
    check_index,
    check_plain_module,
    example_tensors,
)
from torch_xla_pp.schedule import Kind
from torch_xla_pp.state import (
    HeldBytes,
    SavedValues,
    StageMemory,
    optimizer_bytes,
)
from torch_xla_pp.torch_compat import SilentStage
from torch_xla_pp.transport import of_group


class _Forward(NamedTuple):
    """A forward with its operands."""

    run: Run
    microbatch: int
    values: dict[str, Tensor]
    seed: int


@final
class PipelineStage(SilentStage):
    """A module as one stage of a pipeline.

    Takes the arguments of `torch.distributed.pipelining.PipelineStage`, and how to
    shard values over the local devices. Made directly or by `Pipe.build_stage`. All
    ranks of `group` must make their stages and drive them with equal schedules. A third
    of this class documents its arguments, which other places refer to.

    Args:
        submodule: The stage's module; on the host, on meta, or on the XLA device;
            moved to the device in place.
        stage_index: Index of this stage.
        num_stages: Number of stages of the pipeline.
        device: `xpp.device()`.
        input_args: Example of the positional inputs; if given, inputs must have these
            shapes and dtypes. Without it, the module takes any inputs that it can run
            on; XLA promotes dtypes where eager would refuse to mix them.
        output_args: Example of the outputs, likewise.
        group: Group of the pipeline's ranks, of backend "xla_pp"; None for the
            default group.
        dw_builder: Not supported: the backward is always split by the compiler.
        mesh: SPMD mesh of this rank's devices, e.g. `mesh["data", "model"]`.
        sharding: `AxisRules` for the whole model, or glob pattern on parameter names
            → mesh axis per dimension.
        batch_axis: Mesh axis that splits the batch; "auto" takes that of "batch" in
            axis rules, or else the axis called "data" if there is one.
        inputs_from: Which stages make the first arguments of the module: `[0, (1, 2)]`
            for the output of stage 0 and item 2 of that of stage 1, `{"x": 0}` for
            keyword arguments, `[]` for none; None for the previous stage, the items
            of whose output are taken one by one. Further arguments come from the
            schedule's `step` on this rank.
        tied: Name of a parameter → name of a group, for a parameter of which other
            stages have copies, e.g. `{"head.weight": "embedding"}`: parameters of one
            group begin with equal values and get the sum of all their gradients.
        remat: Which forward values the backward computes again: "none" for those under
            `torch.utils.checkpoint` only, "full" for all, or the ops whose results
            are kept, e.g. `[torch.ops.aten.mm.default]`.
        replicas: Group of the ranks that run this stage in each replica of the
            pipeline, e.g. `mesh.get_group("dp")`; None if there is only one. Every
            replica gets its own part of the batch; gradients are averaged over replicas
            once a step. Parameters must begin with equal values; buffers, losses and
            outputs are each replica's own.
        traced: Facts about the model that the module was cut out of, given by
            `Pipe.build_stage`.

    Raises:
        TypeError: Examples are not tensors.
        ValueError: An argument does not fit; raised on every rank in its first step
            at the latest.

    Attributes:
        num_steps: How many steps the stage has begun; random numbers depend on it. To
            continue another run, set it to the value of that run, on all ranks.

    Example:
        >>> stage = PipelineStage(block, 0, 2, xpp.device(), mesh=mesh["data"])
    """

    def __init__(
        self,
        submodule: nn.Module,
        stage_index: int,
        num_stages: int,
        device: torch.device,
        input_args: Tensor | tuple[Tensor, ...] | None = None,
        output_args: Tensor | tuple[Tensor, ...] | None = None,
        group: dist.ProcessGroup | None = None,
        dw_builder: Any = None,
        *,
        mesh: Any | None = None,
        sharding: Sharding | None = None,
        batch_axis: BatchAxis = AUTO,
        inputs_from: InputsFrom | None = None,
        tied: Mapping[str, str] | None = None,
        remat: Remat = "none",
        replicas: dist.ProcessGroup | None = None,
        traced: TracedModel | None = None,
    ) -> None:
        if dw_builder is not None:
            raise ValueError(
                "dw_builder: expected None, got a builder. The backward of an XLA "
                "stage is split by the compiler; leave the argument out."
            )
        options = StageOptions(
            mesh=mesh,
            sharding=sharding,
            batch_axis=batch_axis,
            remat=remat,
            inputs_from=inputs_from,
            tied=tied,
            input_args=example_tensors("input_args", input_args),
            output_args=example_tensors("output_args", output_args),
            traced=traced,
        )
        self.process_group = of_group(group)
        self.groups, others = linked_groups(self.process_group, replicas)
        with self.groups.reporting():
            check_plain_module("stage", submodule)
            check_index(stage_index, num_stages)
            check_device(device)
            activity = self.groups.activity
            activity.stages = tuple(sorted({*activity.stages, stage_index}))
            super().__init__(submodule, stage_index, num_stages, device, group)
            self.model = StageModel(
                submodule, stage_index, num_stages, self.process_group, others, options
            )
        self.saved = SavedValues(most_small=cpu.most_small_bytes())
        self.outputs = StageOutputs(self.model.world, self.saved)
        self.num_steps = 0
        self._rank: RankPipeline | None = None
        # A forward that is to be one program with its loss and its backward; and the
        # microbatches of such programs, until the last action of their backward.
        self._deferred: _Forward | None = None
        self._joined: set[int] = set()
        # Those whose gradients of weights are summed before the action for them.
        self._done: set[int] = set()

    # Called by a schedule.

    def clear_runtime_states(self) -> None:
        """Begin a step; if the caller is no schedule, only drop leftovers."""
        if self._rank is not None and self._rank.is_beginning(self.stage_index):
            return
        rank = RankPipeline.calling()
        if rank is None:
            self.drop_leftovers()
        else:
            rank.is_beginning(self.stage_index)

    def _prepare_forward_infra(
        self,
        num_microbatches: int,
        args: tuple[Any, ...],
        kwargs: dict[str, Any] | None = None,
    ) -> tuple[Any, ...]:
        """Agree with the other ranks, see `RankPipeline.prepare`."""
        self.chunks = num_microbatches
        self.rank.prepare()
        return ()

    def forward_one_chunk(
        self,
        fwd_chunk_id: int,
        args: tuple[Any, ...],
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Receive, enqueue the forward of one microbatch, and send.

        Returns:
            The output of the last stage, None of others. Its tensors are leaves that a
            loss may be computed from; they are emptied when the compiled loss has been
            computed. None also if the forward waits for its loss, to be one program
            with that and the backward.
        """
        rank = self.rank
        with rank.action(self, "F", fwd_chunk_id, (args, kwargs or {})) as run:
            args = args if self.stage_index == rank.lowest else ()
            values = dict(run.marks)
            if args or kwargs or run.is_given:
                values |= self.model.given(run.plan, fwd_chunk_id, args, kwargs or {})
            is_random = run.compiled.num_random > 0
            seed = rank.seed(self, run.plan, fwd_chunk_id) if is_random else 0
            # Last, as it may wait for a message.
            values |= run.links.receive_inputs(fwd_chunk_id)
            forward = _Forward(run, fwd_chunk_id, values, seed)
            if not rank.joins(self, run):
                return self._forward(forward)
            self._deferred = forward
            return None

    def backward_one_chunk(
        self,
        bwd_chunk_id: int,
        loss: Tensor | None = None,
        full_backward: bool = True,
        last_backward: bool = False,
    ) -> None:
        """Receive gradients, enqueue the backward of one microbatch, and send.

        With `full_backward=False` only the gradients of inputs are computed;
        `backward_weight_one_chunk` does the rest, unless that comes next and no other
        rank waits for these gradients: then all are computed in one program. What the
        program of the forward has computed is not computed again.
        """
        if not self.has_backward:
            return
        kind: Kind = "B" if full_backward else "I"
        with self.rank.action(self, kind, bwd_chunk_id) as run:
            programs, links, sizes = run.programs, run.links, run.compiled.sizes
            if bwd_chunk_id in self._joined:
                if full_backward:
                    self._end_joined(run, bwd_chunk_id)
                return
            values = {**self.saved.take("saved", bwd_chunk_id), **run.marks}
            values |= self._tangents(run, bwd_chunk_id, loss)
            is_whole = full_backward or self.rank.is_whole(self, run, bwd_chunk_id)
            if is_whole and not full_backward:
                self._done.add(bwd_chunk_id)
            fixed = self.model.state.values()
            values |= self.model.sums.values(programs) if is_whole else {}
            values |= links.receive_grads(bwd_chunk_id)
            residual: dict[str, Tensor] = {}
            if is_whole:
                grads, sums = programs.backward(fixed, values)
                self.model.sums.advance(sums)
            else:
                names = programs.recycled("backward input")
                storages = self.saved.storages(programs, names, sizes)
                grads, residual = programs.backward_input(fixed, values | storages)
            self.saved.note_run(programs.extra)
            if not is_whole:
                self.saved.put("residual", bwd_chunk_id, residual, sizes)
            self.saved.free(programs.recycled_in(values, residual), sizes)
            links.send_grads(bwd_chunk_id, grads)

    def backward_weight_one_chunk(
        self, bwd_chunk_id: int, last_backward: bool = False
    ) -> None:
        """Enqueue the rest of a backward that computed only the gradients of inputs."""
        if not self.has_backward:
            return
        with self.rank.action(self, "W", bwd_chunk_id) as run:
            if bwd_chunk_id in self._done:
                self._done.remove(bwd_chunk_id)
            elif bwd_chunk_id in self._joined:
                self._end_joined(run, bwd_chunk_id)
            else:
                read = self._backward_weight(run, bwd_chunk_id)
                self.saved.free(run.programs.recycled_in(read), run.compiled.sizes)

    # Called by the rank's pipeline.

    @property
    def deferred(self) -> int | None:
        """Return the microbatch whose forward waits for its loss, None for none."""
        return None if self._deferred is None else self._deferred.microbatch

    def score_deferred(self, loss: StageLoss, target: Any) -> Any:
        """Run the forward that waits, its loss and its backward as one program.

        Args:
            loss: Computes the loss; if that is no program, the forward runs alone.
            target: The target.

        Returns:
            The loss, a scalar on the device.
        """
        assert self._deferred is not None
        (run, microbatch, values, seed), self._deferred = self._deferred, None
        programs, specs = run.programs, run.compiled.outputs
        template, rows = programs.output_template, run.plan.rows
        known = loss.prepare(template, specs, target, rows, microbatch)
        splits = self.rank.splits(self, run, microbatch)
        joined = known and programs.joined(known.program, is_split=splits)
        if known is None or joined is None:
            output = self._forward(_Forward(run, microbatch, values, seed))
            return self.outputs.score(
                loss, run.plan, run.compiled, output, target, is_trained=True, marks={}
            )
        sizes = run.compiled.sizes
        given = sizes.of(values)
        # It is live while its program runs.
        self.saved.put("saved", microbatch, {}, sizes)
        self.saved.take("saved", microbatch)
        values = {**values, **({} if splits else self.model.sums.values(programs))}
        values |= self._zeros(run, joined.program.inputs)
        values |= run.links.receive_grads(microbatch)
        trained = programs.score(
            joined,
            self.model.state.values(),
            values,
            seed,
            known.others,
            known.scale,
        )
        self._joined.add(microbatch)
        run.links.send_grads(microbatch, trained.grads)
        self.saved.note_run(programs.extra, given)
        self.model.state.update_buffers(trained.updates)
        if splits:
            self.saved.put("residual", microbatch, trained.residual, sizes)
        else:
            self.model.sums.advance(trained.sums)
        loss.keep(microbatch, trained.scored.loss, trained.scored.metrics)
        return trained.scored.loss

    def begin_step(self, rank: RankPipeline, *, wants_outputs: bool) -> None:
        """Begin a step under a schedule."""
        self._rank = rank
        self.saved.share(rank.stages[0].saved, len(rank.stages))
        self.num_steps += 1
        self.outputs.is_wanted = wants_outputs
        self.model.begin_step(rank.observer)

    def drop_leftovers(self) -> None:
        """Drop the leftovers of a failed step."""
        self.saved.clear()
        self.outputs.clear()
        self._deferred = None
        self._joined.clear()
        self._done.clear()
        self.output_chunks.clear()
        self.model.drop_leftovers()

    @property
    def rank(self) -> RankPipeline:
        """Return this rank's pipeline under the schedule that drives the stage.

        Raises:
            PipelineError: No schedule has begun a step.
        """
        if self._rank is None:
            raise PipelineError(
                f"stage {self.stage_index}: expected a schedule to have started a "
                "step. Call the schedule's step or eval."
            )
        return self._rank

    # For users.

    def peak_memory(self) -> StageMemory:
        """Return the peak memory of the stage on one device in the last step.

        Takes a tenth of a second, as all objects are searched for optimizers.
        """
        return _memory_of([self], self.saved.own)

    def rank_memory(self) -> StageMemory:
        """Return the peak memory of all stages of this rank together, likewise.

        It is less than the sum of their own peaks, which are at different times.

        Raises:
            PipelineError: No schedule has begun a step.
        """
        return _memory_of(self.rank.stages, self.saved.of_rank)

    def explain(self, device: str | None = None) -> Explanation:
        """Return the costs of the stage on each device in the last step, to be printed.

        Collectives and products are counted in the programs that XLA dumps, if
        `XLA_FLAGS` make it dump them.

        Args:
            device: "v4", "v5e", "v5p" or "v6e" to add what would bound the stage there,
                and what to change, as `advise` does.

        Raises:
            PipelineError: No step has begun yet.
        """
        run = self.rank.run(self)
        found = self.model.explain(run.plan, run.compiled)
        own = len(self.rank.stages)
        return found.among(self.model.num_stages // own, own, device)

    @property
    def tied(self) -> dict[str, str]:
        """Return the group of each parameter that other stages have copies of."""
        return self.model.tied

    @property
    def replica(self) -> tuple[int, int]:
        """Return the number of this replica of the pipeline, and of replicas."""
        return self.model.replica

    def owned_parameters(self) -> dict[str, nn.Parameter]:
        """Return the parameters by name, without copies that an earlier stage owns.

        The copies are known once a schedule has begun its first step.
        """
        named = self.submod.named_parameters()
        copies = self.model.state.copies
        return {name: p for name, p in named if parameter_role(name) not in copies}

    def state_dict(self) -> dict[str, Any]:
        """Return the module's state, without copies that an earlier stage owns.

        The states of all stages together are that of the model, each value once;
        known once a schedule has begun its first step.
        """
        copies = {name_in_module(role) for role in self.model.state.copies}
        state = self.submod.state_dict()
        return {name: value for name, value in state.items() if name not in copies}

    def _forward(self, forward: _Forward) -> Any:
        """Enqueue the forward of one microbatch, and send; return its output."""
        run, microbatch, values, seed = forward
        programs, links, sizes = run.programs, run.links, run.compiled.sizes
        name: ProgramName = "forward" if self.has_backward else "inference"
        call = programs.forward if self.has_backward else programs.inference
        storages = self.saved.storages(programs, programs.recycled(name), sizes)
        result = call(self.model.state.values(), values | storages, seed)
        self.saved.note_run(programs.extra, sizes.of(values))
        self.model.state.update_buffers(result.updates)
        if self.has_backward:
            self.saved.put("saved", microbatch, result.live, sizes)
        links.send_outputs(microbatch, result)
        return self._output(run, microbatch, result.outputs)

    def _end_joined(self, run: Run, microbatch: int) -> None:
        """Enqueue what a program of forward, loss and backward has left, if anything.

        No later program takes the memory of what it has kept.
        """
        self._joined.remove(microbatch)
        if self.saved.has("residual", microbatch):
            self._backward_weight(run, microbatch)

    def _backward_weight(self, run: Run, microbatch: int) -> dict[str, Tensor]:
        """Enqueue the rest of a backward; return what it reads."""
        programs = run.programs
        values = {**self.saved.take("residual", microbatch), **run.marks}
        values |= self.model.sums.values(programs)
        sums = programs.backward_weight(self.model.state.values(), values)
        self.saved.note_run(programs.extra)
        self.model.sums.advance(sums)
        return values

    def _output(self, run: Run, microbatch: int, outputs: Mapping[int, Tensor]) -> Any:
        """Keep the output of the last stage, and return it to the schedule."""
        if not self.is_last:
            return None
        kept, given = self.outputs.keep(
            run.compiled,
            microbatch,
            outputs,
            is_scored=self.rank.has_loss,
            is_trained=self.has_backward,
        )
        if self.outputs.is_wanted:
            self.output_chunks.append(kept)
        return given

    def _tangents(
        self, run: Run, microbatch: int, loss: Tensor | None
    ) -> dict[str, Tensor]:
        """Return the gradients of outputs that no other stage uses."""
        found: dict[str, Tensor] = {}
        if self.is_last:
            scale = self.rank.grad_scale
            found = self.outputs.take_grads(run.compiled, microbatch, loss, scale)
        if not run.links.unused:
            return found
        unused = {tangent(index) for index in run.links.unused}
        return self._zeros(run, unused.difference(found)) | found

    def _zeros(self, run: Run, names: Collection[str]) -> dict[str, Tensor]:
        """Return zeros for those of the names that are gradients of outputs."""
        return {
            tangent(index): self.model.world.zeros(run.compiled.outputs[index])
            for index in run.links.unused
            if tangent(index) in names
        }


def _memory_of(stages: Sequence[LocalStage], held: HeldBytes) -> StageMemory:
    """Return the memory that stages of a rank held together in the last step."""
    models = [stage.model for stage in stages]
    parameters = [p for stage in stages for p in stage.submod.parameters()]
    return StageMemory(
        num_live=held.most_live,
        saved_bytes=held.most_saved,
        passed_bytes=held.most_passed,
        held_bytes=held.most_held,
        state_bytes=sum(m.state.num_bytes + m.sums.num_bytes for m in models),
        active_bytes=held.most_active,
        optimizer_bytes=optimizer_bytes(parameters),
    )
