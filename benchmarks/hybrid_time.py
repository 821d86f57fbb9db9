"""A training step of ranks of two devices, and of torch with as many processes.

    python benchmarks/hybrid_time.py               small model, 1F1B, dp, fsdp and tp
    python benchmarks/hybrid_time.py --size large --layouts tp --json
    python benchmarks/hybrid_time.py --schedules GPipe 1F1B --microbatches 8 16

Four workers, as two stages of two, train the same GPT on the same data under the same
unmodified schedule classes. Ours are two ranks of two CPU devices each, with presets of
axis rules; the peer is eager CPU PyTorch on gloo in four processes:

layout  ours                                the peer
dp      `presets.dp`                        `DistributedDataParallel`
fsdp    `presets.fsdp(gather_once=True)`    `fully_shard(reshard_after_forward=False)`
tp      `presets.tp`                        `parallelize_module` of DTensors

All that works for stage s, our rank or the peer's two processes, has core s alone. SGD.
The sides take turns of a few steps, and what has no turn sleeps; medians over turns are
printed. As the sides do equally many steps, their losses must agree in every turn; a
cell is not timed where those of the first steps do not. Columns, named as in the JSON:

ours_s, peer_s: Time of a step, the optimizer's included.
ratio: ours_s / peer_s, of the same turn; the median.
ours_cpu_s, peer_cpu_s: Processor time of a step, of all threads of all processes.
    Other work on the machine changes it less than the time of a step.
cpu_ratio: The same of ours_cpu_s / peer_cpu_s.
..._spread: The first and the third quartile of each of these.
loss_difference: The largest relative difference of the sides' mean losses in any turn.
first_step_s: Our first step and the making of the stages before.
compiles: Programs that we compiled or looked up by graph in the timed steps, by
    torch_xla's counters, over both ranks; should be 0.
"""

import argparse
import itertools
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gpt
import torch.distributed as dist
from hybrid_sides import DEVICES, LAYOUTS, PATIENCE, answer_key_of, key_of
from sides import NUM_RANKS, SCHEDULES
from spread import medians_of, ratios, text_of

SIDES = {"ours": NUM_RANKS, "peer": NUM_RANKS * DEVICES}
ROUNDS = 7
STEPS = 2
FIRST_STEPS = (1, 1, 2)  # of the turns before those that count
CLOSE = 1e-4
POLL_S = 0.02
_WORKER = Path(__file__).parent / "hybrid_sides.py"


@dataclass(frozen=True, kw_only=True, slots=True)
class Cell:
    """What is measured at once."""

    layout: str
    schedule: str
    microbatches: int
    size_name: str

    def arguments(self) -> list[str]:
        """Return it as the processes of both sides take it."""
        return [
            f"--layout={self.layout}",
            f"--schedule={self.schedule}",
            f"--microbatches={self.microbatches}",
            f"--size={self.size_name}",
        ]


class Sides:
    """Both sides of a cell, whose processes live as long as this is entered."""

    def __init__(self, cell: Cell, cores: Sequence[int]) -> None:
        self._store = dist.TCPStore(
            "127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=PATIENCE
        )
        shared = [*cell.arguments(), f"--port={self._store.port}"]
        shared += ["--cores", *map(str, cores)]
        self._turns = {side: itertools.count() for side in SIDES}
        self._processes = {
            side: subprocess.Popen(
                [sys.executable, "-m", "torch.distributed.run", "--standalone"]
                + [
                    f"--nproc-per-node={count}",
                    str(_WORKER),
                    f"--side={side}",
                    *shared,
                ],
                env=environment(),
                stdout=sys.stderr,
            )
            for side, count in SIDES.items()
        }

    def __enter__(self) -> "Sides":
        return self

    def __exit__(self, *_: object) -> None:
        for side, process in self._processes.items():
            self._store.set(key_of(side, next(self._turns[side])), "0")
            try:
                process.wait(timeout=60)
            except subprocess.TimeoutExpired:
                process.terminate()
                process.wait()

    def turn(self, side: str, num_steps: int) -> dict[str, Any]:
        """Let a side do some steps; return what it measured.

        Raises:
            RuntimeError: Its processes have ended.
        """
        turn = next(self._turns[side])
        self._store.set(key_of(side, turn), str(num_steps))
        while not self._store.check([answer_key_of(side, turn)]):
            if self._processes[side].poll() is not None:
                raise RuntimeError(
                    f"hybrid_time: expected an answer of {side} in turn {turn}, got "
                    "the end of its processes. See what they have printed."
                )
            time.sleep(POLL_S)
        found: dict[str, Any] = json.loads(self._store.get(answer_key_of(side, turn)))
        return found


