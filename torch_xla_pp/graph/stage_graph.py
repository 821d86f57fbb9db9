"""The stages of a model as a graph.

Terms: an *edge* carries one output of a producing stage to one input of a consuming
stage; stages are numbered so that a producer comes before its consumers. A *group* is
one parameter of the model that several stages hold a copy of.

Law: edges, not the schedule, determine which values are sent. Every stage but the first
takes all its positional inputs from edges.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace

import torch

from torch_xla_pp.errors import PlanError
from torch_xla_pp.graph.source import Source
from torch_xla_pp.mesh import LogicalAxes
from torch_xla_pp.text import bytes_text, count_text, type_text


@dataclass(frozen=True, kw_only=True, slots=True)
class StageValue:
    """An input or output of a stage.

    Args:
        name: Its name in the traced graph.
        shape: Its shape; None if it is unknown or no tensor.
        dtype: Its dtype, likewise.
    """

    name: str
    shape: tuple[int, ...] | None = None
    dtype: torch.dtype | None = None

    def __str__(self) -> str:
        return f"{self.name} {type_text(self.shape, self.dtype)}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Stage:
    """A stage: its inputs, its outputs, and its size.

    Args:
        name: Its name.
        inputs: Inputs of its module: positional ones in order, on the first stage the
            model's own, flat.
        outputs: Outputs of its module, flat.
        is_bare: Whether the module returns one tensor, not a tuple of them.
        num_parameters: Numbers in its parameters, None if unknown.
        parameter_bytes: Bytes of its parameters, None if unknown.
        flops: Estimate of the forward of one microbatch, None if unknown.
    """

    name: str
    inputs: tuple[StageValue, ...] = ()
    outputs: tuple[StageValue, ...] = ()
    is_bare: bool = False
    num_parameters: int | None = None
    parameter_bytes: int | None = None
    flops: int | None = None

    def __str__(self) -> str:
        return ": ".join(filter(None, [self.name, ", ".join(self.facts)]))

    @property
    def facts(self) -> tuple[str, ...]:
        """Return what is known of its size, as texts."""
        facts = []
        if self.num_parameters is not None and self.parameter_bytes is not None:
            size = bytes_text(self.parameter_bytes)
            facts.append(f"{count_text(self.num_parameters)} parameters ({size})")
        if self.flops is not None:
            facts.append(f"{count_text(self.flops)} FLOPs")
        return tuple(facts)


@dataclass(frozen=True, kw_only=True, slots=True)
class StageEdge:
    """An edge from an output of one stage to an input of another.

    Args:
        producer: Index of the stage that makes the value.
        output: Index of the value among its outputs.
        consumer: Index of the stage that takes it.
        input: Index of the value among its positional inputs.
        shape: Shape of the value for one microbatch, None if unknown.
        dtype: Its dtype, None if unknown.
        axes: Logical axes that `shard` gave it, None if it does not come from there.
        sharding: Text of its sharding, None if unknown.
    """

    producer: int
    output: int
    consumer: int
    input: int
    shape: tuple[int, ...] | None = None
    dtype: torch.dtype | None = None
    axes: LogicalAxes | None = None
    sharding: str | None = None

    @property
    def bytes(self) -> int | None:
        """Return the bytes of the whole value, None if they are unknown."""
        if self.shape is None or self.dtype is None:
            return None
        return math.prod(self.shape) * self.dtype.itemsize

    def __str__(self) -> str:
        ends = f"{self.producer}.out{self.output} -> {self.consumer}.in{self.input}"
        if self.bytes is None:
            return ends
        facts = [type_text(self.shape, self.dtype), bytes_text(self.bytes)]
        return "  ".join([ends, *facts, *([self.sharding] if self.sharding else [])])


@dataclass(frozen=True, kw_only=True, slots=True)
class SharedParameter:
    """A parameter of which several stages hold a copy.

    Args:
        group: Its first name in the model.
        names: Pairs of a stage and the parameter's name in that stage.
    """

    group: str
    names: tuple[tuple[int, str], ...]

    @property
    def stages(self) -> tuple[int, ...]:
        """Return the stages that hold a copy, in order."""
        return tuple(stage for stage, _ in self.names)

    def __str__(self) -> str:
        held = ", ".join(f"{name} in stage {stage}" for stage, name in self.names)
        return f"{self.group}: {held}"


@dataclass(frozen=True, kw_only=True, slots=True)
class StageGraph:
    """The stages of a model and the edges between them.

    Args:
        stages: The stages, producers before consumers.
        edges: All edges, ordered by consumer, then by input.
        shared: Parameters of which several stages hold a copy.

    Raises:
        PlanError: An edge does not lead to a later stage, inputs of a stage are
            missing or given twice, or a stage is not connected to the others.
    """

    stages: tuple[Stage, ...]
    edges: tuple[StageEdge, ...]
    shared: tuple[SharedParameter, ...] = field(default=())

    def __post_init__(self) -> None:
        check_connections([stage.name for stage in self.stages], self.pairs)
        faults = [text for i in range(self.num_stages) for text in self._gaps(i)]
        if faults:
            raise PlanError("stage graph: " + "\n".join(faults))

    def __str__(self) -> str:
        lines = [f"{self.num_stages} stages"]
        for index, stage in enumerate(self.stages):
            lines.append(f"  {index} {stage}")
            lines += [f"      in  {value}" for value in stage.inputs]
            lines += [f"      out {value}" for value in stage.outputs]
        lines += [f"  {edge}" for edge in self.edges]
        lines += [f"  shared {parameter}" for parameter in self.shared]
        return "\n".join(lines)

    def to_dot(self) -> str:
        """Return the graph in graphviz's language, stages as boxes."""
        lines = ["digraph stages {", "  node [shape=box];"]
        for index, stage in enumerate(self.stages):
            label = _quoted("\n".join([f"{index} {stage.name}", *stage.facts]))
            lines.append(f"  {index} [label={label}];")
        for edge in self.edges:
            size = [] if edge.bytes is None else [bytes_text(edge.bytes)]
            facts = [type_text(edge.shape, edge.dtype), *size]
            text = _quoted("\n".join(filter(None, facts)))
            lines.append(f"  {edge.producer} -> {edge.consumer} [label={text}];")
        return "\n".join([*lines, "}"])

    @property
    def num_stages(self) -> int:
        """Return the number of stages."""
        return len(self.stages)

    @property
    def pairs(self) -> frozenset[tuple[int, int]]:
        """Return each pair of stages with an edge between them, producer first."""
        return frozenset((edge.producer, edge.consumer) for edge in self.edges)

    @property
    def is_chain(self) -> bool:
        """Return whether values go from each stage to the next one only."""
        return all(consumer == producer + 1 for producer, consumer in self.pairs)

    def sources(self, stage: int) -> tuple[Source, ...]:
        """Return where each positional input of a stage's module comes from.

        Returns:
            The outputs of producers, without an index for a producer that returns one
            bare tensor. Empty for the first stage, whose inputs the schedule passes in.
        """
        return tuple(
            Source(e.producer, None if self.stages[e.producer].is_bare else e.output)
            for e in self._inputs(stage)
        )

    def producers(self, stage: int) -> tuple[int, ...]:
        """Return the stages that `stage` takes values from, in order."""
        return tuple(sorted({p for p, consumer in self.pairs if consumer == stage}))

    def consumers(self, stage: int) -> tuple[int, ...]:
        """Return the stages that take values from `stage`, in order."""
        return tuple(sorted({c for producer, c in self.pairs if producer == stage}))

    def outputs_sent(self, stage: int) -> tuple[int, ...]:
        """Return which outputs of `stage` are sent on, in the consumers' order."""
        return tuple(e.output for e in self.edges if e.producer == stage)

    def depth(self, stage: int) -> int:
        """Return the number of edges on the longest path that leads to `stage`.

        Stages of equal depth have no path between them: they are parallel branches.
        """
        return _longest_path(self.pairs, stage)

    def height(self, stage: int) -> int:
        """Return the number of edges on the longest path from `stage` to the sink."""
        return _longest_path(((c, p) for p, c in self.pairs), stage)

    def shared_of(self, stage: int) -> dict[str, str]:
        """Return the group of each parameter of `stage` that other stages hold too.

        Returns:
            The parameter's name in the stage's module → the group's name.
        """
        return {
            name: parameter.group
            for parameter in self.shared
            for holder, name in parameter.names
            if holder == stage
        }

    def with_shardings(
        self, sharding_of: Callable[[tuple[int, ...], LogicalAxes | None], str]
    ) -> "StageGraph":
        """Return the graph with the sharding of each value of known shape.

        Args:
            sharding_of: Shape and logical axes → text of the sharding.
        """
        edges = tuple(
            edge
            if edge.shape is None
            else replace(edge, sharding=sharding_of(edge.shape, edge.axes))
            for edge in self.edges
        )
        return replace(self, edges=edges)

    @classmethod
    def chain(cls, num_outputs: Sequence[int]) -> "StageGraph":
        """Make a chain in which stage k sends all its outputs to stage k + 1.

        Args:
            num_outputs: Number of outputs of each stage but the last.
        """
        sources: list[list[Source]] = [[]]
        for stage, count in enumerate(num_outputs):
            sources.append([Source(stage, i) for i in range(count)])
        return cls.from_sources(sources)

    @classmethod
    def from_sources(cls, sources: Sequence[Sequence[Source]]) -> "StageGraph":
        """Make the graph of stages from the sources of their inputs.

        Args:
            sources: For each stage what `sources` returns for it.

        Raises:
            PlanError: The stages form no graph.
        """
        edges = tuple(
            StageEdge(
                producer=source.stage,
                output=source.key if isinstance(source.key, int) else 0,
                consumer=consumer,
                input=i,
            )
            for consumer, inputs in enumerate(sources)
            for i, source in enumerate(inputs)
        )
        bare = {s.stage for inputs in sources for s in inputs if s.key is None}
        stages = tuple(
            Stage(name=f"stage_{i}", is_bare=i in bare) for i in range(len(sources))
        )
        return cls(stages=stages, edges=edges)

    def _inputs(self, stage: int) -> list[StageEdge]:
        edges = [edge for edge in self.edges if edge.consumer == stage]
        return sorted(edges, key=lambda edge: edge.input)

    def _gaps(self, stage: int) -> list[str]:
        """List the inputs of a stage that are missing or given twice."""
        found = [edge.input for edge in self._inputs(stage)]
        if found == list(range(len(found))):
            return []
        return [
            f"{stage} {self.stages[stage].name}: expected one edge for each input "
            f"0..{len(found) - 1}, got edges for {found}. Give each input one source."
        ]


