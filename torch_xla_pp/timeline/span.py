"""The pieces of a timeline: actions that ran, and messages that were sent.

Terms: times are seconds on one clock that all ranks share; where it starts does not
matter. A rank *waits* while its running program has not received its inputs.
"""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Span:
    """The time in which a rank ran one action.

    Args:
        rank: The rank.
        stage: Stage of the action.
        kind: Kind of the action: F, B, I or W.
        microbatch: Microbatch of the action.
        start_s: When it began, on the first of the rank's devices.
        end_s: When it ended, on the last of them.
        waiting_s: Part of that time in which it waited to receive.
        dispatch_s: Time of the host that enqueued it, None if unknown.

    Raises:
        ValueError: It ends before it begins, or waits longer than it takes.
    """

    rank: int
    stage: int
    kind: str
    microbatch: int
    start_s: float
    end_s: float
    waiting_s: float = 0.0
    dispatch_s: float | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.waiting_s <= self.end_s - self.start_s:
            raise ValueError(
                f"span {self} of rank {self.rank}: expected an end after its start, "
                f"and waiting within them, got {self.start_s} to {self.end_s} s "
                f"with {self.waiting_s} s of waiting. Correct what records it."
            )

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.microbatch}"

    @property
    def duration_s(self) -> float:
        """Return the time from start to end, with waiting."""
        return self.end_s - self.start_s

    @property
    def busy_s(self) -> float:
        """Return the time from start to end, without waiting."""
        return self.duration_s - self.waiting_s


@dataclass(frozen=True, kw_only=True, slots=True)
class Transfer:
    """A message from one stage to another, for one microbatch.

    Args:
        sender_stage: Stage that sends the values.
        sender_rank: Rank of that stage.
        receiver_stage: Stage that receives them.
        receiver_rank: Rank of that stage.
        kind: "F" for values, "B" for their gradients, "S" for sums of gradients of
            shared parameters.
        microbatch: The microbatch.
        sent_s: When the sender had sent them.
        received_s: When the receiver had them.
        num_bytes: Their size, over all devices.

    Raises:
        ValueError: It has a negative size.
    """

    sender_stage: int
    sender_rank: int
    receiver_stage: int
    receiver_rank: int
    kind: str
    microbatch: int
    sent_s: float
    received_s: float
    num_bytes: int = 0

    def __post_init__(self) -> None:
        if self.num_bytes < 0:
            raise ValueError(
                f"transfer {self}: expected a size of at least 0 bytes, got "
                f"{self.num_bytes}. Correct what records it."
            )

    def __str__(self) -> str:
        return (
            f"{self.sender_stage}->{self.receiver_stage} {self.kind}{self.microbatch}"
        )
