"""The stages of all ranks, and the inputs that each takes from the others."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch.utils import _pytree as pytree

from torch_xla_pp.graph import Slot, Template
from torch_xla_pp.mesh import Tiling
from torch_xla_pp.plan.consumers import Consumers, Value
from torch_xla_pp.plan.stage_inputs import StageInputs
from torch_xla_pp.schedule import carriers_of


@dataclass(frozen=True, kw_only=True, slots=True)
class Wiring:
    """The inputs of each stage, the parameters that it shares, and its rank.

    Args:
        inputs: Inputs of each stage.
        ranks: Rank of each stage.
        shared: Group of shared parameters → stages that have a copy, in order.
        tilings: Group → stage → tiling of its copy on its rank.
    """

    inputs: Sequence[StageInputs]
    ranks: Sequence[int]
    shared: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    tilings: Mapping[str, Mapping[int, Tiling]] = field(default_factory=dict)

    def __str__(self) -> str:
        lines = []
        for stage, rank in enumerate(self.ranks):
            sources = ", ".join(
                f"{p} on rank {self.ranks[p]}" for p in self.producers(stage)
            )
            taken = f", takes from stage {sources}" if sources else ""
            lines.append(f"stage {stage} on rank {rank}{taken}")
        for group, stages in self.shared.items():
            lines.append(f"{group} is shared by stages {', '.join(map(str, stages))}")
        return "\n".join(lines)

    def titles(self) -> dict[int, str]:
        """Return the stages of each rank as a text, e.g. "stages 0, 3"."""
        texts = {}
        for rank in sorted(set(self.ranks)):
            mine = [str(s) for s, r in enumerate(self.ranks) if r == rank]
            texts[rank] = f"stage{'s' * (len(mine) > 1)} {', '.join(mine)}"
        return texts

    def producers(self, stage: int) -> tuple[int, ...]:
        """Return the stages whose outputs `stage` takes."""
        return tuple(sorted({source.stage for source in self.inputs[stage].sources}))

    def consumers(self, stage: int) -> tuple[int, ...]:
        """Return the stages that take outputs of `stage`."""
        count = len(self.inputs)
        return tuple(s for s in range(count) if stage in self.producers(s))

    def edges(self) -> list[tuple[int, int]]:
        """Return all pairs of a producer and a consumer."""
        count = len(self.inputs)
        return [(p, stage) for stage in range(count) for p in self.producers(stage)]

    def carriers(self) -> list[tuple[int, int]]:
        """Return pairs of stages of a rank of which the first may receive for both.

        The structure of outputs is not known yet: each source counts as one value.
        """
        stages = range(len(self.inputs))
        values = [value for stage in stages for value in self._values_of(stage)]
        return carriers_of(values, self.ranks)

    def _values_of(self, producer: int) -> Iterator[tuple[int, set[int]]]:
        """Yield the consumers of each item that is named, and of all others."""
        uses = [
            (consumer, source.key)
            for consumer, inputs in enumerate(self.inputs)
            for source in inputs.sources
            if source.stage == producer
        ]
        for item in {key for _, key in uses} | {None}:
            yield producer, {c for c, key in uses if key in (item, None)}

    def faults(self) -> list[str]:
        """List the stages that have no inputs, or whose outputs no stage takes."""
        last = len(self.inputs) - 1
        taken = {producer for producer, _ in self.edges()}
        return [
            f"stage {stage}: expected an output that another stage takes, got none. "
            "Name it in inputs_from of a later stage, or leave the stage out."
            for stage in range(last)
            if stage not in taken
        ]

    def consumers_of_values(self, producer: int, output: Template) -> Consumers:
        """Return how the values of a stage's output reach their consumers."""
        tree = _named(producer, output)
        uses = {c: self._slots(c, producer, tree) for c in self.consumers(producer)}
        return Consumers(
            producer=producer,
            uses={consumer: slots for consumer, slots in uses.items() if slots},
            ranks=self.ranks,
        )

    def arguments(
        self, stage: int, outputs: Mapping[int, Template]
    ) -> tuple[Template, list[Value]]:
        """Put the arguments of a stage together.

        Args:
            stage: Index of the stage.
            outputs: Template of the output of each of its producers.

        Returns:
            Template of positional and keyword arguments, and the value of each slot.
        """
        trees = {p: _named(p, output) for p, output in outputs.items()}
        arguments = self.inputs[stage].arguments(trees)
        values = _values(arguments)
        leaves, spec = pytree.tree_flatten(arguments)
        marks = [Slot(values.index(x)) if isinstance(x, Value) else x for x in leaves]
        return Template(spec, tuple(marks)), values

    def _slots(self, consumer: int, producer: int, tree: Any) -> tuple[int, ...]:
        inputs = self.inputs[consumer]
        mine = [s.of(tree) for s in inputs.sources if s.stage == producer]
        return tuple(value.slot for value in _values(mine))


def _named(stage: int, output: Template) -> Any:
    """Return a stage's output with a `Value` in place of each tensor."""
    return output.fill([Value(stage, slot) for slot in range(output.num_slots)])


def _values(tree: Any) -> list[Value]:
    leaves = pytree.tree_leaves(tree)
    return list(dict.fromkeys(leaf for leaf in leaves if isinstance(leaf, Value)))
