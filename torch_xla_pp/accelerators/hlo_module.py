"""Read a compiled `HloModuleProto`, as far as reports need it.

Numbers of fields are those of xla/service/hlo.proto and xla/xla_data.proto of OpenXLA.
"""

import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from torch_xla_pp.accelerators.compiled_program import (
    DeviceCollective,
    DeviceLayout,
)
from torch_xla_pp.protobuf import (
    WireValue,
    fields_of,
    integer_of,
    integers,
    integers_of,
    messages,
    one_field,
    packed,
    written_message,
)

_KINDS = (
    "all-reduce",
    "all-gather",
    "reduce-scatter",
    "all-to-all",
    "collective-permute",
    "collective-broadcast",
    "ragged-all-to-all",
)
# HloModuleProto.
_MODULE_NAME, _MODULE_ID = 1, 5
_COMPUTATIONS, _SIGNATURE, _ENTRY, _OUTPUT_SHARDING, _DONORS = 3, 4, 6, 12, 18
# ProgramShapeProto.
_PARAMETERS, _RESULT = 1, 2
# HloComputationProto.
_COMPUTATION_NAME, _INSTRUCTIONS, _COMPUTATION_ID = 1, 2, 5
# HloInstructionProto.
_NAME, _OPCODE, _SHAPE, _METADATA, _CALLED, _CONFIG = 1, 2, 3, 7, 38, 43
_PARAMETER_NUMBER, _CHANNEL, _TARGET, _SHARDING = 9, 26, 28, 40
_GROUPS, _PAIRS, _DEVICE_LIST, _MESH_AXES = 49, 52, 87, 93
# OpMetadata.
_OP_NAME = 2
_NUMBERED = re.compile(rb"\.\d+(?=/)")
# ShapeProto.
_ELEMENT_TYPE, _DIMENSIONS, _TUPLE_SHAPES, _LAYOUT = 2, 3, 4, 5
# LayoutProto, and TileProto.
_ORDER, _TILES_OF_LAYOUT, _TILE_SIZES = 1, 6, 1
# OpSharding.
_SHARDING_TYPE, _TILES, _DEVICES, _TUPLE_SHARDINGS, _LAST_IS_REPLICATED = 1, 3, 4, 5, 6
_IOTA_SHAPE, _IOTA_ORDER = 9, 10
_REPLICATED, _MAXIMAL, _TUPLE, _OTHER = 0, 1, 2, 3
# PrimitiveType → bits; what is not listed takes a byte or, as a token, nothing.
_BITS = {
    **{2: 8, 3: 16, 4: 32, 5: 64, 6: 8, 7: 16, 8: 32, 9: 64, 10: 16, 11: 32},
    **{12: 64, 15: 64, 16: 16, 18: 128, 21: 4, 22: 4, 1: 8, 17: 0, 14: 0},
}
_TILED = re.compile(r"\{devices=\[([\d,]+)\]([\d,]+)( last_tile_dim_replicate)?\}")
_COMPUTING = ("fusion", "custom-call", "gather", "scatter", "sort", "convolution")
# Names for values that are there already.
_FREE_CALLS = ("ConcatBitcast", "X64", "AssumeGatherIndicesInBound")
_CONTROL = ("while", "conditional", "call")
# A sum of which each device keeps a part is written as a whole one, then cut.
_SCATTERED_SUM = "all-reduce-scatter"
_ASYNCHRONOUS = "async-collective"


