"""Count the microbatches whose saved values a stage holds."""

from collections import Counter
from collections.abc import Iterator, Sequence

from torch_xla_pp.schedule.action import Action
from torch_xla_pp.schedule.schedule import Schedule


def live_after(row: Sequence[Action]) -> Iterator[tuple[Action, int]]:
    """Yield each action of a rank with the live microbatches of its stage after it.

    A microbatch is live from its forward until its saved activations are freed: until
    its B, or its W if the backward is split.
    """
    live: Counter[int] = Counter()
    for action in row:
        if action.kind == "F":
            live[action.stage] += 1
        elif action.kind != "I":
            live[action.stage] -= 1
        yield action, live[action.stage]


def peak_live(schedule: Schedule) -> dict[int, int]:
    """Return for each stage how many microbatches are live at most."""
    peaks: dict[int, int] = {}
    for row in schedule.actions:
        for action, live in live_after(row):
            peaks[action.stage] = max(peaks.get(action.stage, 0), live)
    return dict(sorted(peaks.items()))
