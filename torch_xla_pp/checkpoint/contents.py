"""What a rank saves or loads, as a state dict of torch.distributed.checkpoint."""

import copy
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from torch_xla_pp.checkpoint.catalogue import Catalogue, Path
from torch_xla_pp.checkpoint.parts import Names
from torch_xla_pp.errors import CheckpointError

# Entries of a group of parameters that are no options of its optimizer.
_NO_OPTIONS = {"params", "param_names", "initial_lr", "max_lr", "min_lr", "swa_lr"}
_NO_OPTIONS |= {"base_momentum", "max_momentum"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Wanted:
    """The entries of a checkpoint that a rank needs.

    Args:
        values: Name in the model → key that takes precedence, if it is there.
        slots: Names of the parameters that optimizers train, None if there is no
            optimizer.
        options: Kind of an optimizer → names of its options.
        extra: Other things, by key.
        optional: Those that need not be there.
    """

    values: dict[str, str | None]
    slots: tuple[str, ...] | None
    options: dict[str, frozenset[str]]
    extra: tuple[str, ...]
    optional: tuple[str, ...] = ()


@dataclass(kw_only=True, slots=True)
class Found:
    """The keys of `Contents` under which a checkpoint has what is wanted."""

    values: dict[str, str] = field(default_factory=dict)
    slots: dict[str, dict[Path, str]] = field(default_factory=dict)
    options: dict[str, dict[Path, str]] = field(default_factory=dict)
    extra: dict[str, dict[Path, str]] = field(default_factory=dict)
    has_optimizer: bool = False


class Contents(dict[str, Any]):
    """The values to be written, or those that were read.

    Args:
        values: What is to be written, nested.
        names: The names of the whole model.
        wanted: What this rank needs when it loads.
    """

    def __init__(
        self, values: Mapping[str, Any], *, names: Names, wanted: Wanted
    ) -> None:
        super().__init__(values)
        self._names, self._wanted = names, wanted
        self.found: Found | None = None

    @property
    def aliases(self) -> dict[str, str]:
        """Return key of another name of a tied parameter → key of its first one."""
        first = self._names.first
        return {f"model.{alias}": f"model.{name}" for alias, name in first.items()}

    def __deepcopy__(self, memo: dict[int, Any]) -> "Contents":
        values = {key: copy.deepcopy(value, memo) for key, value in self.items()}
        return Contents(values, names=self._names, wanted=self._wanted)

    def ask(self, metadata: Metadata, prefix: str, *, strict: bool) -> None:
        """Replace the values to be written by space for those of a checkpoint.

        Raises:
            CheckpointError: The checkpoint is of another model; equal on all ranks.
        """
        catalogue = Catalogue(metadata, prefix, self._names)
        found = self._find(catalogue, prefix)
        if strict:
            self._check(catalogue, found)
        self.found = found
        self.clear()
        for key in _keys(found):
            entry = catalogue.entries[key]
            self[key.removeprefix(prefix)] = (
                torch.empty(entry.size, dtype=entry.properties.dtype)
                if isinstance(entry, TensorStorageMetadata)
                else None
            )
        self._drop_prefix(found, prefix)

    def first_with(self, name: str, known: Collection[str]) -> str:
        """Return the first of a parameter's names that is among some, else `name`."""
        names = self._names.all_of(name)
        return next((other for other in names if other in known), name)

    def _find(self, catalogue: Catalogue, prefix: str) -> Found:
        found = Found(has_optimizer=catalogue.has_optimizer())
        wanted = self._wanted
        for name, rather in wanted.values.items():
            own = f"{prefix}{rather}"
            key = own if own in catalogue.entries else catalogue.key_of(name)
            if key is not None:
                found.values[name] = key
        if wanted.slots is not None:
            found.slots = {n: catalogue.slots_of(n) for n in wanted.slots}
            found.options = catalogue.options(wanted.slots)
        for name in (*wanted.extra, *wanted.optional):
            found.extra[name] = catalogue.extra(name)
        return found

    def _check(self, catalogue: Catalogue, found: Found) -> None:
        faults = catalogue.faults()
        if self._wanted.slots and not found.has_optimizer:
            faults.append("no state of an optimizer")
        faults += self._faults_of_options(found)
        lacking = [name for name in self._wanted.extra if not found.extra[name]]
        if lacking:
            faults.append(f"nothing for {', '.join(lacking)}")
        if faults:
            raise CheckpointError(
                "checkpoint: expected one of this model, got another: "
                f"{'. '.join(faults)}. Load it into the model that it is of, or pass "
                "strict=False to load what fits by name."
            )

    def _faults_of_options(self, found: Found) -> list[str]:
        """List optimizers that are of another kind than any in the checkpoint.

        Versions of one kind, and schedulers, may add options; another kind has others.
        """
        paths = [path for group in found.options.values() for path in group]
        saved = {str(path[0]).partition(".")[0] for path in paths} - _NO_OPTIONS
        return [
            f"an optimizer with {', '.join(sorted(saved - own))} in place of {kind} "
            f"with {', '.join(sorted(own - saved))}"
            for kind, own in self._wanted.options.items()
            if saved and saved - own and own - saved
        ]

    def _drop_prefix(self, found: Found, prefix: str) -> None:
        def short(keys: dict[Any, str]) -> None:
            for path, key in keys.items():
                keys[path] = key.removeprefix(prefix)

        for keys in _each(found):
            short(keys)


def _keys(found: Found) -> Iterator[str]:
    for keys in _each(found):
        yield from keys.values()


def _each(found: Found) -> Iterator[dict[Any, str]]:
    yield found.values
    for nested in (found.slots, found.options, found.extra):
        yield from nested.values()


def contents_in(state_dict: Mapping[str, Any]) -> Iterator[tuple[str, Contents]]:
    """Yield the contents of each `State` in a state dict, with its keys' prefix."""
    if isinstance(state_dict, Contents):
        yield "", state_dict
        return
    for key, value in state_dict.items():
        if isinstance(value, Contents):
            yield f"{key}.", value
