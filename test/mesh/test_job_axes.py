import pytest

from torch_xla_pp.mesh import MeshLayout, launch_hint

pytestmark = pytest.mark.pure

LAYOUT = MeshLayout(shape=(2, 2, 3), names=("pp", "data", "model"))


def test_the_first_axis_counts_ranks_and_the_others_devices() -> None:
    assert LAYOUT.num_processes == 2
    assert LAYOUT.num_local_devices == 6
    assert str(LAYOUT) == "pp=2 x data=2 x model=3"


@pytest.mark.parametrize(
    ("names", "shape", "ranks", "processes"),
    [
        (("pp", "data", "model"), (2, 2, 3), 2, ("pp",)),
        (("pp", "data"), (2, 1), 2, ("pp",)),
        (("dp", "pp", "model"), (2, 2, 2), 4, ("dp", "pp")),
        (("pp", "dp", "model"), (2, 2, 2), 4, ("pp", "dp")),
        # Of size one are process axes in front of pp, and local ones behind it.
        (("dp", "pp", "model"), (1, 2, 2), 2, ("dp", "pp")),
        (("dp", "pp", "model"), (2, 1, 2), 2, ("dp", "pp")),
        (("pp", "dp", "model"), (2, 1, 2), 2, ("pp",)),
        (("pp", "dp"), (1, 2), 2, ("pp", "dp")),
    ],
)
def test_process_axes_are_the_fewest_that_make_the_number_of_ranks(
    names: tuple[str, ...],
    shape: tuple[int, ...],
    ranks: int,
    processes: tuple[str, ...],
) -> None:
    layout = MeshLayout(shape=shape, names=names).of_ranks(ranks)
    assert layout.process_names == processes
    assert layout.process_names + layout.local_names == names
    assert layout.process_shape + layout.local_shape == shape
    assert layout.faults(ranks, [layout.num_local_devices] * ranks) == []


def test_a_fitting_job_has_no_faults() -> None:
    assert LAYOUT.faults(2, [6, 6]) == []


def test_faults_name_both_sides() -> None:
    faults = LAYOUT.of_ranks(3).faults(3, [6, 1, 6])
    assert faults[0].endswith(
        "count processes: expected 2 (pp=2) or 4 (pp=2 x data=2) or 12 "
        "(pp=2 x data=2 x model=3) ranks, got 3"
    )
    assert "expected 6 per rank, got: rank 1 has 1" in faults[1]


def test_the_launch_hint_is_a_command() -> None:
    expected = "CPU_NUM_DEVICES=6 torchrun --nproc-per-node 2 script.py"
    assert launch_hint(LAYOUT) == expected


@pytest.mark.parametrize(
    ("shape", "names", "text"),
    [
        ((2, 2), (), "expected one name for each of the 2 axes"),
        ((2, 2), ("pp", "pp"), "expected distinct axis names"),
        ((2, 0), ("pp", "data"), "expected positive axis sizes"),
        ((), (), "expected one name for each"),
        ((2, 2), ("dp", "data"), "expected an axis called 'pp', the ranks of one"),
    ],
)
def test_bad_axes_are_refused(
    shape: tuple[int, ...], names: tuple[str, ...], text: str
) -> None:
    with pytest.raises(ValueError, match=text):
        MeshLayout(shape=shape, names=names)
