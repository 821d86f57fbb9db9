"""The work of a model as a graph, from which stages can be cut.

Terms: a *work* is one operation of the exported model, or several that must stay
together or are too small to be cut apart. A *value* is a tensor that one work makes, or
that is an input of the model, and that other works use. Rows are those of a microbatch.

Laws: every work is named once, and so is every operation; works are in program order,
so that values go to later works only, and there is no cycle.
"""

import hashlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path

from torch_xla_pp import record
from torch_xla_pp.work.amount import Cost
from torch_xla_pp.work.repeated import LayeredModel
from torch_xla_pp.work.works import Work, WorkValue

_FORMAT = "torch_xla_pp work 1"


@dataclass(frozen=True, kw_only=True)
class WorkGraph:
    """The work of a model.

    Args:
        works: All works, in program order.
        values: The values between them, the inputs and the outputs.
        rows: Rows with which the model was traced.
        outputs: Names of the values that the model returns.
        op_digests: Name of each operation → its digest, with one for the model's
            results; empty if nothing was traced.
        unknown_ops: Operations whose FLOPs are unknown → their share of all bytes.
        has_loss: Whether the cost of the loss is included in that of the last work.
        source: Where it comes from, for printing.

    Raises:
        ValueError: It breaks one of the laws of this module; all faults are listed.
    """

    works: tuple[Work, ...]
    values: tuple[WorkValue, ...]
    rows: int
    outputs: tuple[str, ...]
    op_digests: Mapping[str, str] = field(default_factory=dict)
    unknown_ops: Mapping[str, float] = field(default_factory=dict)
    has_loss: bool = False
    source: str = field(default="", compare=False)

    def __post_init__(self) -> None:
        faults = [*_name_faults(self), *_value_faults(self), *_tie_faults(self.works)]
        if faults:
            raise ValueError("\n".join(f"work graph: {fault}" for fault in faults))

    def __str__(self) -> str:
        return (
            f"{len(self.works)} works of {self.num_ops} operations, "
            f"{len(self.values)} values, traced with {self.rows} rows"
        )

    @property
    def num_ops(self) -> int:
        """Number of operations in all works."""
        return sum(len(work.ops) for work in self.works)

    @cached_property
    def index(self) -> Mapping[str, int]:
        """Name of each work → its place."""
        return {work.name: place for place, work in enumerate(self.works)}

    @cached_property
    def edges(self) -> tuple[tuple[int, int], ...]:
        """Pairs of the places of a work and of one that uses its values, in order."""
        index = self.index
        return tuple(
            sorted(
                {
                    (index[value.producer], index[user])
                    for value in self.values
                    if value.producer is not None
                    for user in value.users
                }
            )
        )

    @cached_property
    def ancestors(self) -> tuple[int, ...]:
        """For each work a number with a bit set for each work that it depends on."""
        return closure_of(self.edges, len(self.works))

    @cached_property
    def digest(self) -> str:
        """A text of operations, edges and parameters' shapes, independent of the batch.

        For a traced model it does not depend on how operations are grouped into works.
        """
        held = {
            (p.name, p.shape, p.dtype) for work in self.works for p in work.parameters
        }
        parts: object = sorted(self.op_digests.items())
        if not self.op_digests:
            values = [(v.name, v.producer, v.users) for v in self.values]
            parts = [work.ops for work in self.works], values, self.outputs
        text = repr((sorted(held), parts))
        return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()

    def with_loss(self, cost: Cost) -> "WorkGraph":
        """Return the work with a loss of the model's outputs.

        Its program runs with the backward of the work that makes the last output.

        Args:
            cost: The cost of the loss and its gradient together.

        Raises:
            ValueError: No work makes an output, or there is a loss already.
        """
        made = {v.name: v.producer for v in self.values if v.producer is not None}
        homes = [self.index[made[name]] for name in self.outputs if name in made]
        if self.has_loss or not homes:
            raise ValueError(
                "work graph: expected outputs that works make, and no loss so far, got "
                f"outputs {', '.join(self.outputs) or 'none'}"
                f"{' and a loss' if self.has_loss else ''}. Trace the model with one."
            )
        last = self.works[max(homes)]
        changed = replace(last, backward_input=last.backward_input + cost)
        works = tuple(changed if work is last else work for work in self.works)
        return replace(self, works=works, has_loss=True)

    def repeated(self, path: str, count: int) -> "WorkGraph":
        """Return the work of a model that has more equal layers in a row.

        For plans of deep models that were not traced: costs are those of the traced
        layers, and operations have names that no model has.

        Args:
            path: Path of the layers, such as "layers" for `layers.0`, `layers.1`, …
            count: How many there are to be in all.

        Raises:
            ValueError: No two layers of that path are equal neighbours, or there are
                more of them already.
        """
        model = LayeredModel(self.works, self.values, self.outputs)
        works, values = model.repeated(path, count)
        return replace(self, works=works, values=values, op_digests={})

    def to_json(self, path: str | Path | None = None) -> str:
        """Return it as JSON.

        Args:
            path: A file to write as well.
        """
        return record.to_json(self, _FORMAT, path)

    @classmethod
    def from_json(cls, source: str | Path) -> "WorkGraph":
        """Read what `to_json` wrote.

        Args:
            source: A file, or the text itself, which is known by its line ends.

        Raises:
            ValueError: Fields are missing, unknown or faulty; all are named.
        """
        return record.from_json(cls, source, _FORMAT)


