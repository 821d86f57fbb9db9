"""The command that compiles a script's pipeline for devices that are not here."""

import runpy
from argparse import Namespace
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch_xla_pp import env
from torch_xla_pp.accelerators import AcceleratorCompiler, Slice
from torch_xla_pp.cli.sources import schedule_of
from torch_xla_pp.simulate import Link
from torch_xla_pp.timeline import Timeline

if TYPE_CHECKING:
    from torch_xla_pp.mesh import AxisRules
    from torch_xla_pp.planner import PipelinePlan

_PRESETS = (
    *("dp", "fsdp", "fsdp_transpose", "tp", "tp_transpose", "tensor_sequence"),
    *("cp", "sp", "ep"),
)


def fit_script(parsed: Namespace) -> int:
    """Compile what a script's function returns, and print the result.

    Returns:
        0 if everything compiles and fits, else 1.
    """
    devices = Slice.parse(parsed.topology)
    if (parsed.target is None) == (parsed.dump is None):
        raise ValueError(
            "fit: expected script.py:function or --dump, got "
            f"{'neither' if parsed.target is None else 'both'}. Give one of them."
        )
    compiler = AcceleratorCompiler(devices)
    if parsed.dump is not None:
        return _fit_dump(parsed, compiler)
    schedule = schedule_of(parsed)
    env.stand_in_for(devices.num_devices)
    from torch_xla_pp.cli.plan_targets import made_by  # Imports torch.
    from torch_xla_pp.fitting import fit
    from torch_xla_pp.pipe import pipeline
    from torch_xla_pp.planner import PipelinePlan

    model, args, *loss = made_by(parsed.target)
    loss_fn, target = loss or (None, None)
    rules = _rules_of(parsed.sharding)
    plan = None
    if parsed.plan:
        plan = PipelinePlan.from_json(Path(parsed.plan))
    elif schedule.num_stages > 1 and pipeline(model, args).num_stages == 1:
        plan = _cut(parsed, devices, (model, args, loss_fn, target))
    if plan is not None:
        schedule = plan.table()
    found = fit(
        model,
        args,
        topology=parsed.topology,
        schedule=schedule,
        mesh=parsed.mesh or _mesh_of(rules, devices),
        sharding=rules,
        loss_fn=loss_fn,
        target=target,
        optimizer=parsed.optimizer,
        remat=parsed.remat,
        plan=plan,
        compiler=compiler,
        link=_link_of(parsed, devices),
        recorded=Timeline.from_json(Path(parsed.calibrate))
        if parsed.calibrate
        else None,
    )
    if parsed.output:
        found.to_json(parsed.output)
    print(found)
    return int(not found.fits)


def _fit_dump(parsed: Namespace, compiler: AcceleratorCompiler) -> int:
    """Compile the programs that a run has dumped."""
    env.stand_in_for(compiler.topology.num_devices)
    from torch_xla_pp.fitting import fit_dump  # Imports torch.

    found = fit_dump(
        parsed.dump, topology=parsed.topology, mesh=parsed.mesh, compiler=compiler
    )
    if parsed.output:
        found.to_json(parsed.output)
    print(found)
    return int(not found.compiles)


def _link_of(parsed: Namespace, devices: Slice) -> Link:
    """Return the link between ranks: that of the options, else the network's."""
    from torch_xla_pp.fitting import host_link

    known = host_link(devices)
    latency_s = 0.0 if parsed.latency is None else parsed.latency * 1e-6
    bytes_per_s = known.bytes_per_s if not parsed.bandwidth else parsed.bandwidth * 1e9
    return Link(latency_s=latency_s, bytes_per_s=bytes_per_s)


def _rules_of(names: tuple[str, ...]) -> "AxisRules":
    """Return the rules that presets and tables in scripts make together.

    Raises:
        ValueError: A name is neither.
    """
    from torch_xla_pp.mesh import AxisRules, presets

    known = [getattr(presets, name)() for name in names if name in _PRESETS]
    rules = presets.mix(*known)
    for name in names:
        if name in _PRESETS:
            continue
        script, _, key = name.rpartition(":")
        table: Any = None
        if Path(script).is_file():
            table = runpy.run_path(script).get(key)
        if not isinstance(table, AxisRules):
            raise ValueError(
                f"fit --sharding: expected some of {', '.join(_PRESETS)}, or "
                f"script.py:NAME of AxisRules, got {name!r}. Correct the name."
            )
        rules |= table
    return rules


def _mesh_of(rules: "AxisRules", devices: Slice) -> Mapping[str, int]:
    """Return a mesh with the axes that rules name, if it is clear how large they are.

    Raises:
        ValueError: There are several.
    """
    from torch_xla_pp.mesh import axis_names

    tables = (rules.axes, rules.parameter_axes)
    named = [axis for table in tables for axis in table.values()]
    names = list(dict.fromkeys(n for axis in named for n in axis_names(axis)))
    if len(names) > 1:
        raise ValueError(
            f"fit: expected --mesh with the sizes of {', '.join(names)}, got none. "
            f"Add e.g. --mesh {','.join(f'{name}=2' for name in names)}."
        )
    return {(names or ["data"])[0]: devices.num_devices}


def _cut(parsed: Namespace, devices: Slice, made: tuple[Any, ...]) -> "PipelinePlan":
    """Return the planner's cut of a model without marks of its own."""
    from torch_xla_pp.planner import DEVICES, make_plan
    from torch_xla_pp.tracing import trace_work

    model, args, loss_fn, target = made
    work = trace_work(model, args, loss_fn=loss_fn, target=target)
    known = devices.kind if devices.kind in DEVICES else "v5e"
    count = parsed.microbatches
    return make_plan(
        work,
        rows=work.rows * count,
        ranks=parsed.ranks,
        devices_per_rank=devices.num_devices,
        device=known,
        memory_bytes=devices.chip.usable_bytes,
        reserve=0.0,
        optimizer=parsed.optimizer,
        replicas=(1,),
        microbatches=(count,),
        schedules=(parsed.schedule,),
        remat=(parsed.remat,),
    )
