"""Draw orders of actions: `python docs/pictures/draw.py` writes the pictures.

An action begins when its rank is free and what it needs is there. Messages take no
time. F, I and W of a rank's share of the model take one unit each, B two.
"""

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import get_args

from torch_xla_pp.schedule import (
    Action,
    Kind,
    Schedule,
    chain_of,
    dag_1f1b,
    dualpipev,
    gpipe,
    interleaved_1f1b,
    one_f_one_b,
    zb1p,
    zbv,
)
from torch_xla_pp.simulate import Costs, Flow, simulate

FOLDER = Path(__file__).parent
UNIT, ROW, MARGIN, TITLE = 16, 18, 52, 24
COLOURS = {"F": "#8ab4d8", "B": "#e7b278", "I": "#eac98f", "W": "#a8c686"}
DURATIONS = {"F": 1.0, "B": 2.0, "I": 1.0, "W": 1.0}
KINDS: tuple[Kind, ...] = get_args(Kind)

Edges = Iterable[tuple[int, int]]
Times = Mapping[Action, tuple[float, float]]


def times_of(schedule: Schedule, edges: Edges, share: float) -> Times:
    """Return when each action begins and ends.

    Args:
        schedule: An order that can run.
        edges: Pairs (producer, consumer).
        share: The part of a rank's share of the model that a stage is.
    """
    stages = range(schedule.num_stages)
    costs = Costs(
        seconds={(s, kind): share * DURATIONS[kind] for s in stages for kind in KINDS},
        flows=tuple(Flow(producer=p, consumers=(c,)) for p, c in edges),
    )
    spans = simulate(schedule, costs).spans
    return {
        Action(stage=span.stage, kind=span.kind, microbatch=span.microbatch): (
            span.start_s + span.waiting_s,
            span.end_s,
        )
        for span in spans
    }


def idle_share(times: Times, num_ranks: int) -> float:
    """Return the share of the ranks' time in which nothing is computed."""
    length = max(end for _, end in times.values())
    return 1 - sum(end - start for start, end in times.values()) / (length * num_ranks)


def chart(title: str, schedule: Schedule, times: Times, top: int) -> Iterator[str]:
    """Yield the SVG elements of one order, from `top` downwards."""
    idle = idle_share(times, schedule.num_ranks)
    yield f'<text x="4" y="{top + 16}" class="title">{title}: {idle:.0%} idle</text>'
    for rank, row in enumerate(schedule.actions):
        y = top + TITLE + rank * ROW
        yield f'<text x="4" y="{y + 13}">rank {rank}</text>'
        first = min(schedule.stages_of(rank))
        for action in row:
            start, end = times[action]
            x, width = MARGIN + start * UNIT, (end - start) * UNIT
            shade = "1" if action.stage == first else "0.55"
            yield (
                f'<rect x="{x:g}" y="{y}" width="{width:g}" height="{ROW - 2}" '
                f'fill="{COLOURS[action.kind]}" fill-opacity="{shade}"/>'
            )
            yield (
                f'<text x="{x + width / 2:g}" y="{y + 12}" class="number">'
                f"{action.microbatch}</text>"
            )


def picture(charts: Iterable[tuple[str, Schedule, Edges, float]]) -> str:
    """Return an SVG picture of orders below each other."""
    elements: list[str] = []
    top, width = 0, 0.0
    for title, schedule, edges, share in charts:
        times = times_of(schedule, edges, share)
        elements += chart(title, schedule, times, top)
        top += TITLE + schedule.num_ranks * ROW + 8
        width = max(width, MARGIN + UNIT * max(end for _, end in times.values()) + 4)
    style = (
        "text{font:11px sans-serif}.title{font-weight:bold}"
        ".number{font-size:8px;text-anchor:middle}rect{stroke:#fff}"
    )
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:g}" height="{top}" '
        f'viewBox="0 0 {width:g} {top}">'
    )
    paper = f'<rect width="{width:g}" height="{top}" fill="#fff"/>'
    return "\n".join([head, f"<style>{style}</style>", paper, *elements, "</svg>\n"])


def pictures() -> dict[str, str]:
    """Return the text of each picture, by its file's name."""
    usual = {
        "GPipe": gpipe(4, 8),
        "1F1B": one_f_one_b(4, 8),
        "Interleaved1F1B, 2 stages a rank": interleaved_1f1b(4, 8, 2),
        "ZB1P (InterleavedZeroBubble), 1 stage a rank": zb1p(4, 8),
        "ZBVZeroBubble": zbv(4, 8),
        "DualPipeV": dualpipev(4, 8),
    }
    charts = [
        (title, order, chain_of(order.num_stages), 4 / order.num_stages)
        for title, order in usual.items()
    ]
    edges = [(0, 1), (0, 2), (1, 2)]
    example = dag_1f1b(edges, {0: 0, 1: 1, 2: 0}, 4)
    return {
        "schedules.svg": picture(charts),
        "example.svg": picture([("The example's order", example, edges, 1.0)]),
    }


if __name__ == "__main__":
    for name, text in pictures().items():
        (FOLDER / name).write_text(text)
