"""The end of a step: from a stage's sums of gradients to `.grad`."""

from collections.abc import Sequence
from dataclasses import dataclass

from torch_xla_pp.compile import StagePrograms
from torch_xla_pp.runtime.gradients.replicas import Replicas
from torch_xla_pp.runtime.gradients.sums import GradientSums
from torch_xla_pp.runtime.gradients.tied import TiedParameters
from torch_xla_pp.transport import XlaPpProcessGroup


@dataclass(frozen=True, kw_only=True, slots=True)
class StageGradients:
    """The gradients of a stage, including those from other stages and replicas.

    Args:
        sums: Its own sums.
        group: The ranks of its pipeline.
        tied: Its parameters that other stages have copies of.
        replicas: The same stage of other pipelines, None if there are none.
    """

    sums: GradientSums
    group: XlaPpProcessGroup
    tied: TiedParameters
    replicas: Replicas | None

    def end_backwards(self, programs: StagePrograms) -> None:
        """Finish the stage's own sums, and send them; after its last backward.

        The parts on the devices of this rank are added up. The sums are sent to the
        other replicas while other stages still compute.
        """
        self.sums.reduce(programs)
        if self.replicas is not None:
            self.replicas.send(self.sums)


def combine(stages: Sequence[StageGradients]) -> None:
    """Add the gradients of others; all stages of a rank send, then receive.

    A replica gets its averages only after every other one has checked that its own
    pipeline had no failure: a lost message would be NaN in them.

    Args:
        stages: Those of the rank; all or none have replicas.
    """
    replicas = [(s.replicas, s.sums) for s in stages if s.replicas is not None]
    if replicas:
        stages[0].group.transport.settle()
        for own, _ in replicas:
            own.average()
        for own, sums in replicas:
            own.receive(sums)
        replicas[0][0].group.transport.settle()
    tied = [stage for stage in stages if stage.tied]
    for stage in tied:
        stage.tied.send(stage.sums)
    for stage in tied:
        stage.tied.add(stage.sums)
