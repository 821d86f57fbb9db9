"""From a module to one joint graph of its forward and backward.

The joint graph comes from AOTAutograd. It is functional: parameters, buffers and
constants are inputs, updated buffers are outputs. Its placeholders are named by
their role, see `compile.names`, and its results are listed by role in `JointGraph`.
This is the only file that uses the insides of AOTAutograd and `torch._guards`.

Functions under `torch.utils.checkpoint.checkpoint` are traced as all others, and only
marked: a *region* is all that one outermost call of `checkpoint` runs. This is the
only file that uses the insides of `torch.utils.checkpoint` and `torch.fx.traceback`.
Differences to eager: a region under `use_reentrant=True` has gradients even if none
of its arguments has; buffers are not updated a second time in the backward; and of
`context_fn`, only the contexts that `create_selective_checkpoint_contexts` makes are
taken.
"""

import contextlib
import inspect
import itertools
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from traceback import walk_tb
from typing import Any
from unittest import mock

import torch
from torch import Tensor, fx, nn
from torch._C._functorch import is_functorch_wrapped_tensor
from torch._functorch._aot_autograd.descriptors import (
    BufferAOTInput,
    ParamAOTInput,
    PlainAOTInput,
    PlainAOTOutput,
    TangentAOTInput,
)
from torch._functorch._aot_autograd.schemas import OutputType
from torch._functorch.aot_autograd import aot_export_joint_with_descriptors
from torch._guards import TracingContext, tracing
from torch._higher_order_ops.wrap import TagActivationCheckpoint
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import traceback
from torch.nn import functional
from torch.overrides import TorchFunctionMode, resolve_name
from torch.utils import _mode_utils
from torch.utils import _pytree as pytree
from torch.utils import checkpoint as torch_checkpoint
from torch.utils._mode_utils import no_dispatch
from torch.utils.checkpoint import CheckpointPolicy

from torch_xla_pp import xla_compat
from torch_xla_pp.compile.decompositions import (
    functions_in_autograd,
    functions_in_graph,
)
from torch_xla_pp.compile.layer_norm import layer_norm
from torch_xla_pp.compile.lines import place_of, running_line
from torch_xla_pp.compile.names import (
    buffer_role,
    constant_role,
    index_of_input,
    input_role,
    is_buffer,
    is_input,
    is_parameter,
    is_tangent,
    parameter_role,
    tangent,
)
from torch_xla_pp.compile.ops import views
from torch_xla_pp.errors import PipelineError
from torch_xla_pp.graph import SHARD, Template, axes_of
from torch_xla_pp.mesh import LogicalAxes

_WRAPPED = "module."

# Fields of `node.meta`, those that torch.compile has for the same purpose: they are
# copied from one trace to the next.
_REGION = "ac_graph_id"
_POLICY = "recompute"
_LINE = "stack_trace"

# These return their operand's value as it lies, maybe in another dtype.
_SAME_VALUE = {
    *views("same"),
    torch.ops.aten._to_copy.default,
    torch.ops.aten.clone.default,
}


@dataclass(kw_only=True, slots=True)
class JointGraph:
    """Hold the joint graph of one stage for one signature.

    Args:
        graph: The FX graph; its placeholders are keyed by `roles`.
        roles: Placeholder → role, see `compile.names`.
        constants: Values of the placeholders of constants: literals, and tensors that
            the module reads from closures, globals or attributes.
        outputs: The node of each tensor output of the stage.
        outputs_need_grad: Whether each of them has a gradient.
        output_template: How the outputs are put together for the caller.
        buffer_updates: Buffer role → node of its new value.
        parameter_grads: Parameter role → node of its gradient.
        input_grads: Input index → node of its gradient, None where the stage's
            outputs do not depend on that input.
        regions: Node → the region in which it was made; for a node of the backward,
            that of the operation whose gradient it computes.
        selected: Nodes that a selective checkpoint saves.

    In-place updates of inputs are not kept: inputs belong to the pipeline.
    """

    graph: fx.GraphModule
    roles: dict[fx.Node, str]
    constants: dict[str, Tensor]
    outputs: list[fx.Node]
    outputs_need_grad: list[bool]
    output_template: Template
    buffer_updates: dict[str, fx.Node] = field(default_factory=dict)
    parameter_grads: dict[str, fx.Node] = field(default_factory=dict)
    input_grads: dict[int, fx.Node | None] = field(default_factory=dict)
    regions: dict[fx.Node, int] = field(default_factory=dict)
    selected: set[fx.Node] = field(default_factory=set)

    @property
    def constraints(self) -> list[tuple[LogicalAxes, Tensor]]:
        """Return the axes that `shard` was called with, each with its value's metadata.

        Those of gradients are among them.
        """
        nodes = self.graph.graph.find_nodes(op="call_function", target=SHARD)
        return [(axes_of(node.args[1]), node.meta["val"]) for node in nodes]

    @property
    def output_axes(self) -> list[LogicalAxes | None]:
        """Return the axes of each output that comes from `shard`, None for others.

        In between there may be a change of dtype.
        """
        return [_constraint_of(node) for node in self.outputs]

    @property
    def num_random(self) -> int:
        """Return how many random operations the stage has."""
        return sum(is_random(node) for node in self.graph.graph.nodes)

    @property
    def example_outputs(self) -> list[tuple[Tensor, bool]]:
        """Return the metadata of each output and whether it needs a gradient."""
        values = [node.meta["val"] for node in self.outputs]
        return list(zip(values, self.outputs_need_grad, strict=True))


