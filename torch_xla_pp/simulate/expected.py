"""The mean time of a step whose actions vary.

An action waits for the latest of the values that it needs. The mean of a maximum is
above the maximum of means (Jensen, 1906), so a step of actions that take their mean
times is too short: by 1 to 4 % for the actions of two CPU ranks.
"""

from random import Random
from statistics import fmean

from torch_xla_pp.schedule import Schedule
from torch_xla_pp.simulate.costs import Costs
from torch_xla_pp.simulate.network import Network
from torch_xla_pp.simulate.simulation import simulate


def expected_step_s(
    schedule: Schedule,
    costs: Costs,
    network: Network | None = None,
    *,
    num_draws: int = 24,
) -> float:
    """Return the mean time of steps whose actions take times drawn from samples.

    Equal arguments give equal results.

    Args:
        schedule: The actions of each rank.
        costs: Their times, as `measured_costs` returns them; an action without samples
            always takes its mean.
        network: The links between ranks; None for messages that take no time.
        num_draws: Number of steps; one without samples.

    Raises:
        ScheduleError: The schedule cannot run to its end.
        ValueError: A cost is missing.
    """
    random = Random(0)
    count = num_draws if costs.samples else 1
    return fmean(
        simulate(schedule, costs, network, random=random).step_s for _ in range(count)
    )
