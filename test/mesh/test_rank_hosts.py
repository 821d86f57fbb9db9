"""Fast axes of a job's mesh are to stay within a host."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torch_xla_pp.mesh import MeshLayout, host_faults

pytestmark = pytest.mark.pure


def layout_of(*axes: tuple[str, int]) -> MeshLayout:
    names, shape = zip(*axes, strict=True)
    return MeshLayout(shape=shape, names=names, num_process_axes=len(axes))


def test_replicas_may_be_on_hosts_of_their_own() -> None:
    layout = layout_of(("dp", 2), ("pp", 2))
    assert host_faults(layout, ["dp"], ["a", "a", "b", "b"]) == []
    assert host_faults(layout, ["dp"], ["a"] * 4) == []


def test_a_pipeline_over_two_hosts_is_told() -> None:
    swapped = layout_of(("pp", 2), ("dp", 2))
    assert host_faults(swapped, ["dp"], ["a", "a", "b", "b"]) == [
        "fast axes pp: expected ranks 0 and 2 on one host, got a and b",
        "fast axes pp: expected ranks 1 and 3 on one host, got a and b",
    ]
    assert host_faults(swapped, ["dp", "pp"], ["a", "a", "b", "b"]) == []


def test_only_axes_over_ranks_may_be_slow() -> None:
    layout = MeshLayout(shape=(2, 2, 4), names=("dp", "pp", "model"))
    assert host_faults(layout, ["model"], ["a"] * 4) == [
        "slow: expected process axes, dp, pp, got model"
    ]


AXES = st.lists(st.integers(1, 3), min_size=1, max_size=3)


@given(AXES, st.data())
def test_ranks_of_one_place_on_the_slow_axes_share_a_host(
    sizes: list[int], data: st.DataObject
) -> None:
    names = ["pp", "b", "c"][: len(sizes)]
    slow = data.draw(st.lists(st.sampled_from(names), unique=True))
    places = [*itertools.product(*map(range, sizes))]
    hosts = data.draw(
        st.lists(st.sampled_from("xy"), min_size=len(places), max_size=len(places))
    )
    layout = layout_of(*zip(names, sizes, strict=True))
    is_split = any(
        hosts[a] != hosts[b]
        for a, b in itertools.combinations(range(len(places)), 2)
        if all(
            places[a][i] == places[b][i] for i, name in enumerate(names) if name in slow
        )
    )
    assert bool(host_faults(layout, slow, hosts)) is is_split
