"""The only place that touches private parts of torch_xla.

Everything here is a thin, typed name for one private call of torch_xla 2.9, so that a
new version of torch_xla needs changes in one file only. A *sharding* is an opaque
`_XLAC.OpSharding`; its *text* is the HLO notation, e.g. `{devices=[2,1]0,1}`, and the
empty text means that the tensor has no annotation.
"""

import contextlib
import functools
import hashlib
import importlib
import itertools
import logging
import math
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, NewType

import torch
import torch_xla
import torch_xla.core.xla_model as xm
import torch_xla.debug.metrics as metrics
import torch_xla.runtime as xr
from torch import Tensor
from torch_xla.core.xla_builder import create_placeholder_tensor
from torch_xla.distributed.spmd import XLAShardedTensor

from torch_xla_pp import env

_XLAC = torch_xla._XLAC

OpSharding = Any
GraphHash = NewType("GraphHash", bytes)

MAX_IN_FLIGHT = 24
"""How many programs may be enqueued and not have ended."""

_REPLICATED = 0
_MANUAL = 4
_TYPED_FFI = 4
_CALLED = "torch_xla_pp::call"
_ON_HOST = {"_xla_compute_type": "host"}
_SEED_FACTOR = 214013
_SEED_TERM = 2531011
_SEED_RANGE = 1 << 64

# In an analysis of torch_xla, for one device; a GB has 2**30 bytes there.
_SIZE = re.compile(r"Analysis: (?P<what>[\w ]+) size: (?P<size>[\d.]+) GB")

_logger = logging.getLogger(__name__)


def enable_spmd() -> None:
    """Switch this process to SPMD and create its client, once.

    The client must exist before autograd runs: the engine sizes its queues by the
    number of devices, which torch_xla reports as zero until then.
    """
    if not xr.is_spmd():
        xr.use_spmd()
    _XLAC._init_computation_client()


def has_client() -> bool:
    """Return whether this process has an XLA client."""
    return bool(_XLAC._xla_runtime_is_initialized())


def is_spmd() -> bool:
    """Return whether SPMD is switched on in this process."""
    return bool(xr.is_spmd())


def num_local_devices() -> int:
    """Return the number of XLA devices of this process."""
    return int(xr.addressable_runtime_device_count())


@functools.cache
def replicated_sharding() -> OpSharding:
    """Return the sharding of a value that every local device holds whole."""
    return _XLAC.OpSharding([], [], [], _REPLICATED)


def sharding_texts(tensors: Sequence[Tensor]) -> list[str]:
    """Return the HLO text of each tensor's sharding, empty for none."""
    return list(_XLAC._get_xla_sharding_specs(list(tensors)))


def op_sharding(tensor: Tensor) -> OpSharding | None:
    """Return the sharding of `tensor`, None if it has none."""
    return _XLAC._get_xla_op_sharding(tensor)


def is_replicated(tensor: Tensor) -> bool:
    """Return whether every local device holds the whole of `tensor`."""
    return _XLAC._get_xla_sharding_type(tensor) in (None, _REPLICATED)


def annotate(tensor: Tensor, sharding: OpSharding) -> None:
    """Give `tensor` a sharding, in place.

    Pending values get a constraint in their graph, without a transfer; values that
    are on the device are downloaded and uploaded again.
    """
    _XLAC._xla_mark_sharding(tensor, sharding)


def forget_sharding(tensor: Tensor) -> None:
    """Remove the sharding of a replicated tensor, so that it may get another."""
    _XLAC._xla_clear_sharding(tensor)


def constrain(value: Tensor, sharding: OpSharding) -> Tensor:
    """Return a pending copy of `value` that is sharded as `sharding`.

    Values on the device are moved by the program that computes the copy; they keep
    their own sharding.
    """
    value = value.detach().clone()
    _XLAC._xla_annotate_custom_sharding(value, sharding)
    return value


