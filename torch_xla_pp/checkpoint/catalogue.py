"""The keys of a checkpoint, whichever library wrote it.

Ours are nested as {"model", "optim", ...}. Those of others have a model's names behind
another prefix or none, and options of an optimizer by group or by parameter, as
`torch.distributed.checkpoint.state_dict` writes them.
"""

from collections import Counter
from collections.abc import Collection

from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from torch_xla_pp.checkpoint.parts import Names

Path = tuple[str | int, ...]
MODEL, OPTIMIZER = "model", "optim"


class Catalogue:
    """The metadata of a checkpoint, searched by what a key stands for.

    Args:
        metadata: What torch.distributed.checkpoint has written.
        base: What all keys that count begin with, e.g. "app." or "".
        names: The names of the model that is to be loaded.
    """

    def __init__(self, metadata: Metadata, base: str, names: Names) -> None:
        self._paths = metadata.planner_data or {}
        self._names = names
        self._shapes = set(names.shapes)
        self._base = base
        self.entries = {
            key: entry
            for key, entry in metadata.state_dict_metadata.items()
            if key.startswith(base)
        }
        self._model = self._model_prefix()
        self._optimizer, self._slots = self._find_slots()

    def key_of(self, name: str) -> str | None:
        """Return the key of a value of the model, None if it is not there.

        A tied parameter is there if it is under one of its names.
        """
        keys = [self._model + other for other in self._names.all_of(name)]
        return next((key for key in keys if key in self.entries), None)

    def faults(self) -> list[str]:
        """List how the checkpoint's model differs, in names and shapes."""
        names = self._names
        missing = [name for name in names.shapes if self.key_of(name) is None]
        found = [f"missing: {', '.join(missing)}"] if missing else []
        known = {other for name in names.shapes for other in names.all_of(name)}
        unexpected = [
            key.removeprefix(self._model)
            for key in self.entries
            if key.startswith(self._model) and self._model != self._base
            if key.removeprefix(self._model) not in known
        ]
        if unexpected:
            found.append(f"unexpected: {', '.join(unexpected)}")
        shapes = []
        for name, shape in names.shapes.items():
            entry = self.entries.get(self.key_of(name) or "")
            if isinstance(entry, TensorStorageMetadata) and tuple(entry.size) != shape:
                expected = "no tensor" if shape is None else list(shape)
                shapes.append(f"{name}: expected {expected}, got {list(entry.size)}")
        return [*found, *([f"other shapes: {'; '.join(shapes)}"] if shapes else [])]

    def slots_of(self, name: str) -> dict[Path, str]:
        """Return path → key of an optimizer's state for a parameter."""
        for other in self._names.all_of(name):
            if other in self._slots:
                return self._slots[other]
        return {}

    def options(self, names: Collection[str]) -> dict[str, dict[Path, str]]:
        """Return group → path → key of the options of an optimizer's groups.

        Args:
            names: The parameters to read where each has options of its own; each is
                then a group by its name. Other groups have numbers.
        """
        found: dict[str, dict[Path, str]] = {}
        known = {other for name in names for other in self._names.all_of(name)}
        for path, key in self.below(f"{self._optimizer}param_groups").items():
            text = ".".join(map(str, path))
            name = _longest_name(text, self._shapes)
            if name is None:
                found.setdefault(str(path[0]), {})[path[1:]] = key
            elif name in known:
                found.setdefault(name, {})[text[len(name) + 1 :],] = key
        return found

    def has_optimizer(self) -> bool:
        """Return whether there is state of an optimizer."""
        return bool(self._slots or self.below(f"{self._optimizer}param_groups"))

    def below(self, stem: str) -> dict[Path, str]:
        """Return path → key of all that is nested in a key, or of itself."""
        return {
            self._path(key, stem): key
            for key in self.entries
            if key == stem or key.startswith(f"{stem}.")
        }

    def extra(self, name: str) -> dict[Path, str]:
        """Return path → key of what is neither the model's nor an optimizer's.

        Checkpoints of other libraries lack the prefix "extra." of ours.
        """
        stems = (f"{self._base}{name}", f"{self._base}{name.removeprefix('extra.')}")
        return next(filter(None, map(self.below, stems)), {})

    def _path(self, key: str, stem: str) -> Path:
        """Return the path of a key below a stem, as it was nested when written."""
        path: Path = tuple(self._paths.get(key, ()))
        for depth in range(len(path) + 1):
            if ".".join(map(str, path[:depth])) == stem:
                return path[depth:]
        rest = key[len(stem) + 1 :]
        return tuple(rest.split(".")) if rest else ()

    def _model_prefix(self) -> str:
        """Return the prefix of the names of the model."""
        expected = f"{self._base}{MODEL}."
        found: Counter[str] = Counter()
        tails = [(name, f".{name}") for name in self._names.shapes]
        keys = list(self.entries)
        for name, tail in tails[:1]:
            found.update(k[: -len(name)] for k in keys if k == name or k.endswith(tail))
        found.update((expected, self._base))
        counts = {p: self._num_found(p) for p in (expected, self._base, *found)}
        best = max(counts.values())
        return next(prefix for prefix, count in counts.items() if count == best)

    def _num_found(self, prefix: str) -> int:
        names = self._names
        return sum(
            any(prefix + other in self.entries for other in names.all_of(name))
            for name in names.shapes
        )

    def _find_slots(self) -> tuple[str, dict[str, dict[Path, str]]]:
        """Return the prefix of an optimizer's entries, and its state by parameter."""
        found: dict[str, dict[str, dict[Path, str]]] = {}
        for key in self.entries:
            head, middle, tail = key.partition("state.")
            name = _longest_name(tail, self._shapes) if middle else None
            if name is not None and (not head or head.endswith(".")):
                path = self._path(key, f"{head}state.{name}")
                found.setdefault(head, {}).setdefault(name, {})[path] = key
        known = (f"{self._base}{OPTIMIZER}.", f"{self._base}optimizer.")
        heads = [head for head in (*known, *found) if head in found]
        if heads:
            return heads[0], found[heads[0]]
        has_options = [h for h in known if self.below(f"{h}param_groups")]
        return next(iter(has_options), known[0]), {}


def _longest_name(text: str, names: Collection[str]) -> str | None:
    """Return the longest name that is followed by a dot at the start of a text."""
    while text:
        text = text.rpartition(".")[0]
        if text in names:
            return text
    return None
