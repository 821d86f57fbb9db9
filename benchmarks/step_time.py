"""A training step here and in torch.distributed.pipelining on gloo, side by side.

    python benchmarks/step_time.py                 small model, GPipe and 1F1B
    python benchmarks/step_time.py --size large --microbatches 4 8 16 --json
    python benchmarks/step_time.py --schedules 1F1B ZBVZeroBubble --compiled
    python benchmarks/step_time.py --together --schedules GPipe 1F1B ZBVZeroBubble
    python benchmarks/step_time.py --layers        cost per layer of larger programs

Two ranks of one local device each, rank r with all its threads on core r; the same
model, data and unmodified schedule classes; SGD. All sides run in the same processes in
turns of a few steps; medians over turns are printed. The peer is eager CPU PyTorch.
Its handshake is left out, whose two sides disagree on the size of a message in torch
2.9, and its V-shaped schedule is run by torch's other runtime, see `sides.make_runner`.
With `--compiled` a peer whose modules are torch.compile'd takes its turns, too; that
needs a C++ compiler. Columns, as the JSON names them:

ours_s, peer_s, compiled_peer_s: Time of a step, the optimizer's included. Where there
    is no compiled peer, `compiled_error` says why.
ratio: ours_s / peer_s, of the same turn; the median.
..._spread: The first and the third quartile of each of these.
peer_schedule (with `--together`): That of the peer. All schedules of both sides take
    their turns in the same rounds then, with no other columns than these; a last row
    has the fastest of ours and the fastest of theirs, by medians.
efficiency: Time that a step would take without any cost of distribution, by the time
    that it takes: `single_s * (M + P - 1) / (M * P) / ours_s` for M microbatches on P
    ranks. `single_s` is the time in which one process on one core runs the programs of
    all stages in turn. The bubble is GPipe's: schedules that have a smaller one may
    exceed 1.
shared_efficiency: The same with `shared_s` for `single_s`, the time while each rank
    does so on its own core: what the cores share, such as memory, costs both.
dispatch_us: CPU time of the main thread in actions and losses, by the number of
    actions, the mean over both ranks and 3 steps. It holds all that the thread does,
    and programs, should XLA run them in the calling thread; waiting is no CPU time. It
    should not grow with M.
programs: Programs that both ranks enqueue in a step, such as those of stages, losses,
    gradients and the optimizer.
first_step_s: From before the stages are built until the first step is done.
compiles: Programs compiled or looked up by graph in the timed steps, by torch_xla's
    counters, over both ranks; should be 0.
split_ratio (a line of its own): Time of the two halves of a split backward by the
    time of the full backward.
"""

import argparse
import gc
import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import gpt
import programs
import sides
import torch.distributed as dist
from pinning import check_pinned
from sides import NUM_RANKS, ONE_STAGE, SCHEDULES, MakeStage, Side
from spread import medians_of, ratios, text_of

ROUNDS = 7
STEPS = 2
# Beside the first one. The optimizer's program runs with the next step, and the second
# one differs from the first.
WARM_UP_STEPS = 2
DISPATCH_STEPS = 3
ACTIONS = ("forward_one_chunk", "backward_one_chunk", "backward_weight_one_chunk")
COUNTERS = ("UncachedCompile", "CreateCompileHandles")
PEER_TIMEOUT = timedelta(minutes=3)


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """The cells to measure, and the core of each rank."""

    schedules: Sequence[str]
    counts: Sequence[int]
    size_name: str
    is_compiled: bool
    cores: Sequence[int]
    rounds: int = ROUNDS
    is_together: bool = False


