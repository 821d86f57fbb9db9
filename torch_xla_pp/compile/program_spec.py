"""The inputs, the work and the results of a program, known before it is traced.

All of it follows from names, so it is plain data: a `Program` only adds the tracing.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from torch_xla_pp import xla_compat
from torch_xla_pp.compile import border
from torch_xla_pp.compile.border import Border
from torch_xla_pp.compile.bundles import Bundle
from torch_xla_pp.compile.flat_values import FlatValue
from torch_xla_pp.compile.lowering import LoweringRule
from torch_xla_pp.compile.names import MARK, TOKEN, route_in, route_out
from torch_xla_pp.compile.partition import Function


@dataclass(frozen=True, kw_only=True, slots=True)
class ProgramSpec:
    """A program: a function, with what happens before and after it.

    Args:
        function: What to run.
        pins: Output name → the sharding that the output must have.
        checked: Names of the inputs whose sharding is compared at every call; they
            come from outside of the stage's own programs.
        donated: Names of the inputs whose buffers the program may reuse; they are void
            after a call.
        received: Inputs that the program receives from other ranks.
        sent: Values that the program sends to other ranks.
        parts: Name of an input → names of the inputs whose sum it is.
        wanted: Names of outputs, received values and sums to return; None for the
            function's outputs.
        rules: How the function's operations are run, see `compile.lowering`.
        used: Name of an input → its sharding in use, if that differs from how it is
            kept.
        recycled: Names of outputs that take the memory of earlier ones, which a call
            may pass by `storage_of`.
        bundles: Values that it takes or returns as one; the other arguments name the
            single ones, but for `donated` and `recycled`.
        made_flat: Flat values in which it may return some of its outputs, `recycled`
            like these; which ones is known when it has been traced.
        given_flat: Those from which it takes inputs that are in them, if a call passes
            them.
        updated_flat: Name of one of these, which every call passes → the flat value
            that it returns in the same memory.
        is_marked: Whether it notes its begin and end, under the action that a `MARK`
            among its inputs names.
    """

    function: Function
    pins: Mapping[str, xla_compat.OpSharding] = field(default_factory=dict)
    checked: Collection[str] = ()
    donated: Collection[str] = ()
    received: Sequence[Border] = ()
    sent: Sequence[Border] = ()
    parts: Mapping[str, Sequence[str]] = field(default_factory=dict)
    wanted: Collection[str] | None = None
    rules: Sequence[LoweringRule] = ()
    used: Mapping[str, xla_compat.OpSharding] = field(default_factory=dict)
    recycled: Sequence[str] = ()
    bundles: Sequence[Bundle] = ()
    made_flat: Sequence[FlatValue] = ()
    given_flat: Sequence[FlatValue] = ()
    updated_flat: Mapping[str, FlatValue] = field(default_factory=dict)
    is_marked: bool = False

    @property
    def added(self) -> dict[str, Sequence[str]]:
        """Return the `parts` of what the program reads, sends or returns."""
        used = {*self.function.inputs, *border.border_names(self.sent)}
        used.update(self.wanted or ())
        return {name: parts for name, parts in self.parts.items() if name in used}

    @property
    def inputs(self) -> tuple[str, ...]:
        """Return the names of the values that a call needs."""
        arriving = {*border.border_names(self.received), *self.added}
        made = arriving.union(self.function.outputs)
        sent = [name for name in border.border_names(self.sent) if name not in made]
        parts = [part for parts in self.added.values() for part in parts]
        read = [*self.function.inputs, *sent, *parts]
        needed = [name for name in read if name not in arriving]
        needed += [route_in(message.stage) for message in self.received]
        needed += [route_out(message.stage) for message in self.sent]
        needed += [MARK] if self.is_marked else []
        returned = [bundle for bundle in self.bundles if bundle.name in self.outputs]
        needed += [bundle.total for bundle in returned if bundle.total]
        return self._bundled(needed)

    @property
    def outputs(self) -> tuple[str, ...]:
        """Return the names of the values that a call returns."""
        outputs = self.function.outputs
        if self.wanted is not None:
            made = (*outputs, *border.border_names(self.received), *self.added)
            outputs = tuple(n for n in dict.fromkeys(made) if n in self.wanted)
        has_token = bool(self.received or self.sent or self.is_marked)
        outputs = self._bundled(outputs)
        return (*outputs, TOKEN) if has_token else outputs

    def _bundled(self, names: Iterable[str]) -> tuple[str, ...]:
        """Return names, each once; bundles are in the place of their values."""
        bundle_of = {
            name: bundle.name for bundle in self.bundles for name in bundle.shapes
        }
        return tuple(dict.fromkeys(bundle_of.get(name, name) for name in names))

    @property
    def is_empty(self) -> bool:
        """Return whether there is nothing to compute, to add, to receive or to send."""
        is_passing = bool(self.received or self.sent or self.added)
        return not (self.function.outputs or is_passing)
