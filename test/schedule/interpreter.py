"""Run a table on simulated ranks with real numbers.

A stage computes tanh(weight * (its inputs + the microbatch's number) + bias), in
Python floats, which are float64. Every rank runs its actions in order and blocks at
one whose values have not come. Nothing here knows of the laws that `verify` checks.
"""

import math
from collections import defaultdict
from dataclasses import dataclass, field

import torch
from strategies import StageDag

from torch_xla_pp.schedule import Action, Schedule


class Stuck(Exception):
    """The ranks wait for each other, or for what never comes."""


@dataclass
class Run:
    """Values under way, and the gradients so far.

    Args:
        dag: The stages.
        network: Values sent to another rank, by (producer, rank, microbatch). One for
            several stages of a rank is sent once and received by the lowest of them.
        local: Values that a rank has, by the same.
        grads: Gradients of values, by (consumer, producer, microbatch).
        saved: Inputs and output of a stage, by (stage, microbatch).
        residual: What the gradients of a stage's parameters are still to be made of.
        losses: Microbatches in the order of their losses.
        weights: Gradient of each stage's weight.
        biases: Gradient of each stage's bias.
    """

    dag: StageDag
    network: dict[tuple[int, int, int], float] = field(default_factory=dict)
    local: dict[tuple[int, int, int], float] = field(default_factory=dict)
    grads: dict[tuple[int, int, int], float] = field(default_factory=dict)
    saved: dict[tuple[int, int], tuple[float, float]] = field(default_factory=dict)
    residual: dict[tuple[int, int], float] = field(default_factory=dict)
    losses: list[int] = field(default_factory=list)
    weights: dict[int, float] = field(default_factory=lambda: defaultdict(float))
    biases: dict[int, float] = field(default_factory=lambda: defaultdict(float))

    def parameters(self, stage: int) -> tuple[float, float]:
        return 0.3 + 0.1 * stage, 0.05 * (stage + 1)

    def producers(self, stage: int) -> list[int]:
        return [p for p, c in self.dag.edges if c == stage]

    def consumers(self, stage: int) -> list[int]:
        return [c for p, c in self.dag.edges if p == stage]

    def receives(self, stage: int, producer: int) -> bool:
        rank = self.dag.placement[stage]
        here = [c for c in self.consumers(producer) if self.dag.placement[c] == rank]
        return stage == min(here)

    def is_ready(self, action: Action) -> bool:
        stage, mb = action.stage, action.microbatch
        if action.kind == "W":
            return (stage, mb) in self.residual
        if action.kind != "F":
            came = [(c, stage, mb) in self.grads for c in self.consumers(stage)]
            return all(came) and (stage, mb) in self.saved
        rank = self.dag.placement[stage]
        return all(
            (p, rank, mb) in self.local
            or ((p, rank, mb) in self.network and self.receives(stage, p))
            for p in self.producers(stage)
        )

    def run(self, action: Action) -> None:
        stage, mb = action.stage, action.microbatch
        if action.kind == "F":
            self.forward(stage, mb)
        if action.kind in "BI":
            self.backward_input(stage, mb)
        if action.kind in "BW":
            inputs, _ = self.saved.pop((stage, mb))
            grad = self.residual.pop((stage, mb))
            self.weights[stage] += grad * inputs
            self.biases[stage] += grad

    def forward(self, stage: int, mb: int) -> None:
        rank, inputs = self.dag.placement[stage], float(mb)
        for producer in self.producers(stage):
            key = producer, rank, mb
            if key not in self.local:
                self.local[key] = self.network.pop(key)
            inputs += self.local[key]
        weight, bias = self.parameters(stage)
        output = math.tanh(weight * inputs + bias)
        self.saved[stage, mb] = inputs, output
        for there in {self.dag.placement[c] for c in self.consumers(stage)}:
            values = self.local if there == rank else self.network
            values[stage, there, mb] = output
        if stage == self.dag.num_stages - 1:
            self.losses.append(mb)
            if self.losses[mb:] != [mb]:
                raise Stuck(f"the loss of microbatch {mb} is at the wrong place")

    def backward_input(self, stage: int, mb: int) -> None:
        weight, _ = self.parameters(stage)
        _, output = self.saved[stage, mb]
        consumers = self.consumers(stage)
        grads = [self.grads.pop((c, stage, mb)) for c in consumers]
        # A stage that nothing uses gives a part of the loss.
        grad = (sum(grads) if consumers else 1.0) * (1 - output**2)
        self.residual[stage, mb] = grad
        for producer in self.producers(stage):
            self.grads[stage, producer, mb] = grad * weight


def interpret(schedule: Schedule, dag: StageDag) -> list[tuple[float, float]]:
    """Return the gradients of each stage's weight and bias.

    Raises:
        Stuck: A rank does not come to its end.
    """
    run = Run(dag=dag)
    rows = [list(row) for row in schedule.actions]
    while any(rows):
        ready = [row for row in rows if row and run.is_ready(row[0])]
        if not ready:
            raise Stuck([str(row[0]) for row in rows if row])
        for row in ready:
            run.run(row.pop(0))
    return [(run.weights[s], run.biases[s]) for s in range(dag.num_stages)]


def unsplit(dag: StageDag) -> list[tuple[float, float]]:
    """Return the same gradients, of the whole model by autograd."""
    run = Run(dag=dag)
    leaves = [
        [torch.tensor(v, dtype=torch.float64, requires_grad=True) for v in pair]
        for pair in map(run.parameters, range(dag.num_stages))
    ]
    loss = torch.zeros((), dtype=torch.float64)
    for mb in range(dag.num_microbatches):
        outputs: list[torch.Tensor] = []
        for stage, (weight, bias) in enumerate(leaves):
            inputs = mb + sum(outputs[p] for p in run.producers(stage))
            outputs.append(torch.tanh(weight * inputs + bias))
        sinks = [s for s in range(dag.num_stages) if not run.consumers(s)]
        loss = loss + sum(outputs[s] for s in sinks)
    loss.backward()
    return [(float(w.grad), float(b.grad)) for w, b in leaves]
