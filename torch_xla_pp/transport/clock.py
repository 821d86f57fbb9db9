"""How far the clocks of the ranks are apart."""

import time

from torch_xla_pp.transport.rendezvous import Rendezvous

_NUM_ROUNDS = 8


def clock_offset_ns(rendezvous: Rendezvous) -> int:
    """Return what to add to `time.monotonic_ns` of this rank to get that of rank 0.

    Asks rank 0 for its time, several times, and believes the answer that came fastest:
    it was given half-way between question and answer, give or take half of the time
    between them. Zero where that cannot be told from zero, as on one host. All ranks
    must call; it takes some milliseconds for each of them.

    Source: D. Mills, RFC 5905 (Network Time Protocol), section 10.
    """
    # Now everybody has dropped what a call before this one left.
    rendezvous.exchange("clock", None)
    # Names of a failed generation may still lie in the store.
    prefix = f"clock/{rendezvous.generation}"
    offset_ns = 0
    for peer in range(1, rendezvous.size):
        if rendezvous.rank == 0:
            _answer(rendezvous, f"{prefix}/{peer}", peer)
        elif rendezvous.rank == peer:
            offset_ns = _ask(rendezvous, f"{prefix}/{peer}")
    # Now everybody has read everything.
    rendezvous.exchange("clock", None)
    asked = range(1, rendezvous.size) if rendezvous.rank == 0 else [rendezvous.rank]
    for peer in asked:
        for number in range(_NUM_ROUNDS):
            rendezvous.retract(f"{prefix}/{peer}/{number}")
    return offset_ns


def _answer(rendezvous: Rendezvous, name: str, peer: int) -> None:
    for number in range(_NUM_ROUNDS):
        rendezvous.read(f"{name}/{number}", peer, longest_nap_s=0.0)
        rendezvous.publish(f"{name}/{number}", time.monotonic_ns())


def _ask(rendezvous: Rendezvous, name: str) -> int:
    answers = []
    for number in range(_NUM_ROUNDS):
        asked_ns = time.monotonic_ns()
        rendezvous.publish(f"{name}/{number}", None)
        theirs_ns = rendezvous.read(f"{name}/{number}", 0, longest_nap_s=0.0)
        passed_ns = time.monotonic_ns() - asked_ns
        answers.append((passed_ns, theirs_ns - asked_ns - passed_ns // 2))
    passed_ns, offset_ns = min(answers)
    return offset_ns if abs(offset_ns) > passed_ns // 2 else 0
