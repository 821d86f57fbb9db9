"""What the commands do."""

import sys
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from torch_xla_pp.cli.options import parser
from torch_xla_pp.cli.sources import edges_of, inputs_of, schedule_of
from torch_xla_pp.cli.verify_command import verify_script
from torch_xla_pp.errors import PipelineError
from torch_xla_pp.health import doctor
from torch_xla_pp.schedule import Schedule, verify
from torch_xla_pp.simulate import Costs, expected_step_s, simulate
from torch_xla_pp.timeline import Timeline, merge, summarize, to_chrome, to_picture

_AFTER_PLAN = ("make", "show", "check", "-h", "--help")
_Command = Callable[[Namespace], int | None]
_FAULTS = (PipelineError, ValueError, OSError, ModuleNotFoundError)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        arguments: What follows `python -m torch_xla_pp`; None for the process's own.

    Returns:
        0, or 1 if an input is at fault, with a message on stderr, or if a check fails.

    Raises:
        SystemExit: An option is unknown, with code 2, or help is asked for.
    """
    words = [*(sys.argv[1:] if arguments is None else arguments)]
    is_plan = words[:1] == ["plan"]
    if is_plan and words[1:2] and words[1] not in _AFTER_PLAN:
        words.insert(1, "make")
    parsed = parser(has_plans=is_plan).parse_args(words)
    commands: Mapping[str, _Command] = _COMMANDS
    if is_plan:
        from torch_xla_pp.cli.plan_commands import PLAN_COMMANDS  # Imports NumPy.

        commands = PLAN_COMMANDS
    try:
        return commands[parsed.command](parsed) or 0
    except _FAULTS as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


def _show_schedule(parsed: Namespace) -> None:
    schedule = schedule_of(parsed)
    if parsed.csv:
        schedule.to_csv(parsed.csv)
    if parsed.picture:
        costs = Costs.uniform(
            schedule.num_stages, forward_s=1e-3, input_s=1e-3, weight_s=1e-3
        )
        to_picture(simulate(schedule, costs), parsed.picture)
    print(schedule)


def _check_schedule(parsed: Namespace) -> None:
    schedule = schedule_of(parsed)
    verify(
        schedule,
        edges_of(parsed, schedule),
        num_microbatches=parsed.microbatches,
        max_live=parsed.max_live,
        forward_only=parsed.forward_only,
    )
    print(f"can run: {_counts_text(schedule)}")


def _simulate(parsed: Namespace) -> None:
    schedule = schedule_of(parsed)
    costs, network = inputs_of(parsed, schedule)
    timeline = simulate(schedule, costs, network)
    if parsed.output:
        timeline.to_json(parsed.output)
    if parsed.trace:
        to_chrome(timeline, parsed.trace)
    if parsed.picture:
        to_picture(timeline, parsed.picture)
    print(summarize(timeline))
    if costs.samples:
        expected_s = expected_step_s(schedule, costs, network)
        print(f"{expected_s * 1e3:.2f} ms on average, as actions vary")


def _show_timeline(parsed: Namespace) -> None:
    timeline = Timeline.from_json(Path(parsed.file))
    if parsed.picture:
        to_picture(timeline, parsed.picture)
    print(summarize(timeline))


def _merge_timelines(parsed: Namespace) -> None:
    found = [Timeline.from_json(Path(file)) for file in parsed.files]
    if parsed.parts:
        to_chrome(merge(found), parsed.output)
    else:
        to_chrome(dict(zip(parsed.files, found, strict=True)), parsed.output)
    print(f"wrote {parsed.output}: open it at https://ui.perfetto.dev")


def _doctor(parsed: Namespace) -> int:
    diagnosis = doctor(ping=not parsed.no_ping, timeout_s=parsed.timeout)
    print(diagnosis)
    return int(not diagnosis.is_healthy)


def _fit(parsed: Namespace) -> int:
    from torch_xla_pp.cli.fit_command import fit_script  # Imports compilers.

    return fit_script(parsed)


def _counts_text(schedule: Schedule) -> str:
    return (
        f"ranks {schedule.num_ranks}, stages {schedule.num_stages}, "
        f"microbatches {schedule.num_microbatches}"
    )


_COMMANDS: dict[str, _Command] = {
    "schedule show": _show_schedule,
    "schedule check": _check_schedule,
    "doctor": _doctor,
    "fit": _fit,
    "simulate": _simulate,
    "trace show": _show_timeline,
    "trace merge": _merge_timelines,
    "verify": verify_script,
}
