"""The library that multiplies matrices on this machine's processor.

| processor | whose products |
|---|---|
| with AVX-512, not of Intel | OpenBLAS's, by its kernels for AVX-512 |
| with AVX2, not of Intel | OpenBLAS's |
| either, where the user has chosen older kernels for OpenBLAS | those of Intel's MKL |
| any other | those of Intel's MKL, which is inside PyTorch |

MKL uses AVX-512 on Intel's own processors alone: on one core of AMD's Zen 5 it
multiplies at 105 GFLOP/s, OpenBLAS at 110 to 120 by its kernels for AVX2 and at 220 to
245 by those for AVX-512, which it would not choose itself: it does not know the newest
processors. With AVX2, on one core of Zen 3, it multiplies at 80 to 90 GFLOP/s and MKL
at 52 to 88. The choice of the library follows from the processor, never from a
measurement, so that equal machines have equal results.
"""

import ctypes
import logging
from pathlib import Path
from typing import NamedTuple

import torch

from torch_xla_pp import env

_PROCESSOR = Path("/proc/cpuinfo")
_AVX512 = {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}
# OpenBLAS's names of kernels for AVX-512; the first one runs wherever there is AVX-512.
_KERNELS_OF_AVX512 = ("SkylakeX", "Cooperlake", "SapphireRapids")
_AVX2 = {"avx2", "fma"}
_KERNELS_OF_AVX2 = ("Haswell", "Zen")
_logger = logging.getLogger(__name__)


class Blas(NamedTuple):
    """A library that multiplies matrices.

    Attributes:
        multiply: Its `sgemm`, by the Fortran interface.
        set_threads: Sets how many threads calls of this thread use, and returns the
            number before; None if they never use more than this one.
    """

    multiply: ctypes.c_void_p
    set_threads: ctypes.c_void_p | None = None


def find_blas() -> Blas | None:
    """Return the library that the user chose, or the best one; None for XLA itself."""
    name = env.products() or best_products(_PROCESSOR, env.openblas_kernels())
    finders = {"openblas": _openblas, "torch": _mkl}
    try:
        return finders[name]() if name in finders else None
    except (ImportError, OSError, AttributeError) as reason:
        _logger.info("XLA multiplies matrices itself: %s: %s", name, reason)
        return None


def best_products(processor: Path, kernels: str | None) -> env.ProductsName:
    """Return whose products are the fastest on a processor.

    Args:
        processor: Its description, as Linux gives it in /proc/cpuinfo.
        kernels: The kernels that the user chose for OpenBLAS, None for no choice.
    """
    is_intel, flags = _facts_of(processor)
    if is_intel or not flags >= _AVX2:
        return "torch"
    fast = _KERNELS_OF_AVX2 + (_KERNELS_OF_AVX512 if flags >= _AVX512 else ())
    return "openblas" if kernels in (None, *fast) else "torch"


def kernels_of(processor: Path) -> str | None:
    """Return the kernels for OpenBLAS on a processor, None for those that it chooses.

    Args:
        processor: Its description, as Linux gives it in /proc/cpuinfo.
    """
    _, flags = _facts_of(processor)
    return _KERNELS_OF_AVX512[0] if flags >= _AVX512 else None


def _facts_of(processor: Path) -> tuple[bool, set[str]]:
    """Return whether a processor is of Intel, and the names of what it can do."""
    try:
        lines = processor.read_text().split("\n\n")[0].splitlines()
    except OSError:
        return False, set()
    facts = {key.strip(): text for key, _, text in (x.partition(":") for x in lines)}
    is_intel = facts.get("vendor_id", "").strip() == "GenuineIntel"
    return is_intel, set(facts.get("flags", "").split())


def _mkl() -> Blas:
    path = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"
    library = ctypes.CDLL(str(path))
    return Blas(_address(library.sgemm_), _address(library.MKL_Set_Num_Threads_Local))


def _openblas() -> Blas:
    """Load another copy: NumPy's has chosen its kernels already."""
    with env.openblas_choices(kernels_of(_PROCESSOR)):
        # The import loads it already.
        import scipy_openblas32

        folder = Path(scipy_openblas32.get_lib_dir())
        name = scipy_openblas32.get_library(fullname=True)
        library = ctypes.CDLL(str(folder / name))
    return Blas(_address(library.scipy_sgemm_))


def _address(function: object) -> ctypes.c_void_p:
    return ctypes.cast(function, ctypes.c_void_p)  # type: ignore[arg-type]