def environment() -> dict[str, str]:
    """Return the variables of the processes of both sides."""
    ours = {"PJRT_DEVICE": "CPU", "CPU_NUM_DEVICES": str(DEVICES)}
    return {**os.environ, **ours, "OMP_NUM_THREADS": "1"}


def difference(ours: dict[str, Any], peer: dict[str, Any]) -> float:
    """Return how much the sides' losses differ, relative to the peer's."""
    return float(abs(ours["loss"] - peer["loss"]) / abs(peer["loss"]))


def measure(cell: Cell, cores: Sequence[int], rounds: int) -> dict[str, Any]:
    """Measure a cell in processes of its own."""
    with Sides(cell, cores) as both:
        first = [{side: both.turn(side, n) for side in SIDES} for n in FIRST_STEPS]
        differences = [difference(**found) for found in first]
        if max(differences) > CLOSE:
            raise RuntimeError(
                f"hybrid_time: {cell}: expected equal losses of both sides, got "
                f"{[(f['ours']['loss'], f['peer']['loss']) for f in first]}."
            )
        turns = [
            {side: both.turn(side, STEPS) for side in SIDES} for _ in range(rounds)
        ]
    row: dict[str, Any] = {
        "what": "hybrid",
        "model": cell.size_name,
        "layout": cell.layout,
        "schedule": cell.schedule,
        "microbatches": cell.microbatches,
        "loss_difference": max([*differences, *(difference(**t) for t in turns)]),
        "first_step_s": first[0]["ours"]["step_s"] + first[0]["ours"]["setup_s"],
        "compiles": sum(turn["ours"]["compiles"] for turn in turns),
    }
    for kind, prefix in (("step_s", ""), ("cpu_s", "cpu_")):
        values = {side: [turn[side][kind] for turn in turns] for side in SIDES}
        found = {f"{side}_{prefix}s": own for side, own in values.items()}
        found[f"{prefix}ratio"] = ratios(values["ours"], values["peer"])
        row |= medians_of(found)
    return row


def line_of(row: dict[str, Any]) -> str:
    """Return a row as a line of text."""
    return (
        f"{row['model']} {row['layout']:4} {row['schedule']:21}"
        f" M={row['microbatches']:<3}"
        f" ours {row['ours_s']:6.3f} s  peer {row['peer_s']:6.3f} s"
        f"  ratio {text_of(row, 'ratio')}"
        f"  processors {row['ours_cpu_s']:6.3f} s  {row['peer_cpu_s']:6.3f} s"
        f"  ratio {row['cpu_ratio']:.2f}  losses differ by {row['loss_difference']:.0e}"
        f"  first step {row['first_step_s']:.1f} s  compiles {row['compiles']}"
    )


def main() -> None:
    """Measure the cells that the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", choices=gpt.SIZES, default="small")
    parser.add_argument("--layouts", nargs="+", choices=LAYOUTS, default=list(LAYOUTS))
    parser.add_argument("--schedules", nargs="+", choices=SCHEDULES, default=["1F1B"])
    parser.add_argument("--microbatches", nargs="+", type=int, default=[8])
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    cores = sorted(os.sched_getaffinity(0))
    for layout, schedule, microbatches in itertools.product(
        options.layouts, options.schedules, options.microbatches
    ):
        cell = Cell(
            layout=layout,
            schedule=schedule,
            microbatches=microbatches,
            size_name=options.size,
        )
        row = measure(cell, cores, options.rounds)
        print(json.dumps(row) if options.json else line_of(row), flush=True)
    if not options.json:
        print(f"Medians of {options.rounds} turns, in which the sides alternate.")


if __name__ == "__main__":
    main()
