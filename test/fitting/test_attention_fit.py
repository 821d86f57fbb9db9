"""Stages with `attention` compile for TPUs, with torch_xla's kernel if JAX is there."""

import importlib.util
import logging
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from fitting.small_model import TOPOLOGY, Recorder
from integration.attending import CONTEXT, RULES, attending

import torch_xla_pp as xpp
from torch_xla_pp.accelerators import AcceleratorCompiler, CompilerLibrary, Slice
from torch_xla_pp.compile import attention_kernel
from torch_xla_pp.errors import PipelineError
from torch_xla_pp.fitting import Fit
from torch_xla_pp.graph import plain_attention, plain_attention_backward
from torch_xla_pp.schedule import one_f_one_b

pytestmark = pytest.mark.xla

HAS_JAX = importlib.util.find_spec("jax") is not None
needs_jax = pytest.mark.skipif(not HAS_JAX, reason="JAX is not installed")
LENGTH, WIDTH = 256, 256
# The target of a call, behind its length; names of operations have it, too.
KERNEL = b"\x0ftpu_custom_call"


def has_library() -> bool:
    try:
        CompilerLibrary.find()
    except PipelineError:
        return False
    return True


def fit_attending(
    compiler: Any, dtype: torch.dtype = torch.bfloat16, rules: xpp.AxisRules = RULES
) -> Fit:
    with torch.device("meta"):
        model = attending(WIDTH).to(dtype)
        x = torch.zeros(4, LENGTH, WIDTH, dtype=dtype)
    rules |= xpp.AxisRules(axes={"batch": None})
    return xpp.fit(
        model,
        (x,),
        topology=TOPOLOGY,
        schedule=one_f_one_b(2, 4),
        mesh={"model": 2},
        sharding=rules,
        compiler=compiler,
    )


def test_without_jax_programs_are_plain_and_it_is_said(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    attention_kernel.has_kernel_compiler.cache_clear()
    compiler = Recorder()
    with caplog.at_level(logging.WARNING):
        fit_attending(compiler)
    attention_kernel.has_kernel_compiler.cache_clear()
    assert "Install torch_xla[pallas]" in caplog.text
    assert compiler.asked
    assert not [hlo for hlo, _, _ in compiler.asked if KERNEL in hlo]


@needs_jax
@pytest.mark.skipif(not has_library(), reason="libtpu is not installed")
def test_both_passes_are_compiled_with_the_kernel(tmp_path: Path) -> None:
    calls: list[int] = []

    class Counting(AcceleratorCompiler):
        def compile(self, hlo: bytes, **options: Any) -> Any:
            calls.append(len(re.findall(KERNEL, hlo)))
            return super().compile(hlo, **options)

    found = fit_attending(Counting(Slice.parse(TOPOLOGY), cache=tmp_path))
    assert found.fits, str(found)
    # Of each stage one kernel in the forward; two give gradients, of keys and queries.
    assert sorted(calls) == [1, 1, 2, 2]


@pytest.mark.skipif(not has_library(), reason="libtpu is not installed")
def test_no_scores_move_where_the_sequence_is_split(tmp_path: Path) -> None:
    compiler = AcceleratorCompiler(Slice.parse(TOPOLOGY), cache=tmp_path)
    found = fit_attending(compiler, rules=CONTEXT)
    assert found.fits, str(found)
    programs = [program for stage in found.stages for program in stage.programs]
    moved = [one.kind for x in programs for one in x.compiled.collectives]
    assert "all-gather" in moved
    assert "all-to-all" not in moved


@needs_jax
@pytest.mark.parametrize("is_causal", [False, True])
def test_the_kernels_numbers_are_those_of_the_plain_form(is_causal: bool) -> None:
    """JAX's interpreter runs the kernels on the host."""
    import jax.numpy as jnp
    from jax.experimental.pallas import tpu as pltpu
    from jax.experimental.pallas.ops.tpu import flash_attention as kernels

    generator = torch.Generator().manual_seed(0)
    query, key, value, grad = torch.randn(4, 1, 2, 256, 64, generator=generator)
    scale = 0.3
    operands = query, key, value, None
    result, *kept = plain_attention(*operands, is_causal, scale)
    turned = grad.transpose(1, 2)
    grads = plain_attention_backward(turned, *operands, result, *kept, is_causal, scale)
    plain = result.transpose(1, 2), *kept
    q, k, v, g = (jnp.asarray(x.numpy()) for x in (query, key, value, grad))
    rows = [jnp.asarray(x.numpy()) for x in plain]
    along = (rows[0] * g).sum(-1)
    with pltpu.force_tpu_interpret_mode():
        result, sums, maxima = kernels._flash_attention_impl(
            q, k, v, None, None, True, is_causal, scale, 1, 128, 128, 128, False
        )
        of_query, _ = kernels._flash_attention_bwd_dq(
            *(q, k, v, None, None, *rows[1:], g, along),
            block_q_major=128,
            block_k_major=128,
            block_k=128,
            sm_scale=scale,
            causal=is_causal,
            mask_value=kernels.DEFAULT_MASK_VALUE,
            debug=False,
        )
    found = {"result": result, "sums": sums, "maxima": maxima, "query": of_query}
    wanted = dict(zip(found, (*plain, grads[0]), strict=True))
    for name, own in found.items():
        given = torch.tensor(own.tolist())
        torch.testing.assert_close(given, wanted[name], rtol=2e-3, atol=2e-3, msg=name)
