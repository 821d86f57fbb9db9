"""Hypothesis strategies of the whole suite."""

from hypothesis import strategies as st

from torch_xla_pp.mesh import LocalMesh

AXES = ("data", "model", "expert")


@st.composite
def local_meshes(draw: st.DrawFn) -> LocalMesh:
    """Meshes of one to three axes."""
    count = draw(st.integers(1, 3))
    sizes = draw(st.tuples(*[st.integers(1, 4)] * count))
    return LocalMesh(names=AXES[:count], shape=sizes)


@st.composite
def partitioned_shapes(
    draw: st.DrawFn, mesh: LocalMesh
) -> tuple[tuple[int, ...], tuple[str | None, ...]]:
    """A shape and a partition of it over `mesh`, each axis used at most once."""
    shape = draw(st.lists(st.integers(0, 9), max_size=4))
    names = draw(st.permutations([*mesh.names, *[None] * len(shape)]))
    return tuple(shape), tuple(names[: len(shape)])