@dataclass(frozen=True, kw_only=True, slots=True)
class CompiledModule:
    """The parts of a compiled module that reports need.

    Args:
        cycles: See `CompiledProgram`, as the rest.
        num_timed: See there.
        num_untimed: See there.
        untimed_bytes: See there.
        collectives: See there.
        output_shardings: See there.
        argument_layouts: See there.
        result_layouts: See there.
    """

    cycles: int
    num_timed: int
    num_untimed: int
    untimed_bytes: int
    collectives: tuple[DeviceCollective, ...]
    output_shardings: tuple[str, ...]
    argument_layouts: tuple[DeviceLayout, ...]
    result_layouts: tuple[DeviceLayout, ...]

    @classmethod
    def of(cls, module: bytes) -> "CompiledModule":
        """Read an `HloModuleProto`."""
        computations = [_Computation.of(c) for c in messages(module, _COMPUTATIONS)]
        entry = next((v for n, v in fields_of(module) if n == _ENTRY), None)
        runs = _runs(computations, entry)
        timed, untimed = _timed(computations, entry, runs)
        shardings = messages(module, _OUTPUT_SHARDING)
        signature = b"".join(messages(module, _SIGNATURE)[:1])
        results = [
            part for one in messages(signature, _RESULT) for part in _leaves(one)
        ]
        return cls(
            cycles=sum(timed),
            num_timed=len(timed),
            num_untimed=len(untimed),
            untimed_bytes=sum(untimed),
            collectives=tuple(_collectives(computations, runs)),
            output_shardings=_sharding_texts(shardings[0]) if shardings else (),
            argument_layouts=tuple(map(_layout, messages(signature, _PARAMETERS))),
            result_layouts=tuple(map(_layout, results)),
        )


def module_of_dump(data: bytes) -> bytes:
    """Return the `HloModuleProto` of an `HloProto`, which XLA writes.

    Its name and number are left out, as they differ between equal programs.
    """
    module = b"".join(messages(data, 1)[:1])
    dropped = (_MODULE_NAME, _MODULE_ID)
    rest = [pair for pair in fields_of(module) if pair[0] not in dropped]
    return written_message((_MODULE_NAME, b"program"), *rest)


def with_donors(module: bytes, parameters: Sequence[int]) -> bytes:
    """Return an `HloModuleProto` that may reuse the buffers of some parameters.

    torch_xla passes these only to the compiler that it calls itself.
    """
    entries = b"".join(one_field(1, one_field(1, number)) for number in parameters)
    return module + one_field(_DONORS, entries) if parameters else module


def with_shardings(module: bytes, texts: Sequence[str]) -> bytes:
    """Return an `HloModuleProto` whose parameters are sharded as HLO texts say.

    Args:
        module: The module.
        texts: The sharding of each parameter of the entry, by its number.
    """
    entry = next((v for n, v in fields_of(module) if n == _ENTRY), None)

    def of_instruction(message: bytes) -> bytes:
        values = dict(fields_of(message))
        if values.get(_OPCODE) != b"parameter":
            return message
        number = values.get(_PARAMETER_NUMBER, 0)
        text = texts[number] if isinstance(number, int) else ""
        rest = [pair for pair in fields_of(message) if pair[0] != _SHARDING]
        return written_message(*rest, (_SHARDING, sharding_message(text)))

    def of_computation(message: bytes) -> bytes:
        numbers = [value for n, value in fields_of(message) if n == _COMPUTATION_ID]
        if numbers != [entry]:
            return message
        return _replaced(message, _INSTRUCTIONS, of_instruction)

    return _replaced(module, _COMPUTATIONS, of_computation)


def with_plain_origins(module: bytes) -> bytes:
    """Return an `HloModuleProto` whose operations have names without numbers.

    torch_xla numbers scopes through the whole process, and records its own source
    lines, so that equal programs would differ. What is left is `scope/operation`.
    """

    def of_instruction(message: bytes) -> bytes:
        return _replaced(message, _METADATA, of_metadata)

    def of_metadata(message: bytes) -> bytes:
        name = b"".join(messages(message, _OP_NAME)[:1])
        return one_field(_OP_NAME, _NUMBERED.sub(b"", name)) if name else b""

    def of_computation(message: bytes) -> bytes:
        return _replaced(message, _INSTRUCTIONS, of_instruction)

    return _replaced(module, _COMPUTATIONS, of_computation)


