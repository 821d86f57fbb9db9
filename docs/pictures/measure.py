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


def main() -> None:
    """Record and draw each schedule."""
    cores = sorted(os.sched_getaffinity(0))
    for schedule, name in PICTURES.items():
        args = (schedule, MICROBATCHES, "small", cores, ROUNDS)
        with Worlds() as worlds:
            steps, _ = worlds.run(
                prediction.recorded, ranks=NUM_RANKS, args=args, timeout_s=900
            )
        steps.sort(key=lambda step: step.step_s)
        to_picture(steps[len(steps) // 2], FOLDER / f"measured-{name}.svg")


if __name__ == "__main__":
    main()
