import pytest

from torch_xla_pp.hlo import Collective, collectives_of
from torch_xla_pp.mesh import LocalMesh

pytestmark = pytest.mark.pure

MESH = LocalMesh(names=("data", "model"), shape=(2, 2))

HLO = """
  %g = f32[2,8]{1,0} all-gather(%x), channel_id=1, replica_groups={{0,2},{1,3}}, dimensions={0}
  %h = bf16[4]{0} all-gather(%y), channel_id=2, replica_groups=[2,2]<=[2,2]T(1,0), dimensions={0}
  %r = (f32[8]{0}, pred[3]{0}) all-reduce(%a, %b), replica_groups=[2,2]<=[4], to_apply=%add
  %s = f32[] all-reduce-start(%c), replica_groups={{0,1,2,3}}, to_apply=%add
  %t = f32[] all-reduce-done(%s)
  %p = s64[2]{0} collective-permute(%d), source_target_pairs={{0,1},{1,0},{2,3},{3,2}}
  %q = f32[2]{0} collective-permute(%d), source_target_pairs={{0,1},{1,2},{2,0},{3,3}}
  %f = f32[2,8]{1,0} fusion(%all-gather, %all-reduce.3), kind=kLoop
"""  # noqa: E501


def test_collectives_are_counted_by_kind_and_mesh_axes() -> None:
    def line(kind: str, axes: tuple[str, ...] | None, *sizes: int) -> Collective:
        return Collective(kind=kind, axes=axes, count=sizes[0], num_bytes=sizes[1])

    assert set(collectives_of(HLO, MESH)) == {
        line("all-gather", ("data",), 2, 64 + 8),
        line("all-reduce", ("model",), 1, 32 + 3),
        line("all-reduce", ("data", "model"), 1, 4),
        line("collective-permute", ("model",), 1, 16),
        line("collective-permute", None, 1, 8),
    }


def test_counts_can_be_read() -> None:
    (found,) = collectives_of(HLO.splitlines()[1], MESH)
    assert str(found) == "1 all-gather over data: 64 bytes"
