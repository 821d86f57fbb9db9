"""Build the package and `csrc/`; all metadata is in pyproject.toml."""

import importlib.util
from pathlib import Path

from setuptools import Extension, setup


def folder_of(package: str) -> Path:
    """Find an installed package without importing it."""
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None:
        raise SystemExit(f"setup.py: expected {package} to be installed for the build")
    return Path(spec.origin).parent


ucx = folder_of("libucx")
native = Extension(
    "torch_xla_pp._native",
    sources=sorted(str(path) for path in Path("csrc").glob("*.cc")),
    depends=sorted(str(path) for path in Path("csrc").glob("*.h")),
    # Headers of XLA's FFI come with jaxlib, which nothing needs at run time.
    include_dirs=[str(folder_of("jaxlib") / "include"), str(ucx / "include")],
    library_dirs=[str(ucx / "lib")],
    libraries=["ucp", "ucs"],
    # Nobody looks at the processor's flags of floating-point errors: loops that compare
    # can use vectors. Python's own -fwrapv would make sums of rows three times as slow.
    extra_compile_args=[
        *("-std=c++17", "-O3", "-fno-trapping-math", "-fno-wrapv"),
        *("-g0", "-fvisibility=hidden", "-Wall"),
    ],
    language="c++",
    # Without a compiler the package sends through the host and says so.
    optional=True,
)

setup(ext_modules=[native])