def check_connections(names: Sequence[str], pairs: Iterable[tuple[int, int]]) -> None:
    """Refuse stages that do not form one graph from the first to the last.

    Args:
        names: The stages' names.
        pairs: Producer and consumer of every edge.

    Raises:
        PlanError: They do not; all faults are listed.
    """
    pairs = sorted(set(pairs))
    faults = _direction_faults(len(names), pairs)
    takers = {consumer for _, consumer in pairs}
    givers = {producer for producer, _ in pairs}
    for index, name in enumerate(names):
        if index > 0 and index not in takers:
            faults.append(
                f"stage {index} ({name}) takes nothing: expected a value of an earlier "
                "stage, got none. Move the split points so that it has an input."
            )
        if index < len(names) - 1 and index not in givers:
            faults.append(
                f"stage {index} ({name}) is used by none: expected a later stage that "
                "takes a value of it, got none. Use its result or remove its mark."
            )
    if faults:
        raise PlanError("\n".join(faults))


def _direction_faults(num_stages: int, pairs: Sequence[tuple[int, int]]) -> list[str]:
    faults = []
    unknown = [p for p in pairs if not all(0 <= i < num_stages for i in p)]
    if unknown:
        faults.append(
            f"stage graph: expected stages 0..{num_stages - 1}, got edges "
            f"{_arrows(unknown)}. Correct the sources."
        )
    cycle = _cycle([pair for pair in pairs if pair not in unknown])
    if cycle:
        faults.append(
            "stage graph: expected stages without a cycle, got "
            f"{' -> '.join(map(str, cycle))}. Move the split points, or merge these "
            "stages."
        )
    backward = [(p, c) for p, c in pairs if p >= c and (p, c) not in unknown]
    if backward and not cycle:
        faults.append(
            "stage graph: expected each stage to take values of earlier ones only, "
            f"got {_arrows(backward)}. Number the stages in the order of the data."
        )
    return faults


def _cycle(pairs: Sequence[tuple[int, int]]) -> list[int]:
    """Return the stages of some cycle, its first one at both ends; empty if none."""
    left = list(pairs)
    while True:
        givers = {producer for producer, _ in left}
        kept = [(p, c) for p, c in left if c in givers]
        if len(kept) == len(left):
            break
        left = kept
    path: list[int] = [left[0][0]] if left else []
    while path and path[-1] not in path[:-1]:
        path.append(next(c for p, c in left if p == path[-1]))
    return path[path.index(path[-1]) :] if path else []


def _longest_path(pairs: Iterable[tuple[int, int]], end: int) -> int:
    """Return the number of pairs on the longest path that leads to `end`."""
    ends, length = {end}, -1
    pairs = tuple(pairs)
    while ends:
        ends = {producer for producer, consumer in pairs if consumer in ends}
        length += 1
    return length


def _arrows(pairs: Iterable[tuple[int, int]]) -> str:
    return ", ".join(f"{producer} -> {consumer}" for producer, consumer in pairs)


def _quoted(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'"{escaped}"'
