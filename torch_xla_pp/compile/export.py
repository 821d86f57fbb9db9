"""From a module to one joint graph of its forward and backward.

The joint graph comes from AOTAutograd. It is functional: parameters, buffers and
constants are inputs, updated buffers are outputs. Its placeholders are named by
their role, see `compile.names`, and its results are listed by role in `JointGraph`.
This is the only file that uses the insides of AOTAutograd and `torch._guards`.
"""

import contextlib
import functools
import inspect
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from traceback import walk_tb
from typing import Any

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
from torch._guards import TracingContext, detect_fake_mode, tracing
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import traceback
from torch.nn import functional
from torch.overrides import TorchFunctionMode, resolve_name
from torch.utils import _mode_utils
from torch.utils import _pytree as pytree
from torch.utils._mode_utils import no_dispatch

from torch_xla_pp import xla_compat
from torch_xla_pp.compile.checkpoint_regions import (
    REGION,
    marking_checkpoints,
    read_regions,
)
from torch_xla_pp.compile.decompositions import (
    functions_in_autograd,
    functions_in_graph,
)
from torch_xla_pp.compile.dot_product_attention import scaled_dot_product_attention
from torch_xla_pp.compile.equal_layers import lengthen, shorten
from torch_xla_pp.compile.joint_graph import JointGraph
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
from torch_xla_pp.errors import PipelineError
from torch_xla_pp.graph import Template, noting_host_randomness, replaced
from torch_xla_pp.phases import phase

_WRAPPED = "module."

# A field of `node.meta` that is copied from one trace to the next.
_LINE = "stack_trace"


def _attention(*args: Any, **kwargs: Any) -> Tensor:
    """Compute PyTorch's attention, as one operation unless within `torch.func`.

    Its transforms know PyTorch's operations alone.
    """
    given = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
    is_transformed = any(map(is_functorch_wrapped_tensor, given))
    plain: Callable[..., Tensor] = functional.scaled_dot_product_attention
    return (plain if is_transformed else scaled_dot_product_attention)(*args, **kwargs)


_IN_PLACE_OF: Mapping[Any, Callable[..., Any]] = {
    functional.scaled_dot_product_attention: _attention,
    torch.ops.aten.scaled_dot_product_attention.default: _attention,
    functional.layer_norm: layer_norm,
    torch.layer_norm: layer_norm,
    torch.ops.aten.layer_norm.default: layer_norm,
}


