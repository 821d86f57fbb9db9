"""The commands and their options."""

import argparse
import math
from argparse import ArgumentParser
from typing import Any

from torch_xla_pp.cli.sources import NAMES

_EXAMPLES = """\
examples:
  python -m torch_xla_pp schedule show 1f1b --ranks 4 --microbatches 8
  python -m torch_xla_pp schedule show zbv --ranks 4 --microbatches 8 --png zbv.png
  python -m torch_xla_pp schedule check mine.csv
  python -m torch_xla_pp simulate zb1p --ranks 8 --microbatches 32 --forward 2.5
  python -m torch_xla_pp simulate 1f1b --ranks 2 --microbatches 8 --profile step.json
  python -m torch_xla_pp plan work.json --rows 512 --ranks 8 --device v5p
  python -m torch_xla_pp doctor --no-ping
  python -m torch_xla_pp trace show step.json
  python -m torch_xla_pp trace merge measured.json predicted.json --output trace.json

exit codes: 0 if all is well, 1 if an input or what was looked at is at fault, 2 if an
option is
"""
_SCHEDULE = f"""\
SCHEDULE is a CSV file with one line a rank and actions such as 2F0, or one of the
names {", ".join(NAMES)};
names of torch's classes such as InterleavedZeroBubble are known, too.
"""
_TIMES = """
Times are milliseconds: one for all stages, or one for each, such as 1,2,2,3. A whole
backward takes as long as its two parts. Stages form a chain unless --edges are given.
"""
_PLAN = """
Every choice that no option gives is the planner's. Lists have commas, such as
--microbatches 8,16. The work of a model is what WorkGraph.to_json writes.

examples:
  python -m torch_xla_pp plan work.json --rows 512 --ranks 8 --devices-per-rank 4
  python -m torch_xla_pp plan work.json --rows 512 --devices 32 --device v5p
  python -m torch_xla_pp plan work.json --rows 64 --ranks 2 --memory 2GiB --remat full
  python -m torch_xla_pp plan work.json --rows 16 --ranks 2 --fix stages=plan.json
  python -m torch_xla_pp plan show plan.json --against other.json
  python -m torch_xla_pp plan show plan.json --top 5 --memory-png memory.png
"""


_VERIFY = """
The function returns what xpp.verify takes: the unsplit model, a schedule or stages, the
arguments and the target. It is called in every rank, after init_process_group. Under
torchrun the command is one of its ranks; otherwise it starts them.

examples:
  python -m torch_xla_pp verify train.py:small --ranks 2 --devices 2
  torchrun --nproc-per-node 2 -m torch_xla_pp verify train.py:small
"""


_FIT = """
The function returns what `plan` takes: a model, the tuple of a microbatch's arguments
and, if there is one, a loss function and its target; nothing of it needs memory. The
model's marks say where stages begin; the planner cuts one that has none. No TPU is
needed, but libtpu: see docs/how-to/fit-an-accelerator.md.

example:
  python -m torch_xla_pp fit model.py:plan --topology v5p:2x2x1 --ranks 4 \\
      --microbatches 32 --sharding fsdp,tp,model.py:RULES --mesh data=2,model=2
"""


