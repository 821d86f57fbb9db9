"""Gradients of parameters that several stages have copies of, added up once a step.

Each copy gets the same sum: the parts are added in the order of the stages, on every
rank alike, so that copies that began as equal stay equal to the bit. Every stage that
has a copy sends its part to every other one that is on another rank.

The programs send before they receive, each for all parameters at once: a program that
received first could wait for a rank that waits for it.
"""

from collections.abc import Collection, Mapping, Sequence

from torch import Tensor

from torch_xla_pp import xla_compat
from torch_xla_pp.compile.border import Border
from torch_xla_pp.compile.names import shared_part, shared_total
from torch_xla_pp.compile.partition import nothing
from torch_xla_pp.compile.program import Program
from torch_xla_pp.compile.program_spec import ProgramSpec
from torch_xla_pp.transport import ShardLayout


class SharedSums:
    """Hold the programs that add up the gradients of one stage's shared parameters.

    Args:
        stage: Index of the stage.
        holders: Name of a parameter → all stages that have it, in order.
        senders: The stages that the programs exchange with themselves.
        layouts: How the parameters lie on this rank's devices.
        pins: Their shardings.

    Attributes:
        others: The other stages that have one of the parameters → their names.
    """

    def __init__(
        self,
        stage: int,
        holders: Mapping[str, Sequence[int]],
        senders: Collection[int],
        layouts: Mapping[str, ShardLayout],
        pins: Mapping[str, xla_compat.OpSharding],
    ) -> None:
        self._stage = stage
        self.others: dict[int, tuple[str, ...]] = {
            other: tuple(name for name, stages in holders.items() if other in stages)
            for other in sorted({s for stages in holders.values() for s in stages})
            if other != stage
        }

        def borders(owner_of: Mapping[int, int]) -> list[Border]:
            return [
                Border(
                    other,
                    tuple(
                        shared_part(name, owner_of[other])
                        for name in self.others[other]
                    ),
                    tuple(layouts[name] for name in self.others[other]),
                )
                for other in senders
            ]

        parts = {
            shared_total(name): [shared_part(name, holder) for holder in stages]
            for name, stages in holders.items()
        }
        function = nothing("shared gradients")
        sent = borders(dict.fromkeys(senders, stage))
        self._send = Program(ProgramSpec(function=function, sent=sent))
        self._add = Program(
            ProgramSpec(
                function=function,
                pins={shared_total(name): pin for name, pin in pins.items()},
                received=borders({sender: sender for sender in senders}),
                parts=parts,
                wanted=set(parts),
            )
        )

    def send(self, sums: Mapping[str, Tensor], routes: Mapping[str, Tensor]) -> None:
        """Enqueue the sending of this stage's parts.

        Args:
            sums: Name → gradient of this stage.
            routes: Where to, see `compile.border`.
        """
        if self._send.inputs:
            self._send({**self._parts(self._stage, sums), **routes})

    def add(
        self,
        sums: Mapping[str, Tensor],
        given: Mapping[int, Mapping[str, Tensor]],
        routes: Mapping[str, Tensor],
    ) -> dict[str, Tensor]:
        """Enqueue the adding; return name → gradient of all stages.

        Args:
            sums: Name → gradient of this stage.
            given: Stage → its gradients, of stages that are not received from.
            routes: Where from.
        """
        values = {**self._parts(self._stage, sums), **routes}
        for stage, found in given.items():
            values |= self._parts(stage, found)
        results = self._add(values)
        return {name: results[shared_total(name)] for name in sums}

    @staticmethod
    def _parts(stage: int, sums: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {shared_part(name, stage): value for name, value in sums.items()}
