"""How long simulating a step takes: `python benchmarks/simulator.py`.

Prints the time of building 1F1B for 64 stages and 1,024 microbatches, which are 131,072
actions, and that of simulating it, the median of some runs and their quartiles. The
latter should be below 2 s. Times are those of the processor, since it is one thread
that never waits.
"""

import time

from spread import medians_of, text_of

from torch_xla_pp.schedule import one_f_one_b
from torch_xla_pp.simulate import Costs, simulate
from torch_xla_pp.timeline import summarize

NUM_RANKS = 64
NUM_MICROBATCHES = 1024
RUNS = 5


def main() -> None:
    """Print the times."""
    start = time.process_time()
    schedule = one_f_one_b(NUM_RANKS, NUM_MICROBATCHES)
    built_s = time.process_time() - start
    costs = Costs.uniform(NUM_RANKS)
    times = []
    for _ in range(RUNS):
        start = time.process_time()
        timeline = simulate(schedule, costs)
        times.append(time.process_time() - start)
    print(
        f"{NUM_RANKS} stages, {NUM_MICROBATCHES} microbatches, "
        f"{len(timeline.spans)} actions: built in {built_s:.2f} s, "
        f"simulated in {text_of(medians_of({'s': times}), 's')} s"
    )
    share = summarize(timeline).bubble_share
    exact = (NUM_RANKS - 1) / (NUM_MICROBATCHES + NUM_RANKS - 1)
    print(f"bubble {share:.6f}, by the formula {exact:.6f}")


if __name__ == "__main__":
    main()
