"""Find out whether a pipeline fits devices that are not here."""

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import numpy as np
import torch_xla.distributed.spmd as xs
from torch import Tensor, nn
from torch.distributed.pipelining import SplitPoint

from torch_xla_pp import xla_compat
from torch_xla_pp.accelerators import AcceleratorCompiler, Slice
from torch_xla_pp.compile import Remat
from torch_xla_pp.deferred import shapes_of
from torch_xla_pp.fitting.abstract_stage import (
    AbstractStage,
    Loss,
    StageSetting,
    offers_of,
)
from torch_xla_pp.fitting.fit_report import Fit
from torch_xla_pp.fitting.stage_fit import StageFit
from torch_xla_pp.graph import for_each_mode
from torch_xla_pp.launch import device
from torch_xla_pp.mesh import (
    AUTO,
    AxisRules,
    BatchAxis,
    LogicalAxes,
    Sharding,
    strategy_names,
)
from torch_xla_pp.pipe import Pipe, pipeline
from torch_xla_pp.plan import StageInputs, Wiring
from torch_xla_pp.planner import PipelinePlan, optimizer_ratio
from torch_xla_pp.schedule import Schedule
from torch_xla_pp.simulate import Link
from torch_xla_pp.timeline import Timeline
from torch_xla_pp.torch_pipe import move_factories_to
from torch_xla_pp.world import World


def fit(
    module: nn.Module | Sequence[nn.Module],
    mb_args: tuple[Any, ...],
    mb_kwargs: dict[str, Any] | None = None,
    split_spec: dict[str, SplitPoint] | None = None,
    *,
    topology: str,
    schedule: Schedule,
    mesh: Mapping[str, int] | None = None,
    sharding: Sharding | None = None,
    batch_axis: BatchAxis = AUTO,
    loss_fn: Callable[..., Any] | None = None,
    target: Tensor | None = None,
    optimizer: str | float = "adamw",
    remat: Remat = "none",
    activations: Mapping[str, LogicalAxes] | None = None,
    plan: PipelinePlan | None = None,
    compiler: AcceleratorCompiler | None = None,
    link: Link | None = None,
    recorded: Timeline | None = None,
) -> Fit:
    """Compile every stage of a pipeline for TPUs, and add up what each rank holds.

    No TPU is needed, nothing runs, and a model on meta or under `deferred_init` takes
    no memory. The process has CPU devices in place of those of one rank, as many of
    them: set `CPU_NUM_DEVICES`. Compilers answer within seconds to minutes for each
    program, and once for equal programs.

    Args:
        module: The model, in the mode in which it is to run; or stages in a row that
            are not traced from one, as `PipelineStage` takes them.
        mb_args: Example of one microbatch's positional arguments.
        mb_kwargs: Example of its keyword arguments.
        split_spec: As for `pipeline`.
        topology: The devices of one rank, such as `v5e:2x2` or `v5p:2x2x1`.
        schedule: The order of actions on all ranks.
        mesh: Axes of a rank's devices → their sizes; one axis "data" if None.
        sharding: As for `PipelineStage`.
        batch_axis: Likewise.
        loss_fn: Takes what the model returns and the target; without it the loss is
            left out.
        target: Example of one microbatch's target.
        optimizer: "sgd", "momentum" or "adamw", or bytes of state for a byte of
            parameters.
        remat: As for `PipelineStage`.
        activations: As for `pipeline`; those of the axis rules if None.
        plan: As for `pipeline`.
        compiler: The compiler; None for the library that is installed.
        link: The link from one rank to another, for the time of a step; None for the
            network of the data center.
        recorded: A step of these stages on such devices, to which times are scaled.

    Raises:
        PipelineError: There is no compiler, or the model cannot be traced.
        ValueError: Devices, stages, mesh and schedule do not fit each other.

    Example:
        >>> print(fit(model, (x,), topology="v5e:2x2", schedule=one_f_one_b(4, 32)))
    """
    devices = Slice.parse(topology)
    compiler = compiler or AcceleratorCompiler(devices)
    device()
    axes = dict(mesh or {"data": devices.num_devices})
    check_devices(devices, axes)
    if activations is None and isinstance(sharding, AxisRules):
        activations = sharding.activations
    if isinstance(module, nn.Module):
        pipe = pipeline(
            module, mb_args, mb_kwargs, split_spec, activations=activations, plan=plan
        )
        modules, inputs = stages_of_pipe(pipe)
    else:
        modules = tuple(module)
        inputs = [StageInputs.of(index, None) for index in range(len(modules))]
    _check_stages(len(modules), schedule)
    rules = sharding if isinstance(sharding, AxisRules) else None
    found = fitted_stages(
        modules,
        inputs,
        (mb_args, mb_kwargs or {}),
        schedule,
        devices=devices,
        mesh=axes,
        sharding=sharding,
        batch_axis=batch_axis,
        loss=_loss_of(loss_fn, target),
        optimizer=optimizer,
        remat=remat,
        compiler=compiler,
    )
    return Fit.of(
        schedule,
        found,
        topology=str(devices),
        compiler=compiler.library.version,
        mesh=axes,
        limit_bytes=devices.chip.usable_bytes,
        strategies=strategy_names(rules),
        link=link,
        recorded=recorded,
    )


