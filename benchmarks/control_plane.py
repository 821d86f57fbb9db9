"""What it takes that ranks agree and hear of each other, by the number of ranks.

    python benchmarks/control_plane.py
    python benchmarks/control_plane.py --ranks 4 8 --json

Ranks of one host, which share its cores: times grow with their number for that reason
alone. Columns, as the JSON names them:

ranks: Ranks of the group.
threads: Threads that joining the group has added to a process, at most.
sockets: Sockets that it has added, at most over all ranks, and in the median.
join_s: Until the last rank has joined, in seconds.
exchange_ms: All ranks give a value and get all values.
announce_ms: The first rank gives a value, as the kind of a step, until the last one has
    it; half of a round trip.
all_reduce_ms: A sum of one number on the CPU, by gloo.

Times in milliseconds are medians of rounds, in each of which the median rank counts, or
the first one where that is named; `..._spread` are their quartiles.
"""

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from spread import medians_of, text_of

ROUNDS = 20


def measure() -> dict[str, Any]:
    """Join the group and use it, in every rank."""
    from torch_xla_pp.transport import of_group

    before = _threads(), _sockets()
    begin_s = time.perf_counter()
    dist.init_process_group("xla_pp")
    group = of_group(None)
    rendezvous = group.rendezvous
    rendezvous.exchange("joined", None)
    found: dict[str, Any] = {"join_s": time.perf_counter() - begin_s}
    found["exchange_ms"] = _times_ms(lambda _: rendezvous.exchange("round", None))
    last = rendezvous.size - 1

    def there_and_back(number: int) -> None:
        """The farthest rank answers when it has the value."""
        if rendezvous.rank == 0:
            rendezvous.announce(f"kind {number}", number)
            rendezvous.take(f"answer {number}", last)
            return
        rendezvous.take(f"kind {number}", 0)
        if rendezvous.rank == last:
            rendezvous.announce(f"answer {number}", number)

    found["announce_ms"] = [time_ms / 2 for time_ms in _times_ms(there_and_back)]
    rendezvous.exchange("announced", None)
    # A connection is there while ranks talk; in a step only neighbours do.
    found["threads"], found["sockets"] = _threads() - before[0], _sockets() - before[1]
    found["all_reduce_ms"] = _times_ms(lambda _: dist.all_reduce(torch.ones(())))
    found["all_reduce_sockets"] = _sockets() - before[1]
    rendezvous.exchange("done", None)
    return found


def _times_ms(call: Callable[[int], Any]) -> list[float]:
    """Return what each round takes."""
    times = []
    for number in range(ROUNDS):
        begin_s = time.perf_counter()
        call(number)
        times.append(1e3 * (time.perf_counter() - begin_s))
    return times


def _threads() -> int:
    return len(list(Path("/proc/self/task").iterdir()))


def _sockets() -> int:
    count = 0
    for name in os.listdir("/proc/self/fd"):
        try:
            count += os.readlink(f"/proc/self/fd/{name}").startswith("socket:")
        except OSError:  # the folder itself was open
            continue
    return count


def row_of(worlds: Any, ranks: int) -> dict[str, Any]:
    """Measure a group of so many ranks."""
    # The workers import this file, so its functions must not be those of `__main__`.
    import control_plane

    found = worlds.run(control_plane.measure, ranks=ranks, timeout_s=300)
    times = {"announce_ms": found[0]["announce_ms"]}
    for name in ("exchange_ms", "all_reduce_ms"):
        by_rank = zip(*(row[name] for row in found), strict=True)
        times[name] = [statistics.median(own) for own in by_rank]
    return {
        "ranks": ranks,
        "threads": max(row["threads"] for row in found),
        "sockets": max(row["sockets"] for row in found),
        "sockets_median": statistics.median(row["sockets"] for row in found),
        "all_reduce_sockets": max(row["all_reduce_sockets"] for row in found),
        "join_s": max(row["join_s"] for row in found),
    } | medians_of(times)


def line_of(row: dict[str, Any]) -> str:
    """Return a row as a line of text."""
    return (
        f"{row['ranks']:3} ranks: {row['threads']:2} threads, "
        f"{row['sockets']:3} sockets (median {row['sockets_median']:g}; "
        f"{row['all_reduce_sockets']} after an all_reduce), "
        f"join {row['join_s']:.2f} s, exchange {text_of(row, 'exchange_ms')} ms, "
        f"announce {text_of(row, 'announce_ms')} ms, "
        f"all_reduce {text_of(row, 'all_reduce_ms')} ms"
    )


def main() -> None:
    """Run the sizes that the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", nargs="+", type=int, default=[2, 4, 8, 16, 32])
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    from torch_xla_pp.testing import Worlds

    for ranks in options.ranks:
        with Worlds() as worlds:
            row = row_of(worlds, ranks)
        print(json.dumps(row) if options.json else line_of(row), flush=True)


if __name__ == "__main__":
    main()
