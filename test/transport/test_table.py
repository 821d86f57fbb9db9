"""A transport is its own class and one line of the table."""

import os
from collections.abc import Sequence
from pathlib import Path
from unittest import mock

import pytest
from integration.test_parity import check
from integration.training import Job, Report, train
from torch import Tensor

from torch_xla_pp import env, xla_compat
from torch_xla_pp.mesh import Tiling
from torch_xla_pp.testing import Worlds
from torch_xla_pp.transport import Message, ShardLayout
from torch_xla_pp.transport.table import TRANSPORTS, Carriers


class PickledTransport:
    """A toy: the devices' shards, pickled, in messages of the group's wire."""

    name = "pickled"
    in_program = None
    num_sent = 0

    def __init__(self, group: Carriers) -> None:
        self._wire = group.wire

    def expect(self, message: Message, peer: int) -> None:
        pass

    def settle(self) -> None:
        pass

    def close(self) -> None:
        pass

    def send(
        self,
        message: Message,
        peer: int,
        tensors: Sequence[Tensor],
        there: Sequence[Tiling] | None = None,
    ) -> None:
        shards = xla_compat.read_shards(tensors)
        self._wire.send(peer, ("pickled", message.title), shards, [])
        PickledTransport.num_sent += 1

    def recv(
        self,
        message: Message,
        peer: int,
        layouts: Sequence[ShardLayout],
        there: Sequence[Tiling] | None = None,
    ) -> list[Tensor]:
        ticket = self._wire.expect(peer, ("pickled", message.title))
        return [
            xla_compat.from_local_shards(shards, layout.sharding, layout.shape)
            for shards, layout in zip(
                self._wire.receive(ticket).header, layouts, strict=True
            )
        ]


def with_the_toy() -> mock._patch_dict:
    return mock.patch.dict(TRANSPORTS, {PickledTransport.name: PickledTransport})


def train_on_it(job: Job) -> tuple[Report, int]:
    PickledTransport.num_sent = 0
    env = {"TORCH_XLA_PP_TRANSPORT": job.transport}
    with with_the_toy(), mock.patch.dict(os.environ, env):
        return train(job), PickledTransport.num_sent


@pytest.mark.worlds
@pytest.mark.parametrize(
    "job",
    [
        # Each rank has two stages, and the tied weights are on both.
        Job(schedule="Interleaved1F1B", frontend="manual", is_tied=True, devices=2),
        Job(schedule="GPipe", frontend="traced", replicas=2),
    ],
    ids=["interleaved", "replicas"],
)
def test_a_transport_that_the_table_lists_trains_as_the_others(
    worlds: Worlds, job: Job
) -> None:
    job = Job(**{**vars(job), "transport": PickledTransport.name})
    ranks = job.ranks * job.replicas
    found = worlds.run(train_on_it, ranks=ranks, devices=job.devices, args=(job,))
    check([report for report, _ in found])
    assert all(num_sent > 0 for _, num_sent in found)


@pytest.mark.pure
def test_only_the_table_knows_which_transports_there_are() -> None:
    root = Path(xla_compat.__file__).parent
    free = {"table.py", "in_graph.py", "host.py", "__init__.py"}
    found = [
        str(file.relative_to(root))
        for file in root.rglob("*.py")
        if "InGraphTransport" in file.read_text() or "HostTransport" in file.read_text()
        if not (file.parent.name == "transport" and file.name in free)
    ]
    assert found == []


@pytest.mark.pure
def test_the_user_may_ask_for_what_the_table_lists(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TORCH_XLA_PP_TRANSPORT", PickledTransport.name)
    with pytest.raises(ValueError, match=r"one of \('in_graph', 'host'\), got 'pick"):
        env.transport(TRANSPORTS)
    with with_the_toy():
        assert env.transport(TRANSPORTS) == PickledTransport.name