def parser(*, has_plans: bool = True) -> ArgumentParser:
    """Return the parser; its result has the command's name as `command`.

    Args:
        has_plans: Whether it knows the commands on plans, for which it loads NumPy.
    """
    top = ArgumentParser(
        prog="python -m torch_xla_pp",
        description="Plan pipelines, verify them, look at schedules, simulate steps, "
        "and merge recorded ones.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    groups = top.add_subparsers(required=True, metavar="COMMAND")
    _add_schedule(groups)
    _add_simulate(groups)
    plans = _group(groups, "plan", "find out how to cut and run a model", _PLAN)
    if has_plans:
        _add_plan(plans)
    _add_fit(groups)
    _add_verify(groups)
    _add_doctor(groups)
    _add_trace(groups)
    return top


def _add_schedule(groups: Any) -> None:
    commands = _group(groups, "schedule", "show or check the order of actions")
    show = _command(commands, "show", "schedule show", "print a schedule", _SCHEDULE)
    _add_source(show)
    show.add_argument("--csv", metavar="FILE", help="write it as CSV")
    _add_picture(show, "draw it, with actions that all take equally long")
    check = _command(
        commands, "check", "schedule check", "say whether a schedule can run", _SCHEDULE
    )
    _add_source(check)
    check.add_argument(
        "--max-live", type=_count, metavar="N", help="bound on saved microbatches"
    )
    check.add_argument(
        "--forward-only", action="store_true", help="it has no backwards"
    )


def _add_simulate(groups: Any) -> None:
    run = _command(
        groups, "simulate", "simulate", "predict a step's time", _SCHEDULE + _TIMES
    )
    _add_source(run)
    one = [1.0]
    run.add_argument("--forward", type=_times, default=one, metavar="MS", help="F")
    run.add_argument("--input", type=_times, default=one, metavar="MS", help="I")
    run.add_argument("--weight", type=_times, default=one, metavar="MS", help="W")
    run.add_argument(
        "--profile",
        nargs="+",
        metavar="FILE",
        help="take times and sizes from recorded timelines",
    )
    run.add_argument(
        "--latency",
        type=float,
        default=0.0,
        metavar="US",
        help="of each message, in us",
    )
    run.add_argument(
        "--bandwidth", type=float, default=math.inf, metavar="GBPS", help="in GB/s"
    )
    run.add_argument(
        "--bytes", type=int, default=0, metavar="N", help="size of each message"
    )
    run.add_argument("--output", metavar="FILE", help="write the timeline as JSON")
    run.add_argument("--trace", metavar="FILE", help="write a trace for Perfetto")
    _add_picture(run, "draw the timeline")


def _add_fit(groups: Any) -> None:
    fit = _command(
        groups, "fit", "fit", "compile a pipeline for TPUs that are not here", _FIT
    )
    add = fit.add_argument
    add("target", metavar="SCRIPT.py:FUNCTION", nargs="?")
    add(
        "--dump",
        metavar="DIR",
        help="programs that XLA has dumped of a rank's run, in the place of a script",
    )
    add("--topology", required=True, metavar="NAME", help="a rank's, as v5e:2x2")
    add("--schedule", default="1f1b", help="name or CSV file (default 1f1b)")
    add("--ranks", type=_count, metavar="N", help="number of ranks")
    add("--microbatches", type=_count, metavar="N", help="of a step")
    add("--stages-per-rank", type=_count, metavar="N", help="if interleaved")
    add("--plan", metavar="FILE", help="a plan of the stages and the schedule")
    add(
        "--sharding",
        type=_texts,
        default=("dp",),
        metavar="NAME,...",
        help="presets, and script.py:NAME of axis rules (default dp)",
    )
    add("--mesh", type=_axes, metavar="AXIS=N,...", help="axes of a rank's devices")
    add("--optimizer", default="adamw", help="sgd, momentum, adamw, or a ratio")
    add("--remat", choices=("none", "full"), default="none")
    add("--latency", type=float, metavar="US", help="of links between ranks")
    add("--bandwidth", type=float, metavar="GBPS", help="of links between ranks, GB/s")
    add(
        "--calibrate",
        metavar="FILE",
        help="scale times to a step that was recorded on such devices, as JSON",
    )
    add("--output", metavar="FILE", help="write the result as JSON")


def _add_verify(groups: Any) -> None:
    verify = _command(
        groups, "verify", "verify", "compare a pipeline with its unsplit model", _VERIFY
    )
    verify.add_argument("target", metavar="SCRIPT.py:FUNCTION")
    verify.add_argument("--ranks", type=_count, default=2, metavar="N")
    verify.add_argument("--devices", type=_count, metavar="N", help="of each rank")
    verify.add_argument("--tolerance", type=float, metavar="X", help="of rounding")


def _add_doctor(groups: Any) -> None:
    doctor = _command(
        groups, "doctor", "doctor", "say whether this machine can run pipelines"
    )
    doctor.add_argument("--no-ping", action="store_true", help="start no ranks")
    doctor.add_argument(
        "--timeout", type=float, default=300.0, metavar="S", help="of the ranks"
    )


def _add_plan(commands: Any) -> None:
    from torch_xla_pp.cli.plan_options import add_plan_options

    make = _command(
        commands, "make", "plan make", "plan a model; `make` may be left out", _PLAN
    )
    add_plan_options(make)
    _add_plan_files(make)
    show = _command(commands, "show", "plan show", "print a plan, or what differs")
    show.add_argument("file", help="a plan as JSON")
    show.add_argument("--against", metavar="FILE", help="a plan to compare it with")
    _add_plan_files(show)
    check = _command(
        commands, "check", "plan check", "say whether a plan fits a model and memory"
    )
    check.add_argument("file", help="a plan as JSON")
    check.add_argument("--work", required=True, metavar="FILE", help="the model's work")


def _add_plan_files(command: ArgumentParser) -> None:
    command.add_argument(
        "--trace", metavar="FILE", help="write the predicted step for Perfetto"
    )
    _add_picture(command, "draw the predicted step")
    command.add_argument(
        "--memory-png",
        "--memory-svg",
        dest="memory_picture",
        metavar="FILE",
        help="draw what each rank holds, and what it has (matplotlib)",
    )
    command.add_argument(
        "--scatter",
        metavar="FILE",
        help="draw the time of all candidates over their memory (matplotlib)",
    )
    command.add_argument(
        "--dot", metavar="FILE", help="write the stages as a graph for Graphviz"
    )
    command.add_argument(
        "--top", type=_count, metavar="N", help="print the N best candidates, too"
    )


def _add_trace(groups: Any) -> None:
    commands = _group(groups, "trace", "show or merge recorded timelines")
    show = _command(commands, "show", "trace show", "print the figures of a timeline")
    show.add_argument("file", help="a timeline as JSON")
    _add_picture(show, "draw it")
    merge = _command(
        commands, "merge", "trace merge", "make one trace for Perfetto of timelines"
    )
    merge.add_argument("files", nargs="+", help="timelines as JSON")
    merge.add_argument("--output", required=True, metavar="FILE", help="the trace")
    merge.add_argument(
        "--parts",
        action="store_true",
        help="they are parts of one step, not steps to be compared",
    )


def _group(groups: Any, name: str, text: str, epilog: str = "") -> Any:
    group = groups.add_parser(
        name,
        help=text,
        description=text,
        epilog=epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    return group.add_subparsers(required=True, metavar="COMMAND")


def _command(
    commands: Any, name: str, command: str, text: str, epilog: str = ""
) -> ArgumentParser:
    found: ArgumentParser = commands.add_parser(
        name,
        help=text,
        description=text,
        epilog=epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    found.set_defaults(command=command)
    return found


def _add_source(command: ArgumentParser) -> None:
    command.add_argument("schedule", metavar="SCHEDULE", help="name or CSV file")
    command.add_argument("--ranks", type=_count, metavar="N", help="number of ranks")
    command.add_argument(
        "--microbatches", type=_count, metavar="N", help="number of microbatches"
    )
    command.add_argument(
        "--stages-per-rank", type=_count, metavar="N", help="of an interleaved schedule"
    )
    command.add_argument(
        "--edges",
        type=_edges,
        metavar="P-C,...",
        help="pairs of a stage and one that uses its values, such as 0-1,1-2,0-2",
    )


def _add_picture(command: ArgumentParser, text: str) -> None:
    command.add_argument(
        "--png", "--svg", dest="picture", metavar="FILE", help=f"{text} (matplotlib)"
    )


def _count(text: str) -> int:
    count = int(text) if text.isdigit() else 0
    if count < 1:
        raise argparse.ArgumentTypeError(f"expected a count from 1, got {text!r}")
    return count


def _texts(text: str) -> tuple[str, ...]:
    return tuple(text.split(","))


def _axes(text: str) -> dict[str, int]:
    pairs = [part.partition("=") for part in text.split(",")]
    if not all(name and size.isdigit() for name, _, size in pairs):
        raise argparse.ArgumentTypeError(
            f"expected axes and sizes such as data=2,model=2, got {text!r}"
        )
    return {name: int(size) for name, _, size in pairs}


def _times(text: str) -> list[float]:
    try:
        return [float(part) for part in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"expected milliseconds such as 1.5 or 1,2,3, got {text!r}"
        ) from None


def _edges(text: str) -> tuple[tuple[int, int], ...]:
    pairs = [part.split("-") for part in text.split(",")]
    if not all(len(pair) == 2 and all(map(str.isdigit, pair)) for pair in pairs):
        raise argparse.ArgumentTypeError(
            f"expected pairs of stages such as 0-1,1-2, got {text!r}"
        )
    return tuple((int(producer), int(consumer)) for producer, consumer in pairs)
