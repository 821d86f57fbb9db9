"""The stages of a model as a graph, read from the split FX module.

Terms: an *edge* carries one output of a producing stage to one input of a consuming
stage. Edges, not the schedule, say which values are sent.
"""

import operator
from dataclasses import dataclass
from typing import Any

from torch import fx

from torch_xla_pp.errors import PlanError


@dataclass(frozen=True, kw_only=True, slots=True)
class StageEdge:
    """Carry output `output` of stage `producer` to input `input` of `consumer`."""

    producer: int
    output: int
    consumer: int
    input: int

    def __str__(self) -> str:
        return f"{self.producer}.out{self.output} -> {self.consumer}.in{self.input}"


@dataclass(frozen=True, kw_only=True, slots=True)
class StageGraph:
    """Hold the stages of a model and the edges between them.

    Args:
        num_stages: Number of stages.
        edges: All edges, ordered by consumer, then by input.

    Raises:
        PlanError: The edges do not form a chain of neighbours, the only shape that
            is supported so far.
    """

    num_stages: int
    edges: tuple[StageEdge, ...]

    def __post_init__(self) -> None:
        skips = [str(e) for e in self.edges if e.consumer != e.producer + 1]
        if skips:
            raise PlanError(
                "pipeline: expected values to go from each stage to the next one, "
                f"got edges between other stages: {', '.join(skips)}. Move the split "
                "points so that no value skips a stage."
            )

    def __str__(self) -> str:
        lines = [f"{self.num_stages} stages"]
        return "\n".join(lines + [f"  {edge}" for edge in self.edges])

    def outputs_sent(self, stage: int) -> tuple[int, ...]:
        """Return which outputs of `stage` are sent on, in the consumer's order."""
        return tuple(e.output for e in self.edges if e.producer == stage)

    @classmethod
    def chain(cls, num_outputs: tuple[int, ...]) -> "StageGraph":
        """Make a chain in which stage k sends all its outputs to stage k + 1.

        Args:
            num_outputs: Number of outputs of each stage but the last.
        """
        edges = tuple(
            StageEdge(producer=stage, output=i, consumer=stage + 1, input=i)
            for stage, count in enumerate(num_outputs)
            for i in range(count)
        )
        return cls(num_stages=len(num_outputs) + 1, edges=edges)

    @classmethod
    def from_split(cls, split: fx.GraphModule) -> "StageGraph":
        """Read the graph from a module whose `call_module` nodes are the stages.

        Raises:
            PlanError: A later stage reads an input of the whole model, an earlier
                stage makes an output of it, or a value skips a stage.
        """
        nodes = [node for node in split.graph.nodes if node.op == "call_module"]
        index = {node: stage for stage, node in enumerate(nodes)}
        edges = []
        for node, stage in index.items():
            for position, value in enumerate(node.args):
                source, output = _source(value)
                if source in index:
                    edge = StageEdge(
                        producer=index[source],
                        output=output,
                        consumer=stage,
                        input=position,
                    )
                    edges.append(edge)
                elif stage > 0:
                    raise PlanError(
                        f"pipeline: stage {stage} reads the model's input "
                        f"{value!s}: expected only stage 0 to read inputs. Pass the "
                        "value through the earlier stages."
                    )
        _check_outputs(split, nodes[-1])
        return cls(num_stages=len(nodes), edges=tuple(edges))


def _source(value: Any) -> tuple[Any, int]:
    """Return the node that makes `value` and the index of the output it is."""
    if isinstance(value, fx.Node) and value.target is operator.getitem:
        return value.args[0], int(value.args[1])  # type: ignore[arg-type]
    return value, 0


def _check_outputs(split: fx.GraphModule, last: fx.Node) -> None:
    """Refuse models with an output that is not made by the last stage."""
    output = next(node for node in split.graph.nodes if node.op == "output")
    foreign = [n for n in output.all_input_nodes if _source(n)[0] is not last]
    if foreign:
        raise PlanError(
            "pipeline: expected every output of the model to come from its last "
            f"stage, got {', '.join(map(str, foreign))} from an earlier one. Return "
            "it through the later stages or move the split points."
        )
