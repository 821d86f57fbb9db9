"""A function's graph, run on pending values by rules.

The result is what XLA compiles. An operation is run by the first *rule* that
applies to it, or else as torch_xla runs it. An error names the operation and
the line of the model that it comes from.

Some operations have no implementation for XLA: torch_xla then computes what is pending,
runs them on the host, and goes on with their results as if these were constants. In a
program that runs again on other values, that would be wrong, so it is refused.
"""

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, fx, nn
from torch._ops import OpOverload

from torch_xla_pp import xla_compat
from torch_xla_pp.compile.lines import describe
from torch_xla_pp.errors import PipelineError

# torch_xla's indices are of int32, although it says int64.
_NARROW = (
    torch.ops.aten.cummax.default,
    torch.ops.aten.max_pool2d_with_indices.default,
    torch.ops.aten.max_pool3d_with_indices.default,
)


_SCOPE = "op"


class LoweringRule(Protocol):
    """A rule that runs some operations in another way than torch_xla does."""

    def __call__(
        self,
        node: fx.Node,
        values: Mapping[fx.Node, Any],
        notes: dict[fx.Node, Any],
        /,
    ) -> Any | None:
        """Run one operation.

        Args:
            node: The operation.
            values: What has run so far.
            notes: What rules note about an operation, for later operations of the run.

        Returns:
            The result, None to leave the operation to other rules.
        """


class Lowering(fx.Interpreter):
    """One run of a graph of operations.

    Args:
        module: The graph.
        name: What it is, for messages.
        rules: How operations are run; the first rule that applies counts.

    Raises:
        PipelineError: An operation fails, or would run on the host.
    """

    def __init__(
        self, module: nn.Module, name: str, rules: Sequence[LoweringRule] = ()
    ) -> None:
        super().__init__(module, garbage_collect_values=False)
        self.extra_traceback = False
        self._name = name
        self._rules = rules
        self._notes: dict[fx.Node, Any] = {}
        self._scopes: dict[str, fx.Node] = {}

    def run_node(self, n: fx.Node) -> Any:
        """Run one node; its operands have run."""
        if n.op != "call_function":
            return super().run_node(n)
        before = xla_compat.num_host_operations()
        scope = f"{_SCOPE}{len(self._scopes)}"
        self._scopes[scope] = n
        try:
            with xla_compat.origin_scope(scope):
                result = self._run_operation(n)
        except Exception as error:
            raise PipelineError(
                f"{self._name} program: {describe(n)} failed: {error}. Write it with "
                "other operations."
            ) from error
        if xla_compat.num_host_operations() != before:
            raise PipelineError(
                f"{self._name} program: expected operations that XLA can run, got "
                f"{describe(n)}, which torch_xla runs on the host. Write it with other "
                "operations, or move it out of the stage."
            )
        return self._as_traced(n, result)

    def call_function(
        self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Call an operation; what it makes or moves is on the program's devices."""
        if "device" in kwargs:
            kwargs = {**kwargs, "device": xla_compat.device()}
        return super().call_function(target, args, kwargs)

    def _run_operation(self, node: fx.Node) -> Any:
        for rule in self._rules:
            result = rule(node, self.env, self._notes)
            if result is not None:
                return result
        return super().run_node(node)

    def _as_traced(self, node: fx.Node, result: Any) -> Any:
        """Return a result with the dtype that the trace gave it.

        Raises:
            PipelineError: It has another shape, or is missing.
        """
        traced = node.meta.get("val")
        is_known = node.target is operator.getitem or isinstance(
            node.target, OpOverload
        )
        if not is_known or not isinstance(traced, Tensor):
            return result
        source = node.all_input_nodes[0] if node.target is operator.getitem else node
        if isinstance(result, Tensor) and result.shape == traced.shape:
            if source.target in _NARROW and not traced.is_floating_point():
                return result + torch.zeros(
                    (), dtype=traced.dtype, device=result.device
                )
            return result if result.dtype == traced.dtype else result.to(traced.dtype)
        got = list(result.shape) if isinstance(result, Tensor) else result
        raise PipelineError(
            f"{self._name} program: expected {describe(source)} to give a value of "
            f"shape {list(traced.shape)} on XLA devices, got {got}. Write it with "
            "other operations, or move it out of the stage."
        )

    def origins(self) -> dict[str, str]:
        """Return each scope's operation and its line; the graph has run.

        Instructions have the names of scopes in them if origins were noted. Numbers in
        place of lines keep programs of equal layers equal.
        """
        return {scope: describe(node) for scope, node in self._scopes.items()}

    def first(self, is_wanted: Callable[[Tensor], bool]) -> str | None:
        """Return the first operation whose result meets a condition, None if none does.

        The graph has run.
        """
        for node, value in self.env.items():
            is_pending = (
                isinstance(value, Tensor) and xla_compat.are_pending([value])[0]
            )
            if node.op == "call_function" and is_pending and is_wanted(value):
                is_item = node.target is operator.getitem
                return describe(node.all_input_nodes[0] if is_item else node)
        return None
