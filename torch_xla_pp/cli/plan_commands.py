"""What the commands on plans do.

The other commands do without this file: it loads the planner, and with it NumPy.
"""

from argparse import Namespace
from collections.abc import Callable
from pathlib import Path

from torch_xla_pp.cli.plan_options import plan_of_options
from torch_xla_pp.planner import (
    PipelinePlan,
    candidates_text,
    check,
    differences,
    draw_candidates,
    draw_memory,
    to_dot,
)
from torch_xla_pp.simulate import simulate
from torch_xla_pp.timeline import to_chrome, to_picture
from torch_xla_pp.work import WorkGraph


def _make_plan(parsed: Namespace) -> None:
    plan = plan_of_options(parsed)
    if parsed.output:
        plan.to_json(parsed.output)
    _draw_plan(plan, parsed)
    _print_plan(plan, parsed)


def _show_plan(parsed: Namespace) -> None:
    plan = PipelinePlan.from_json(Path(parsed.file))
    _draw_plan(plan, parsed)
    if parsed.against:
        print(differences(plan, PipelinePlan.from_json(Path(parsed.against))))
    else:
        _print_plan(plan, parsed)


def _print_plan(plan: PipelinePlan, parsed: Namespace) -> None:
    print(plan)
    if parsed.top:
        print(f"\n{candidates_text(plan, parsed.top)}")


def _draw_plan(plan: PipelinePlan, parsed: Namespace) -> None:
    if parsed.trace or parsed.picture:
        timeline = simulate(plan.table(), plan.stage_costs(), plan.network())
        if parsed.trace:
            to_chrome(timeline, parsed.trace)
        if parsed.picture:
            to_picture(timeline, parsed.picture)
    if parsed.memory_picture:
        draw_memory(plan, parsed.memory_picture)
    if parsed.scatter:
        draw_candidates(plan, parsed.scatter)
    if parsed.dot:
        to_dot(plan, parsed.dot)


def _check_plan(parsed: Namespace) -> None:
    plan = PipelinePlan.from_json(Path(parsed.file))
    check(plan, WorkGraph.from_json(Path(parsed.work)))
    print(f"sound: {len(plan.stages)} stages on {len(plan.ranks)} ranks")


PLAN_COMMANDS: dict[str, Callable[[Namespace], None]] = {
    "plan make": _make_plan,
    "plan show": _show_plan,
    "plan check": _check_plan,
}
