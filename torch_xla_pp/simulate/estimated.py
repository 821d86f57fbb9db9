"""The costs of stages, estimated from the FLOPs in a stage graph."""

from collections import defaultdict
from typing import TYPE_CHECKING

from torch_xla_pp.simulate.costs import Costs, Flow, stage_seconds

if TYPE_CHECKING:  # It imports torch, which simulations do not need.
    from torch_xla_pp.graph import StageEdge, StageGraph


def estimated_costs(
    graph: "StageGraph", *, flops_per_s: float, num_devices: int = 1
) -> Costs:
    """Estimate the costs of a model's stages from their FLOPs and the values they send.

    A forward takes the time of its FLOPs. I and W take as long each, since a product
    of matrices has two of the same size as its gradients; B takes as long as both.

    Args:
        graph: The stages, as `pipe.stage_graph` has them.
        flops_per_s: FLOP/s of one device.
        num_devices: Devices of each rank, which share the work evenly.

    Raises:
        ValueError: The FLOPs of a stage or the size of a value are unknown.
    """
    _check(graph)
    speed = flops_per_s * num_devices
    forwards_s = [(stage.flops or 0) / speed for stage in graph.stages]
    seconds = stage_seconds((time, time, time) for time in forwards_s)
    return Costs(seconds=seconds, flows=_flows(graph))


def _flows(graph: "StageGraph") -> tuple[Flow, ...]:
    """Return one flow for each output that other stages use."""
    uses: defaultdict[tuple[int, int], list[StageEdge]] = defaultdict(list)
    for edge in graph.edges:
        uses[edge.producer, edge.output].append(edge)
    return tuple(
        Flow(
            producer=producer,
            consumers=tuple(sorted({edge.consumer for edge in edges})),
            num_bytes=edges[0].bytes or 0,
            has_gradient=edges[0].dtype is None or edges[0].dtype.is_floating_point,
        )
        for (producer, _), edges in sorted(uses.items())
    )


def _check(graph: "StageGraph") -> None:
    unknown = [
        f"FLOPs of stage {i}" for i, s in enumerate(graph.stages) if s.flops is None
    ]
    unknown += [f"size of {edge}" for edge in graph.edges if edge.bytes is None]
    if unknown:
        raise ValueError(
            "estimated_costs: expected a graph with the FLOPs of stages and the sizes "
            f"of values, got none for {', '.join(unknown)}. Use the graph of a traced "
            "model, or give Costs."
        )
