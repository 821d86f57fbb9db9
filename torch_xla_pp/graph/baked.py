"""The values that a trace has built in, and whether they still hold.

A traced stage follows the modes and the parameters of its own module, and the hooks of
the module itself. It cannot follow changes of anything else that its forward, or that
of the traced model, reads, so these are refused.
"""

from collections.abc import Callable, Mapping
from typing import Any
from weakref import ref

from torch import Tensor, nn

from torch_xla_pp.errors import PipelineError
from torch_xla_pp.graph.captured import Captured


class Baked:
    """The values of the stage's own module that a trace has built in.

    Args:
        captured: The values that the module reads from outside.
    """

    # Hooks of a stage itself are called.
    _has_root_hooks = False

    def __init__(self, captured: Captured) -> None:
        self._captured = captured
        self._first = captured.number()

    def check(self) -> None:
        """Refuse changes since the trace; takes some 50 µs.

        Raises:
            PipelineError: Numbers, flags or texts have changed, or hooks.
        """
        if found := self._changes():
            raise PipelineError(
                "traced stage: expected what the model's forward reads to be as it was "
                f"when it was traced, got changes: {found}. Call pipeline again, or "
                "build the stage by hand, whose forward is traced for each change."
            )

    def _changes(self) -> str:
        """Describe what has changed."""
        now = self._captured.number()
        if now == self._first:
            return ""
        values = self._captured.values_changed(self._first, now)
        return values or self._captured.hooks_changed(
            self._first, now, of_root=self._has_root_hooks
        )


class BakedModel(Baked):
    """The values of the traced model that a trace has built in.

    The stages have its parameters, but parts and other tensors of their own. The model
    is not kept alive, and parts of it may be deleted.

    Args:
        model: The model.
    """

    _has_root_hooks = True

    def __init__(self, model: nn.Module) -> None:
        super().__init__(Captured(model, is_kept=False))
        self._model = ref(model)
        self._num_walks = self._captured.num_walks
        self._held = {name: ref(x) for name, x in _held_by(model).items()}
        self._tensors = _Versions(_tensors_of(model))
        self._buffers = _Versions({})

    def part_from(self, stage: nn.Module) -> None:
        """Note that from now on a stage has buffers of its own, on the device."""
        model = self._model()
        if model is not None:
            own = {name for name, _ in stage.named_buffers()}
            shared = {n: x for n, x in model.named_buffers() if n in own}
            self._buffers.update(_Versions(shared))

    def check(self) -> None:
        """Refuse changes since the trace; takes some 50 µs.

        Raises:
            PipelineError: Something other than parameters' values was changed.
        """
        super().check()
        if found := self._buffers.written():
            raise PipelineError(
                "traced stage: expected the model's buffers as they were when the "
                f"stage was built, got others written to {', '.join(found)}. The stage "
                "has buffers of its own: load into stage.submod, with strict=False."
            )

    def _changes(self) -> str:
        return super()._changes() or self._replaced() or self._written()

    def _replaced(self) -> str:
        """Name the parts, parameters and other tensors that are other objects now."""
        model, count = self._model(), self._captured.num_walks
        if model is None or count == self._num_walks:
            return ""
        now = _held_by(model)
        names = (n for n, x in self._held.items() if n in now and x() is not now[n])
        found = ", ".join(f"{name} is another one" for name in names)
        if not found:
            self._num_walks = count
        return found

    def _written(self) -> str:
        """Name the tensors, except parameters and buffers, that were written to."""
        return ", ".join(f"{name} was written to" for name in self._tensors.written())


class _Versions(dict[str, tuple[Callable[[], Tensor | None], int]]):
    """The versions of tensors by name, which count writes; they are not kept alive."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        known = {n: x for n, x in tensors.items() if not x.is_inference()}
        super().__init__({n: (ref(x), x._version) for n, x in known.items()})

    def written(self) -> list[str]:
        """Return the names of the tensors that were written to since."""
        found = ((name, held(), version) for name, (held, version) in self.items())
        return [n for n, x, version in found if x is not None and x._version != version]


def _held_by(model: nn.Module) -> dict[str, Any]:
    """Return name → part, parameter, or other tensor, without buffers."""
    parts = {name: part for name, part in model.named_modules() if name}
    named = dict(model.named_parameters(remove_duplicate=False))
    return {**parts, **named, **_tensors_of(model)}


def _tensors_of(model: nn.Module) -> dict[str, Tensor]:
    """Return name → attribute that is a tensor and neither parameter nor buffer."""
    return {
        f"{path}.{name}" if path else name: value
        for path, part in model.named_modules()
        for name, value in vars(part).items()
        if isinstance(value, Tensor)
    }
