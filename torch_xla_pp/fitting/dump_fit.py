"""Compile the programs of a run that was dumped, for TPUs that are not here.

`XLA_FLAGS="--xla_dump_to=D --xla_dump_hlo_as_proto"` makes XLA write each program that
a run compiles. All programs are there, also the optimizer's; the stage and action of a
program are not.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from torch_xla_pp import record
from torch_xla_pp.accelerators import (
    AcceleratorCompiler,
    CompiledProgram,
    ProgramTime,
    Slice,
    module_of_dump,
)
from torch_xla_pp.fitting.program_collectives import collectives_by_kind
from torch_xla_pp.fitting.stage_fit import ProgramFit
from torch_xla_pp.fitting.surprises import surprises_in
from torch_xla_pp.mesh import LocalMesh

_FORMAT = "torch_xla_pp dump fit 1"
_SUFFIX = ".before_optimizations.hlo.pb"
_UNPROVEN = (
    "Nothing ran on a device. What programs hold beside their own arguments is not "
    "known of a dump."
)
_FOREIGN = (
    "Calls of the CPU's own functions are in no other compiler: dump a run with "
    "TORCH_XLA_PP_TRANSPORT=host and TORCH_XLA_PP_PRODUCTS=xla."
)


@dataclass(frozen=True, kw_only=True, slots=True)
class DumpFit:
    """A compiler's answers for the programs of a run; `print` shows them.

    Args:
        topology: The devices that they were compiled for.
        compiler: Version of the compiler.
        programs: Each program once, in the order in which the run compiled them.
    """

    topology: str
    compiler: str
    programs: tuple[ProgramFit, ...]

    @property
    def compiles(self) -> bool:
        """Return whether all programs compile."""
        return not any(program.compiled.error for program in self.programs)

    def __str__(self) -> str:
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        count = sum(not program.compiled.error for program in self.programs)
        yield f"{self.topology}, libtpu {self.compiler}"
        yield f"{count} of {len(self.programs)} programs compile"
        for program in self.programs:
            yield from program.lines()
        if any("custom" in p.compiled.error.lower() for p in self.programs):
            yield _FOREIGN
        yield _UNPROVEN

    def to_json(self, path: str | Path | None = None) -> str:
        """Return it as JSON.

        Args:
            path: A file to write as well.
        """
        return record.to_json(self, _FORMAT, path)

    @classmethod
    def from_json(cls, source: str | Path) -> "DumpFit":
        """Read what `to_json` wrote: a file, or the text itself.

        Raises:
            ValueError: It is something else.
        """
        return record.from_json(cls, source, _FORMAT)


def fit_dump(
    folder: str | Path,
    *,
    topology: str,
    mesh: Mapping[str, int] | None = None,
    compiler: AcceleratorCompiler | None = None,
) -> DumpFit:
    """Compile the programs in a folder that XLA has dumped a rank's programs into.

    Args:
        folder: The folder, with files such as
            `module_0001.SyncTensorsGraph.25.before_optimizations.hlo.pb`.
        topology: Devices, as many as the rank had, such as `v5e:2x2`.
        mesh: The rank's axes and their sizes; one axis "data" if None.
        compiler: The compiler; None for the library that is installed.

    Raises:
        PipelineError: There is no compiler.
        ValueError: There is no such file.
    """
    devices = Slice.parse(topology)
    axes = dict(mesh or {"data": devices.num_devices})
    paths = sorted(Path(folder).glob(f"*{_SUFFIX}"))
    if not paths:
        raise ValueError(
            f"fit --dump: expected files *{_SUFFIX} in {folder}, got none. Run with "
            f'XLA_FLAGS="--xla_dump_to={folder} --xla_dump_hlo_as_proto".'
        )
    compiler = compiler or AcceleratorCompiler(devices)
    local = LocalMesh(names=tuple(axes), shape=tuple(axes.values()))
    counts: Counter[bytes] = Counter()
    names: dict[bytes, str] = {}
    for path in paths:
        module = module_of_dump(path.read_bytes())
        counts[module] += 1
        names.setdefault(module, path.name.removesuffix(_SUFFIX))
    programs = []
    for module, name in names.items():
        answer = compiler.compile(module)
        times = f" x {counts[module]}" if counts[module] > 1 else ""
        programs.append(_program(f"{name}{times}", answer, local, devices))
    return DumpFit(
        topology=str(devices),
        compiler=compiler.library.version,
        programs=tuple(programs),
    )


def _program(
    name: str, answer: CompiledProgram, mesh: LocalMesh, devices: Slice
) -> ProgramFit:
    if answer.error:
        return ProgramFit(name=name, compiled=answer)
    return ProgramFit(
        name=name,
        compiled=answer,
        collectives=tuple(collectives_by_kind(answer, mesh)),
        time=ProgramTime.of(answer, devices),
        surprises=tuple(surprises_in(answer, {})),
    )
