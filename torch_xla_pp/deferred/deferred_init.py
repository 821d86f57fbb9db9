"""Build modules whose parameters and buffers get their values later.

Inside `deferred_init` every new tensor is on meta, and operations on it are recorded
(see `recipes`). Reading a value computes it at once, which is meant for small ones: a
depth-dependent rate, a check.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch.nn.modules import module as hooks
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _disable_current_modes,
    _get_current_dispatch_mode_stack,
)

from torch_xla_pp.deferred.naming import name_built
from torch_xla_pp.deferred.recipes import (
    Operation,
    View,
    meta_like,
    record_of,
    takes_device,
    value_of,
)
from torch_xla_pp.errors import PipelineError

_aten = torch.ops.aten
_UNWRITTEN = (
    _aten.empty,
    _aten.empty_like,
    _aten.empty_strided,
    _aten.new_empty,
    _aten.new_empty_strided,
)
# Conjugate and negative bits, which a `View` does not record.
_WITHOUT_BITS = {
    _aten._conj.default: _aten._conj_physical.default,
    _aten._neg_view.default: _aten.neg.default,
}
_READS = (Tensor.tolist, Tensor.numpy, Tensor.__array__)


@contextlib.contextmanager
def deferred_init() -> Iterator[None]:
    """Build modules without memory; stages compute the values of their part later.

    Inside, modules are built as usual, with their own initialization or any other.
    Their tensors are on meta; `build_stage`, `PipelineStage` and `materialize` compute
    the values that the recorded operations give. Random values depend only on torch's
    seed and on a tensor's name in the largest module that was built: not on where the
    model is split, nor on the number of ranks or devices. They differ from those of a
    model that is built without this.

    Casts, copies and re-initialization belong inside, too; it may be entered
    again for that, also for a module that was built on meta. Tensors that are made from
    data (`torch.from_numpy`, a file) are kept as they are.

    Raises:
        PipelineError: Something cannot be recorded.

    Example:
        >>> with deferred_init():
        ...     model = Model(config).to(torch.bfloat16)
        >>> pipe = pipeline(model, mb_args=(x,), split_spec=spec)
    """
    modes = _get_current_dispatch_mode_stack()  # type: ignore[no-untyped-call]
    if any(isinstance(mode, _Recorder) for mode in modes):
        yield
        return
    built: dict[nn.Module, None] = {}

    def note(module: nn.Module, name: str, value: Any) -> None:
        built[module] = None

    handles = [
        hooks.register_module_parameter_registration_hook(note),
        hooks.register_module_buffer_registration_hook(note),
        hooks.register_module_module_registration_hook(note),
    ]
    try:
        with _Reads(), _Recorder():  # type: ignore[no-untyped-call]
            yield
    finally:
        for handle in handles:
            handle.remove()
    name_built(list(built))


class _Recorder(TorchDispatchMode):
    """A mode that runs everything on meta, and records operations that write."""

    def __torch_dispatch__(
        self,
        func: OpOverload,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        function, kwargs = _WITHOUT_BITS.get(func, func), kwargs or {}
        tensors = _tensors((args, kwargs))
        if tensors and not any(x.is_meta for x in tensors):
            result = function(*args, **kwargs)
            # Data that `torch.tensor` has read.
            is_new = function is _aten.lift_fresh.default
            return constant(result) if is_new else result
        written = _written(function, args, kwargs)
        if not all(x.is_meta for x in written):
            return _compute(function, args, kwargs, "it writes to what has a value")
        recorded = pytree.tree_map_only(Tensor, _stand_in, (args, kwargs))
        try:
            result = _on_meta(function, args, kwargs)
        except (NotImplementedError, RuntimeError) as error:
            return _compute(function, args, kwargs, error)
        if function.overloadpacket not in _UNWRITTEN:
            _record(function, recorded, written, pytree.tree_leaves(result))
        return result


class _Reads(TorchFunctionMode):
    """A mode in which Python can read the values that tensors will have."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func in _READS and args[0].is_meta:
            with _disable_current_modes():
                args = (_current(args[0]), *args[1:])
        return func(*args, **(kwargs or {}))


