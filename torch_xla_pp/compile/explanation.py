"""What a stage costs on each device: memory, collectives, and messages."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from torch_xla_pp.advice import (
    Exchange,
    Machine,
    PipelineLoad,
    StageLoad,
    advise,
    counted_once,
    when_of,
    whole_bytes,
)
from torch_xla_pp.compile.program import Program
from torch_xla_pp.hlo import Collective, collectives_of, product_flops
from torch_xla_pp.mesh import AxisRules, LocalMesh, TensorSpec, strategy_names

_HINT = (
    "unknown: set XLA_FLAGS='--xla_dump_to=<folder of the rank> "
    "--xla_dump_hlo_as_text' before the first import of torch_xla"
)


@dataclass(frozen=True, kw_only=True, slots=True)
class ProgramCost:
    """The work of a compiled program, and its exchanges between a rank's devices.

    The *arithmetic intensity* of an exchange is the work that there is for each of its
    bytes. Where it is below a device's FLOP/s by the bytes/s of the link, the exchange
    takes longer than the work. Source: MaxText's guide to sharding.

    Args:
        name: What the program does.
        collectives: By kind and mesh axes; None if its HLO is not known.
        flops: Operations of its products of matrices, on one device; None if its HLO
            is not known.
    """

    name: str
    collectives: tuple[Collective, ...] | None
    flops: int | None = 0

    def __str__(self) -> str:
        if self.collectives is None or self.flops is None:
            return f"  {self.name}: {_HINT}"
        found = [
            f"    {collective}, {per_byte(self.flops, collective.num_bytes)}"
            for collective in self.collectives
        ] or ["    no collectives"]
        return "\n".join([f"  {self.name}: {self.flops} FLOP", *found])


def per_byte(flops: int, num_bytes: int) -> str:
    """Return the arithmetic intensity of an exchange as a text."""
    return f"{flops / num_bytes:.3g} FLOP per byte" if num_bytes else "no bytes"


@dataclass(frozen=True, kw_only=True, slots=True)
class Explanation:
    """The costs of a stage on each device of its rank.

    Args:
        stage: Index of the stage.
        num_parameters: Parameters of the whole stage.
        parameter_bytes: Bytes of parameters and buffers, on one device.
        received_bytes: Bytes that one device receives for a microbatch's forward.
        sent_bytes: Bytes of the outputs of a microbatch, on one device; those of the
            last stage go to the loss.
        programs: The programs that have run so far.
        reduced_per_microbatch: Parameter → why its gradient is reduced in every
            microbatch and not once a step.
        moves: Values that are resharded on the way from or to another rank, whose
            devices shard them in another way.
        sends: Whether its outputs go to another stage.
        num_microbatches: Microbatches of a step.
        num_ranks: Ranks of the pipeline.
        stages_per_rank: Stages of each.
        mesh: The rank's devices, None if not given.
        rules: What logical axes are split over, None likewise.
        device: The kind of devices that advice is for, None for none.
    """

    stage: int
    num_parameters: int
    parameter_bytes: int
    received_bytes: int
    sent_bytes: int
    programs: tuple[ProgramCost, ...]
    reduced_per_microbatch: Mapping[str, str] = field(default_factory=dict)
    moves: tuple[str, ...] = ()
    sends: bool = False
    num_microbatches: int = 1
    num_ranks: int = 1
    stages_per_rank: int = 1
    mesh: LocalMesh | None = None
    rules: AxisRules | None = None
    device: str | None = None

    def __str__(self) -> str:
        lines = [
            f"stage {self.stage}, on each device",
            f"  {self.parameter_bytes} bytes of {self.num_parameters} parameters and "
            "of buffers",
            f"  {self.received_bytes} bytes in, {self.sent_bytes} bytes out, per "
            f"microbatch{self._intensity()}",
            *(f"    {move}" for move in self.moves),
        ]
        for reason in dict.fromkeys(self.reduced_per_microbatch.values()):
            names = [n for n, r in self.reduced_per_microbatch.items() if r == reason]
            lines.append(
                f"  gradients reduced in every microbatch, as {reason}: "
                f"{', '.join(names)}"
            )
        lines += map(str, self.programs)
        if self.device is not None:
            lines += (f"  {line}" for line in advise(self).lines())
        return "\n".join(lines)

    def among(
        self, num_ranks: int, stages_per_rank: int, device: str | None
    ) -> "Explanation":
        """Return it for a pipeline of so many ranks and stages, on some devices."""
        return replace(
            self, num_ranks=num_ranks, stages_per_rank=stages_per_rank, device=device
        )

    def load(self) -> PipelineLoad:
        """Return what a device computes and exchanges, for `advise`.

        Raises:
            ValueError: The HLO of no program is known.
        """
        known = [p for p in self.programs if p.flops is not None]
        if not known:
            raise ValueError(
                f"advise: expected the HLO of programs, got none. {_HINT}."
            )
        counted = counted_once([program.name for program in known])
        known = [program for program in known if program.name in counted]
        flops: dict[str, float] = {}
        for program in known:
            when = when_of(program.name)
            flops[when] = flops.get(when, 0.0) + float(program.flops or 0)
        exchanges = [e for program in known for e in self._exchanges(program)]
        if self.sends:
            exchanges.append(
                Exchange(
                    when="F",
                    kind="boundary",
                    axis="pp",
                    num_devices=1,
                    count=1,
                    num_bytes=self.sent_bytes,
                )
            )
        stage = StageLoad(stage=self.stage, flops=flops, exchanges=tuple(exchanges))
        return PipelineLoad(
            stages=(stage,),
            num_microbatches=self.num_microbatches,
            num_ranks=self.num_ranks,
            stages_per_rank=self.stages_per_rank,
            mesh=self._sizes,
            strategies=strategy_names(self.rules),
            machine=self._machine,
        )

    @property
    def _sizes(self) -> dict[str, int]:
        """Return axes of the rank's devices → their sizes."""
        mesh = self.mesh
        return {} if mesh is None else dict(zip(mesh.names, mesh.shape, strict=True))

    @property
    def _machine(self) -> Machine | None:
        if self.device is None:
            return None
        return Machine.named(self.device, self._sizes, {})

    def _exchanges(self, program: ProgramCost) -> Iterator[Exchange]:
        """Yield the exchanges of a program, except those that are along no axes."""
        for found in program.collectives or ():
            if found.axes:
                size = math.prod(self._sizes[axis] for axis in found.axes)
                yield Exchange(
                    when=when_of(program.name),
                    kind=found.kind,
                    axis="+".join(found.axes),
                    num_devices=size,
                    count=found.count,
                    num_bytes=whole_bytes(found.kind, found.num_bytes, size),
                )

    def _intensity(self) -> str:
        """Return the forward's work for each byte that leaves, if both are known."""
        for program in self.programs:
            if program.name == "forward" and program.flops and self.sent_bytes:
                return f", {per_byte(program.flops, self.sent_bytes)} out"
        return ""


def costs_of(
    programs: Mapping[str, Program], mesh: LocalMesh
) -> tuple[ProgramCost, ...]:
    """Return the work and the exchanges of each program."""
    return tuple(
        ProgramCost(
            name=name,
            collectives=None
            if program.hlo is None
            else collectives_of(program.hlo, mesh),
            flops=None if program.hlo is None else product_flops(program.hlo),
        )
        for name, program in programs.items()
    )


def bytes_of(specs: Sequence[TensorSpec], mesh: LocalMesh) -> int:
    """Return the bytes of values on one device."""
    return sum(spec.shard_bytes(mesh) for spec in specs)