def product(
    left: Tensor,
    right: Tensor,
    sums: tuple[Sequence[int], Sequence[int]],
    batch: Sequence[int] = (),
) -> Tensor:
    """Multiply tensors of any dimensions.

    Args:
        left: A tensor.
        right: Another one.
        sums: The dimensions of each that are summed over, in pairs.
        batch: Dimensions that both have and that stay.

    Returns:
        A tensor with dimensions `batch`, the others of `left`, those of `right`.
    """
    numbers = ((list(sums[0]), list(sums[1])), (list(batch), list(batch)))
    result: Tensor = _XLAC._xla_dot_general(left, right, numbers)
    return result


def are_pending(tensors: Sequence[Tensor]) -> list[bool]:
    """Return for each tensor whether its value still has to be computed."""
    return list(_XLAC._check_tensor_need_materialization(list(tensors)))


def is_of_whole_values(value: Tensor) -> bool:
    """Return whether a value is pending, and computed only from replicated ones."""
    if not are_pending([value])[0]:
        return False
    _ids, sources = graph_parameters([value])
    return all(map(is_replicated, sources))


def materialize(tensors: Sequence[Tensor]) -> None:
    """Put `tensors` on the device, with one program for the pending ones.

    Other pending values are left alone. Returns when the program is enqueued.
    """
    if tensors:
        _in_flight().add_one()
        _XLAC._xla_sync_multi(list(tensors), [], False, True)


def sync_all() -> None:
    """Compute every pending value of the process in one program."""
    _in_flight().add_one()
    torch_xla.sync(reset_scope=False)


def num_compilations() -> int:
    """Return how many programs this process has compiled."""
    return metrics.counter_value("UncachedCompile") or 0


def num_enqueued() -> int:
    """Return how many programs were enqueued; all but the last 24 have ended."""
    return _in_flight().total


def wait_device() -> None:
    """Wait until the device has run every program that was enqueued."""
    xm.wait_device_ops()
    _in_flight().count = 0


class _InFlight:
    """The programs that were enqueued and may not have ended.

    A launch waits, on a thread of the client's pool, while 32 programs of its device
    have not ended; and memory grows with the number of programs that wait. So there are
    never that many: a call that would enqueue one too many waits first.

    Attributes:
        count: The most programs.
        total: All that were ever enqueued.
    """

    def __init__(self) -> None:
        self.count = self.total = 0

    def add_one(self) -> None:
        """Wait until another program may be enqueued."""
        if self.count >= MAX_IN_FLIGHT:
            wait_device()
        self.count += 1
        self.total += 1


@functools.cache
def _in_flight() -> _InFlight:
    """Return the count of this process."""
    return _InFlight()


def flush() -> None:
    """Wait until every local device has run every program that was enqueued.

    `wait_device` may return while other devices than the first still run. Before SPMD
    is switched on, which creates the client, nothing was.
    """
    if not is_spmd():
        return
    if num_local_devices() == 1:
        wait_device()
        return
    value = replicate(torch.zeros(1)) + 1
    annotate(value, replicated_sharding())
    read_shards([value])


def shown_as(name: str) -> contextlib.AbstractContextManager[Any]:
    """Give the block a name in torch's and XLA's profilers; costs 1 µs without them.

    The public `torch_xla.debug.profiler.Trace` also names the operations traced inside,
    which costs a hundred times as much, and torch's `record_function` takes 20 µs or
    more also while its profiler is off.
    """
    in_xlas = _XLAC.profiler.TraceMe(name)
    if not torch.autograd.profiler._is_profiler_enabled:
        return in_xlas  # type: ignore[no-any-return]
    both = contextlib.ExitStack()
    both.enter_context(in_xlas)
    both.enter_context(torch.profiler.record_function(name))
    return both


def read_shards(tensors: Sequence[Tensor]) -> list[list[Tensor]]:
    """Copy each local device's shard of every tensor to the host, waiting once.

    Returns for each tensor one CPU tensor per local device, padding included, or a
    single one if it is replicated. Waits for everything that was enqueued.
    """
    materialize(tensors)
    wait_device()
    return [_host_shards(tensor.detach()) for tensor in tensors]