def constant(value: Tensor) -> Tensor:
    """Return a meta tensor that stands for a value, which it keeps alive."""
    value = value.detach()
    result = meta_like(value)
    _record(_aten.clone.default, ((value,), {}), [], [result])
    return result


def _on_meta(function: OpOverload, args: Any, kwargs: dict[str, Any]) -> Any:
    args, kwargs = pytree.tree_map_only(Tensor, lambda x: x.to("meta"), (args, kwargs))
    if takes_device(function):
        kwargs = kwargs | {"device": torch.device("meta")}
    return function(*args, **_without_generator(kwargs))


def _record(
    function: OpOverload,
    arguments: tuple[tuple[Any, ...], dict[str, Any]],
    written: list[Tensor],
    leaves: list[Any],
) -> None:
    """Record a call that has written to tensors or made new ones.

    Args:
        function: What was called.
        arguments: Its arguments, with views in place of meta tensors.
        written: The tensors that it has written to.
        leaves: The leaves of what it returned.
    """
    args, kwargs = arguments
    seen = [x.record for x in pytree.tree_leaves(arguments) if isinstance(x, View)]
    results = [
        View.of(leaf) if isinstance(leaf, Tensor) and record_of(leaf) is None else None
        for leaf in leaves
    ]
    new = [view.record for view in results if view is not None]
    changed = [*(View.of(value).record for value in written), *new]
    if not changed:
        return
    is_random = torch.Tag.nondeterministic_seeded in function.tags
    operation = Operation(
        function=function,
        args=args,
        kwargs=_without_generator(kwargs),
        results=tuple(results),
        records=tuple(dict.fromkeys(seen)),
        number=1 + max((record.clock for record in seen), default=0),
        default_dtype=torch.get_default_dtype(),
        seed=_seed(kwargs) if is_random else None,
    )
    for record in dict.fromkeys(changed):
        record.writes.append(operation)
    for value in written:
        record = View.of(value).record
        if record.version is not None:
            record.version = max(record.version, value._version)
    for record in [*seen, *new]:
        record.clock = operation.number


def _compute(
    function: OpOverload, args: Any, kwargs: dict[str, Any], reason: Exception | str
) -> Any:
    """Call a function that needs or changes values, or does not support meta."""
    is_random = torch.Tag.nondeterministic_seeded in function.tags
    written = _written(function, args, kwargs)
    if is_random or any(x.is_meta for x in written):
        raise PipelineError(
            f"deferred_init: expected operations that can be recorded, got {function}: "
            f"{reason}. Write it another way, or call it before deferred_init."
        )
    args, kwargs = pytree.tree_map_only(Tensor, _current, (args, kwargs))
    if takes_device(function):
        kwargs = kwargs | {"device": torch.device("cpu")}
    result = function(*args, **kwargs)
    own = {id(value) for value in written}
    return pytree.tree_map_only(
        Tensor, lambda x: x if id(x) in own else constant(x), result
    )


def _current(tensor: Tensor) -> Tensor:
    """Return the value that a tensor has so far."""
    if not tensor.is_meta:
        return tensor
    value = value_of(tensor)
    return torch.zeros_like(tensor, device="cpu") if value is None else value


def _written(function: OpOverload, args: Any, kwargs: dict[str, Any]) -> list[Tensor]:
    """Return the arguments that a function writes to."""
    found = []
    for index, argument in enumerate(function._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[index] if index < len(args) else kwargs.get(argument.name)
            found += _tensors(value)
    return found


def _stand_in(tensor: Tensor) -> Any:
    return View.of(tensor) if tensor.is_meta else tensor.detach()


def _seed(kwargs: dict[str, Any]) -> int:
    generator = kwargs.get("generator")
    return torch.initial_seed() if generator is None else generator.initial_seed()


def _without_generator(kwargs: dict[str, Any]) -> dict[str, Any]:
    return kwargs | ({"generator": None} if "generator" in kwargs else {})


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor)]
