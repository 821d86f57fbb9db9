import pytest

from torch_xla_pp.plan import ReplicaClaim, replica_faults

pytestmark = pytest.mark.pure


def claim(
    *stages: int, num_stages: int = 2, transport: str = "host", **parameters: str
) -> ReplicaClaim:
    return ReplicaClaim(
        num_stages=num_stages,
        stages=dict.fromkeys(stages, parameters),
        transport=transport,
    )


def test_equal_replicas_have_no_faults() -> None:
    assert replica_faults([claim(0, 1, w="x"), claim(1, 0, w="x")]) == []


def test_other_stages_are_named() -> None:
    (fault,) = replica_faults([claim(0), claim(1, num_stages=3)])
    assert fault.startswith("expected the same stages in every replica, got ")
    assert "got stages [0] of 2, stages [1] of 3. Give every stage the group" in fault


def test_parameters_that_differ_are_named() -> None:
    faults = replica_faults([claim(1, v="a", w="x"), claim(1, v="a", w="y", z="b")])
    texts = ["'w': expected the same in every replica, got x in replica 0, y in "]
    texts += ["'z': expected the same in every replica, got none in replica 0, b in"]
    assert len(faults) == 3
    for text, fault in zip(texts, faults, strict=False):
        assert fault.startswith(f"stage 1: parameter {text}")
    assert faults[2] == "Seed all replicas alike, or load the same values."


def test_a_few_of_many_parameters_are_named() -> None:
    names = [f"w{i}" for i in range(9)]
    claims = [claim(0, **dict.fromkeys(names, text)) for text in "xy"]
    faults = replica_faults(claims)
    assert len(faults) == 6
    assert faults[-1].startswith("4 more parameters differ. Seed all replicas alike")


def test_other_transports_are_named() -> None:
    (fault,) = replica_faults([claim(0), claim(0, transport="in_graph")])
    assert fault.startswith("transport: expected the same on every rank, got ['host',")
