"""From the sums of gradients that a stage has at the end of a step to `.grad`."""

from collections.abc import Sequence
from dataclasses import dataclass

from torch_xla_pp.compile import StagePrograms
from torch_xla_pp.runtime.gradients.replicas import Replicas
from torch_xla_pp.runtime.gradients.sums import GradientSums
from torch_xla_pp.runtime.gradients.tied import TiedParameters
from torch_xla_pp.transport import XlaPpProcessGroup


@dataclass(frozen=True, kw_only=True, slots=True)
class StageGradients:
    """The gradients of a stage, and who else has some of its parameters.

    Args:
        sums: The sums of its own.
        group: The ranks of its pipeline.
        tied: Its parameters that other stages have copies of.
        replicas: The same stage of other pipelines, None if there are none.
    """

    sums: GradientSums
    group: XlaPpProcessGroup
    tied: TiedParameters
    replicas: Replicas | None

    def end_backwards(self, programs: StagePrograms) -> None:
        """Finish what the stage does alone, and send it; after its last backward.

        What the devices of this rank have is added up. The sums travel to the
        other replicas while other stages still compute.
        """
        self.sums.reduce(programs)
        if self.replicas is not None:
            self.replicas.send(self.sums)


def combine(stages: Sequence[StageGradients]) -> None:
    """Add up what others have; all stages of a rank send, then receive.

    A replica has its averages only once each other one knows that nothing went wrong
    in its own pipeline: a lost message would be NaN in them.

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
