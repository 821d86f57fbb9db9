"""Restore the calls of a prepared model that was cut, and describe its stages."""

import operator
from collections.abc import Sequence
from typing import Any

from torch import Tensor, fx, nn

from torch_xla_pp.graph.flops import forward_flops
from torch_xla_pp.graph.prepare import Prepared, carry
from torch_xla_pp.graph.shard import SHARD, axes_of
from torch_xla_pp.graph.stage_graph import (
    Stage,
    StageEdge,
    StageGraph,
    StageValue,
)
from torch_xla_pp.graph.ties import shared_parameters
from torch_xla_pp.mesh import LogicalAxes


def finish_split(split: fx.GraphModule, prepared: Prepared) -> None:
    """Let the first stage take the model's arguments and the last return its outputs.

    Args:
        split: The model whose `call_module` nodes are the stages, changed in place.
        prepared: What `prepare` returned for the model.
    """
    nodes = _stage_nodes(split)
    stages: list[Any] = [split.get_submodule(str(node.target)) for node in nodes]
    _return_outputs(split, nodes[-1], stages[-1])
    for index, stage in enumerate(stages):
        _drop_carries(stage.graph)
        prepared.call.apply(
            stage.graph,
            takes_inputs=index == 0,
            returns_outputs=index == len(stages) - 1,
        )
        stage.graph.lint()
        stage.recompile()
    split.recompile()


def describe_stages(
    split: fx.GraphModule, names: Sequence[str], groups: Sequence[tuple[str, ...]]
) -> StageGraph:
    """Return the graph of the stages that a finished model consists of.

    Args:
        split: The model whose `call_module` nodes are the stages.
        names: The stages' names.
        groups: All names of each parameter of the model.
    """
    nodes = _stage_nodes(split)
    modules = [split.get_submodule(str(node.target)) for node in nodes]
    stages = [_stage(n, m) for n, m in zip(names, modules, strict=True)]
    return StageGraph(
        stages=tuple(stages),
        edges=tuple(_edges(nodes, modules)),
        shared=shared_parameters(groups, modules),
    )


def _stage_nodes(split: fx.GraphModule) -> list[fx.Node]:
    """Return the calls of the stages by their index, which their names end with."""
    nodes = [node for node in split.graph.nodes if node.op == "call_module"]
    return sorted(nodes, key=lambda node: int(str(node.target).rpartition("_")[2]))


def _return_outputs(split: fx.GraphModule, last: fx.Node, stage: Any) -> None:
    """Let the last stage return the model's outputs as the flat list that they are."""
    output = _output_of(split.graph)
    own = _output_of(stage.graph)
    results = _results(stage)
    leaves = []
    for value in output.args[0]:  # type: ignore[union-attr]
        source, index = _source(value) if isinstance(value, fx.Node) else (value, 0)
        leaves.append(results[index] if source is last else value)
    own.args = (leaves,)
    output.args = (last,)
    for node in list(last.users):
        if node is not output:
            split.graph.erase_node(node)


def _drop_carries(graph: fx.Graph) -> None:
    for node in list(graph.nodes):
        if node.target is carry:
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)


def _stage(name: str, module: Any) -> Stage:
    parameters = list(module.parameters())
    return Stage(
        name=name,
        inputs=tuple(_value(node) for node in _inputs(module)),
        outputs=tuple(_value(node) for node in _results(module)),
        is_bare=not isinstance(_output_of(module.graph).args[0], (list, tuple)),
        num_parameters=sum(p.numel() for p in parameters),
        parameter_bytes=sum(p.numel() * p.element_size() for p in parameters),
        flops=forward_flops(module),
    )


def _edges(nodes: Sequence[fx.Node], modules: Sequence[nn.Module]) -> list[StageEdge]:
    index = {node: stage for stage, node in enumerate(nodes)}
    edges = []
    for node, consumer in list(index.items())[1:]:
        for position, value in enumerate(node.args):
            source, output = _source(value)
            tensor = _inputs(modules[consumer])[position].meta["val"]
            edges.append(
                StageEdge(
                    producer=index[source],
                    output=output,
                    consumer=consumer,
                    input=position,
                    shape=tuple(tensor.shape),
                    dtype=tensor.dtype,
                    axes=_axes(modules[index[source]], output),
                )
            )
    return edges


def _axes(module: Any, index: int) -> LogicalAxes | None:
    """Return the logical axes of a result, also of one that a submodule computes."""
    node, output = _source(_results(module)[index])
    if not isinstance(node, fx.Node):
        return None
    if node.op == "call_module":
        inner = module.get_submodule(str(node.target))
        return _axes(inner, output) if hasattr(inner, "graph") else None
    return axes_of(node.args[1]) if node.target is SHARD else None  # type: ignore[arg-type]


def _value(node: Any) -> StageValue:
    if not isinstance(node, fx.Node):
        return StageValue(name=repr(node))
    value = node.meta.get("val")
    if not isinstance(value, Tensor):
        return StageValue(name=node.name)
    return StageValue(name=node.name, shape=tuple(value.shape), dtype=value.dtype)


def _inputs(module: Any) -> list[fx.Node]:
    return [node for node in module.graph.nodes if node.op == "placeholder"]


def _results(module: Any) -> list[Any]:
    result = _output_of(module.graph).args[0]
    return list(result) if isinstance(result, (list, tuple)) else [result]


def _source(value: Any) -> tuple[Any, int]:
    """Return the node that makes `value`, and the index among its outputs."""
    if isinstance(value, fx.Node) and value.target is operator.getitem:
        return value.args[0], int(value.args[1])  # type: ignore[arg-type]
    return value, 0


def _output_of(graph: fx.Graph) -> fx.Node:
    (output,) = graph.find_nodes(op="output")
    return output  # type: ignore[no-any-return]
