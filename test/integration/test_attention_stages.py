"""Stages compute `attention` as the unsplit model does, plainly or by a kernel."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from unittest.mock import patch

import pytest
import torch
from integration.attending import CONTEXT, RULES, attending
from joining import join
from torch.distributed.pipelining import ScheduleGPipe
from torch.nn import functional as F

import torch_xla_pp as xpp
from torch_xla_pp.compile import attention_kernel
from torch_xla_pp.graph import plain_attention, plain_attention_backward
from torch_xla_pp.testing import Worlds

pytestmark = pytest.mark.worlds

LENGTH, WIDTH = 6, 16


@contextmanager
def standing_in(calls: list[tuple[int, ...]]) -> Iterator[None]:
    """Let devices have a kernel, which computes its own part plainly."""

    def kernel(
        shards: list[torch.Tensor], is_causal: bool, scale: float, is_forward: bool
    ) -> tuple[torch.Tensor, ...]:
        calls.append(tuple(shards[0].shape))
        options = is_causal, scale
        if is_forward:
            result, *others = plain_attention(*shards, None, *options)  # type: ignore[call-arg, arg-type]
            return result.transpose(1, 2), *others
        shards[0], shards[4] = (shards[i].transpose(1, 2) for i in (0, 4))
        return plain_attention_backward(*shards[:4], None, *shards[4:], *options)  # type: ignore[call-arg, arg-type]

    home = "torch_xla_pp.compile"
    with ExitStack() as stack:
        for name, value in (
            (f"{home}.rank_rules.calls_kernel", lambda: True),
            (f"{home}.attention_kernel.takes_shapes", lambda query, key: True),
            ("torch_xla_pp.xla_compat.flash_attention", kernel),
        ):
            stack.enter_context(patch(name, value))
        yield


def verified(
    has_kernel: bool, is_split: bool = False
) -> tuple[bool, str, list[tuple[int, ...]]]:
    join()
    names = ("pp", "data", "model")
    mesh = xpp.init_device_mesh("xla", (2, 2, 2), mesh_dim_names=names)
    calls: list[tuple[int, ...]] = []
    with ExitStack() as stack:
        if has_kernel:
            stack.enter_context(standing_in(calls))
        # No function of the package takes float64.
        model = attending(WIDTH).to(torch.float64 if is_split else torch.float32)
        generator = torch.Generator().manual_seed(1)
        x, y = torch.randn(2, 8, LENGTH, WIDTH, generator=generator).to(
            next(model.parameters()).dtype
        )
        pipe = xpp.pipeline(model, (x[:4],))
        rank = mesh.get_local_rank("pp")
        stage = pipe.build_stage(
            rank,
            xpp.device(),
            mesh.get_group("pp"),
            mesh=mesh["data", "model"],
            sharding=CONTEXT if is_split else RULES,
        )
        schedule = ScheduleGPipe(stage, 2, loss_fn=F.mse_loss)
        report = xpp.verify(model, schedule, x, y)
    return report.is_equal, str(report), calls


@pytest.mark.parametrize("has_kernel", [False, True])
def test_two_ranks_compute_what_the_unsplit_model_does(
    worlds: Worlds, has_kernel: bool
) -> None:
    found = worlds.run(verified, ranks=2, devices=4, args=(has_kernel,))
    for is_equal, report, calls in found:
        assert is_equal, report
        # A device has half of the rows of a microbatch, and half of the heads.
        assert set(calls) == ({(2, 2, LENGTH, WIDTH // 4)} if has_kernel else set())
        assert len(calls) >= 2 * has_kernel


def test_scores_stay_where_their_queries_are(worlds: Worlds) -> None:
    for is_equal, report, _ in worlds.run(
        verified, ranks=2, devices=4, args=(False, True)
    ):
        assert is_equal, report


@pytest.mark.pure
@pytest.mark.parametrize(
    ("query", "key", "is_taken"),
    [
        ((8, 4, 512, 128), (8, 4, 512, 128), True),
        ((8, 4, 128, 64), (8, 4, 2048, 64), True),
        ((8, 4, 1024, 256), (8, 4, 256, 256), True),
        ((8, 4, 384, 64), (8, 4, 128, 64), True),
        ((8, 4, 512, 128), (8, 4, 384, 128), False),
        ((8, 4, 640, 128), (8, 4, 512, 128), False),
        ((8, 4, 1536, 128), (8, 4, 512, 128), False),
        ((8, 4, 512, 128), (8, 4, 100, 128), False),
        ((8, 4, 512, 192), (8, 4, 512, 192), False),
    ],
)
def test_the_kernel_takes_whole_blocks(
    query: tuple[int, ...], key: tuple[int, ...], is_taken: bool
) -> None:
    assert attention_kernel.takes_shapes(query, key) is is_taken