class Bench:
    """The measurement of cells; every rank makes the same calls in the same order."""

    def __init__(self, job: Job) -> None:
        self.core = sides.join(job.cores)
        from torch_xla_pp import xla_compat

        self.rank = dist.get_rank()
        self.job = job
        self.size = gpt.SIZES[job.size_name]
        self._wait_device = xla_compat.wait_device
        self._gloo = dist.new_group(backend="gloo")
        alone = [dist.new_group([r], backend="xla_pp") for r in range(NUM_RANKS)]
        self._alone = alone[self.rank]

    def cell(self, schedule: str, microbatches: int) -> dict[str, Any]:
        """Measure one schedule with one number of microbatches."""
        start = time.perf_counter()
        ours = sides.our_side(schedule, microbatches, self.size)
        ours.step()
        self._wait_device()
        row: dict[str, Any] = {
            "what": "step",
            "model": self.job.size_name,
            "schedule": schedule,
            "microbatches": microbatches,
            "first_step_s": time.perf_counter() - start,
        }
        peer = self._side(sides.peer(self._gloo), schedule, microbatches)
        single = self._single(microbatches, sides.num_stages_of(schedule))
        turns: dict[str, Side | None] = {"ours": ours, "peer": peer, "shared": single}
        turns["single"] = None if self.rank else single
        if self.job.is_compiled:
            compiled, row["compiled_error"] = self._compiled(schedule, microbatches)
            turns |= {"compiled_peer": compiled} if compiled else {}
        row |= self._rounds(turns)
        bubble = (microbatches + NUM_RANKS - 1) / (microbatches * NUM_RANKS)
        row["efficiency"] = row["single_s"] * bubble / row["ours_s"]
        row["shared_efficiency"] = row["shared_s"] * bubble / row["ours_s"]
        row |= self._dispatches(ours)
        check_pinned(self.core)
        return row

    def together(self, microbatches: int) -> list[dict[str, Any]]:
        """Measure all schedules in the same turns, and compare the fastest ones."""
        makers = {"ours": sides.ours(), "peer": sides.peer(self._gloo)}
        turns: dict[str, Side | None] = {
            f"{schedule} {side}": self._side(make, schedule, microbatches)
            for schedule in self.job.schedules
            for side, make in makers.items()
        }
        self._warm_up(turns)
        seconds = self._seconds(turns)

        def row(what: str, ours: str, peer: str) -> dict[str, Any]:
            times = {"ours": seconds[f"{ours} ours"], "peer": seconds[f"{peer} peer"]}
            return compared(times) | {
                "what": what,
                "model": self.job.size_name,
                "microbatches": microbatches,
                "schedule": ours,
                "peer_schedule": peer,
            }

        rows = [row("together", schedule, schedule) for schedule in self.job.schedules]
        fastest = [
            min(rows, key=lambda row: row[f"{side}_s"])["schedule"] for side in makers
        ]
        return [*rows, row("best", *fastest)]

    def _side(self, make: MakeStage, schedule: str, microbatches: int) -> Side:
        indices = sides.stage_indices(schedule, self.rank)
        num_stages = sides.num_stages_of(schedule)
        return Side(make, schedule, indices, num_stages, microbatches, self.size)

    def _compiled(self, schedule: str, microbatches: int) -> tuple[Side | None, str]:
        """Return a compiled peer after its first step, or None and why there is none.

        It has a group of its own, since a rank that fails leaves the other one in the
        middle of a step until the group's time is over.
        """
        from torch._inductor import config

        config.compile_threads = 1
        group = dist.new_group(backend="gloo", timeout=PEER_TIMEOUT)
        side, error = None, None
        try:
            make = sides.peer(group, is_compiled=True)
            side = self._side(make, schedule, microbatches)
            side.step()
        except Exception as failure:
            text = f"{type(failure).__name__}: {' '.join(str(failure).split())}"
            error = time.time(), text[:200]
        errors = [found for found in gathered(error) if found is not None]
        # What failed later did so because of the first.
        return (None, min(errors)[1]) if errors else (side, "")

    def _rounds(self, turns: dict[str, Side | None]) -> dict[str, Any]:
        """Let the sides take turns; return times, and what ours compiled meanwhile."""
        self._warm_up(turns)
        before = num_compiles()
        found = compared(self._seconds(turns))
        return found | {"compiles": sum(gathered(num_compiles() - before))}

    def _seconds(self, turns: dict[str, Side | None]) -> dict[str, list[float]]:
        """Let the sides take turns; return the time of a step in each."""
        seconds: dict[str, list[float]] = {name: [] for name in turns}
        for _ in range(self.job.rounds):
            for name, side in turns.items():
                dist.barrier()
                start = time.perf_counter()
                self._steps(side)
                dist.barrier()
                seconds[name].append((time.perf_counter() - start) / STEPS)
        return seconds

    def _warm_up(self, turns: dict[str, Side | None]) -> None:
        for side in turns.values():
            self._steps(side, WARM_UP_STEPS)

    def _steps(self, side: Side | None, count: int = STEPS) -> None:
        for _ in range(count if side else 0):
            side.step()
        self._wait_device()

    def _single(self, microbatches: int, num_stages: int) -> Side:
        """Return a pipeline with all stages on this rank."""
        make, stages = sides.ours(self._alone), range(num_stages)
        # With one rank it takes the microbatches one by one through all stages.
        schedule = "Interleaved1F1B"
        side = Side(make, schedule, stages, num_stages, microbatches, self.size)
        for _ in range(2):
            side.step()
        return side

    def _dispatches(self, ours: Side) -> dict[str, float]:
        """Count what the main thread does, in steps of their own."""
        from torch_xla_pp import xla_compat

        actions: list[float] = []
        losses: list[float] = []
        timed = [(stage, name, actions) for stage in ours.stages for name in ACTIONS]
        timed.append((ours.runner, "_compute_loss", losses))
        for owner, name, seconds in timed:
            setattr(owner, name, with_cpu_time(getattr(owner, name), seconds))
        before = xla_compat.num_enqueued()
        self._steps(ours, DISPATCH_STEPS)
        num_enqueued = xla_compat.num_enqueued() - before
        for owner, name, _ in timed:
            delattr(owner, name)
        total_s = sum(gathered(sum(actions) + sum(losses)))
        return {
            "dispatch_us": total_s / sum(gathered(len(actions))) * 1e6,
            "programs": sum(gathered(num_enqueued)) / DISPATCH_STEPS,
        }