class _Captures(TorchFunctionMode):
    """A mode in which inputs of a trace stand for tensors read from elsewhere.

    Some functions are replaced by others, see `_IN_PLACE_OF`.

    Args:
        inputs: Pairs of a tensor from elsewhere and the input that stands for it.

    Attributes:
        found: Tensors from elsewhere that no input stands for.
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
    """A module that takes the tensor arguments of another and returns its tensors."""

    def __init__(
        self,
        module: nn.Module,
        graph: fx.Graph | None,
        arguments: Template,
        cloned: frozenset[int],
        captured: Sequence[Tensor],
    ) -> None:
        super().__init__()
        self.module = module
        self._graph = graph
        self._arguments = arguments
        self._cloned = cloned
        self._captured = tuple(captured)
        self.output_template: Template | None = None
        self.found: list[Tensor] = []

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        num_inputs = len(tensors) - len(self._captured)
        args, kwargs = self._arguments.fill(tensors[:num_inputs])
        captured = zip(self._captured, tensors[num_inputs:], strict=True)
        with (
            _without_leaks(self.module),
            _updating_buffers(self.module),
            _Captures(captured) as captures,
        ):
            result = _call(self.module, self._graph, args, kwargs)
        traceback.current_meta.pop(_LINE, None)
        self.found = captures.found
        self.output_template, outputs = Template.of(result)
        _check_constants(self.output_template)
        return tuple(
            x.clone() if i in self._cloned else x for i, x in enumerate(outputs)
        )


@contextlib.contextmanager
def _without_leaks(module: nn.Module) -> Iterator[None]:
    """Restore attributes in which a trace leaves tensors: these have no values."""
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


@contextlib.contextmanager
def _keeping_parameters(module: nn.Module) -> Iterator[None]:
    """Restore parameters and buffers that a trace has replaced.

    AOTAutograd does so itself, by name; of a part that has two names it leaves the
    tensors of the trace.
    """
    before = [
        (held, dict(held))
        for part in module.modules()
        for held in (part._parameters, part._buffers)
    ]
    try:
        yield
    finally:
        for held, old in before:
            held.update(old)  # type: ignore[arg-type]


@contextlib.contextmanager
def _updating_buffers(module: nn.Module) -> Iterator[None]:
    """Write into a buffer the tensor that the module replaces it by.

    Raises:
        PipelineError: It has another shape or dtype.
    """
    before = [
        (name, part, dict(part._buffers)) for name, part in module.named_modules()
    ]
    yield
    for name, part, buffers in before:
        for key, old in buffers.items():
            new = part._buffers.get(key)
            if new is old or old is None:
                continue
            if new is None or new.shape != old.shape or new.dtype != old.dtype:
                got = None if new is None else f"{new.dtype} {[*new.shape]}"
                raise PipelineError(
                    f"stage: expected its forward to leave buffer "
                    f"{f'{name}.{key}'.lstrip('.')} {old.dtype} {[*old.shape]}, got "
                    f"{got}. Give it its last shape and dtype in the beginning."
                )
            with torch.no_grad():
                part._buffers[key] = old.copy_(new)


def _check_constants(output: Template) -> None:
    known = (bool, int, float, complex, str, torch.dtype, type(None))
    strange = [type(x).__name__ for x in output.constants if not isinstance(x, known)]
    if strange:
        raise TypeError(
            "stage outputs: expected tensors, numbers, texts and None in tuples, "
            f"lists, dicts or registered dataclasses, got {', '.join(strange)}. "
            "Register a class of your own with torch.export.register_dataclass."
        )


def _call(
    module: nn.Module,
    graph: fx.Graph | None,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
) -> Any:
    """Call a module; the marks of a traced one's nodes are kept.

    Args:
        module: The module.
        graph: What it is to do, None for what it does.
        args: Its arguments.
        kwargs: Those by name.
    """
    if not isinstance(module, fx.GraphModule):
        return module(*args, **kwargs)
    if graph is None:
        graph = module.graph
        if not any(REGION in n.meta or _LINE in n.meta for n in graph.nodes):
            return module(*args, **kwargs)
    bound = inspect.signature(module.forward).bind(*args, **kwargs)
    return fx.Interpreter(module, graph=graph).run(*bound.args)


@phase("joint graph")
def export_joint(
    module: nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    tensors: Sequence[Tensor] = (),
    *,
    stays: Callable[..., bool] | None = None,
) -> JointGraph:
    """Trace `module` and its backward into one joint graph.

    Of many equal layers some are traced, see `compile.equal_layers`.

    Args:
        module: The stage's module, on the device that it runs on.
        args: Example arguments; only shapes, dtypes and `requires_grad` of tensors
            count. Other values are built into the graph.
        kwargs: Example keyword arguments, likewise.
        tensors: The tensors that get the first roles, in order; others as they appear.
        stays: Whether attention stays one operation, see `functions_in_graph`.

    Raises:
        TypeError: The module returns what stages cannot exchange.
        PipelineError: The module updates a parameter in its forward, or reads a
            tensor from outside that needs a gradient.
    """
    trace = functools.partial(_trace, module, args, kwargs, tensors, stays)
    shortened = shorten(module)
    if shortened is not None:
        joint = trace(shortened.graph)
        if lengthen(joint, shortened):
            return joint
    return trace(None)


def _trace(
    module: nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    tensors: Sequence[Tensor],
    stays: Callable[..., bool] | None,
    graph: fx.Graph | None,
) -> JointGraph:
    """Trace a module, with a graph for what it does if there is one."""
    arguments, inputs = Template.of((tuple(args), dict(kwargs)), tensors)
    wrapped = _TensorsOnly(module, graph, arguments, frozenset(), ())
    joint = _export(wrapped, inputs, stays)
    aliased, captured = _aliased_outputs(joint), wrapped.found
    _check_captured(captured)
    if aliased or captured:
        wrapped = _TensorsOnly(module, graph, arguments, aliased, captured)
        joint = _export(wrapped, [*inputs, *captured], stays)
    if wrapped.output_template is None:
        raise PipelineError("export: the stage's forward did not run.")
    read = _read(joint, wrapped.output_template, _first_names(module))
    _name_captured(read, captured, len(inputs))
    read.copied = aliased
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


def _export(
    module: nn.Module, args: list[Tensor], stays: Callable[..., bool] | None
) -> Any:
    # The first trace finds the tensors that the module reads from elsewhere.
    held = [*args, *module.parameters(), *module.buffers()]
    fake = detect_fake_mode(held) or FakeTensorMode(allow_non_fake_inputs=True)
    with (
        _keeping_parameters(module),
        contextlib.ExitStack() as stack,
        noting_host_randomness("a stage's forward or loss_fn"),
        marking_checkpoints(),
        torch.set_grad_enabled(True),
        tracing(TracingContext(fake)),
        # A part that torch.compile has wrapped is compiled with the rest.
        torch.compiler.set_stance("force_eager"),
        _as_if_compiling(),
        _views_on_metadata(),
        xla_compat.in_autograd(functions_in_autograd()),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")
        try:
            functions = functions_in_graph(stays)
            return aot_export_joint_with_descriptors(
                stack, module, tuple(args), decompositions=functions
            )
        except Exception as error:
            _note_operation(error)
            raise


def _note_operation(error: Exception) -> None:
    """Note on an error the operation in which it was raised, if any."""
    found = None
    for frame, _ in walk_tb(error.__traceback__):
        value = frame.f_locals.get("func")
        found = value if isinstance(value, OpOverload) else found
    if found is not None:
        error.add_note(f"in {found}")


def _as_if_compiling() -> contextlib.AbstractContextManager[None]:
    """Let `torch.compiler.is_compiling` return True.

    So modules do not branch on values, and `shard` is an operator. Upstream sets the
    flag in torch.compile and torch.export, not where AOTAutograd is called by itself.
    """
    return replaced(torch.compiler, "_is_compiling_flag", True)


def _views_on_metadata() -> contextlib.AbstractContextManager[None]:
    """Let in-place views change nothing but the shape of functionalization's wrapper.

    It repeats an operation such as `as_strided_` on its wrapper of a value, which is no
    XLA tensor that torch_xla's kernels could use, see docs/upstreaming.md.
    """
    return replaced(_mode_utils, "no_dispatch", _on_metadata)


@contextlib.contextmanager
def _on_metadata() -> Iterator[None]:
    """Let operations change nothing but the shape of their operand."""
    keys, key_set = torch._C.DispatchKey, torch._C.DispatchKeySet
    with no_dispatch():
        included = torch._C._dispatch_tls_local_include_set() | key_set(keys.Meta)
        excluded = torch._C._dispatch_tls_local_exclude_set()
        excluded |= key_set(keys.XLA) | key_set(keys.AutogradXLA)
        with torch._C._ForceDispatchKeyGuard(included, excluded):
            yield


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
    read_regions(read)
    _read_lines(read)
    _merge_tied(read)
    _lift_constants(read)
    return read


def _read_lines(joint: JointGraph) -> None:
    """Give a node of the backward the line of the operation that it differentiates."""
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
