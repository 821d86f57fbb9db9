"""Timelines as a picture: a line for each rank, a bar for each action."""

from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch_xla_pp.timeline.figure import new_figure
from torch_xla_pp.timeline.span import Span
from torch_xla_pp.timeline.timeline import Timeline

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_COLOURS = {"F": "#72a0c8", "B": "#76b76f", "I": "#8ed0c8", "W": "#efcf60"}
_OTHER_COLOUR = "#c79bc0"
_WAITING_COLOUR = "#e4e4e4"
# The last of several stages of a rank keeps this much of the colour's light.
_DARKEST = 0.7
_HEIGHT = 0.8
_INCHES = 14.0
# Narrower bars have no space for the number of a microbatch.
_LABEL_INCHES = 0.16


def to_picture(timeline: Timeline, path: str | Path) -> None:
    """Draw the actions of ranks; the suffix of the file's name is the format.

    Bars have the colour of their kind, and the number of their microbatch if there is
    space. Of several stages of a rank, later ones are darker. Time in which an action
    waits for a receive is grey.

    Args:
        timeline: The timeline.
        path: The file to write: .png, .svg, .pdf, or another format of matplotlib.

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
        ValueError: matplotlib does not know the format.
    """
    figure = new_figure(_INCHES, 1.2 + 0.35 * timeline.num_ranks)
    axes = figure.add_subplot()
    _draw_bars(axes, timeline)
    _draw_numbers(axes, timeline)
    _draw_legend(axes, timeline)
    ranks = range(timeline.num_ranks)
    axes.set_yticks(ranks, [f"rank {rank}" for rank in ranks])
    axes.set_ylim(timeline.num_ranks - 0.5, -0.5)
    axes.set_xlim(0, timeline.step_s * 1e3 or 1.0)
    axes.set_xlabel("ms")
    figure.savefig(path, bbox_inches="tight")


def _draw_bars(axes: "Axes", timeline: Timeline) -> None:
    """Draw all bars of a rank that have one colour at once."""
    bars: defaultdict[tuple[Any, int], list[tuple[float, float]]] = defaultdict(list)
    lights = _lights(timeline)
    for span in timeline.spans:
        start_s = span.start_s - timeline.start_s
        colour = _colour(span.kind, lights[span.rank, span.stage])
        work = (1e3 * (start_s + span.waiting_s), 1e3 * span.busy_s)
        bars[colour, span.rank].append(work)
        if span.waiting_s > 0:
            waiting = (1e3 * start_s, 1e3 * span.waiting_s)
            bars[_WAITING_COLOUR, span.rank].append(waiting)
    for (colour, rank), found in bars.items():
        place = (rank - _HEIGHT / 2, _HEIGHT)
        axes.broken_barh(
            found, place, facecolors=colour, edgecolor="white", linewidth=0.3
        )


def _lights(timeline: Timeline) -> dict[tuple[int, int], float]:
    """Return the lightness of colours for each rank's stages."""
    stages: defaultdict[int, set[int]] = defaultdict(set)
    for span in timeline.spans:
        stages[span.rank].add(span.stage)
    return {
        (rank, stage): 1 - (1 - _DARKEST) * number / max(1, len(found) - 1)
        for rank, found in stages.items()
        for number, stage in enumerate(sorted(found))
    }


def _colour(kind: str, light: float) -> tuple[float, float, float]:
    text = _COLOURS.get(kind, _OTHER_COLOUR)
    red, green, blue = (int(text[i : i + 2], 16) / 255 * light for i in (1, 3, 5))
    return red, green, blue


def _draw_numbers(axes: "Axes", timeline: Timeline) -> None:
    narrowest_s = timeline.step_s * _LABEL_INCHES / _INCHES
    for span in timeline.spans:
        if span.busy_s >= narrowest_s > 0:
            axes.text(
                1e3 * (_middle_s(span) - timeline.start_s),
                span.rank,
                str(span.microbatch),
                ha="center",
                va="center",
                fontsize=7,
            )


def _middle_s(span: Span) -> float:
    return (span.start_s + span.waiting_s + span.end_s) / 2


def _draw_legend(axes: "Axes", timeline: Timeline) -> None:
    from matplotlib.patches import Patch

    colours = {
        kind: _colour(kind, 1.0) for kind in sorted({s.kind for s in timeline.spans})
    }
    patches = [Patch(color=colour, label=kind) for kind, colour in colours.items()]
    if any(span.waiting_s > 0 for span in timeline.spans):
        patches.append(Patch(color=_WAITING_COLOUR, label="waiting"))
    axes.legend(handles=patches, loc="lower right", bbox_to_anchor=(1, 1), ncols=5)
