"""From the sums of gradients that a stage has at the end of a step to `.grad`."""

from collections.abc import Sequence
from dataclasses import dataclass

from torch_xla_pp.compile import Sizes, StagePrograms
from torch_xla_pp.runtime.gradients.replicas import Replicas
from torch_xla_pp.runtime.gradients.tied import TiedParameters
from torch_xla_pp.runtime.module_state import ModuleState
from torch_xla_pp.transport import XlaPpProcessGroup


@dataclass(frozen=True, kw_only=True, slots=True)
class StageGradients:
    """The gradients of a stage, and who else has some of its parameters.

    Args:
        state: The stage's parameters with their sums.
        group: The ranks of its pipeline.
        tied: Its parameters that other stages have copies of.
        replicas: The same stage of other pipelines, None if there are none.
    """

    state: ModuleState
    group: XlaPpProcessGroup
    tied: TiedParameters
    replicas: Replicas | None

    def end_backwards(self, programs: StagePrograms, sizes: Sizes) -> None:
        """Finish what the stage does alone, and send it; after its last backward.

        What the devices of this rank have is added up. To the other replicas the sums
        travel while other stages still compute.
        """
        self.state.reduce_sums(programs, sizes)
        if self.replicas is not None:
            self.replicas.send(self.state)


def combine(stages: Sequence[StageGradients]) -> None:
    """Add up what others have; all stages of a rank send, then receive.

    A replica has its averages only once each other one knows that nothing went wrong
    in its own pipeline: a lost message would be NaN in them.

    Args:
        stages: Those of the rank; all or none have replicas.
    """
    replicas = [(s.replicas, s.state) for s in stages if s.replicas is not None]
    if replicas:
        stages[0].group.transport.settle()
        for own, _ in replicas:
            own.average()
        for own, state in replicas:
            own.receive(state)
        replicas[0][0].group.transport.settle()
    tied = [stage for stage in stages if stage.tied]
    for stage in tied:
        stage.tied.send(stage.state)
    for stage in tied:
        stage.tied.add(stage.state)
