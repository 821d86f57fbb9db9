"""From the sums of gradients that a stage has at the end of a step to `.grad`."""

from collections.abc import Sequence
from dataclasses import dataclass

from torch_xla_pp.compile import Sizes, StagePrograms
from torch_xla_pp.runtime.exchange import Exchange
from torch_xla_pp.runtime.module_state import ModuleState
from torch_xla_pp.runtime.replicas import Replicas
from torch_xla_pp.runtime.shared import SharedParameters


@dataclass(frozen=True, kw_only=True, slots=True)
class StageGradients:
    """Know who else has gradients of the parameters of a stage.

    Args:
        state: The stage's parameters with their sums.
        exchange: The stage's messages.
        shared: Its parameters of which other stages have copies.
        replicas: The same stage of other pipelines, None if there are none.
    """

    state: ModuleState
    exchange: Exchange
    shared: SharedParameters
    replicas: Replicas | None

    def end_backwards(self, programs: StagePrograms, sizes: Sizes) -> None:
        """Finish what the stage does alone, and send it; after its last backward.

        What the devices of this rank have is added up. To the other replicas the sums
        travel while other stages still compute.
        """
        self.state.reduce_sums(programs, sizes)
        if self.replicas is not None:
            self.replicas.give(self.state)


def combine(stages: Sequence[StageGradients]) -> None:
    """Add up what others have; all stages of a rank send, then receive.

    Args:
        stages: Those of the rank; all or none have replicas.
    """
    replicas = [(s.replicas, s.state) for s in stages if s.replicas is not None]
    if replicas:
        _average(stages[0].exchange, replicas)
    sharing = [stage for stage in stages if stage.shared]
    for stage in sharing:
        stage.shared.give(stage.state)
    for stage in sharing:
        stage.shared.take(stage.state)


def _average(
    exchange: Exchange, replicas: Sequence[tuple[Replicas, ModuleState]]
) -> None:
    """Average the gradients that all stages of the rank have sent to replicas.

    A replica has its averages only once each other one knows that nothing went wrong
    in its own pipeline: a lost message would be NaN in them.
    """
    exchange.settle()
    for own, _ in replicas:
        own.average()
    for own, state in replicas:
        own.take(state)
    replicas[0][0].settle()