def _constraint_of(node: fx.Node) -> LogicalAxes | None:
    while node.target in _SAME_VALUE:
        node = node.all_input_nodes[0]
    return axes_of(node.args[1]) if node.target is SHARD else None  # type: ignore[arg-type]


def is_random(node: fx.Node) -> bool:
    """Return whether a node draws random numbers."""
    return torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())


_IN_PLACE_OF: Mapping[Any, Callable[..., Any]] = {
    functional.layer_norm: layer_norm,
    torch.layer_norm: layer_norm,
    torch.ops.aten.layer_norm.default: layer_norm,
}


class _Captures(TorchFunctionMode):
    """Put inputs of a trace in place of tensors that it reads from elsewhere.

    Some functions are put in place of others, see `_IN_PLACE_OF`.

    Args:
        inputs: Pairs of a tensor from elsewhere and the input that stands for it.

    Attributes:
        found: Such tensors that no input stands for.
    """

    def __init__(self, inputs: Iterable[tuple[Tensor, Tensor]]) -> None:
        super().__init__()
        self._inputs = {id(captured): value for captured, value in inputs}
        self.found: list[Tensor] = []

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        args, kwargs = pytree.tree_map(self._replace, (args, kwargs or {}))
        line = running_line(_TensorsOnly.forward.__code__)
        if line is not None:
            traceback.current_meta[_LINE] = line
        try:
            return _IN_PLACE_OF.get(function, function)(*args, **kwargs)
        except Exception as error:
            error.add_note(f"in {resolve_name(function)} ({place_of(line)})")
            raise

    def _replace(self, value: Any) -> Any:
        if not isinstance(value, Tensor) or _is_of_trace(value):
            return value
        if id(value) in self._inputs:
            return self._inputs[id(value)]
        if not any(value is known for known in self.found):
            self.found.append(value)
        return value


def _is_of_trace(value: Tensor) -> bool:
    """Return whether a trace made a tensor: of a subclass, or wrapped, e.g. by vmap.

    XLA tensors are wrapped, too, but around another XLA tensor.
    """
    if torch._is_functional_tensor(value):
        value = torch._from_functional_tensor(value)
    is_plain = type(value) in (Tensor, nn.Parameter)
    return not is_plain or is_functorch_wrapped_tensor(value)


class _TensorsOnly(nn.Module):
    """Call a module with its tensor arguments alone and return tensors alone."""

    def __init__(
        self,
        module: nn.Module,
        arguments: Template,
        cloned: frozenset[int],
        captured: Sequence[Tensor],
    ) -> None:
        super().__init__()
        self.module = module
        self._arguments = arguments
        self._cloned = cloned
        self._captured = tuple(captured)
        self.output_template: Template | None = None
        self.found: list[Tensor] = []

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        num_inputs = len(tensors) - len(self._captured)
        args, kwargs = self._arguments.fill(tensors[:num_inputs])
        captured = zip(self._captured, tensors[num_inputs:], strict=True)
        with _without_leaks(self.module), _Captures(captured) as captures:
            result = _call(self.module, args, kwargs)
        traceback.current_meta.pop(_LINE, None)
        self.found = captures.found
        self.output_template, outputs = Template.of(result)
        _check_constants(self.output_template)
        return tuple(
            x.clone() if i in self._cloned else x for i, x in enumerate(outputs)
        )


