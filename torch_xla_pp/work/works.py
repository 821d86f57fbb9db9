"""The parts of a work graph: works, their parameters, and values between them."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace

from torch_xla_pp.work.amount import Amount, Cost


@dataclass(frozen=True, kw_only=True, slots=True)
class ParameterDim:
    """A dimension of a parameter, which stands for dimensions of values, too.

    A value that is computed of a matrix is split where a dimension of the matrix is.

    Args:
        parameter: Name of the parameter.
        dim: Which of its dimensions.
    """

    parameter: str
    dim: int


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkSum:
    """What a work adds up over devices if a dimension that it sums over is split.

    Args:
        when: "F", "I" or "W".
        dims: The dimensions that it sums over, of one factor and of the other.
        size: Size of the result.
    """

    when: str
    dims: tuple[ParameterDim, ...]
    size: Amount


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkPart:
    """What a work keeps of values with some dimensions, a part of all that it keeps.

    Args:
        dims: Those of the values' dimensions that parameters have, too.
        saved: Of `Work.saved`.
        passed: Of `Work.passed`.
    """

    dims: tuple[ParameterDim, ...]
    saved: Mapping[str, Amount]
    passed: Mapping[str, Amount]


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
        read_by: Which of "F", "I" and "W" read it.
        looked_up: Size of what F looks up in it, if it is a table; else None.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    bytes: int
    tied: str | None = None
    read_by: tuple[str, ...] = ("F", "I")
    looked_up: Amount | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkValue:
    """A tensor that goes from one work to others.

    Args:
        name: FX node name.
        bytes_per_row: Its size for each row; 0 if the batch is not in it.
        bytes: Its fixed size, whatever the rows.
        has_gradient: Whether its users send a gradient of the same size back.
        producer: Name of the work that makes it, None for an input of the model.
        users: Names of the works that use it, in program order; none for one of
            which they use views alone.
        kept_by: Names of those works, users or the producer, whose backward reads
            it: a stage with one of them keeps the value, once, from F to B or I.
        passed_by: Names of those whose W reads it: a stage with one of them keeps it
            from I to W.
        passed_again_by: Names of further ones whose W reads it where they compute again
            what they save, see `Work.passed`.
        unread_by: Names of users whose I does not read it where they compute again: a
            stage's I computes it there only if it needs what they make of it.
        dims: Those of its dimensions that parameters have, too.
        view_of: Name of the value that it is a view of, None if it is one of its own.
            A stage with its producer keeps that value in its place, unless the views
            that are read are fewer bytes together.
    """

    name: str
    bytes_per_row: float
    bytes: int
    has_gradient: bool
    producer: str | None
    users: tuple[str, ...]
    kept_by: tuple[str, ...] = ()
    passed_by: tuple[str, ...] = ()
    passed_again_by: tuple[str, ...] = ()
    unread_by: tuple[str, ...] = ()
    dims: tuple[ParameterDim, ...] = ()
    view_of: str | None = None

    @property
    def size(self) -> Amount:
        """Return its size as an amount."""
        return Amount(bytes_per_row=self.bytes_per_row, bytes=self.bytes)

    def with_works(
        self, change: Callable[[tuple[str, ...]], Iterable[str]]
    ) -> "WorkValue":
        """Return it with other users, and other works that read it later.

        Args:
            change: Takes names of such works and returns others.
        """
        return replace(
            self,
            users=tuple(change(self.users)),
            kept_by=tuple(change(self.kept_by)),
            passed_by=tuple(change(self.passed_by)),
            passed_again_by=tuple(change(self.passed_again_by)),
            unread_by=tuple(change(self.unread_by)),
        )


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
        saved: Remat, "none" or "full" → bytes kept from F to B or I, without values
            between works: see `WorkValue.kept_by`.
        passed: The same → bytes kept from I to W: those that W reads of saved values,
            and of values that I has computed, also without values between works. I
            computes again what other works of a stage need, so that "full" counts
            for works alone of whose values its I reads none, such as its last ones.
        made: The same → bytes of `passed` that I makes; the rest is saved from F on. I
            makes all of what works pass that compute again but are not the last.
        parameters: The parameters that it uses.
        sums: Its sums over devices if parameters are split.
        parts: The values that it keeps, where parameters say how they are split.
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
    made: Mapping[str, Amount] = field(default_factory=_nothing)
    parameters: tuple[WorkParameter, ...] = ()
    sums: tuple[WorkSum, ...] = ()
    parts: tuple[WorkPart, ...] = ()

    def renamed(self, name_of: Callable[[str], str]) -> "Work":
        """Return the work with other names of parameters.

        Args:
            name_of: Takes a name and returns the new one.
        """
        return replace(
            self,
            parameters=tuple(replace(p, name=name_of(p.name)) for p in self.parameters),
            sums=tuple(
                replace(one, dims=renamed_dims(one.dims, name_of)) for one in self.sums
            ),
            parts=tuple(
                replace(one, dims=renamed_dims(one.dims, name_of)) for one in self.parts
            ),
        )


def renamed_dims(
    dims: Iterable[ParameterDim], name_of: Callable[[str], str]
) -> tuple[ParameterDim, ...]:
    """Return dimensions of parameters that have other names."""
    return tuple(replace(dim, parameter=name_of(dim.parameter)) for dim in dims)


def added_parts(parts: Iterable[WorkPart]) -> tuple[WorkPart, ...]:
    """Add up the parts that have the same dimensions."""
    found: dict[tuple[ParameterDim, ...], WorkPart] = {}
    for part in parts:
        old = found.get(part.dims)
        found[part.dims] = part if old is None else _added(old, part)
    return tuple(found.values())


def _added(one: WorkPart, other: WorkPart) -> WorkPart:
    saved, passed = (
        {remat: own[remat] + more[remat] for remat in own}
        for own, more in ((one.saved, other.saved), (one.passed, other.passed))
    )
    return replace(one, saved=saved, passed=passed)
