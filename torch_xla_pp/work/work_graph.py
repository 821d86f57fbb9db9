"""The work of a model as a graph, from which stages can be cut.

Terms: a *work* is one operation of the exported model, or several that must stay
together or are too small to be cut apart. A *value* is a tensor that one work makes, or
the model is given, and other works use. Rows are those of a microbatch.

Laws: every work is named once, and so is every operation; works are in program order,
so that a value goes to later works only, and there is no cycle.
"""

import hashlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from torch_xla_pp import record
from torch_xla_pp.work.amount import Amount, Cost

_FORMAT = "torch_xla_pp work 1"


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkParameter:
    """A parameter that a work uses.

    Args:
        name: Its name in the model.
        shape: Its shape.
        dtype: Its dtype without "torch.", such as "float32".
        bytes: Its size.
        tied: Name of its group if several works use it, else None. It is equal in
            all works that share it.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    bytes: int
    tied: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkValue:
    """A tensor that goes from one work to others.

    Args:
        name: FX node name.
        bytes_per_row: Its size for each row; 0 if the batch is not in it.
        bytes: Its size besides, whatever the rows.
        has_gradient: Whether its users send a gradient of the same size back.
        producer: Name of the work that makes it, None for an input of the model.
        users: Names of the works that use it, in program order.
        kept_by: Names of those works, users or the producer, whose backward reads
            it: a stage with one of them keeps the value, once, from F to B or I.
        passed_by: Names of those whose W reads it: a stage with one of them keeps it
            from I to W.
    """

    name: str
    bytes_per_row: float
    bytes: int
    has_gradient: bool
    producer: str | None
    users: tuple[str, ...]
    kept_by: tuple[str, ...] = ()
    passed_by: tuple[str, ...] = ()

    @property
    def size(self) -> Amount:
        """Return its size as an amount."""
        return Amount(bytes_per_row=self.bytes_per_row, bytes=self.bytes)


def _nothing() -> Mapping[str, Amount]:
    return {"none": Amount(), "full": Amount()}


@dataclass(frozen=True, kw_only=True, slots=True)
class Work:
    """A part of a model that is never cut.

    Args:
        name: Its name, for example that of its last operation.
        ops: FX node names of the exported graph, in program order.
        module: Path of the module that it is in, for printing.
        digest: A text that is equal for works that cost the same.
        forward: Cost of F.
        backward_input: Cost of I.
        backward_weight: Cost of W; B costs as much as I and W.
        saved: How much to compute again, "none" or "full" → what is kept from F to B
            or I. Values between works are not in it: see `WorkValue.kept_by`.
        passed: The same → what is kept from I to W: what W reads of what was saved,
            and of what I has computed. Values between works are not in it, either. I
            computes again all that other works of a stage are made of, so that "full"
            counts for its last ones only.
        parameters: What it uses.
    """

    name: str
    ops: tuple[str, ...]
    module: str
    digest: str
    forward: Cost
    backward_input: Cost
    backward_weight: Cost
    saved: Mapping[str, Amount]
    passed: Mapping[str, Amount] = field(default_factory=_nothing)
    parameters: tuple[WorkParameter, ...] = ()


@dataclass(frozen=True, kw_only=True)
class WorkGraph:
    """The work of a model.

    Args:
        works: All works, in program order.
        values: What goes between them, into the first and out of the last ones.
        rows: Rows with which the model was traced.
        outputs: Names of the values that the model returns.
        op_digests: Name of each operation → a text of what it is and what it takes,
            and the same of what the model returns; empty if nothing was traced.
        source: Where it comes from, for printing.

    Raises:
        ValueError: It breaks one of the laws of this module; all faults are listed.
    """

    works: tuple[Work, ...]
    values: tuple[WorkValue, ...]
    rows: int
    outputs: tuple[str, ...]
    op_digests: Mapping[str, str] = field(default_factory=dict)
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
        """Places of each work and one that uses a value of it, in order."""
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
        """A text of operations, edges and parameters' shapes, but of no batch.

        Of a traced model it does not depend on how operations are put into works.
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

    def predecessors(self, work: str) -> tuple[str, ...]:
        """Return the names of the works whose values a work uses."""
        place = self.index[work]
        return tuple(self.works[p].name for p, c in self.edges if c == place)

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
    """Find names that are there twice, and counts below one."""
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
        for what, amounts in (("saves", work.saved), ("passes", work.passed)):
            if missing := {"none", "full"} - set(amounts):
                yield (
                    f"work {work.name}: expected what it {what} for remat none and "
                    f"full, got nothing for {', '.join(sorted(missing))}. Add it."
                )


def _value_faults(graph: WorkGraph) -> Iterator[str]:
    """Find works and values that are not there, and edges that lead backward."""
    places = {work.name: place for place, work in enumerate(graph.works)}
    for value in graph.values:
        own = {*value.users, *([] if value.producer is None else [value.producer])}
        keepers = {"kept_by": value.kept_by, "passed_by": value.passed_by}
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
    for name in sorted(set(graph.outputs) - {value.name for value in graph.values}):
        yield f"expected outputs among the values, got {name}. Add it to the values."


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
