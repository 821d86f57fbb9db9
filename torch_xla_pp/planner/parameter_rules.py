"""What a model's axis rules say of its parameters, for the strategies of the planner.

The planner needs no torch, so these are `AxisRules` as a value of its own: read from
the JSON that `AxisRules.to_json` writes. Which mesh axes split which logical ones is
said by the presets of a strategy, as where the plan is carried out; the rules' own
tables come after them.
"""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Protocol

from torch_xla_pp.planner.strategies import DATA, MODEL, Strategy
from torch_xla_pp.record import text_of

LogicalDims = tuple[str | None, ...]
MeshAxes = tuple[str, ...]

# Logical axes of the presets, and what these split: see `mesh.presets`.
TP_AXES = ("mlp", "heads", "kv_heads", "vocab")
FSDP_AXES = ("embed",)
_KNOWN_AXES = (
    *("batch", "sequence", "norm_sequence", "key_sequence", "expert", "head_dim"),
    *(*FSDP_AXES, *TP_AXES),
)


class HasRules(Protocol):
    """What writes rules as `AxisRules.to_json` does."""

    def to_json(self) -> str:
        """Return the rules as JSON."""
        ...


@dataclass(frozen=True, kw_only=True)
class ParameterRules:
    """How a model's parameters may be split.

    Args:
        axes: Logical axis → mesh axes that split it, where presets say something else.
        parameter_axes: The same for how parameters are kept.
        parameters: Pattern on the names of parameters → the logical axis of each
            dimension; of several that match the first counts.
    """

    axes: Mapping[str, MeshAxes] = field(default_factory=dict)
    parameter_axes: Mapping[str, MeshAxes] = field(default_factory=dict)
    parameters: Mapping[str, LogicalDims] = field(default_factory=dict)

    @classmethod
    def of(cls, source: HasRules | str | Path) -> "ParameterRules":
        """Read `AxisRules`, a file that `AxisRules.to_json` wrote, or its text.

        Raises:
            ValueError: It is no such JSON, or has what is not planned; all is told.
        """
        if isinstance(source, str | Path):
            is_text = isinstance(source, str) and source.lstrip().startswith("{")
            text = str(source) if is_text else text_of(Path(source))
        else:
            text = source.to_json()
        try:
            tables = json.loads(text)
        except json.JSONDecodeError as error:
            raise ValueError(
                f"rules: expected JSON as of AxisRules.to_json, got none ({error}). "
                "Write the file again."
            ) from None
        faults = [*_faults(tables)]
        if faults:
            raise ValueError("\n".join(f"rules, {fault}" for fault in faults))
        axes, kept = (
            {name: _names(axis) for name, axis in tables.get(table, {}).items()}
            for table in ("axes", "parameter_axes")
        )
        patterns = tables.get("parameters", {}).items()
        return cls(
            axes=axes,
            parameter_axes=kept,
            parameters={pattern: tuple(dims) for pattern, dims in patterns},
        )

    def logical(self, name: str) -> LogicalDims | None:
        """Return the logical axes of a parameter, None if no pattern matches it."""
        for pattern, dims in self.parameters.items():
            if fnmatchcase(name, pattern):
                return dims
        return None

    def used_axes(self, strategy: Strategy) -> dict[str, MeshAxes]:
        """Return for each logical axis what splits it where values are computed."""
        found = dict.fromkeys(TP_AXES, (MODEL,)) if strategy.model > 1 else {}
        return {**found, **self.axes}

    def kept_axes(self, strategy: Strategy) -> dict[str, MeshAxes]:
        """Return for each logical axis what splits it in parameters as they are kept.

        What is not in it is split as where it is used.
        """
        found = dict.fromkeys(FSDP_AXES, (DATA,)) if strategy.has_fsdp else {}
        return {**found, **self.parameter_axes}

    def model_faults(self, shapes: Mapping[str, Sequence[int]]) -> Iterator[str]:
        """Yield what does not fit the parameters of a model, whatever the strategy."""
        known = {*_KNOWN_AXES, *self.axes, *self.parameter_axes}
        for name, shape in shapes.items():
            dims = self.logical(name)
            if dims is None:
                continue
            if len(dims) != len(shape):
                yield (
                    f"{name}: expected {len(shape)} logical axes, one for each "
                    f"dimension of {list(shape)}, got {dims}. Correct the pattern."
                )
            for axis in dims:
                if axis is not None and axis not in known:
                    yield (
                        f"{name}: expected logical axes of {', '.join(sorted(known))}, "
                        f"got {axis}. Name another, or add it to axes."
                    )

    def unmatched(self, names: Iterable[str]) -> list[str]:
        """Return the patterns that match none of the names."""
        known = [*names]
        return [
            pattern
            for pattern in self.parameters
            if not any(fnmatchcase(name, pattern) for name in known)
        ]


def _faults(tables: Any) -> Iterator[str]:
    """Find what is no table of rules, and what plans cannot do."""
    if not isinstance(tables, dict):
        yield f"expected tables as of AxisRules.to_json, got {type(tables).__name__}."
        return
    for table in ("axes", "parameter_axes"):
        for name, axis in _table(tables, table).items():
            if unknown := sorted({*_names(axis)} - {DATA, MODEL}):
                yield (
                    f"{table}: expected the mesh axes {DATA} and {MODEL}, which plans "
                    f"have, got {', '.join(unknown)} for {name}. Name these."
                )
    for pattern, dims in _table(tables, "parameters").items():
        is_list = isinstance(dims, list)
        if not is_list or not all(x is None or isinstance(x, str) for x in dims):
            yield (
                f"parameters: expected a list of logical axes for {pattern}, got "
                f"{dims!r}. Correct it."
            )
    if tables.get("gather_once"):
        yield (
            "gather_once: expected false, as plans count with weights that are "
            "gathered for each microbatch, got true. Leave it out for the plan."
        )


def _table(tables: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    found = tables.get(name, {})
    return found if isinstance(found, dict) else {}


def _names(axis: Any) -> MeshAxes:
    if axis is None:
        return ()
    return (axis,) if isinstance(axis, str) else tuple(map(str, axis))