def closure_of(edges: Sequence[tuple[int, int]], count: int) -> tuple[int, ...]:
    """Return for each node a number with a bit for each node that leads to it.

    Args:
        edges: Pairs (lower, higher).
        count: Number of nodes.
    """
    found = [0] * count
    for producer, consumer in sorted(edges, key=lambda edge: edge[1]):
        found[consumer] |= found[producer] | 1 << producer
    return tuple(found)


def _name_faults(graph: WorkGraph) -> Iterator[str]:
    """Find repeated names, and counts below one."""
    if graph.rows < 1:
        yield f"expected at least 1 row, got {graph.rows}. Trace it with a batch."
    if not graph.works:
        yield "expected at least one work, got none. Trace a model that computes."
    for what, names in (
        ("work", [work.name for work in graph.works]),
        ("value", [value.name for value in graph.values]),
        ("operation", [op for work in graph.works for op in work.ops]),
    ):
        for name, count in Counter(names).items():
            if count > 1:
                yield f"expected {what} {name} once, got it {count} times. Keep one."
    for work in graph.works:
        for what, amounts in (
            ("saves", work.saved),
            ("passes", work.passed),
            ("makes", work.made),
        ):
            if missing := {"none", "full"} - set(amounts):
                yield (
                    f"work {work.name}: expected what it {what} for remat none and "
                    f"full, got nothing for {', '.join(sorted(missing))}. Add it."
                )


def _value_faults(graph: WorkGraph) -> Iterator[str]:
    """Find unknown works and values, and edges that lead backward."""
    places = {work.name: place for place, work in enumerate(graph.works)}
    for value in graph.values:
        own = {*value.users, *([] if value.producer is None else [value.producer])}
        keepers = {
            "kept_by": value.kept_by,
            "passed_by": value.passed_by,
            "passed_again_by": value.passed_again_by,
            "unread_by": value.unread_by,
        }
        for name in sorted(own.union(*keepers.values()) - set(places)):
            yield f"value {value.name}: expected known works, got {name}. Add it."
        for what, names in keepers.items():
            for name in sorted(set(names) - own):
                yield (
                    f"value {value.name}: expected {what} to name its producer or "
                    f"users, got {name}. Remove it."
                )
        first = places.get(value.producer or "", -1)
        for name in value.users:
            if places.get(name, len(places)) <= first:
                yield (
                    f"value {value.name}: expected users after {value.producer}, got "
                    f"{name}. Order the works by data flow, and join works that are in "
                    "a cycle."
                )
    yield from _view_faults(graph)
    for name in sorted(set(graph.outputs) - {value.name for value in graph.values}):
        yield f"expected outputs among the values, got {name}. Add it to the values."


def _view_faults(graph: WorkGraph) -> Iterator[str]:
    """Find views of values that their producers do not have, and views in a circle."""
    known = {value.name: value for value in graph.values}
    for value in graph.values:
        if value.view_of is None:
            continue
        whole = known.get(value.view_of)
        makers = () if whole is None else (whole.producer, *whole.users)
        if value.producer is None or value.producer not in makers:
            yield (
                f"value {value.name}: expected it to be a view of a value that "
                f"{value.producer or 'a work'} makes or uses, got {value.view_of}. "
                "Correct one."
            )
        seen = {value.name}
        while whole is not None and whole.name not in seen:
            seen.add(whole.name)
            whole = known.get(whole.view_of or "")
        if whole is not None:
            yield (
                f"value {value.name}: expected views of other values, got views of one "
                f"another: {', '.join(sorted(seen))}. Make one of them no view."
            )


def _tie_faults(works: Sequence[Work]) -> Iterator[str]:
    """Find tied parameters of different sizes."""
    sizes: dict[str, tuple[str, int]] = {}
    for work in works:
        for parameter in work.parameters:
            if parameter.tied is None:
                continue
            name, size = sizes.setdefault(
                parameter.tied, (parameter.name, parameter.bytes)
            )
            if size != parameter.bytes:
                yield (
                    f"tied group {parameter.tied}: expected {name} and "
                    f"{parameter.name} of one size, got {size} and {parameter.bytes} "
                    "bytes. Correct one."
                )
