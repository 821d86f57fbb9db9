"""The call of a traced module: names and pytrees of arguments and results.

The only place that touches torch.fx's private pytree code generator, by which
exported modules take and return pytrees. (torch.fx has no public way to give a graph
another signature.)
"""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import fx
from torch.fx.graph import CodeGen, _PyTreeCodeGen, _PyTreeInfo
from torch.utils import _pytree as pytree


@dataclass(frozen=True, kw_only=True, slots=True)
class CallSpec:
    """The arguments that a model takes, and what it returns.

    Args:
        names: Names of its arguments, positional ones first.
        inputs: Pytree of `(args, kwargs)`; None if they are flat tensors.
        outputs: Pytree of its outputs; None if they are those of the graph.
    """

    names: tuple[str, ...]
    inputs: pytree.TreeSpec | None
    outputs: pytree.TreeSpec | None

    @classmethod
    def of(cls, graph: fx.Graph) -> "CallSpec":
        """Return the call of a graph's module."""
        codegen = graph._codegen
        if isinstance(codegen, _PyTreeCodeGen):
            info = codegen.pytree_info
            return cls(
                names=tuple(info.orig_args), inputs=info.in_spec, outputs=info.out_spec
            )
        return cls(names=tuple(_placeholders(graph)), inputs=None, outputs=None)

    def apply(
        self, graph: fx.Graph, *, takes_inputs: bool, returns_outputs: bool
    ) -> None:
        """Let the module of a graph take the model's arguments, or return its outputs.

        Args:
            graph: The graph; its placeholders are the flat inputs if `takes_inputs`,
                its output is a list of the flat outputs if `returns_outputs`.
            takes_inputs: Whether to take the model's arguments.
            returns_outputs: Whether to return the model's outputs.
        """
        names, inputs = list(self.names), self.inputs
        outputs = self.outputs if returns_outputs else None
        if not takes_inputs or inputs is None:
            names = _placeholders(graph)
            inputs = _flat_spec(names)
        needed = takes_inputs or outputs is not None
        graph.set_codegen(
            _PyTreeCodeGen(_PyTreeInfo(names, inputs, outputs)) if needed else CodeGen()  # type: ignore[no-untyped-call]
        )


def call_as(graph: fx.Graph, other: fx.Graph) -> None:
    """Let the module of a graph be called as that of another one of equal inputs."""
    graph.set_codegen(other._codegen)


def _placeholders(graph: fx.Graph) -> list[str]:
    return [str(node.target) for node in graph.nodes if node.op == "placeholder"]


def _flat_spec(names: Sequence[str]) -> pytree.TreeSpec:
    return pytree.tree_structure((tuple(names), {}))
