"""What XLA's client for CPU devices needs, set before it is made.

The client's pool has threads that launch programs, one for each device, and others that
run them, one for each device, since the threads of one launch begin when the launch
before has ended; all of these threads may wait. One more is for copies. With one device
the caller launches programs. See docs/design/024-in-flight.md.

Nothing here imports torch_xla: this runs while that is being imported.
"""

from torch_xla_pp import env


def prepare_client() -> None:
    """Set what XLA reads as it makes a client for CPU devices; there is none yet.

    Called when torch_xla is loaded, too, so that it holds for a client that the program
    makes itself. XLA's matrix products are faster without XNNPACK, see
    docs/performance/step.md, and its loops are compiled in half of the time without
    MLIR, see docs/design/041-loops-as-calls.md.
    """
    if env.device_kind() == "CPU":
        env.add_xla_flag("xla_cpu_use_xnnpack", "false")
        env.add_xla_flag("xla_cpu_use_fusion_emitters", "false")
        env.enlarge_pool(num_threads(env.num_cpu_devices()))


def num_threads(num_devices: int) -> int:
    """Return how many threads a client needs to avoid a deadlock."""
    return 2 if num_devices == 1 else 2 * num_devices + 1
