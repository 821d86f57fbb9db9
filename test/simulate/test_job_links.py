"""Sums over fast and slow links take what sending each part by itself takes."""

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torch_xla_pp.schedule import one_f_one_b
from torch_xla_pp.simulate import (
    AxisLink,
    Costs,
    JobLinks,
    Link,
    Network,
    ring_all_reduce_s,
    simulate,
)

pytestmark = pytest.mark.pure

SLOW, FAST = Link(latency_s=3.0, bytes_per_s=0.5), Link(latency_s=0.25, bytes_per_s=8.0)


def job(slow: int, fast: int) -> JobLinks:
    return JobLinks.of(("dp", slow, SLOW), ("pp", fast, FAST))


class Ranks:
    """Ranks that hold a vector each, send parts of it, and have a clock."""

    def __init__(self, values: list[list[float]], network: Network) -> None:
        self.values = values
        self.network = network
        self.clocks = [0.0] * len(values)
        self.slow_bytes = 0

    def round(self, sent: list[tuple[int, int, range, bool]]) -> None:
        """Send parts at once: from a rank, to one, which part, whether to add it."""
        arrived = []
        for sender, receiver, part, is_sum in sent:
            link = self.network.link(sender, receiver)
            self.slow_bytes += len(part) * (link is SLOW)
            # Within a round nobody waits for what another one gets in it.
            time = self.clocks[sender] + link.latency_s + len(part) / link.bytes_per_s
            taken = [self.values[sender][i] for i in part]
            arrived.append((receiver, part, is_sum, taken, time))
        for receiver, part, is_sum, taken, time in arrived:
            self.clocks[receiver] = max(self.clocks[receiver], time)
            for i, value in zip(part, taken, strict=True):
                own = self.values[receiver][i] if is_sum else 0.0
                self.values[receiver][i] = own + value

    def around(self, rings: list[list[int]], parts: list[range], *, adds: bool) -> None:
        """Let parts go around rings at once, and stay with the rank of their number."""
        count = len(rings[0])
        for step in range(count - 1):
            sent = []
            for ring, own in zip(rings, parts, strict=True):
                pieces = cut(own, count)
                for place, sender in enumerate(ring):
                    # A sum of part p ends at rank p, a gather begins there.
                    first = place - 1 - step if adds else place - step
                    piece = pieces[first % count]
                    sent.append((sender, ring[(place + 1) % count], piece, adds))
            self.round(sent)


def cut(own: range, count: int) -> list[range]:
    size = len(own) // count
    return [own[i * size : (i + 1) * size] for i in range(count)]


def summed(slow: int, fast: int, unit: int) -> Ranks:
    """Sum vectors over all ranks, first along the fast axis."""
    size = slow * fast * unit
    values = [
        [float(rank * size + i) for i in range(size)] for rank in range(slow * fast)
    ]
    ranks = Ranks(values, job(slow, fast).network())
    whole = range(size)
    inner = [[k * fast + i for i in range(fast)] for k in range(slow)]
    outer = [[k * fast + i for k in range(slow)] for i in range(fast)]
    ranks.around(inner, [whole] * slow, adds=True)
    own = cut(whole, fast)
    ranks.around(outer, own, adds=True)
    ranks.around(outer, own, adds=False)
    ranks.around(inner, [whole] * slow, adds=False)
    return ranks


@pytest.mark.parametrize(
    ("slow", "fast"), [(2, 1), (1, 4), (2, 2), (2, 4), (3, 2), (4, 3)]
)
def test_a_sum_over_both_axes_takes_what_its_messages_take(
    slow: int, fast: int
) -> None:
    ranks = summed(slow, fast, unit=2)
    size = slow * fast * 2
    count = slow * fast
    total = [float(sum(r * size + i for r in range(count))) for i in range(size)]
    assert ranks.values == [total] * count
    predicted = job(slow, fast).all_reduce_s(size, ("pp", "dp"))
    assert ranks.clocks == pytest.approx([predicted] * count)
    # Of each vector an n-th goes over the slow links, twice but for a rank's own part.
    assert ranks.slow_bytes == count * 2 * (slow - 1) * size // fast // slow


def test_a_sum_with_the_slow_axis_inside_sends_more_over_slow_links() -> None:
    fast_inside = job(2, 8)
    swapped = JobLinks.of(("pp", 8, FAST), ("dp", 2, SLOW))
    axes = ("dp", "pp")
    assert fast_inside.all_reduce_s(1024, axes) < swapped.all_reduce_s(1024, axes)


@given(
    st.lists(st.integers(1, 5), min_size=1, max_size=3),
    st.floats(1, 1e6),
)
def test_a_sum_in_stages_is_no_slower_than_one_ring_over_the_slowest_link(
    sizes: list[int], num_bytes: float
) -> None:
    link = Link(bytes_per_s=7.0)
    job = JobLinks.of(*((str(i), size, link) for i, size in enumerate(sizes)))
    predicted = job.all_reduce_s(num_bytes, [axis.name for axis in job.axes])
    ring = ring_all_reduce_s(num_bytes, math.prod(sizes), link)
    # Without latency and with equal links it is the same bytes.
    assert predicted == pytest.approx(ring, abs=1e-9)


def test_ranks_are_numbered_row_by_row_and_linked_by_the_outermost_difference() -> None:
    network = job(2, 3).network()
    for a, b in itertools.permutations(range(6), 2):
        assert network.link(a, b) is (FAST if a // 3 == b // 3 else SLOW)


def test_a_pipeline_along_the_fast_axis_steps_faster() -> None:
    # Two replicas of two ranks: ranks 0, 1 are a pipeline, or ranks 0, 2.
    costs = Costs.uniform(2, num_bytes=4)
    whole = job(2, 2).network()
    seconds = {}
    for name, ranks in (("fast", (0, 1)), ("slow", (0, 2))):
        own = Network(
            links={
                (i, j): whole.link(ranks[i], ranks[j])
                for i, j in itertools.permutations(range(2), 2)
            }
        )
        seconds[name] = simulate(one_f_one_b(2, 1), costs, own).step_s
    # F, a message, F and B, a message, B.
    compute_s = 1 + 1 + 2 + 2
    assert seconds["fast"] == pytest.approx(compute_s + 2 * (0.25 + 4 / 8))
    assert seconds["slow"] == pytest.approx(compute_s + 2 * (3 + 4 / 0.5))


def test_axes_that_are_not_there_are_refused() -> None:
    with pytest.raises(ValueError, match="expected one of the axes dp, pp, got 'ep'"):
        job(2, 2).along("ep")
    with pytest.raises(ValueError, match="expected different axes, got pp, pp"):
        JobLinks(axes=job(2, 2).axes[1:] * 2)
    with pytest.raises(ValueError, match="axis pp: expected at least 1 rank, got 0"):
        AxisLink(name="pp", size=0, link=FAST)
