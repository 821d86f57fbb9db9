"""Sharding in three layers: mesh axes, logical axes, and the tensors that have them.

A model names what the dimensions of its tensors mean (`batch`, `embed`, `heads`): these
are *logical axes*. Rules map each logical axis to the *mesh axis* that it is split
over. To shard in another way takes another table, and no change of the model.

Source: the three layers of MaxText's guide to sharding,
https://maxtext.readthedocs.io.
"""

import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from types import MappingProxyType
from typing import Any

from torch_xla_pp.mesh.local_mesh import (
    Axis,
    LocalMesh,
    LogicalAxes,
    Partition,
    axis_names,
)


@dataclass(frozen=True, kw_only=True)
class AxisRules:
    """The sharding of a model's tensors over a rank's devices, by logical axes.

    Names are those of the model: `"layers.*.up.weight"` means the same before and after
    the model is split. Of several patterns that match, the first counts.

    Args:
        axes: Logical axis → the mesh axis that splits it, a tuple of them, or None.
        parameter_axes: The same for parameters alone, where they are sharded in another
            way than activations: FSDP splits `embed` of weights only. A program first
            gathers such parameters to the sharding of `axes`.
        parameters: Glob pattern on the names of parameters and buffers → the logical
            axis of each dimension, None for one that is never split. A parameter that
            no pattern matches is replicated.
        activations: Glob pattern on the names of submodules → the logical axes of their
            results, as if these went through `shard`. For a model that is traced, pass
            them to `pipeline(activations=...)`, too.
        gather_once: Whether parameters that are gathered by `parameter_axes` are
            gathered, and their gradients reduced, once per step and not once per
            microbatch. A device then holds whole weights and whole gradients during a
            step. Called `pipeline_fsdp_ag_once` in MaxText.

    Example:
        >>> rules = AxisRules(
        ...     axes={"batch": "data", "embed": None, "mlp": "model"},
        ...     parameters={"*.up.weight": ("mlp", "embed"),
        ...                 "*.down.weight": ("embed", "mlp")})
    """

    axes: Mapping[str, Axis] = field(default_factory=dict)
    parameter_axes: Mapping[str, Axis] = field(default_factory=dict)
    parameters: Mapping[str, LogicalAxes] = field(default_factory=dict)
    activations: Mapping[str, LogicalAxes] = field(default_factory=dict)
    gather_once: bool = False

    def __post_init__(self) -> None:
        for name, read in _FIELDS.items():
            table = {key: read(value) for key, value in getattr(self, name).items()}
            object.__setattr__(self, name, MappingProxyType(table))
        if not isinstance(self.gather_once, bool):
            raise TypeError(
                "AxisRules: expected True or False for gather_once, got "
                f"{self.gather_once!r}. Name axes in parameter_axes."
            )

    def __reduce__(self) -> tuple[Any, ...]:
        return AxisRules.from_json, (self.to_json(),)

    def __str__(self) -> str:
        lines = []
        for name in _FIELDS:
            table = getattr(self, name)
            lines += [f"{name}:"] if table else []
            lines += [f"  {key} -> {_text(value)}" for key, value in table.items()]
        lines += ["gather_once"] if self.gather_once else []
        return "\n".join(lines)

    def __or__(self, other: "AxisRules") -> "AxisRules":
        """Return both; `other` replaces entries that both have, at their places."""
        return AxisRules(
            **{
                name: {**getattr(self, name), **getattr(other, name)}
                for name in _FIELDS
            },
            gather_once=self.gather_once or other.gather_once,
        )

    def to_json(self) -> str:
        """Return the rules as JSON, which `from_json` reads."""
        tables = {name: dict(getattr(self, name)) for name in _FIELDS}
        return json.dumps({**tables, "gather_once": self.gather_once})

    @classmethod
    def from_json(cls, text: str) -> "AxisRules":
        """Read what `to_json` wrote."""
        return cls(**json.loads(text))

    def mesh_axis(self, logical: str, *, is_parameter: bool = False) -> Axis:
        """Return the mesh axis that splits a logical axis.

        Raises:
            KeyError: The rules do not have it.
        """
        if is_parameter and logical in self.parameter_axes:
            return self.parameter_axes[logical]
        return self.axes[logical]

    def partition(
        self,
        logical: Sequence[str | None],
        shape: tuple[int, ...],
        mesh: LocalMesh,
        *,
        is_parameter: bool = False,
    ) -> tuple[Partition, list[str]]:
        """Resolve the logical axes of one tensor.

        Args:
            logical: The logical axis of each dimension, None for one that is whole.
            shape: The tensor's shape.
            mesh: The devices of the rank.
            is_parameter: Whether `parameter_axes` counts.

        Returns:
            The partition, and what is wrong with it.
        """
        known = {*self.axes, *(self.parameter_axes if is_parameter else ())}
        unknown = [name for name in logical if name is not None and name not in known]
        if unknown:
            names = ", ".join(sorted(known)) or "none"
            return (), [
                f"unknown logical axis {x!r}, known are {names}" for x in unknown
            ]
        partition = tuple(
            None if name is None else self.mesh_axis(name, is_parameter=is_parameter)
            for name in logical
        )
        return partition, mesh.faults(shape, partition)

    def resolve(
        self,
        shapes: Mapping[str, tuple[int, ...]],
        mesh: LocalMesh,
        *,
        whole_model: Iterable[str] | None = None,
    ) -> dict[str, Partition]:
        """Assign a partition to each parameter that a pattern matches.

        Args:
            shapes: Name → shape of parameters and buffers.
            mesh: The devices of the rank.
            whole_model: All names that the model has. If given, every pattern must
                match one of them; leave it out if `shapes` is a part of the model.

        Returns:
            Name → partition, for the names that a pattern matches.

        Raises:
            ValueError: Something does not fit; all faults are listed, one a line.
        """
        found = self._axis_faults(mesh)
        if whole_model is not None:
            found += [
                f"pattern {pattern!r} matches no parameter of the model"
                for pattern in unmatched(self.parameters, whole_model)
            ]
        partitions = {}
        for name, shape in shapes.items():
            pattern = first_match(self.parameters, name)
            if pattern is None:
                continue
            logical = self.parameters[pattern]
            partitions[name], faults = self.partition(
                logical, shape, mesh, is_parameter=True
            )
            found += [
                f"{name} {list(shape)}: rule {pattern!r} gives {logical}: {fault}"
                for fault in faults
            ]
        if found:
            raise ValueError(
                "sharding: axis rules that do not fit the model. Correct these:\n  "
                + "\n  ".join(found)
            )
        return partitions

    def used(
        self,
        names: Iterable[str],
        partitions: Mapping[str, Partition],
    ) -> dict[str, Partition]:
        """Return the sharding of parameters in use, where it is not how they are kept.

        They are kept by `parameter_axes` and used by `axes`: XLA gathers them.

        Args:
            names: Names of parameters.
            partitions: How they are kept, as `resolve` returns it.
        """
        found = {}
        for name in names:
            pattern = first_match(self.parameters, name)
            if pattern is None:
                continue
            partition = tuple(
                None if logical is None else self.axes.get(logical, kept)
                for logical, kept in zip(
                    self.parameters[pattern], partitions[name], strict=True
                )
            )
            if partition != partitions[name]:
                found[name] = partition
        return found

    def _axis_faults(self, mesh: LocalMesh) -> list[str]:
        """List the axes that the mesh does not have."""
        return [
            f"{table}: {name!r} -> {_text(axis)}: unknown mesh axis {part!r}, the mesh "
            f"has {mesh.names}"
            for table in ("axes", "parameter_axes")
            for name, axis in getattr(self, table).items()
            for part in axis_names(axis)
            if part not in mesh.names
        ]


