import pytest

from torch_xla_pp.mesh import MeshLayout, launch_hint

pytestmark = pytest.mark.pure

LAYOUT = MeshLayout(shape=(2, 2, 3), names=("pp", "data", "model"))


def test_the_first_axis_counts_ranks_and_the_others_devices() -> None:
    assert LAYOUT.num_processes == 2
    assert LAYOUT.num_local_devices == 6
    assert str(LAYOUT) == "pp=2 x data=2 x model=3"


def test_a_fitting_job_has_no_faults() -> None:
    assert LAYOUT.faults(2, [6, 6]) == []


def test_faults_name_both_sides() -> None:
    faults = LAYOUT.faults(4, [6, 6, 1, 6])
    assert faults[0] == "axis 'pp' counts processes: expected 2 ranks, got 4"
    assert "expected 6 per rank, got: rank 2 has 1" in faults[1]


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
    ],
)
def test_bad_axes_are_refused(
    shape: tuple[int, ...], names: tuple[str, ...], text: str
) -> None:
    with pytest.raises(ValueError, match=text):
        MeshLayout(shape=shape, names=names)
