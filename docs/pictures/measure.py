"""Draw recorded steps: `python docs/pictures/measure.py` writes `measured-*.svg`.

The model of `benchmarks/gpt.py` with eight microbatches on two ranks, each with all its
threads on a core of its own. Of several steps the one of median length is shown.
"""

import os
import sys
from pathlib import Path

FOLDER = Path(__file__).parent
sys.path.insert(0, str(FOLDER.parents[1] / "benchmarks"))

import prediction  # noqa: E402
from sides import NUM_RANKS  # noqa: E402

from torch_xla_pp.testing import Worlds  # noqa: E402
from torch_xla_pp.timeline import to_picture  # noqa: E402

PICTURES = {"1F1B": "1f1b", "ZBVZeroBubble": "zbv"}
MICROBATCHES, ROUNDS = 8, 7


def draw(folder: Path, size_name: str, rounds: int) -> None:
    """Record the schedules, which take turns, and draw a step of each.

    Args:
        folder: Where to write the pictures.
        size_name: Of the model.
        rounds: How often each is recorded.
    """
    cores = sorted(os.sched_getaffinity(0))
    cells = [(schedule, MICROBATCHES) for schedule in PICTURES]
    args = (cells, size_name, cores, rounds)
    with Worlds() as worlds:
        recorded, _ = worlds.run(
            prediction.recorded, ranks=NUM_RANKS, args=args, timeout_s=900
        )
    for cell, name in zip(cells, PICTURES.values(), strict=True):
        steps = sorted((found[cell] for found in recorded), key=lambda x: x.step_s)
        to_picture(steps[len(steps) // 2], folder / f"measured-{name}.svg")


if __name__ == "__main__":
    draw(FOLDER, "small", ROUNDS)
