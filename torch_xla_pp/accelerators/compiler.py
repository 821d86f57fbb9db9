"""Compile programs for devices that are not here, each in a process of its own.

A faulty program may abort the process that compiles it; that counts as an answer, too.
Answers are kept between runs: compiling takes seconds to minutes.
"""

import hashlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from torch_xla_pp import env
from torch_xla_pp.accelerators.compiled_program import CompiledProgram
from torch_xla_pp.accelerators.hlo_module import with_donors, with_shardings
from torch_xla_pp.accelerators.host_calls import HostCalls
from torch_xla_pp.accelerators.library import CompilerLibrary
from torch_xla_pp.accelerators.topologies import Slice

_CHILD = "torch_xla_pp.accelerators.child_process"
_FORMAT = "2"
_DEFAULT_TIMEOUT_S = 3600.0
_MOST_LINES = 12


class AcceleratorCompiler:
    """A compiler for the devices of one rank.

    Args:
        topology: These devices.
        library: What compiles, None for what `CompilerLibrary.find` finds.
        timeout_s: How long one program may take.
        cache: Folder of answers; None for one in the user's cache.

    Raises:
        PipelineError: There is no library.

    Attributes:
        topology: As given.
        library: What compiles.
    """

    def __init__(
        self,
        topology: Slice,
        *,
        library: CompilerLibrary | None = None,
        timeout_s: float = _DEFAULT_TIMEOUT_S,
        cache: Path | None = None,
    ) -> None:
        self.topology = topology
        self.library = library or CompilerLibrary.find()
        self._timeout_s = timeout_s
        self._cache = cache or env.cache_dir() / "compiled"

    def compile(
        self,
        hlo: bytes,
        *,
        shardings: Sequence[str] | None = None,
        donated: Sequence[int] = (),
        host_calls: HostCalls | None = None,
    ) -> CompiledProgram:
        """Compile a program, or return the answer from before.

        Args:
            hlo: An `HloModuleProto`, sharded over as many devices as there are.
            shardings: HLO text of the sharding of each parameter, None for what the
                program says itself.
            donated: Parameters whose buffers results may have, beside those that it
                says itself.
            host_calls: The handlers of its calls of the host.

        Returns:
            With `error` if it does not compile, or if the compiler has died.
        """
        if shardings is not None:
            hlo = with_shardings(hlo, shardings)
        module = with_donors(hlo, donated)
        calls = host_calls or HostCalls()
        path = self._cache / f"{self._digest(module, *sorted(calls.targets))}.json"
        if path.is_file():
            try:
                return CompiledProgram.from_json(path)
            except ValueError:
                path.unlink(missing_ok=True)
        found = self._answer(module, calls)
        if isinstance(found, CompiledProgram):
            _write_whole(path, found.to_json())
            return found
        return CompiledProgram(error=found)

    def _digest(self, module: bytes, *targets: str) -> str:
        """Return a digest of what the answer depends on: program, devices, compiler."""
        parts = (_FORMAT, str(self.topology), self.library.version, *targets)
        known = hashlib.sha256("\n".join(parts).encode())
        known.update(hashlib.sha256(module).digest())
        return known.hexdigest()

    def _answer(self, module: bytes, calls: HostCalls) -> CompiledProgram | str:
        """Compile in another process; returns the reason if that gave no answer."""
        with tempfile.TemporaryDirectory(prefix="torch_xla_pp_") as folder:
            request, answer = (
                Path(folder) / "request.json",
                Path(folder) / "answer.json",
            )
            program = Path(folder) / "program.pb"
            program.write_bytes(module)
            asked = {
                "library": str(self.library.path),
                "topology": str(self.topology),
                "program": str(program),
                "answer": str(answer),
                **calls.to_request(),
            }
            request.write_text(json.dumps(asked))
            try:
                done = subprocess.run(
                    [sys.executable, "-m", _CHILD, str(request)],
                    env=env.for_compiler(folder),
                    stdin=subprocess.DEVNULL,
                    capture_output=True,
                    timeout=self._timeout_s,
                )
            except subprocess.TimeoutExpired:
                return f"no answer within {self._timeout_s:.0f} s. Allow more time."
            if answer.is_file():
                return CompiledProgram.from_json(answer)
        return _last_words(done)


def _last_words(done: "subprocess.CompletedProcess[bytes]") -> str:
    """Return how a compiler died."""
    lines = done.stderr.decode(errors="replace").strip().splitlines()
    last = "\n".join(lines[-_MOST_LINES:])
    return f"the compiler's process ended with code {done.returncode}:\n{last}".strip()


def _write_whole(path: Path, text: str) -> None:
    """Write a file that others see whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=path.stem)
    with os.fdopen(handle, "w") as file:
        file.write(text)
    os.replace(name, path)
