"""Which variables give each rank of a host its own chips. Untested on the devices.

Every rank must be a world of its own: a client that sees some chips of the host, and
no other process. Each kind of devices has variables that say so to its clients; they
differ from rank to rank.

Sources: for TPU https://gist.github.com/skye/f82ba45d2445bb19d53545538754f9a3, for
Neuron https://awsdocs-neuron.readthedocs-hosted.com/en/latest/neuron-runtime/api/
nrt-env-var-reference.html and torch_xla's `_internal/neuron.py`, which reads the rest.
"""

import re
from collections.abc import Callable, Mapping

_HOST = re.compile(r"(?P<kind>\w+):(?P<count>\d+)")
_TPU_PORT, _NEURON_PORT = 8476, 62182
# Chips of a rank on a host with 2x2 chips → the shape of the block that they are.
_BLOCKS = {1: "1,1,1", 2: "1,2,1", 4: "2,2,1"}


def own_chips(host: str, local_rank: int, num_ranks: int) -> dict[str, str]:
    """Return the variables of one rank.

    Args:
        host: The kind of devices, and how many the host has: "tpu:4" for chips,
            "neuron:32" for cores.
        local_rank: Which of the host's ranks it is.
        num_ranks: How many ranks the host has.

    Raises:
        ValueError: There is no such kind, or ranks do not share the host evenly.

    Example:
        >>> own_chips("tpu:4", 1, 2)["TPU_VISIBLE_CHIPS"]
        '2,3'
    """
    match = _HOST.fullmatch(host)
    if match is None or match["kind"] not in _KINDS:
        raise ValueError(
            f"TORCH_XLA_PP_CHIPS: expected one of {', '.join(_KINDS)} and a count, got "
            f"{host!r}. Write e.g. tpu:4 for a host with four chips."
        )
    count = int(match["count"])
    if count < 1 or num_ranks < 1 or count % num_ranks:
        raise ValueError(
            f"TORCH_XLA_PP_CHIPS: expected {count} devices that {num_ranks} ranks of "
            "the host share evenly, got a remainder. Start another number of ranks."
        )
    if not 0 <= local_rank < num_ranks:
        raise ValueError(
            f"TORCH_XLA_PP_CHIPS: expected a local rank below {num_ranks}, got "
            f"{local_rank}. Start the job by torchrun."
        )
    own = count // num_ranks
    first = local_rank * own
    return {
        name: str(value)
        for name, value in _KINDS[match["kind"]](first, own, local_rank).items()
    }


def _of_tpu(first: int, count: int, local_rank: int) -> Mapping[str, object]:
    if count not in _BLOCKS:
        raise ValueError(
            f"TORCH_XLA_PP_CHIPS: expected ranks of {', '.join(map(str, _BLOCKS))} TPU "
            f"chips, as other blocks of a host are not documented, got {count}. Set "
            "the variables yourself, see docs/how-to/tpu-and-neuron.md."
        )
    port = _TPU_PORT + local_rank
    return {
        "PJRT_DEVICE": "TPU",
        "TPU_VISIBLE_CHIPS": ",".join(map(str, range(first, first + count))),
        "TPU_CHIPS_PER_PROCESS_BOUNDS": _BLOCKS[count],
        "TPU_PROCESS_BOUNDS": "1,1,1",
        "TPU_PROCESS_ADDRESSES": f"localhost:{port}",
        "TPU_PROCESS_PORT": port,
        "CLOUD_TPU_TASK_ID": 0,
    }


def _of_neuron(first: int, count: int, local_rank: int) -> Mapping[str, object]:
    last = first + count - 1
    return {
        "PJRT_DEVICE": "NEURON",
        "XLA_USE_SPMD": 1,
        "NEURON_RT_VISIBLE_CORES": first if count == 1 else f"{first}-{last}",
        "NEURON_PJRT_PROCESSES_NUM_DEVICES": count,
        "NEURON_PJRT_PROCESS_INDEX": 0,
        "NEURON_RT_ROOT_COMM_ID": f"localhost:{_NEURON_PORT + local_rank}",
    }


_KINDS: Mapping[str, Callable[[int, int, int], Mapping[str, object]]] = {
    "tpu": _of_tpu,
    "neuron": _of_neuron,
}
