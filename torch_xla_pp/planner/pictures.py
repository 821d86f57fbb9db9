"""A plan as pictures: the memory of ranks, other candidates, and the stages."""

from dataclasses import fields
from pathlib import Path

from torch_xla_pp.planner.evaluation import RankBytes
from torch_xla_pp.planner.plan import PipelinePlan
from torch_xla_pp.planner.plan_values import Candidate
from torch_xla_pp.planner.report import modules_text
from torch_xla_pp.text import bytes_text, seconds_text
from torch_xla_pp.timeline import new_figure

_INCHES = 10.0
_COLOURS = {
    "parameters": "#4f7cac",
    "gradients": "#72a0c8",
    "optimizer": "#a6c6e0",
    "saved": "#76b76f",
    "passed": "#8ed0c8",
    "outputs": "#efcf60",
    "temporary": "#c79bc0",
}
_GIB = 2**30


def draw_memory(plan: PipelinePlan, path: str | Path) -> None:
    """Draw the memory that a device of each rank uses, part by part, and its capacity.

    Args:
        plan: The plan.
        path: The file to write: .png, .svg, .pdf, or another format of matplotlib.

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
        ValueError: matplotlib does not know the format.
    """
    count = len(plan.ranks)
    figure = new_figure(_INCHES, 1.4 + 0.35 * count)
    axes = figure.add_subplot()
    left = [0.0] * count
    for part in (field.name for field in fields(RankBytes)):
        sizes = [getattr(r.bytes, part) / _GIB for r in plan.predicted.ranks]
        axes.barh(range(count), sizes, left=left, label=part, color=_COLOURS[part])
        left = [low + size for low, size in zip(left, sizes, strict=True)]
    for number, rank in enumerate(plan.ranks):
        axes.plot(
            [rank.capacity_bytes / _GIB] * 2,
            [number - 0.5, number + 0.5],
            color="black",
            label="capacity" if number == 0 else None,
        )
    axes.set_yticks(range(count), [f"rank {rank}" for rank in range(count)])
    axes.set_ylim(count - 0.5, -0.5)
    axes.set_xlabel("GiB of a device")
    axes.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=4)
    figure.savefig(path, bbox_inches="tight")


def draw_candidates(plan: PipelinePlan, path: str | Path) -> None:
    """Draw the step time of all candidates over their peak memory.

    The front, of candidates that no other one beats in both, is a line; the plan is a
    star; candidates that do not fit are hollow.

    Args:
        plan: The plan.
        path: The file to write, as for `draw_memory`.

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
        ValueError: matplotlib does not know the format, or there are no candidates.
    """
    if not plan.candidates:
        raise ValueError(
            "plan: expected candidates to draw, got a plan that was kept without any. "
            "Plan again."
        )
    figure = new_figure(_INCHES, 0.6 * _INCHES)
    axes = figure.add_subplot()
    for fits, colour in ((True, "#4f7cac"), (False, "none")):
        shown = [c for c in plan.candidates if c.fits == fits]
        axes.scatter(
            [c.peak_bytes / _GIB for c in shown],
            [1e3 * c.step_s for c in shown],
            facecolors=colour,
            edgecolors="#4f7cac",
            label="fits" if fits else "does not fit",
        )
    front = front_of(plan.candidates)
    axes.step(
        [c.peak_bytes / _GIB for c in front],
        [1e3 * c.step_s for c in front],
        where="post",
        color="#76b76f",
        label="front",
    )
    peak = max(rank.bytes.total for rank in plan.predicted.ranks)
    star = [peak / _GIB], [1e3 * plan.predicted.step_s]
    axes.scatter(*star, marker="*", s=200, color="#c0504d", label="plan", zorder=3)
    for number, capacity in enumerate(sorted({r.capacity_bytes for r in plan.ranks})):
        label = None if number else "capacity"
        axes.axvline(capacity / _GIB, color="black", label=label)
    axes.set_xlabel("GiB of a device, at most")
    axes.set_ylabel("ms of a step")
    axes.legend()
    figure.savefig(path, bbox_inches="tight")


def front_of(candidates: tuple[Candidate, ...]) -> list[Candidate]:
    """Return the candidates that none beats in time and memory, the smallest first."""
    found: list[Candidate] = []
    for one in sorted(candidates, key=lambda c: (c.peak_bytes, c.step_s)):
        if not found or one.step_s < found[-1].step_s:
            found.append(one)
    return found


def to_dot(plan: PipelinePlan, path: str | Path | None = None) -> str:
    """Return the stages as a graph for Graphviz, each rank a cluster of its stages.

    Args:
        plan: The plan.
        path: A file to write as well.
    """
    lines = ["digraph plan {", "  rankdir=LR;", "  node [shape=box];"]
    for number, rank in enumerate(plan.ranks):
        lines += [
            f"  subgraph cluster_{number} {{",
            f"    label={_quoted(f'rank {number}: {rank.devices} {rank.device}')};",
            *(f"    {line}" for line in _nodes_of(plan, number)),
            "  }",
        ]
    for flow in plan.predicted.flows:
        for producer, consumer in flow.edges:
            label = _quoted(bytes_text(flow.num_bytes))
            lines.append(f"  stage_{producer} -> stage_{consumer} [label={label}];")
    text = "\n".join([*lines, "}"]) + "\n"
    if path is not None:
        Path(path).write_text(text)
    return text


def _nodes_of(plan: PipelinePlan, rank: int) -> list[str]:
    found = []
    for number, stage in enumerate(plan.stages):
        if stage.rank == rank:
            cost = plan.predicted.stages[number]
            backward_s = cost.input_s + cost.weight_s
            label = (
                f"stage {number}\n{modules_text(stage.modules)}\n"
                f"F {seconds_text(cost.forward_s)}, B {seconds_text(backward_s)}"
            )
            found.append(f"stage_{number} [label={_quoted(label)}];")
    return found


def _quoted(text: str) -> str:
    """Quote a text for Graphviz."""
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'"{escaped}"'
