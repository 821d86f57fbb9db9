"""The offsets between the clocks of the ranks."""

import time

from torch_xla_pp.transport import XlaPpProcessGroup

_NUM_ROUNDS = 8
_KEY = ("clock",)


def clock_offset_ns(group: XlaPpProcessGroup) -> int:
    """Return what to add to `time.monotonic_ns` of this rank to get that of rank 0.

    Asks rank 0 for its time, several times, and uses the fastest answer: rank 0 read
    its clock half-way between question and answer, up to half of the time between them.
    The offset is zero if it cannot be distinguished from zero, as on one host. All
    ranks must call; it takes some milliseconds for each of them.

    Source: D. Mills, RFC 5905 (Network Time Protocol), section 10.
    """
    offset_ns = 0
    for peer in range(1, group.size()):
        if group.rank() == 0:
            _answer(group, peer)
        elif group.rank() == peer:
            offset_ns = _ask(group)
    return offset_ns


def _answer(group: XlaPpProcessGroup, peer: int) -> None:
    for _ in range(_NUM_ROUNDS):
        group.wire.receive(group.wire.expect(peer, _KEY))
        group.wire.send(peer, _KEY, time.monotonic_ns(), ())


def _ask(group: XlaPpProcessGroup) -> int:
    answers = []
    for _ in range(_NUM_ROUNDS):
        asked_ns = time.monotonic_ns()
        group.wire.send(0, _KEY, None, ())
        theirs_ns = group.wire.receive(group.wire.expect(0, _KEY)).header
        passed_ns = time.monotonic_ns() - asked_ns
        answers.append((passed_ns, theirs_ns - asked_ns - passed_ns // 2))
    passed_ns, offset_ns = min(answers)
    return offset_ns if abs(offset_ns) > passed_ns // 2 else 0
