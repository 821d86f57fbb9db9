"""What the command line's arguments stand for."""

from argparse import Namespace
from collections.abc import Callable, Sequence
from pathlib import Path

from torch_xla_pp.schedule import (
    Schedule,
    chain_of,
    dualpipev,
    gpipe,
    interleaved_1f1b,
    one_f_one_b,
    zb1p,
    zbv,
)
from torch_xla_pp.simulate import (
    Costs,
    Link,
    Network,
    edge_flows,
    measured_costs,
    measured_network,
    stage_seconds,
)
from torch_xla_pp.timeline import Timeline

# Number of ranks, of microbatches and of stages on a rank → schedule.
_BUILDERS: dict[str, Callable[[int, int, int], Schedule]] = {
    "gpipe": lambda p, m, _: gpipe(p, m),
    "1f1b": lambda p, m, _: one_f_one_b(p, m),
    "interleaved1f1b": interleaved_1f1b,
    "zb1p": zb1p,
    "zbv": lambda p, m, _: zbv(p, m),
    "dualpipev": lambda p, m, _: dualpipev(p, m),
}
NAMES = tuple(_BUILDERS)
_INTERLEAVED = ("interleaved1f1b", "zb1p")
# Names of upstream's classes.
_SAME = {"interleavedzerobubble": "zb1p", "zbvzerobubble": "zbv"}


def schedule_of(arguments: Namespace) -> Schedule:
    """Return the schedule that is named, or the one in a file.

    Raises:
        ValueError: There is no such schedule or file, or it does not fit the counts.
    """
    source: str = arguments.schedule
    name = source.lower().removeprefix("schedule")
    name = _SAME.get(name, name)
    if name in _BUILDERS:
        return _built(name, arguments)
    if not Path(source).is_file():
        raise ValueError(
            f"schedule: expected one of {', '.join(NAMES)}, or a CSV file with one "
            f"line a rank, got {source!r}, which is neither. Correct the name or path."
        )
    return Schedule.from_csv(Path(source))


def _built(name: str, arguments: Namespace) -> Schedule:
    counts = {"--ranks": arguments.ranks, "--microbatches": arguments.microbatches}
    missing = [option for option, count in counts.items() if count is None]
    if missing:
        raise ValueError(
            f"schedule {name}: expected --ranks and --microbatches, got no "
            f"{' and no '.join(missing)}. Add e.g. --ranks 4 --microbatches 8."
        )
    stages = arguments.stages_per_rank
    if stages is None:
        stages = 2 if name == "interleaved1f1b" else 1
    elif name not in _INTERLEAVED:
        raise ValueError(
            f"schedule {name}: expected no --stages-per-rank, as it has a fixed "
            f"placement, got {stages}. Leave it out, or take one of "
            f"{', '.join(_INTERLEAVED)}."
        )
    return _BUILDERS[name](arguments.ranks, arguments.microbatches, stages)


def inputs_of(arguments: Namespace, schedule: Schedule) -> tuple[Costs, Network]:
    """Return the costs and links that options state, or those measured in files.

    Raises:
        ValueError: They do not fit the schedule's stages.
    """
    if arguments.profile:
        profiles = [Timeline.from_json(Path(file)) for file in arguments.profile]
        return measured_costs(profiles), measured_network(profiles)
    return _stated_costs(arguments, schedule), _stated_network(arguments)


def edges_of(arguments: Namespace, schedule: Schedule) -> tuple[tuple[int, int], ...]:
    """Return the edges that options state, or those of a chain."""
    if arguments.edges is None:
        return chain_of(schedule.num_stages)
    edges: tuple[tuple[int, int], ...] = arguments.edges
    return edges


def _stated_costs(arguments: Namespace, schedule: Schedule) -> Costs:
    count = schedule.num_stages
    times = zip(
        _for_each_stage("--forward", arguments.forward, count),
        _for_each_stage("--input", arguments.input, count),
        _for_each_stage("--weight", arguments.weight, count),
        strict=True,
    )
    return Costs(
        seconds=stage_seconds(times),
        flows=edge_flows(edges_of(arguments, schedule), arguments.bytes),
    )


def _stated_network(arguments: Namespace) -> Network:
    """Return equal links."""
    bytes_per_s = arguments.bandwidth * 1e9
    link = Link(latency_s=arguments.latency * 1e-6, bytes_per_s=bytes_per_s)
    return Network(default=link)


def _for_each_stage(
    option: str, milliseconds: Sequence[float], num_stages: int
) -> list[float]:
    """Return seconds for each stage."""
    if len(milliseconds) not in (1, num_stages):
        raise ValueError(
            f"{option}: expected one time, or one for each of the {num_stages} stages, "
            f"got {len(milliseconds)}. Write e.g. {option} 1.5 or {option} 1,2,..."
        )
    times = [1e-3 * time for time in milliseconds]
    return times * num_stages if len(times) == 1 else times
