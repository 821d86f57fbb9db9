"""Which library multiplies follows from the processor."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from torch_xla_pp.cpu.blas import best_products, kernels_of

pytestmark = pytest.mark.pure

ALL = "fpu sse2 avx avx2 fma avx512f avx512bw avx512cd avx512dq avx512vl"
AVX2 = "fpu sse2 avx avx2 fma"
PROCESSORS = {
    ("AuthenticAMD", ALL): "openblas",
    ("HygonGenuine", ALL): "openblas",
    ("GenuineIntel", ALL): "torch",
    ("AuthenticAMD", ALL.replace("avx512vl", "")): "openblas",
    ("AuthenticAMD", AVX2): "openblas",
    ("AuthenticAMD", "fpu sse2 avx"): "torch",
    ("GenuineIntel", AVX2): "torch",
}

# Multiplies with the library that is loaded, and prints its kernels.
SCRIPT = """
import ctypes, json
import numpy
from torch_xla_pp.cpu import blas
found = blas.find_blas()
(path,) = {line.split()[-1] for line in open("/proc/self/maps")
           if "scipy_openblas32" in line}
library = ctypes.CDLL(path)
library.scipy_openblas_get_corename.restype = ctypes.c_char_p
library.scipy_openblas_get_num_threads.restype = ctypes.c_int
size = 64
left, right, result = (numpy.full((size, size), x, "f") for x in (0.25, 0.375, 0))
n = ctypes.byref(ctypes.c_int(size))
one, zero = ctypes.byref(ctypes.c_float(1)), ctypes.byref(ctypes.c_float(0))
a, b, c = (x.ctypes.data_as(ctypes.c_void_p) for x in (left, right, result))
sgemm = ctypes.CFUNCTYPE(None, *[ctypes.c_void_p] * 13)(found.multiply.value)
sgemm(b"N", b"N", n, n, n, one, a, n, b, n, zero, c, n)
print(json.dumps([
    library.scipy_openblas_get_corename().decode(),
    library.scipy_openblas_get_num_threads(),
    float(result[0, 0]),
]))
"""


@pytest.mark.parametrize(("processor", "name"), PROCESSORS.items())
def test_the_library_is_chosen_by_the_processor(
    tmp_path: Path, processor: tuple[str, str], name: str
) -> None:
    vendor, flags = processor
    path = tmp_path / "cpuinfo"
    core = f"processor\t: 0\nvendor_id\t: {vendor}\nflags\t\t: {flags}\n"
    path.write_text(f"{core}\n{core}")
    assert best_products(path, None) == name


def test_kernels_that_the_user_has_chosen_are_used_if_they_are_fast(
    tmp_path: Path,
) -> None:
    path = tmp_path / "cpuinfo"
    path.write_text(f"vendor_id : AuthenticAMD\nflags : {ALL}\n")
    assert best_products(path, "Cooperlake") == "openblas"
    assert best_products(path, "Haswell") == "openblas"
    assert best_products(path, "Sandybridge") == "torch"
    path.write_text(f"vendor_id : AuthenticAMD\nflags : {AVX2}\n")
    assert best_products(path, "Haswell") == "openblas"
    assert best_products(path, "Cooperlake") == "torch"
    assert best_products(path, "Sandybridge") == "torch"
    path.write_text(f"vendor_id : GenuineIntel\nflags : {ALL}\n")
    assert best_products(path, "Haswell") == "torch"


def test_openblas_is_given_no_kernels_that_the_processor_cannot_run(
    tmp_path: Path,
) -> None:
    path = tmp_path / "cpuinfo"
    for vendor in ("AuthenticAMD", "GenuineIntel"):
        path.write_text(f"vendor_id : {vendor}\nflags : {ALL}\n")
        assert kernels_of(path) == "SkylakeX"
        path.write_text(f"vendor_id : {vendor}\nflags : {AVX2}\n")
        assert kernels_of(path) is None
    assert kernels_of(tmp_path / "nothing") is None


def test_a_processor_that_is_not_described_multiplies_as_torch_does(
    tmp_path: Path,
) -> None:
    assert best_products(tmp_path / "nothing", None) == "torch"
    (tmp_path / "arm").write_text("processor\t: 0\nBogoMIPS\t: 243.75\n")
    assert best_products(tmp_path / "arm", None) == "torch"


@pytest.mark.parametrize("kernels", ["Haswell", None])
def test_openblas_runs_on_one_thread_although_numpy_has_loaded_another(
    kernels: str | None,
) -> None:
    kept = {k: v for k, v in os.environ.items() if not k.startswith("OPENBLAS_")}
    chosen = {} if kernels is None else {"OPENBLAS_CORETYPE": kernels}
    run = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        env={
            **kept,
            **chosen,
            "PJRT_DEVICE": "CPU",
            "TORCH_XLA_PP_PRODUCTS": "openblas",
        },
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    found, threads, product = json.loads(run.stdout.splitlines()[-1])
    assert kernels in (None, found)
    assert threads == 1
    # Kernels that the processor cannot run would have ended the process.
    assert product == 6.0
