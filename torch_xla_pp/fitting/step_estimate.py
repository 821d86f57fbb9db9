"""The time of a step by the times of compiled programs.

An action takes the time of its programs; the schedule's order decides the rest, see
`simulate`. At the end of a step a rank sums its gradients, gathers weights that are
gathered once, and runs the optimizer. The optimizer is not compiled: it is charged with
the time to read and write all of parameters, gradients and its own state, by the
memory's bandwidth.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from torch_xla_pp.accelerators import Slice
from torch_xla_pp.fitting.stage_fit import StageFit
from torch_xla_pp.schedule import KINDS, Schedule
from torch_xla_pp.simulate import (
    Calibration,
    Costs,
    Link,
    Network,
    simulate,
    step_seconds,
)
from torch_xla_pp.text import seconds_text
from torch_xla_pp.timeline import Timeline, summarize


@dataclass(frozen=True, kw_only=True, slots=True)
class StepEstimate:
    """The time of a step; nothing of it ran.

    Args:
        step_s: The whole step.
        bubble_share: Share of the ranks' time, up to their last action, in which they
            compute nothing.
        final_s: The time of the slowest rank after its last action.
        seconds: Stage and kind of action, such as "0F" → its time.
        link_bytes_per_s: Bandwidth from one rank to another that was assumed.
        link_latency_s: Latency likewise.
        factors: Kind of action → ratio of a recorded step's times to those of the
            compiler's cycles, which is included in `seconds`; empty without a recorded
            step.
    """

    step_s: float
    bubble_share: float
    final_s: float
    seconds: Mapping[str, float]
    link_bytes_per_s: float
    link_latency_s: float
    factors: Mapping[str, float] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        schedule: Schedule,
        stages: Sequence[StageFit],
        devices: Slice,
        *,
        link: Link | None = None,
        recorded: Timeline | None = None,
    ) -> "StepEstimate":
        """Simulate a step.

        Args:
            schedule: The actions of each rank.
            stages: The stages, all of whose programs compile.
            devices: Those of a rank.
            link: The link from one rank to another; None for the network of the data
                center, which values between ranks go through, without latency.
            recorded: A step of the same stages on such devices, to which times of
                actions are scaled.

        Raises:
            ValueError: The recorded step has other stages.
        """
        link = link or host_link(devices)
        costs = fitted_costs(stages, devices)
        factors: Mapping[str, float] = {}
        if recorded is not None:
            calibration = Calibration.of(costs, recorded)
            ran = {kind for (_, kind), seconds in costs.seconds.items() if seconds}
            factors = {k: x for k, x in calibration.factors.items() if k in ran}
            costs = calibration.scaled(costs)
        network = Network(default=link)
        timeline = simulate(schedule, costs, network)
        final_s = [
            sum(costs.final_s[stage] for stage in schedule.stages_of(rank))
            for rank in range(schedule.num_ranks)
        ]
        return cls(
            step_s=step_seconds(schedule, costs, network),
            bubble_share=summarize(timeline).bubble_share,
            final_s=max(final_s),
            seconds={f"{s}{kind}": t for (s, kind), t in costs.seconds.items() if t},
            link_bytes_per_s=link.bytes_per_s,
            link_latency_s=link.latency_s,
            factors=factors,
        )

    def __str__(self) -> str:
        scaled = ", ".join(f"{kind} x{x:.2f}" for kind, x in self.factors.items())
        return (
            f"step {seconds_text(self.step_s)}, bubble {self.bubble_share:.1%}, "
            f"{seconds_text(self.final_s)} after the last action; between ranks "
            f"{self.link_bytes_per_s / 1e9:.4g} GB/s, latency "
            f"{seconds_text(self.link_latency_s)}"
            + (f"; scaled to a recorded step: {scaled}" if scaled else "")
        )


def host_link(devices: Slice) -> Link:
    """Return the link between ranks that send through hosts and their network."""
    chip = devices.chip
    per_chip = min(chip.network_bytes_per_s, chip.host_bytes_per_s)
    return Link(bytes_per_s=per_chip * devices.num_devices)


def fitted_costs(stages: Sequence[StageFit], devices: Slice) -> Costs:
    """Return the costs of stages by their compiled programs.

    Args:
        stages: The stages, all of whose programs compile.
        devices: Those of a rank.
    """
    per_s = devices.chip.memory_bytes_per_s
    return Costs(
        seconds={(s.index, kind): s.seconds(kind) for s in stages for kind in KINDS},
        flows=tuple(flow for stage in stages for flow in stage.flows),
        saved_bytes={stage.index: stage.saved_bytes for stage in stages},
        passed_bytes={stage.index: stage.passed_bytes for stage in stages},
        final_s={s.index: s.once_s + s.updated_bytes / per_s for s in stages},
    )