def sharding_message(text: str) -> bytes:
    """Return an `OpSharding` for HLO text with listed devices.

    Raises:
        ValueError: It is some other text.
    """
    if text == "{replicated}":
        return one_field(_SHARDING_TYPE, _REPLICATED)
    match = _TILED.fullmatch(text)
    if match is None:
        raise ValueError(
            f"sharding: expected {{replicated}} or listed devices such as "
            f"{{devices=[2,1]0,1}}, got {text!r}. Shard the value over all devices."
        )
    tiles, devices = ([int(n) for n in match[i].split(",")] for i in (1, 2))
    found = one_field(_SHARDING_TYPE, _OTHER) + one_field(_TILES, packed(tiles))
    found += one_field(_DEVICES, packed(devices))
    return found + (one_field(_LAST_IS_REPLICATED, 1) if match[3] else b"")


def _replaced(message: bytes, number: int, change: Callable[[bytes], bytes]) -> bytes:
    """Return a message with all values of one field changed."""
    fields = fields_of(message)
    return written_message(
        *(
            (n, change(v) if n == number and isinstance(v, bytes) else v)
            for n, v in fields
        )
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class _Instruction:
    name: str
    opcode: str
    called: tuple[int, ...]
    values: Mapping[int, list[WireValue]] = field(repr=False)

    @classmethod
    def of(cls, message: bytes) -> "_Instruction":
        values: dict[int, list[WireValue]] = {}
        for number, value in fields_of(message):
            values.setdefault(number, []).append(value)
        return cls(
            name=_text(values, _NAME),
            opcode=_text(values, _OPCODE),
            called=integers(values.get(_CALLED, [])),
            values=values,
        )

    def message(self, number: int) -> bytes:
        """Return a field that is a message, empty if it is not there."""
        found = self.values.get(number, [b""])[0]
        return found if isinstance(found, bytes) else b""

    @property
    def cycles(self) -> int | None:
        """Return what the compiler expects the instruction to take, if it says so."""
        text = _text(self.values, _CONFIG)
        if "estimated_cycles" not in text:
            return None
        config = json.loads(text)
        found = config.get("window_config", config).get("estimated_cycles")
        return None if found is None else int(found)

    @property
    def computes(self) -> bool:
        """Return whether it takes time of its own, judged by its name."""
        is_free = _text(self.values, _TARGET).startswith(_FREE_CALLS)
        is_end = self.name.startswith(_ASYNCHRONOUS)
        return self.opcode in _COMPUTING and not is_free and not is_end

    @property
    def trip_count(self) -> int:
        """Return how often it runs what it calls, as far as that is known."""
        text = _text(self.values, _CONFIG)
        if self.opcode != "while" or "known_trip_count" not in text:
            return 1
        return max(1, int(json.loads(text)["known_trip_count"]["n"]))


@dataclass(frozen=True, kw_only=True, slots=True)
class _Computation:
    number: int
    name: str
    instructions: tuple[_Instruction, ...]

    @classmethod
    def of(cls, message: bytes) -> "_Computation":
        numbers = [v for n, v in fields_of(message) if n == _COMPUTATION_ID]
        found = messages(message, _INSTRUCTIONS)
        number = numbers[0] if numbers and isinstance(numbers[0], int) else 0
        name = b"".join(messages(message, _COMPUTATION_NAME)[:1]).decode()
        return cls(
            number=number, name=name, instructions=tuple(map(_Instruction.of, found))
        )


def _runs(
    computations: Sequence[_Computation], entry: WireValue | None
) -> dict[int, int]:
    """Return how often each computation runs; those that nothing calls are left out.

    A loop of unknown length counts once, and so does each branch of a condition.
    """
    found = {entry: 1} if isinstance(entry, int) else {}
    # What is called is written before what calls it.
    for computation in reversed(computations):
        times = found.get(computation.number, 0)
        for instruction in computation.instructions if times else ():
            for number in set(instruction.called):
                more = times * instruction.trip_count
                found[number] = found.get(number, 0) + more
    return found


def _timed(
    computations: Sequence[_Computation],
    entry: WireValue | None,
    runs: Mapping[int, int],
) -> tuple[list[int], list[int]]:
    """Return cycles of what has them, and bytes of results of what has none.

    What is inside a fusion is part of it. Exchanges are in neither.
    """
    known = {c.number: c for c in computations}
    exchanging = {c.number for c in computations if any(map(_kind, c.instructions))}
    waiting = [known[entry]] if isinstance(entry, int) and entry in known else []
    seen, timed, untimed = {entry}, [], []
    while waiting:
        computation = waiting.pop()
        times = runs[computation.number]
        for instruction in computation.instructions:
            found = instruction.cycles
            if found is not None:
                timed.append(found * times)
            elif instruction.computes and not (
                exchanging.intersection(instruction.called)
            ):
                untimed.append(_shape_bytes(instruction.message(_SHAPE)) * times)
            if instruction.opcode in _CONTROL:
                new = [n for n in instruction.called if n in known and n not in seen]
                seen.update(new)
                waiting += [known[n] for n in new]
    return timed, untimed


def _kind(instruction: _Instruction) -> str:
    """Return the kind of an exchange, empty if it is none."""
    kind = instruction.opcode.removesuffix("-start")
    return kind if kind in _KINDS else ""


def _collectives(
    computations: Sequence[_Computation], runs: Mapping[int, int]
) -> list[DeviceCollective]:
    """Return all exchanges; a start stands for the pair with its end.

    An exchange that goes on beside several fusions is written in each of them, with the
    number of one channel.
    """
    callers = {n: i for c in computations for i in c.instructions for n in i.called}
    found: dict[tuple[str, object], DeviceCollective] = {}
    for computation in computations:
        caller = callers.get(computation.number)
        is_hidden = caller is not None and _is_asynchronous(caller)
        for place, instruction in enumerate(computation.instructions):
            kind = _kind(instruction)
            if not kind:
                continue
            groups, num_bytes = _groups(instruction), _result_bytes(instruction)
            if computation.name.startswith(_SCATTERED_SUM) and groups:
                kind, num_bytes = "reduce-scatter", num_bytes // len(groups[0])
            one = DeviceCollective(
                kind=kind,
                groups=groups,
                num_bytes=num_bytes,
                is_asynchronous=is_hidden or _is_asynchronous(instruction),
                origin=_origin(instruction.message(_METADATA)),
                times=runs.get(computation.number, 1),
            )
            channel = instruction.values.get(_CHANNEL, [0])[0]
            key = kind, channel or (computation.number, place)
            found.setdefault(key, one)
            if one.is_asynchronous:
                found[key] = replace(found[key], is_asynchronous=True)
    return list(found.values())


def _is_asynchronous(instruction: _Instruction) -> bool:
    is_fused = instruction.opcode == "fusion" and "async" in instruction.name
    return is_fused or instruction.opcode.endswith("-start")


def _groups(instruction: _Instruction) -> tuple[tuple[int, ...], ...]:
    listed = [v for v in instruction.values.get(_GROUPS, []) if isinstance(v, bytes)]
    pairs = [v for v in instruction.values.get(_PAIRS, []) if isinstance(v, bytes)]
    if pairs:
        return tuple((integer_of(pair, 1), integer_of(pair, 2)) for pair in pairs)
    devices = instruction.message(_DEVICE_LIST)
    if devices:
        iota = messages(devices, 2)
        if iota:
            return _of_iota(iota[0])
        listed = messages(devices, 1)
    if instruction.message(_MESH_AXES):
        return _of_mesh_axes(instruction.message(_MESH_AXES))
    return tuple(integers_of(group, 1) for group in listed)


def _of_iota(message: bytes) -> tuple[tuple[int, ...], ...]:
    """Return the groups of an `IotaReplicaGroupListProto`."""
    ids = _iota(integers_of(message, 3), integers_of(message, 4))
    size = integer_of(message, 2) or 1
    return tuple(tuple(ids[i : i + size]) for i in range(0, len(ids), size))


def _of_mesh_axes(message: bytes) -> tuple[tuple[int, ...], ...]:
    """Return the groups along some axes of a mesh, none if parts of axes are meant."""
    mesh, chosen = messages(message, 1)[0], messages(message, 2)
    sizes = [integer_of(axis, 2) for axis in messages(mesh, 1)]
    is_plain = all(n == 1 for n, _ in fields_of(mesh))
    if not is_plain or any(messages(axis, 2) for axis in chosen):
        return ()
    along = [integer_of(axis, 1) for axis in chosen]
    rest = [dim for dim in range(len(sizes)) if dim not in along]
    ids = _iota(sizes, [*rest, *along])
    size = math.prod(sizes[dim] for dim in along)
    return tuple(tuple(ids[i : i + size]) for i in range(0, len(ids), size))


def _iota(shape: Sequence[int], order: Sequence[int]) -> list[int]:
    """Return 0, 1, 2, … in a shape, its dimensions permuted."""
    strides = [math.prod(shape[i + 1 :]) for i in range(len(shape))]
    found = [0]
    for dim in order or range(len(shape)):
        found = [base + k * strides[dim] for base in found for k in range(shape[dim])]
    return found


def _result_bytes(instruction: _Instruction) -> int:
    """Return the bytes of a result.

    The result of a start includes its operand, and is followed by some contexts.
    """
    shape = instruction.message(_SHAPE)
    parts = messages(shape, _TUPLE_SHAPES)
    if instruction.opcode.endswith("-start") and len(parts) > 1:
        return _shape_bytes(parts[1])
    return _shape_bytes(shape)


def _shape_bytes(shape: bytes) -> int:
    parts = messages(shape, _TUPLE_SHAPES)
    if parts:
        return sum(map(_shape_bytes, parts))
    bits = _BITS.get(integer_of(shape, _ELEMENT_TYPE), 8)
    return -(-math.prod(integers_of(shape, _DIMENSIONS)) * bits // 8)


def _leaves(shape: bytes) -> list[bytes]:
    """Return the arrays of a result, which may be a tuple."""
    parts = messages(shape, _TUPLE_SHAPES)
    return [leaf for part in parts for leaf in _leaves(part)] if parts else [shape]


def _layout(shape: bytes) -> DeviceLayout:
    layout = b"".join(messages(shape, _LAYOUT)[:1])
    tiles = messages(layout, _TILES_OF_LAYOUT)
    return DeviceLayout(
        bits=_BITS.get(integer_of(shape, _ELEMENT_TYPE), 8),
        order=integers_of(layout, _ORDER),
        tile=integers_of(tiles[0], _TILE_SIZES) if tiles else (),
    )


def _origin(metadata: bytes) -> str:
    """Return an `OpMetadata` as text: the operation, and where it was called."""
    values = {n: v for n, v in fields_of(metadata) if isinstance(v, bytes)}
    texts = [values.get(n, b"").decode(errors="replace") for n in (2, 3)]
    line = integer_of(metadata, 4)
    if texts[1] and line:
        texts[1] += f":{line}"
    return " at ".join(filter(None, texts))


def _sharding_texts(sharding: bytes) -> tuple[str, ...]:
    if integer_of(sharding, _SHARDING_TYPE) == _TUPLE:
        parts = messages(sharding, _TUPLE_SHARDINGS)
        return tuple(text for part in parts for text in _sharding_texts(part))
    return (_sharding_text(sharding),)


def _sharding_text(sharding: bytes) -> str:
    """Return an `OpSharding` as HLO text, as `hlo.parse_sharding` reads it."""
    kind = integer_of(sharding, _SHARDING_TYPE)
    devices = integers_of(sharding, _DEVICES)
    if kind == _MAXIMAL:
        return f"{{maximal device={devices[0]}}}"
    if kind != _OTHER:
        return "{replicated}"
    if not devices:
        shape, order = (
            integers_of(sharding, _IOTA_SHAPE),
            integers_of(sharding, _IOTA_ORDER),
        )
        devices = tuple(_iota(shape, order))
    tiles = ",".join(map(str, integers_of(sharding, _TILES)))
    last = " last_tile_dim_replicate" * integer_of(sharding, _LAST_IS_REPLICATED)
    return f"{{devices=[{tiles}]{','.join(map(str, devices))}{last}}}"


def _text(values: Mapping[int, list[WireValue]], number: int) -> str:
    found = values.get(number, [b""])[0]
    return found.decode(errors="replace") if isinstance(found, bytes) else ""
