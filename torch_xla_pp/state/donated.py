"""Values whose memory programs have taken."""

from collections import deque
from collections.abc import Iterable

from torch import Tensor

from torch_xla_pp import xla_compat


class DonatedValues:
    """Values whose memory programs have taken, until these programs have ended.

    To drop such a value waits for its program.
    """

    def __init__(self) -> None:
        # Beside how many programs had been enqueued, with the one that took them.
        self._values: deque[tuple[int, list[Tensor]]] = deque()

    def __len__(self) -> int:
        return len(self._values)

    def add(self, values: Iterable[Tensor]) -> None:
        """Keep values whose memory the last program has taken, and drop old ones."""
        number, held = xla_compat.num_enqueued(), self._values
        while held and held[0][0] + xla_compat.MAX_IN_FLIGHT <= number:
            held.popleft()
        held.append((number, [*values]))