def first_match(patterns: Iterable[str], name: str) -> str | None:
    """Return the first of the glob patterns that matches a name."""
    return next((p for p in patterns if fnmatchcase(name, p)), None)


def unmatched(patterns: Iterable[str], names: Iterable[str]) -> list[str]:
    """Return the patterns that match none of the names."""
    known: Collection[str] = list(names)
    return [p for p in patterns if not any(fnmatchcase(name, p) for name in known)]


def axis_of(names: Sequence[str]) -> Axis:
    """Return mesh axes in the form of a rule."""
    if len(names) < 2:
        return names[0] if names else None
    return tuple(names)


def _read_axis(value: Any) -> Axis:
    if value is None or isinstance(value, str):
        return value
    return _read_names(value, str)


def _read_logical(value: Any) -> LogicalAxes:
    return _read_names(value, (str, type(None)))


def _read_names(value: Any, kinds: Any) -> tuple[Any, ...]:
    if isinstance(value, (tuple, list)) and all(isinstance(x, kinds) for x in value):
        return tuple(value)
    raise TypeError(
        f"AxisRules: expected a tuple of names of axes, got {value!r}. Write e.g. "
        'axes={"batch": ("data", "model")}, parameters={"*.bias": ("mlp",)}.'
    )


def _text(value: Any) -> str:
    return str(value) if value is None or isinstance(value, tuple) else repr(value)


_FIELDS: Mapping[str, Any] = MappingProxyType(
    {
        "axes": _read_axis,
        "parameter_axes": _read_axis,
        "parameters": _read_logical,
        "activations": _read_logical,
    }
)