def _host_shards(tensor: Tensor) -> list[Tensor]:
    """Read one tensor; by `.cpu()` only if it has no sharding.

    Under SPMD `.cpu()` gathers, with a program that is compiled at every call.
    """
    if _XLAC._get_xla_sharding_type(tensor) is None:
        return [tensor.cpu()]
    shards = [shard for shard, _device in _XLAC._get_local_shards([tensor])[0]]
    return shards[:1] if is_replicated(tensor) else shards


def read_ready(tensor: Tensor) -> list[Tensor]:
    """Copy each local device's shard of device data to the host, as `read_shards` does.

    Waits only for that value, without the interpreter's lock: any thread may call.
    """
    if is_replicated(tensor) and num_local_devices() > 1:
        # Reads only the first device, and compiles nothing.
        return [tensor.detach().cpu()]
    return _host_shards(tensor.detach())


def wait_launched(tensor: Tensor) -> None:
    """Wait until the previous program is launched; any thread may call.

    Until then `read_ready` may find no buffers of that program's results. `tensor` must
    be device data.
    """
    _XLAC._xla_sync_multi([tensor], [], False, True)


def copies(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Copy device data on the devices, by one program, with the shardings of `tensors`.

    Returns when the program is enqueued. Uneven copies are replicated.
    """
    found = [constrain(tensor, sharding_of(tensor)) for tensor in tensors]
    materialize(found)
    return found


def from_local_shards(
    shards: Sequence[Tensor], sharding: OpSharding, shape: Sequence[int]
) -> Tensor:
    """Upload CPU shards, one per local device, as one XLA tensor.

    Args:
        shards: One tensor per local device, or a single one that all replicate.
        sharding: The sharding of the result.
        shape: The shape of the whole tensor.
    """
    if len(shards) == 1:
        shards = [shards[0]] * _num_shards()
    result: Tensor = _XLAC._global_tensor_from_cpu_shards(
        list(shards), sharding, list(shape)
    )
    return result


@functools.cache
def _num_shards() -> int:
    """Return the number of local devices, with a client if there was none."""
    enable_spmd()
    return num_local_devices()


def replicate(value: Tensor) -> Tensor:
    """Upload a CPU tensor to all local devices."""
    return from_local_shards([value], replicated_sharding(), value.shape)


def replace_value(tensor: Tensor, value: Tensor) -> None:
    """Replace the data and sharding of `tensor` by those of `value`, device data.

    `tensor` remains the same object, with its `grad` and its hooks; nothing is computed
    or copied, and a value that does not divide evenly stays split. Views of the old
    data keep it.
    """
    tensor.data = value
    torch.autograd.graph.increment_version(tensor)


def sharding_of(tensor: Tensor) -> OpSharding:
    """Return the sharding of `tensor`; no annotation counts as replicated."""
    return op_sharding(tensor) or replicated_sharding()


def data_handles(tensors: Sequence[Tensor]) -> list[int]:
    """Return the handle of the device buffers behind each tensor."""
    return list(_XLAC._get_tensors_handle(list(tensors)))


def graph_parameters(outputs: Sequence[Tensor]) -> tuple[list[int], list[Any]]:
    """Return ids and values of the device data that pending `outputs` read.

    The values are tensors, in the order of the program's parameters. Waits until the
    previous program is launched: the process ends where a value has no buffers yet.
    """
    wait_launched(_any_data())
    ids, values = _XLAC._get_tensors_xla_device_data_node(list(outputs))
    return list(ids), list(values)


class ExtraBytes(NamedTuple):
    """What a run of a program takes on a device beside its arguments, to about a KiB.

    Attributes:
        results: Bytes of results that do not reuse arguments.
        temporary: Bytes of temporary values.
    """

    results: int = 0
    temporary: int = 0

    @property
    def num_bytes(self) -> int:
        """Return all of them."""
        return self.results + self.temporary


class CompiledGraph(NamedTuple):
    """A compiled graph, with its text and memory as far as they are known.

    Attributes:
        hash: Key by which it is run.
        hlo: Its HLO after partitioning and optimization. torch_xla does not expose that
            text; it is known only where XLA dumps it (`--xla_dump_to` and
            `--xla_dump_hlo_as_text` in `XLA_FLAGS` from the start), and None elsewhere.
        extra: What a run takes on a device beside its arguments; zero if torch_xla does
            not write its analyses to a file.
    """

    hash: GraphHash
    hlo: str | None
    extra: ExtraBytes


def compile_graph(outputs: Sequence[Tensor]) -> CompiledGraph:
    """Compile the graph of pending `outputs`."""
    before = _dumped()
    graph_hash = GraphHash(_XLAC._get_graph_hash(list(outputs)))
    _XLAC._xla_warm_up_cache(list(outputs), [])
    new = sorted(_dumped() - before)
    if new:
        _texts()[graph_hash] = new[-1].read_text()
    return CompiledGraph(graph_hash, _texts().get(graph_hash), _extra_of(graph_hash))


def is_mistaken(outputs: Sequence[Tensor]) -> bool:
    """Return whether torch_xla confuses the graph of pending `outputs` with another.

    Its hash of a graph does not distinguish which of several equal operands is used
    again: `(a - b) * a` and `(a - b) * b` have the same one, and the program that was
    compiled first would run for both. Graphs are compared with those that were asked
    for.
    """
    graph_hash = GraphHash(_XLAC._get_graph_hash(list(outputs)))
    digest = hashlib.sha256(hlo_module(outputs)).digest()
    return _digests().setdefault(graph_hash, digest) != digest


@functools.cache
def _digests() -> dict[GraphHash, bytes]:
    """Return a digest of the HLO behind each hash; one for the process."""
    return {}


@functools.cache
def _texts() -> dict[GraphHash, str]:
    """Return the HLO of each graph that was dumped.

    One mapping for the process, as torch_xla compiles equal graphs once.
    """
    return {}


def _extra_of(graph_hash: GraphHash) -> ExtraBytes:
    """Return the bytes of a graph beside its arguments, by torch_xla's analyses."""
    path = env.analyses()
    try:
        text = "" if path is None else path.read_text()
    except OSError as error:
        _logger.debug("%s is not readable: %s", path, error)
        return ExtraBytes()
    # A number without leading zeros.
    number = graph_hash[::-1].hex().lstrip("0")
    _, is_there, rest = text.rpartition(f"Graph Hash: {number}\n")
    own, _, _ = rest.partition("Graph Hash: ")
    sizes = {m["what"]: float(m["size"]) for m in _SIZE.finditer(own)}
    if not is_there or not sizes:
        return ExtraBytes()
    results = sizes["Graph output"] - sizes["Aliased Input"]
    temporary = sizes["Intermediate tensor"]
    return ExtraBytes(round(results * 2**30), round(temporary * 2**30))


def _dumped() -> set[Path]:
    """Return the HLO texts that XLA has dumped so far."""
    folders = re.findall(r"--xla_dump_to=(\S+)", os.environ.get("XLA_FLAGS", ""))
    return set(Path(folders[-1]).glob("*after_optimizations.txt")) if folders else set()


@contextlib.contextmanager
def donating(tensors: Sequence[Tensor]) -> Iterator[None]:
    """Let programs that are compiled inside reuse the buffers of `tensors`.

    Every run of such a program then consumes the buffers of those arguments; reading
    such a tensor afterwards raises.
    """
    if not tensors:
        yield
        return
    before = _XLAC._xla_get_enable_alias_with_buffer_donor_config()
    _XLAC._xla_set_enable_alias_with_buffer_donor_config(True)
    try:
        for tensor in tensors:
            _XLAC._set_buffer_donation(tensor, True)
        yield
    finally:
        for tensor in tensors:
            _XLAC._set_buffer_donation(tensor, False)
        _XLAC._xla_set_enable_alias_with_buffer_donor_config(before)


def new_values(looks: Sequence[tuple[torch.Size, torch.dtype]]) -> list[Tensor]:
    """Return replicated zeros of these shapes and dtypes; nothing is compiled."""
    return [replicate(torch.zeros(size, dtype=dtype)) for size, dtype in looks]


def tie(pending: Tensor, others: Sequence[Tensor]) -> Tensor:
    """Return `pending` as a value that depends on all of `others`, still pending.

    So the others are parameters of the program, and `donating` them gives their buffers
    to results of the same size.

    A barrier refuses shapes that torch_xla notes with the layout of an operand, as that
    of `view_as_real`; a flat value has its own.
    """
    flat = pending.reshape(-1)
    copies = [value.detach().clone() for value in others]
    _XLAC._xla_optimization_barrier_([flat, *copies])
    return flat.reshape(pending.shape)


def is_wrapped(value: Tensor) -> bool:
    """Return whether a tensor is torch_xla's wrapper around a sharded one."""
    return isinstance(value, XLAShardedTensor)


def unwrapped(value: Tensor) -> Tensor:
    """Return the sharded tensor in a wrapper."""
    result: Tensor = value.global_tensor  # type: ignore[attr-defined]
    return result


def run_graph(graph_hash: GraphHash, parameters: Sequence[Tensor]) -> list[Tensor]:
    """Enqueue a compiled graph on `parameters`, which must be device data.

    The call waits for the launch of the previous program, which lasts as long as that
    program if XLA considers it cheap, and holds the interpreter's lock for that time:
    if that program receives a value, the sender might never get the messages of this
    rank. So this waits before the call, without the lock, whatever the parameters are.
    """
    _in_flight().add_one()
    wait_launched(_any_data())
    return list(_XLAC._run_cached_graph(graph_hash, list(parameters)))


@functools.cache
def _any_data() -> Tensor:
    """Return a value that is on the device."""
    return replicate(torch.zeros(1))


def seed_id() -> int:
    """Return the id under which a graph's parameters list the random seed."""
    return int(_XLAC._get_seed_info_id())


def seed_tensor(seed: int) -> Tensor:
    """Return `seed` as a program parameter; the process's own seed stays as it is."""
    with fixed_seed(seed):
        result: Tensor = _XLAC._get_base_seed_as_tensor(str(torch_xla.device()))
        return result


@functools.lru_cache(maxsize=256)
def _draws(count: int) -> tuple[int, int]:
    """Return the factor and the summand of `count` random operations on the seed.

    These are the constants of torch_xla's generator of seeds.
    """
    factor, term = 1, 0
    for _ in range(count):
        factor, term = factor * _SEED_FACTOR, term * _SEED_FACTOR + _SEED_TERM
    return factor % _SEED_RANGE, term % _SEED_RANGE


def advanced_seed(seed: int, count: int) -> int:
    """Return the seed that `count` random operations make of `seed`."""
    factor, term = _draws(count)
    return (seed * factor + term) % _SEED_RANGE


@contextlib.contextmanager
def fixed_seed(seed: int) -> Iterator[None]:
    """Let random operations that are traced inside start from `seed`.

    Only a seed that was set right before is listed under `seed_id` in a graph.
    """
    previous = xm.get_rng_state()
    xm.set_rng_state(seed)
    try:
        yield
    finally:
        xm.set_rng_state(previous)


@contextlib.contextmanager
def noting_origins() -> Iterator[None]:
    """Write the operation of each instruction into programs that are traced inside."""
    before = _XLAC._get_ir_debug()
    _XLAC._set_ir_debug(True)
    try:
        yield
    finally:
        _XLAC._set_ir_debug(before)


def origin_scope(name: str) -> contextlib.AbstractContextManager[Any]:
    """Prefix the names of operations traced inside, if origins are noted.

    Args:
        name: Letters and digits; others may be replaced.
    """
    if not _XLAC._get_ir_debug():
        return contextlib.nullcontext()
    return _in_scope(name)


@contextlib.contextmanager
def _in_scope(name: str) -> Iterator[None]:
    held = _XLAC.profiler.scope_pusher(name)
    try:
        yield
    finally:
        del held


def device() -> torch.device:
    """Return the XLA device, which under SPMD stands for all local ones."""
    return torch.device(str(torch_xla.device()))


def sharding_from_args(
    tile_assignment: Any,
    group_assignment: Any,
    replication_groups: Any,
    sharding_type: int,
) -> OpSharding:
    """Make a sharding from the arguments that `parse_sharding` reads from its text."""
    return _XLAC.OpSharding(
        tile_assignment, group_assignment, replication_groups, sharding_type
    )


def mesh_sharding_args(mesh: Any, partition: Sequence[Any]) -> tuple[Any, ...]:
    """Return the arguments of `OpSharding` for a partition over a torch_xla mesh."""
    return tuple(mesh._get_op_sharding_args(tuple(partition)))


def library_path() -> Path:
    """Return torch_xla's compiled library, which has XLA in it."""
    return Path(_XLAC.__file__).resolve()


def to_shards(value: Tensor, sharding: OpSharding) -> Tensor:
    """Enter the part of a graph that is written for one device.

    The value is first sharded by `sharding`.
    """
    value = value.clone()
    _XLAC._xla_mark_sharding(value, sharding)
    shards: Tensor = _XLAC._spmd_full_to_shard_shape(value)
    return shards


def from_shards(
    shards: Tensor, sharding: OpSharding, shape: Sequence[int], dtype: torch.dtype
) -> Tensor:
    """Leave the part of a graph that is written for one device."""
    value: Tensor = _XLAC._spmd_shard_to_full_shape(
        shards, sharding, list(shape), dtype
    )
    return value


def flatten_shards(values: Sequence[Tensor], shardings: Sequence[OpSharding]) -> Tensor:
    """Enter the part of a graph for one device, with values put one after another.

    Args:
        values: Values of one dtype.
        shardings: The shardings that they first get.

    Returns:
        Each device's parts of the values, of one dimension.
    """
    shards = [to_shards(v, s) for v, s in zip(values, shardings, strict=True)]
    return manual(torch.cat([manual(shard.reshape(-1)) for shard in shards]))


def split_shards(flat: Tensor, shapes: Sequence[Sequence[int]]) -> list[Tensor]:
    """Cut the result of `flatten_shards` into parts of some shapes, within `to_shards`.

    A remainder is dropped; if elements are missing, the beginning is repeated.
    """
    sizes = [math.prod(shape) for shape in shapes]
    missing = sum(sizes) - flat.numel()
    if missing > 0:
        times = 1 + -(-missing // flat.numel())
        flat = manual(torch.cat([flat] * times))
    ends = list(itertools.accumulate(sizes))
    return [
        manual(manual(flat[end - size : end]).reshape(list(shape)))
        for end, size, shape in zip(ends, sizes, shapes, strict=True)
    ]


def custom_call(
    target: str,
    operands: Sequence[Tensor],
    shapes: Sequence[Sequence[int]],
    dtypes: Sequence[torch.dtype],
    attributes: Mapping[str, int] | None = None,
) -> list[Tensor]:
    """Call a handler of XLA's typed FFI on each device, within `to_shards`.

    torch_xla distinguishes graphs by `target` alone: it must differ for other shapes,
    dtypes or attributes, also for shapes outside of the per-device part. Calls have no
    order but that of their data; a call with unused results is dropped.

    Operands and results of the handler are flat, in the order of rows: XLA may choose
    any order of dimensions for a buffer that has several, and does not pass it to
    handlers.

    Compilers for TPUs accept such a call, with operands of 32 bits at most, if it is
    marked as one of the host; this was compiled, but never run, see
    docs/how-to/tpu-and-neuron.md.
    """
    flat = [manual(operand.reshape(-1)) for operand in operands]
    sizes = [[math.prod(shape)] for shape in shapes]
    config = attributes_text(attributes or {})
    marks = _ON_HOST if env.device_kind() == "TPU" else {}
    results = _XLAC._xla_custom_call(
        flat, target, sizes, list(dtypes), False, config, _TYPED_FFI, marks
    )
    return [
        manual(manual(result).reshape(list(shape)))
        for result, shape in zip(results, shapes, strict=True)
    ]


def attributes_text(attributes: Mapping[str, int]) -> str:
    """Write the attributes of a call of a handler."""
    fields = ", ".join(f"{k} = {v} : i64" for k, v in attributes.items())
    return f"{{{fields}}}" if fields else ""


def call_module(
    module: bytes, operands: Sequence[Tensor], *, is_kept: bool = True
) -> list[Tensor]:
    """Run a module in a graph for one device.

    Args:
        module: An `HloModuleProto`.
        operands: A value for each of its parameters.
        is_kept: Whether to keep what is made of it for the next call.
    """
    computation = (_computation if is_kept else _new_computation)(module)
    return list(_XLAC._xla_user_computation(_CALLED, list(operands), computation))


def _new_computation(module: bytes) -> Any:
    return _XLAC._xla_op_computation_from_module_proto(_CALLED, module)


_computation = functools.cache(_new_computation)


def flash_attention(
    shards: Sequence[Tensor], is_causal: bool, scale: float, is_forward: bool
) -> tuple[Tensor, ...]:
    """Call torch_xla's kernel of attention for TPUs on each device, within `to_shards`.

    Args:
        shards: Queries, keys and values. For a backward, before them the gradient of
            the output, and after them all results of the forward.
        is_causal: Whether a query sees only keys up to its own place.
        scale: Factor of the scores.
        is_forward: Whether to compute it; else its gradients.

    Returns:
        The output, and for each row the sum of exponentials and the maximum; or the
        gradients of queries, keys and values.
    """
    kernels = importlib.import_module("torch_xla.experimental.custom_kernel")
    no_segments = (None, None)
    with _kernels_for_tpu():
        if is_forward:
            return tuple(
                kernels._fa_custom_forward_single_device(
                    *shards, is_causal, *no_segments, scale, None, _WANTED
                )
            )
        _, query, key, *_ = shards
        shapes = (list(query.shape), list(key.shape), None)
        options = (*no_segments, None, is_causal, scale)
        *found, _ = kernels._fa_custom_backward_single_device(
            *shards, *options, *shapes, _WANTED
        )
    return tuple(found)


# The gradients of a kernel: queries, keys and values, of ten arguments.
_WANTED = [True] * 3 + [False] * 7


@contextlib.contextmanager
def _kernels_for_tpu() -> Iterator[None]:
    """Let JAX write kernels for TPUs, whatever devices it has itself.

    torch_xla asks it for kernels for its default device, which is not the device that
    programs are compiled for here.
    """
    jax: Any = importlib.import_module("jax")
    # Modules that they import in this block would take the name for JAX's own.
    importlib.import_module("jax.experimental.pallas.ops.tpu.flash_attention")
    importlib.import_module("jax._src.pallas.mosaic.pallas_call_registration")
    jit = jax.jit

    def jit_for_tpu(*args: Any, **kwargs: Any) -> Any:
        return _KernelWriter(jit(*args, **kwargs))

    jax.jit = jit_for_tpu
    try:
        yield
    finally:
        jax.jit = jit


class _KernelWriter:
    """A jitted function of JAX that is lowered for TPUs, and otherwise unchanged."""

    def __init__(self, jitted: Any) -> None:
        self._jitted = jitted

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._jitted(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._jitted, name)

    def lower(self, *args: Any, **kwargs: Any) -> Any:
        """Return its lowered form for these arguments, in a format some weeks old.

        The library of torch_xla 2.9 is older than the version of JAX that it requires,
        and does not read the newest format of that version.
        """
        mlir = importlib.import_module("jax._src.interpreters.mlir")
        return self._jitted.trace(*args, **kwargs).lower(
            lowering_platforms=("tpu",),
            _private_parameters=mlir.LoweringParameters(for_export=True),
        )


def manual(value: Tensor) -> Tensor:
    """Mark `value` as part of a graph that is written for one device."""
    _XLAC._xla_mark_sharding(value, _XLAC.OpSharding([], [], [], _MANUAL))
    return value


@functools.cache
def composites_without_gradient() -> tuple[Any, ...]:
    """Return composite operations that torch_xla implements without their gradient.

    Operations that are gradients themselves, or no functions, are left out.

    Where a device implements a composite operation, autograd expects a gradient of it;
    torch_xla 2.9 has none, and results do not require gradients.
    """
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    found = []
    for name in sorted(torch._C._dispatch_get_all_op_names()):
        is_composite = has(name, "CompositeImplicitAutograd") and has(name, "XLA")
        is_internal = name.startswith("aten::_") or name.endswith("_backward")
        if is_composite and not is_internal and not has(name, "AutogradXLA"):
            base, _, overload = name.removeprefix("aten::").partition(".")
            packet = getattr(torch.ops.aten, base)
            found.append(getattr(packet, overload or "default"))
    is_out = [any(x.is_out for x in op._schema.arguments) for op in found]
    return tuple(op for op, has_out in zip(found, is_out, strict=True) if not has_out)


@contextlib.contextmanager
def in_autograd(functions: Mapping[Any, Callable[..., Any]]) -> Iterator[None]:
    """Replace operations on XLA by functions where gradients are taken."""
    with torch.library._scoped_library("aten", "IMPL") as library:
        for op, function in functions.items():
            library.impl(op.name().removeprefix("aten::"), function, "AutogradXLA")
        yield


def num_host_operations() -> int:
    """Return how many operations have run on the host, having no XLA implementation."""
    names = _XLAC._get_executed_fallback_ops()
    return sum(_XLAC._xla_counter_value(name) or 0 for name in names)


def placeholder(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Return a tensor on the device without a buffer, to trace programs with."""
    return create_placeholder_tensor(tuple(shape), dtype)  # type: ignore[no-any-return]


def sharding_text(sharding: OpSharding, num_dims: int) -> str:
    """Return the HLO text of a sharding of values with so many dimensions."""
    value = placeholder((1,) * num_dims, torch.float32)
    return sharding_texts([constrain(value, sharding)])[0]


def hlo_module(outputs: Sequence[Tensor]) -> bytes:
    """Return the HLO of pending `outputs` as an `HloModuleProto`, not partitioned."""
    return bytes(_XLAC._get_xla_tensors_hlo_proto(list(outputs)))


@contextlib.contextmanager
def lowering_for(kind: str) -> Iterator[None]:
    """Let operations be lowered to HLO for other devices than the process has.

    torch_xla asks for the kind in some operations, once its client is made.
    """
    before = os.environ.get("PJRT_DEVICE", "")
    _XLAC._init_computation_client()
    os.environ["PJRT_DEVICE"] = kind
    try:
        yield
    finally:
        os.environ["PJRT_DEVICE"] = before


def hlo_text(outputs: Sequence[Tensor]) -> str:
    """Return the HLO of pending `outputs`, before partitioning."""
    return str(_XLAC._get_xla_tensors_hlo(list(outputs)))


def is_lowered(value: Tensor) -> bool:
    """Return whether torch_xla can write a pending value as HLO."""
    try:
        hlo_text([value])
    except Exception:
        return False
    return True
