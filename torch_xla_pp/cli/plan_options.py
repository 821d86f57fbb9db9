"""The options of a plan, and the plan that they ask for."""

import argparse
import re
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from pathlib import Path

from torch_xla_pp.cli.plan_targets import work_and_costs
from torch_xla_pp.planner import (
    DEVICES,
    PLANNERS,
    PRESETS,
    SCHEDULES,
    DeviceSpec,
    PipelinePlan,
    RankLinks,
    link_between_ranks,
    make_plan,
)
from torch_xla_pp.simulate import Link, Network

_UNITS = {"": 1, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}
_UNITS |= {"KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}


def add_plan_options(command: ArgumentParser) -> None:
    """Add what `plan_of_options` reads."""
    add = command.add_argument
    add(
        "work",
        metavar="WORK",
        help="the model's work as JSON, or script.py:function, which returns a model, "
        "the positional arguments of a microbatch and, if there is one, a loss "
        "function and its target",
    )
    add("--save-work", metavar="FILE", help="write the model's work as JSON")
    add("--rows", type=int, required=True, help="rows of a step, of all replicas")
    add("--ranks", type=int, metavar="N", help="ranks, of all replicas")
    add(
        "--devices-per-rank",
        type=_counts,
        metavar="N,...",
        help="devices of each rank, one number for all or one for each",
    )
    add("--devices", type=int, metavar="N", help="devices in all; ranks are found")
    add(
        "--device",
        type=_names,
        default=("cpu",),
        metavar="NAME|FILE,...",
        help=f"{', '.join(DEVICES)}, or a file with figures (default cpu); one for all "
        "ranks or one for each",
    )
    add("--memory", type=_size, metavar="SIZE", help="of a device, such as 80GiB")
    add(
        "--reserve",
        type=float,
        default=8.0,
        metavar="PERCENT",
        help="left free of it (default 8)",
    )
    add(
        "--costs",
        metavar="[aot:]FILE",
        help="times of works that --measure has written; of aot:FILE, times by a "
        "compiler for TPUs, which need not be there: it is asked for --device, and "
        "they are written, if there is no such file",
    )
    add(
        "--measure",
        metavar="FILE",
        help="run each work on this machine, which takes a second or two each, write "
        "what they take, and plan with it; for script.py:function with a loss",
    )
    add("--latency", type=float, metavar="US", help="of links between ranks")
    add("--bandwidth", type=float, metavar="GBPS", help="of links between ranks, GB/s")
    add("--replica-latency", type=float, metavar="US", help="of links of replicas")
    add(
        "--replica-bandwidth",
        type=float,
        metavar="GBPS",
        help="of the link between replicas, GB/s, if it is slower than within a "
        "pipeline",
    )
    add("--links", metavar="FILE", help="links between ranks, as RankLinks.to_json")
    add(
        "--optimizer",
        default="adamw",
        help="sgd, momentum, adamw, or bytes of state for a byte of parameters",
    )
    add("--replicas", type=_counts, metavar="N,...", help="pipelines to try")
    add("--microbatches", type=_counts, metavar="N,...", help="numbers to try")
    add("--schedules", type=_names, metavar="NAME,...", help=", ".join(SCHEDULES))
    add(
        "--stages-per-rank",
        type=_counts,
        default=(2,),
        metavar="N,...",
        help="numbers to try for interleaved (default 2)",
    )
    add(
        "--sharding",
        type=_names,
        default=PRESETS,
        metavar="NAME,...",
        help=f"ways to share a rank's work to try, of {', '.join(PRESETS)}",
    )
    add(
        "--rules",
        metavar="FILE",
        help="the model's patterns, as AxisRules.to_json writes them: what is split, "
        "and what devices exchange, is known then",
    )
    add(
        "--mesh", type=_meshes, metavar="DxM,...", help="sizes of data and model to try"
    )
    add(
        "--rank-sharding",
        type=_names,
        metavar="[dp:|fsdp:]DxM,...",
        help="how each rank shares its work, such as 1x1,fsdp:2x1, in place of "
        "--sharding and --mesh",
    )
    add(
        "--remat",
        type=_names,
        default=("none", "full"),
        metavar="NAME,...",
        help="what stages may choose to compute again, of none, full (default both)",
    )
    add("--planner", choices=PLANNERS, default="full", help="search (default full)")
    add(
        "--fix",
        type=_fixed,
        metavar="stages=FILE",
        help="keep the stages of a plan, or those in a list of lists of names of "
        "operations, works or modules, and plan the rest",
    )
    add("--compare", action="store_true", help="run the other planners, too")
    add(
        "--own-inputs",
        action="store_true",
        help="let stages take the model's inputs on their own rank",
    )
    add("--output", metavar="FILE", help="write the plan as JSON")


def plan_of_options(options: Namespace) -> PipelinePlan:
    """Return the plan that options ask for.

    Raises:
        ValueError: One is at fault, or nothing fits.
    """
    devices = [DeviceSpec.named(name) for name in options.device]
    work, costs = work_and_costs(
        options.work, options.costs, options.measure, devices[0].name
    )
    if options.save_work:
        work.to_json(options.save_work)
    return make_plan(
        work,
        rows=options.rows,
        ranks=options.ranks,
        devices_per_rank=options.devices_per_rank,
        devices=options.devices,
        device=devices,
        memory_bytes=options.memory,
        reserve=options.reserve / 100,
        network=_network_of(options, devices),
        replica_link=_replica_link_of(options),
        optimizer=options.optimizer,
        replicas=options.replicas,
        microbatches=options.microbatches,
        schedules=options.schedules,
        stages_per_rank=options.stages_per_rank,
        sharding=options.sharding,
        meshes=options.mesh,
        rank_sharding=options.rank_sharding,
        remat=options.remat,
        stages=options.fix,
        planner=options.planner,
        has_own_inputs=options.own_inputs,
        compare=options.compare,
        costs=costs,
        rules=options.rules,
    )


def _network_of(options: Namespace, devices: Sequence[DeviceSpec]) -> Network:
    """Return the links of a file, or equal ones as options or devices have them."""
    latency_s, gb_per_s = options.latency, options.bandwidth
    if options.links is None:
        scaled_s = None if latency_s is None else latency_s * 1e-6
        return link_between_ranks(*devices, latency_s=scaled_s, gb_per_s=gb_per_s)
    if latency_s is not None or gb_per_s is not None:
        raise ValueError(
            "plan: expected --links, or --latency and --bandwidth, got both. Leave one "
            "out."
        )
    return RankLinks.from_json(Path(options.links)).network()


def _replica_link_of(options: Namespace) -> Link | None:
    """Return the link between replicas, None if nothing is said of it.

    Raises:
        ValueError: Half of it is missing.
    """
    latency_s, gb_per_s = options.replica_latency, options.replica_bandwidth
    if gb_per_s is not None:
        return Link(latency_s=(latency_s or 0.0) * 1e-6, bytes_per_s=gb_per_s * 1e9)
    if latency_s is not None:
        raise ValueError(
            "plan: expected --replica-bandwidth with --replica-latency, got the "
            "latency alone. Add it."
        )
    return None


def _size(text: str) -> int:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)", text)
    if match is None or match[2].upper() not in _UNITS:
        raise argparse.ArgumentTypeError(
            f"expected a size such as 80GiB or 16GB, got {text!r}"
        )
    return int(float(match[1]) * _UNITS[match[2].upper()])


def _counts(text: str) -> tuple[int, ...] | None:
    if text == "auto":
        return None
    if not all(part.isdigit() for part in text.split(",")):
        raise argparse.ArgumentTypeError(
            f"expected counts such as 8 or 8,16, or auto, got {text!r}"
        )
    return tuple(int(part) for part in text.split(","))


def _fixed(text: str) -> str:
    what, _, path = text.partition("=")
    if what != "stages" or not path:
        raise argparse.ArgumentTypeError(f"expected stages=FILE, got {text!r}")
    return path


def _names(text: str) -> tuple[str, ...]:
    return tuple(text.split(","))


def _meshes(text: str) -> tuple[tuple[int, int], ...]:
    pairs = [part.split("x") for part in text.split(",")]
    if not all(len(pair) == 2 and all(map(str.isdigit, pair)) for pair in pairs):
        raise argparse.ArgumentTypeError(
            f"expected sizes of data and model such as 2x4,4x2, got {text!r}"
        )
    return tuple((int(data), int(model)) for data, model in pairs)