def stages_of_pipe(
    pipe: Pipe,
) -> tuple[tuple[nn.Module, ...], list[StageInputs]]:
    """Return the modules of traced stages, and the inputs from others of each."""
    indices = range(pipe.num_stages)
    graph = pipe.stage_graph
    inputs = [StageInputs.of(index, graph.sources(index)) for index in indices]
    return tuple(pipe.get_stage_module(index) for index in indices), inputs


def fitted_stages(
    modules: Sequence[nn.Module],
    inputs: Sequence[StageInputs],
    example: tuple[tuple[Any, ...], Mapping[str, Any]],
    schedule: Schedule,
    *,
    devices: Slice,
    mesh: Mapping[str, int],
    compiler: AcceleratorCompiler,
    sharding: Sharding | None = None,
    batch_axis: BatchAxis = AUTO,
    loss: Loss | None = None,
    optimizer: str | float = "adamw",
    remat: Remat = "none",
    indices: Collection[int] | None = None,
) -> list[StageFit]:
    """Compile stages.

    Args:
        modules: Their modules, which lose their values.
        inputs: The inputs that each takes from others.
        example: Arguments of a microbatch.
        schedule: Which actions run them, and where.
        devices: The devices of a rank; the process has as many in their place.
        mesh: Their axes and sizes.
        compiler: The compiler.
        sharding: As for `fit`; so are the following but the last one.
        batch_axis: See there.
        loss: The loss of the last stage, None if not known.
        optimizer: See there.
        remat: See there.
        indices: The stages to compile, None for all.
    """
    with xla_compat.lowering_for("TPU"):
        if isinstance(sharding, AxisRules):
            sharding = AxisRules(
                axes=sharding.axes,
                parameters=sharding.parameters,
                parameter_axes=sharding.parameter_axes,
                gather_once=sharding.gather_once,
            )
        rules = sharding if isinstance(sharding, AxisRules) else None
        ids = np.arange(devices.num_devices)
        whole = xs.Mesh(ids, tuple(mesh.values()), tuple(mesh))
        setting = StageSetting(
            devices=devices,
            world=World(whole, batch_axis, rules),
            wiring=Wiring(
                inputs=list(inputs),
                ranks=[schedule.placement[index] for index in range(len(modules))],
            ),
            sharding={} if sharding is None else sharding,
            shapes={n: x for part in modules for n, x in shapes_of(part).items()},
            remat=remat,
            optimizer_ratio=optimizer_ratio(optimizer),
        )
        stages = []
        for index, part in enumerate(modules):
            for_each_mode(part, lambda part: move_factories_to(part, device()))
            stages.append(AbstractStage(index, part, setting))
        offers_of(stages, schedule.num_microbatches, *example)
        return [
            stage.fit(compiler, _kinds_of(schedule, stage.index), loss)
            for stage in stages
            if indices is None or stage.index in indices
        ]


def _loss_of(function: Callable[..., Any] | None, target: Tensor | None) -> Loss | None:
    if function is None or target is None:
        return None
    return Loss(function, target)


def check_devices(devices: Slice, axes: Mapping[str, int]) -> None:
    """Refuse a process or a mesh of another number of devices."""
    wanted, have = devices.num_devices, xla_compat.num_local_devices()
    if have != wanted:
        raise ValueError(
            f"fit: expected {wanted} CPU devices in the place of those of {devices}, "
            f"got {have}. Start with PJRT_DEVICE=CPU CPU_NUM_DEVICES={wanted}."
        )
    if math.prod(axes.values()) != wanted:
        raise ValueError(
            f"fit: expected a mesh over the {wanted} devices of {devices}, got "
            f"{dict(axes)}. Correct the sizes."
        )


def _check_stages(count: int, schedule: Schedule) -> None:
    if count != schedule.num_stages:
        raise ValueError(
            f"fit: expected a model of {schedule.num_stages} stages, as the schedule "
            f"has, got {count}. Mark where to split it by pipeline_yield or "
            "split_spec, or pass a plan."
        )


def _kinds_of(schedule: Schedule, stage: int) -> str:
    """Return the kinds of actions that run a stage."""
    row = schedule.actions[schedule.placement[stage]]
    return "".join(sorted({action.kind for action in row if action.stage == stage}))