def compared(seconds: Mapping[str, list[float]]) -> dict[str, Any]:
    """Return the times of sides that took turns, and the ratio of ours to the peer."""
    rounds = {f"{name}_s": values for name, values in seconds.items()}
    return medians_of(rounds | {"ratio": ratios(seconds["ours"], seconds["peer"])})


def with_cpu_time(call: Callable[..., Any], seconds: list[float]) -> Callable[..., Any]:
    """Return `call`, noting the CPU time that the calling thread spends in it."""

    def timed(*args: Any, **kwargs: Any) -> Any:
        start = time.thread_time()
        result = call(*args, **kwargs)
        seconds.append(time.thread_time() - start)
        return result

    return timed


def num_compiles() -> int:
    """Return how often torch_xla has compiled a program or looked up a graph's."""
    from torch_xla.debug import metrics

    return sum(metrics.counter_value(name) or 0 for name in COUNTERS)


def gathered(value: Any) -> list[Any]:
    """Return the values of all ranks."""
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def measure(job: Job) -> list[dict[str, Any]]:
    """Measure all cells; every rank calls, rank 0 returns rows."""
    bench = Bench(job)
    rows: list[dict[str, Any]] = []
    if job.is_together:
        for microbatches in job.counts:
            rows += bench.together(microbatches)
            gc.collect()
        return rows if bench.rank == 0 else []
    for schedule in job.schedules:
        for microbatches in job.counts:
            rows.append(bench.cell(schedule, microbatches))
            gc.collect()
    return rows if bench.rank == 0 else []


def line_of(row: dict[str, Any]) -> str:
    """Return a row as a line of text."""
    if row["what"] == "split_backward":
        halves = f"{row['input_ms']:.1f} + {row['weight_ms']:.1f} ms"
        full = f"full {row['full_ms']:.1f} ms"
        return f"split backward: {halves}, {full}, split_ratio {row['split_ratio']:.2f}"
    if row["what"] == "layers":
        ours, eager = row["per_layer_ms"], row["eager_per_layer_ms"]
        both = f"ours {ours:7.2f} ms  eager {eager:7.2f} ms"
        return f"{row['layers']} layers, per layer: {both}  ratio {row['ratio']:.2f}"
    line = (
        f"{row['model']} {row['schedule']:21} M={row['microbatches']:<3}"
        f" ours {row['ours_s']:6.3f} s  peer {row['peer_s']:6.3f} s"
        f"  ratio {text_of(row, 'ratio')}"
    )
    if row["what"] in ("together", "best"):
        is_best = row["what"] == "best"
        return f"{line}  best, peer's {row['peer_schedule']}" if is_best else line
    line += (
        f"  efficiency {row['efficiency']:.2f} ({row['shared_efficiency']:.2f})"
        f"  dispatch {row['dispatch_us']:4.0f} us  programs {row['programs']:.0f}"
        f"  first step {row['first_step_s']:.1f} s  compiles {row['compiles']}"
    )
    if "compiled_peer_s" in row:
        return f"{line}  compiled peer {row['compiled_peer_s']:.3f} s"
    error = row.get("compiled_error")
    return f"{line}\n    no compiled peer: {error}" if error else line


def run(function: Callable[..., Any], ranks: int, *args: Any) -> list[dict[str, Any]]:
    """Run a measurement in fresh processes; return what rank 0 does."""
    from torch_xla_pp.testing import Worlds

    with Worlds() as worlds:
        results = worlds.run(function, ranks=ranks, args=args, timeout_s=7200)
    return results[0]


def main() -> None:
    """Run the cells that the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", choices=gpt.SIZES, default="small")
    parser.add_argument(
        "--schedules", nargs="+", choices=SCHEDULES, default=list(ONE_STAGE)
    )
    parser.add_argument("--microbatches", nargs="+", type=int, default=[4, 8])
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--compiled", action="store_true")
    parser.add_argument("--together", action="store_true")
    parser.add_argument("--layers", action="store_true")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    # The workers import this file, so its functions must not be those of `__main__`.
    import step_time

    cores = sorted(os.sched_getaffinity(0))
    if options.layers:
        rows = run(programs.layers, 1, options.size, cores[0])
    else:
        job = step_time.Job(
            schedules=options.schedules,
            counts=options.microbatches,
            size_name=options.size,
            is_compiled=options.compiled,
            cores=cores,
            rounds=options.rounds,
            is_together=options.together,
        )
        rows = (
            []
            if options.together
            else run(programs.split_backward, 1, options.size, cores[0])
        )
        rows += run(step_time.measure, NUM_RANKS, job)
    for row in rows:
        print(json.dumps(row) if options.json else line_of(row))
    if not options.json:
        print(f"Medians of {options.rounds} turns, in which the sides alternate.")


if __name__ == "__main__":
    main()