@contextlib.contextmanager
def _without_leaks(module: nn.Module) -> Iterator[None]:
    """Take back the tensors that a trace leaves in attributes: they have no values."""
    before = [(vars(part), dict(vars(part))) for part in module.modules()]
    try:
        yield
    finally:
        for held, old in before:
            for name, value in list(held.items()):
                if not isinstance(value, Tensor) or value is old.get(name):
                    continue
                if name in old:
                    held[name] = old[name]
                else:
                    del held[name]


def _check_constants(output: Template) -> None:
    known = (bool, int, float, complex, str, torch.dtype, type(None))
    strange = [type(x).__name__ for x in output.constants if not isinstance(x, known)]
    if strange:
        raise TypeError(
            "stage outputs: expected tensors, numbers, texts and None in tuples, "
            f"lists, dicts or registered dataclasses, got {', '.join(strange)}. "
            "Register a class of your own with torch.export.register_dataclass."
        )


def _call(module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Call a module; one that was traced hands on the marks of its nodes."""
    if not isinstance(module, fx.GraphModule):
        return module(*args, **kwargs)
    if not any(_REGION in n.meta or _LINE in n.meta for n in module.graph.nodes):
        return module(*args, **kwargs)
    bound = inspect.signature(module.forward).bind(*args, **kwargs)
    return fx.Interpreter(module).run(*bound.args)


def export_joint(
    module: nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    tensors: Sequence[Tensor] = (),
) -> JointGraph:
    """Trace `module` and its backward into one joint graph.

    Args:
        module: The stage's module, on the device that it runs on.
        args: Example arguments; only shapes, dtypes and `requires_grad` of tensors
            count. Other values are built into the graph.
        kwargs: Example keyword arguments, likewise.
        tensors: Those of the tensors that get the first roles, in this order; others
            follow as they appear.

    Raises:
        TypeError: The module returns what stages cannot exchange.
        PipelineError: The module updates a parameter in its forward, or reads a
            tensor from outside that needs a gradient.
    """
    arguments, inputs = Template.of((tuple(args), dict(kwargs)), tensors)
    wrapped = _TensorsOnly(module, arguments, frozenset(), ())
    joint = _export(wrapped, inputs)
    aliased, captured = _aliased_outputs(joint), wrapped.found
    _check_captured(captured)
    if aliased or captured:
        wrapped = _TensorsOnly(module, arguments, aliased, captured)
        joint = _export(wrapped, [*inputs, *captured])
    if wrapped.output_template is None:
        raise PipelineError("export: the stage's forward did not run.")
    read = _read(joint, wrapped.output_template, _first_names(module))
    _name_captured(read, captured, len(inputs))
    return read


def _check_captured(captured: Sequence[Tensor]) -> None:
    trained = [f"one of shape {list(x.shape)}" for x in captured if x.requires_grad]
    if trained:
        raise PipelineError(
            "stage or loss function: expected tensors from outside of the module to "
            f"need no gradient, got {', '.join(trained)}. Make it a parameter of the "
            "stage's module, or detach it."
        )


def _name_captured(
    joint: JointGraph, captured: Sequence[Tensor], num_inputs: int
) -> None:
    """Turn the inputs that stand for captured tensors into constants."""
    renamed = {}
    for index, value in enumerate(captured):
        role = constant_role(f"captured_{index}")
        renamed[input_role(num_inputs + index)] = role
        joint.constants[role] = value
        joint.input_grads.pop(num_inputs + index, None)
    joint.roles = {n: renamed.get(role, role) for n, role in joint.roles.items()}


def _export(module: nn.Module, args: list[Tensor]) -> Any:
    # The first trace finds out which tensors the module reads from elsewhere.
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    with (
        contextlib.ExitStack() as stack,
        marking_checkpoints(),
        torch.set_grad_enabled(True),
        tracing(TracingContext(fake)),
        # So that modules do not choose by values, and `shard` is an operator.
        mock.patch.object(torch.compiler, "_is_compiling_flag", True),
        mock.patch.object(_mode_utils, "no_dispatch", _on_metadata),
        xla_compat.in_autograd(functions_in_autograd()),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")
        try:
            return aot_export_joint_with_descriptors(
                stack, module, tuple(args), decompositions=functions_in_graph()
            )
        except Exception as error:
            _note_operation(error)
            raise


def _note_operation(error: Exception) -> None:
    """Note on an error in which operation it was raised, if in any."""
    found = None
    for frame, _ in walk_tb(error.__traceback__):
        value = frame.f_locals.get("func")
        found = value if isinstance(value, OpOverload) else found
    if found is not None:
        error.add_note(f"in {found}")


@contextlib.contextmanager
def _on_metadata() -> Iterator[None]:
    """Let operations change nothing but the shape of the value that they are given.

    Stands in for the context in which functionalization repeats an operation such as
    `as_strided_` on its wrapper, for which torch_xla's kernels have no XLA tensor.
    """
    keys, key_set = torch._C.DispatchKey, torch._C.DispatchKeySet
    with no_dispatch():
        included = torch._C._dispatch_tls_local_include_set() | key_set(keys.Meta)
        excluded = torch._C._dispatch_tls_local_exclude_set()
        excluded |= key_set(keys.XLA) | key_set(keys.AutogradXLA)
        with torch._C._ForceDispatchKeyGuard(included, excluded):
            yield


@contextlib.contextmanager
def marking_checkpoints() -> Iterator[None]:
    """Let traces inside of the context mark checkpointed functions on their nodes.

    `export_joint` enters it itself; enter it around `torch.export` of a module, too,
    for the marks to be on the nodes of the exported graph.

    Raises:
        PipelineError: A trace comes to a `checkpoint` whose `context_fn` is not
            supported.
    """
    count = itertools.count()

    def without_reentrant(
        function: Any,
        preserve_rng_state: bool,
        context_fn: Callable[[], tuple[Any, Any]],
        *_: Any,
        **__: Any,
    ) -> Iterator[None]:
        with _region(count), _selection(context_fn):
            yield

    class Reentrant:
        @staticmethod
        def apply(function: Any, preserve_rng_state: bool, *args: Any) -> Any:
            with _region(count):
                return function(*args)

    def inline(_: Any, body: fx.GraphModule, *args: Any, **__: Any) -> Any:
        if "_checkpoint_context_fn" in body.meta:
            raise _unsupported_context("a context_fn in a model that is exported")
        with _region(count) as region:
            for node in body.graph.nodes:
                node.meta[_REGION] = region
            return fx.Interpreter(body).run(*args)

    with (
        mock.patch.multiple(
            torch_checkpoint,
            _checkpoint_without_reentrant_generator=without_reentrant,
            CheckpointFunction=Reentrant,
        ),
        # What torch.export makes of a call of `checkpoint`, and then cannot export.
        mock.patch.object(TagActivationCheckpoint, "__call__", inline),
    ):
        yield


@contextlib.contextmanager
def _region(count: Iterator[int]) -> Iterator[int]:
    """Mark the nodes made inside; an outer region goes on."""
    before = dict(traceback.current_meta)
    region: int = traceback.current_meta.setdefault(_REGION, next(count))
    try:
        yield region
    finally:
        for key in (_REGION, _POLICY):
            traceback.current_meta.pop(key, None)
            if key in before:
                traceback.current_meta[key] = before[key]


def _selection(context_fn: Callable[[], tuple[Any, Any]]) -> Any:
    """Return the context that marks nodes with a selective checkpoint's policy."""
    context, _ = context_fn()
    known = (contextlib.nullcontext, torch_checkpoint._CachingTorchDispatchMode)
    if not isinstance(context, known):
        raise _unsupported_context(f"a context of type {type(context).__name__}")
    return context


def _unsupported_context(got: str) -> PipelineError:
    return PipelineError(
        "checkpoint: expected a context_fn that returns what "
        "create_selective_checkpoint_contexts returns, in a model that is not "
        f"exported, got {got}. Leave context_fn out, or build the stage by hand."
    )


def _first_names(module: nn.Module) -> dict[str, str]:
    """Map each name of a parameter to the first name that the module has for it."""
    first: dict[int, str] = {}
    named = module.named_parameters(remove_duplicate=False)
    return {name: first.setdefault(id(value), name) for name, value in named}


def _aliased_outputs(joint: Any) -> frozenset[int]:
    """Return the outputs that share memory with an input or another output."""
    infos = joint._aot_state.fw_metadata.output_info
    plain = (OutputType.non_alias, OutputType.custom_function_view)
    return frozenset(i for i, x in enumerate(infos) if x.output_type not in plain)


def _read(
    joint: Any, output_template: Template, first_names: dict[str, str]
) -> JointGraph:
    """Sort the placeholders and results of a joint graph by role."""
    graph: fx.GraphModule = joint.graph_module
    meta = joint._aot_state.fw_metadata
    placeholders = [n for n in graph.graph.nodes if n.op == "placeholder"]
    roles = {node: _role(node.meta["desc"], first_names) for node in placeholders}
    primals = [n for n in placeholders if not is_tangent(roles[n])]
    results = list(graph.graph.find_nodes(op="output")[0].args[0])
    mutated = [primals[i] for i in meta.mutated_inp_runtime_indices]
    num_outputs = len(meta.output_info)
    outputs = results[len(mutated) : len(mutated) + num_outputs]
    read = JointGraph(
        graph=graph,
        roles=roles,
        constants={},
        outputs=outputs,
        outputs_need_grad=[info.requires_grad for info in meta.output_info],
        output_template=output_template,
        buffer_updates={
            roles[node]: new
            for node, new in zip(mutated, results, strict=False)
            if is_buffer(roles[node])
        },
    )
    grads = results[len(mutated) + num_outputs :]
    if grads:
        _read_grads(read, primals, grads)
    _read_regions(read)
    _read_lines(read)
    _merge_tied(read)
    _lift_constants(read)
    return read


def _read_regions(joint: JointGraph) -> None:
    """Sort the nodes by region.

    A node of the backward has the sequence number of its operation, as has the
    first node that the operation has in the forward.
    """
    region_of: dict[int, int | None] = {}
    for node in joint.graph.graph.nodes:
        number, region = node.meta.get("seq_nr"), node.meta.get(_REGION)
        if node.meta.get("partitioner_tag") == "is_backward":
            region = region_of.get(number)
        elif number is not None:
            region_of.setdefault(number, region)
        if region is not None:
            joint.regions[node] = region
        policy = node.meta.get(_POLICY)
        if policy in (CheckpointPolicy.MUST_SAVE, CheckpointPolicy.PREFER_SAVE):
            joint.selected.add(node)


def _read_lines(joint: JointGraph) -> None:
    """Give a node of the backward the line of the operation whose gradient it is of."""
    line_of: dict[int, str | None] = {}
    for node in joint.graph.graph.nodes:
        number, line = node.meta.get("seq_nr"), node.meta.get(_LINE)
        if node.meta.get("partitioner_tag") == "is_backward":
            node.meta[_LINE] = line_of.get(number)
        elif number is not None:
            line_of.setdefault(number, line)


def _role(desc: Any, first_names: dict[str, str]) -> str:
    match desc:
        case ParamAOTInput():
            return parameter_role(first_names[desc.target.removeprefix(_WRAPPED)])
        case BufferAOTInput():
            return buffer_role(desc.target.removeprefix(_WRAPPED))
        case PlainAOTInput():
            return input_role(desc.idx)
        case TangentAOTInput(output=PlainAOTOutput(idx=index)):
            return tangent(index)
    raise PipelineError(
        "export: expected a forward that only updates buffers in place and returns "
        f"new tensors, got {desc.expr()}. Write the stage's forward without it."
    )


def _read_grads(
    joint: JointGraph, primals: list[fx.Node], grads: list[fx.Node | None]
) -> None:
    for node, grad in zip(primals, grads, strict=True):
        role = joint.roles[node]
        if is_input(role):
            joint.input_grads[index_of_input(role)] = grad
        elif is_parameter(role) and grad is not None:
            known = joint.parameter_grads.get(role)
            joint.parameter_grads[role] = (
                grad if known is None else _sum(joint.graph.graph, known, grad)
            )


def _sum(graph: fx.Graph, left: fx.Node, right: fx.Node) -> fx.Node:
    with graph.inserting_before(graph.find_nodes(op="output")[0]):
        total = graph.call_function(torch.ops.aten.add.Tensor, (left, right))
    total.meta["val"] = left.meta["val"]
    return total


def _merge_tied(joint: JointGraph) -> None:
    """Keep one placeholder for a parameter that the stage has under several names.

    AOTAutograd lists it once per name, each with a part of the gradient; equal roles
    show that they are one.
    """
    first: dict[str, fx.Node] = {}
    for node, role in list(joint.roles.items()):
        kept = first.setdefault(role, node)
        if kept is not node:
            node.replace_all_uses_with(kept)
            del joint.roles[node]


def _lift_constants(joint: JointGraph) -> None:
    """Turn the tensors that the trace captured into inputs of the graph.

    A captured tensor would otherwise be built into every program that reads it.
    """
    graph = joint.graph.graph
    first = next(iter(graph.nodes))
    for node in [n for n in graph.nodes if n.op == "get_attr"]:
        role = constant_role(str(node.target))
        value = getattr(joint.graph, str(node.target))
        with graph.inserting_before(first):
            placeholder = graph.placeholder(f"const_{node.target}")
        placeholder.meta = dict(node.meta)
        node.replace_all_uses_with(placeholder)
        graph.erase_node(node)
        joint.roles[placeholder] = role
        joint.constants[role] = value
