"""The parts of a work graph: works, their parameters, and values between them."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch_xla_pp.work.amount import Amount, Cost


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
