"""The instructions of a module's entry, to be written again in another form.

Numbers of fields are those of xla/service/hlo.proto and xla/xla_data.proto of OpenXLA.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from torch_xla_pp.protobuf import (
    WireValue,
    fields_of,
    integer_of,
    integers,
    integers_of,
    messages,
    written_message,
)

# HloModuleProto.
_MODULE_NAME, _ENTRY_NAME, _COMPUTATIONS, _SIGNATURE, _ENTRY = 1, 2, 3, 4, 6
# HloComputationProto.
_COMPUTATION_NAME, _INSTRUCTIONS, _OWN_SIGNATURE, _COMPUTATION_ID, _ROOT = 1, 2, 4, 5, 6
# HloInstructionProto.
_NAME, _OPCODE, _SHAPE, _PARAMETER_NUMBER, _TUPLE_INDEX = 1, 2, 3, 9, 13
_DIMENSIONS, _SLICES, _TARGET, _ID, _OPERANDS = 14, 17, 28, 35, 36
_CALLED, _SHARDING, _CONFIG, _LAYOUTS, _ALIASES = 38, 40, 43, 57, 74
# SliceDimensions.
_START, _STRIDE = 1, 3
# ProgramShapeProto.
_PARAMETERS, _RESULT, _PARAMETER_NAMES = 1, 2, 3
# XLA keeps what is before the dot.
_PLACED = b"placed.0"
# Custom calls that return their operand where there is one device.
_SAME = ("Sharding", "SPMDFullToShardShape", "SPMDShardToFullShape")
# ShapeProto, and a type of elements.
_ELEMENT_TYPE, _SIZES, _TUPLE_SHAPES, _TUPLE = 2, 3, 4, 13


@dataclass(kw_only=True, slots=True)
class Instruction:
    """An instruction.

    Args:
        number: Its own; computations are numbered with them.
        opcode: What it does.
        operands: Numbers of what it reads.
        values: Its fields.
    """

    number: int
    opcode: str
    operands: tuple[int, ...]
    values: list[tuple[int, WireValue]] = field(repr=False)

    @classmethod
    def of(cls, message: bytes) -> "Instruction":
        """Read an `HloInstructionProto`."""
        values = [*fields_of(message)]
        operands = integers([v for n, v in values if n == _OPERANDS])
        found = cls(number=0, opcode="", operands=operands, values=values)
        found.number, found.opcode = found.integer(_ID), found.text(_OPCODE)
        return found

    @classmethod
    def new(
        cls,
        opcode: str,
        number: int,
        shape: bytes,
        operands: Sequence[int] = (),
        *others: tuple[int, WireValue],
    ) -> "Instruction":
        """Make one.

        Args:
            opcode: What it does.
            number: Its own.
            shape: A `ShapeProto` of its result.
            operands: Numbers of what it reads.
            others: More fields.
        """
        values: list[tuple[int, WireValue]] = [
            (_NAME, f"placed.{number}".encode()),
            (_OPCODE, opcode.encode()),
            (_SHAPE, shape),
            (_ID, number),
            *others,
        ]
        return cls(
            number=number, opcode=opcode, operands=tuple(operands), values=values
        )

    @classmethod
    def parameter(cls, number: int, shape: bytes, place: int) -> "Instruction":
        """Make the parameter of a place."""
        return cls.new("parameter", number, shape, (), (_PARAMETER_NUMBER, place))

    @classmethod
    def element(
        cls, number: int, shape: bytes, source: int, place: int
    ) -> "Instruction":
        """Make what takes a result out of several."""
        return cls.new(
            "get-tuple-element", number, shape, (source,), (_TUPLE_INDEX, place)
        )

    def integer(self, number: int) -> int:
        """Return a field, 0 if it is not there."""
        found = [v for n, v in self.values if n == number and isinstance(v, int)]
        return found[-1] if found else 0

    def messages(self, number: int) -> list[bytes]:
        """Return all values of a field that are bytes."""
        return [v for n, v in self.values if n == number and isinstance(v, bytes)]

    def text(self, number: int) -> str:
        """Return a field that is a text, empty if it is not there."""
        return b"".join(self.messages(number)[:1]).decode()

    @property
    def shape(self) -> bytes:
        """The `ShapeProto` of its result."""
        return self.messages(_SHAPE)[0]

    @property
    def place(self) -> int:
        """Which parameter it is, or which of several results it takes."""
        is_parameter = self.opcode == "parameter"
        return self.integer(_PARAMETER_NUMBER if is_parameter else _TUPLE_INDEX)

    @property
    def is_view(self) -> bool:
        """Whether it shows its operand in another form, on one device."""
        return self.opcode in ("reshape", "transpose") or self.text(_TARGET) in _SAME

    @property
    def cut_at(self) -> int | None:
        """Where it begins to cut a piece out of a flat value; None if it does not."""
        if self.opcode != "slice" or len(self.messages(_SLICES)) != 1:
            return None
        cut = dict(fields_of(self.messages(_SLICES)[0]))
        start = cut.get(_START, 0)
        return start if isinstance(start, int) and cut.get(_STRIDE, 1) == 1 else None

    def shown(self, view: Tensor) -> Tensor | None:
        """Return what a view shows of a value that is one of others.

        Args:
            view: A tensor without data, of the form that it shows.

        Returns:
            Likewise, None where that is no view: it has another order of numbers.
        """
        if self.opcode == "transpose":
            dims = integers([v for n, v in self.values if n == _DIMENSIONS])
            return view.permute(dims)
        try:
            return view.view(sizes_of(self.shape))
        except RuntimeError:
            return None

    def written(self, renamed: Mapping[int, int]) -> bytes:
        """Return an `HloInstructionProto` without sharding.

        Args:
            renamed: Number of an operand → that of what stands for it.
        """
        dropped = (_OPERANDS, _SHARDING)
        rest = [pair for pair in self.values if pair[0] not in dropped]
        operands = [(_OPERANDS, renamed.get(n, n)) for n in self.operands]
        return written_message(*rest, *operands)


class HandlerCall(NamedTuple):
    """A call of a handler, as the only instruction of a computation.

    Attributes:
        target: The name of the handler.
        config: Its attributes.
        operands: A `ShapeProto` of each operand.
        results: Likewise of each result.
        is_in_place: Whether its result takes the memory of its last operand.
    """

    target: str
    config: str
    operands: list[bytes]
    results: list[bytes]
    is_in_place: bool


class ValueReader(NamedTuple):
    """What reads a value, as it is or in another form.

    Attributes:
        instruction: It.
        place: Which of its operands it is.
        is_all: Whether the form has all numbers in the same order.
        views: Numbers of the instructions between, which change the form.
    """

    instruction: Instruction
    place: int
    is_all: bool
    views: tuple[int, ...]


class Entry:
    """The entry of a module for one device.

    Args:
        module: An `HloModuleProto`.

    Attributes:
        instructions: In an order in which they can run.
        by_number: The same, by their numbers.
        root: The last one, which makes a tuple of all results.
        parameters: A `ShapeProto` of each parameter.
        last_number: The largest number of an instruction or a computation.
    """

    def __init__(self, module: bytes) -> None:
        self._computations = {
            integer_of(one, _COMPUTATION_ID): one
            for one in messages(module, _COMPUTATIONS)
        }
        self._number = integer_of(module, _ENTRY)
        own = self._computations[self._number]
        self.instructions = [*map(Instruction.of, messages(own, _INSTRUCTIONS))]
        self.by_number = {one.number: one for one in self.instructions}
        self.root = self.by_number[integer_of(own, _ROOT)]
        self.parameters = messages(messages(module, _SIGNATURE)[0], _PARAMETERS)
        self.last_number = max(*self.by_number, *self._computations)
        self._users: dict[int, list[tuple[Instruction, int]]] = {}
        for one in self.instructions:
            for place, operand in enumerate(one.operands):
                self._users.setdefault(operand, []).append((one, place))

    def users(self, number: int) -> list[Instruction]:
        """Return the instructions that read a value."""
        return [one for one, _ in self._users.get(number, ())]

    def source(self, number: int) -> Instruction:
        """Return what makes a value that is shown in other forms."""
        one = self.by_number[number]
        while one.is_view:
            one = self.by_number[one.operands[0]]
        return one

    def readers(self, number: int) -> Iterator[ValueReader]:
        """Yield what reads a value, or a view of it."""
        sizes = sizes_of(self.by_number[number].shape)
        whole: Tensor | None = torch.empty(sizes, device="meta")
        waiting: list[tuple[int, Tensor | None, tuple[int, ...]]] = [
            (number, whole, ())
        ]
        while waiting:
            number, view, views = waiting.pop()
            for one, place in self._users.get(number, ()):
                if one.is_view:
                    shown = None if view is None else one.shown(view)
                    waiting.append((one.number, shown, (*views, one.number)))
                else:
                    is_all = view is not None and view.is_contiguous()
                    yield ValueReader(one, place, is_all, views)

    def handler_call(self, one: Instruction) -> HandlerCall | None:
        """Return the call of a handler that an instruction is, None if it is none."""
        if one.opcode != "call":
            return None
        (called,) = _called(one)
        inner = messages(self._computations[called], _INSTRUCTIONS)
        *parameters, call = map(Instruction.of, inner)
        is_alone = all(other.opcode == "parameter" for other in parameters)
        if call.opcode != "custom-call" or not is_alone:
            return None
        return HandlerCall(
            target=call.text(_TARGET),
            config=call.text(_CONFIG),
            operands=call.messages(_LAYOUTS),
            results=messages(call.shape, _TUPLE_SHAPES) or [call.shape],
            is_in_place=bool(call.messages(_ALIASES)),
        )

    def result_shapes(self) -> list[bytes]:
        """Return a `ShapeProto` of each result."""
        return messages(self.root.shape, _TUPLE_SHAPES)

    def module(
        self,
        instructions: Sequence[Instruction],
        parameters: Sequence[bytes],
        results: Sequence[tuple[int, bytes]],
        renamed: Mapping[int, int],
    ) -> bytes:
        """Return an `HloModuleProto` whose entry has other instructions.

        Args:
            instructions: They; those that nothing reads are left out.
            parameters: A `ShapeProto` of each parameter.
            results: Number and `ShapeProto` of each result.
            renamed: Number of an operand → that of what stands for it.
        """
        shapes = [shape for _, shape in results]
        whole = written_message(
            (_ELEMENT_TYPE, _TUPLE), *((_TUPLE_SHAPES, s) for s in shapes)
        )
        numbers = [number for number, _ in results]
        root = Instruction.new("tuple", self.root.number, whole, numbers)
        found = _needed([*instructions, root], renamed)
        names = [f"parameter.{i}".encode() for i in range(len(parameters))]
        signature = written_message(
            *((_PARAMETERS, shape) for shape in parameters),
            (_RESULT, whole),
            *((_PARAMETER_NAMES, name) for name in names),
        )
        entry = written_message(
            (_COMPUTATION_NAME, _PLACED),
            *((_INSTRUCTIONS, one.written(renamed)) for one in found),
            (_OWN_SIGNATURE, signature),
            (_COMPUTATION_ID, self._number),
            (_ROOT, root.number),
        )
        called = self._called_by(found)
        # What is called comes before what calls it.
        others = [one for number, one in self._computations.items() if number in called]
        return written_message(
            (_MODULE_NAME, _PLACED),
            (_ENTRY_NAME, _PLACED),
            *((_COMPUTATIONS, one) for one in (*others, entry)),
            (_SIGNATURE, signature),
            (_ENTRY, self._number),
        )

    def _called_by(self, instructions: Iterable[Instruction]) -> set[int]:
        """Return the computations that instructions call, at any depth."""
        seen: set[int] = set()
        waiting = [*instructions]
        while waiting:
            for number in {*_called(waiting.pop())} - seen:
                seen.add(number)
                inner = messages(self._computations[number], _INSTRUCTIONS)
                waiting += map(Instruction.of, inner)
        return seen


def sizes_of(shape: bytes) -> tuple[int, ...]:
    """Return the dimensions of a `ShapeProto`."""
    return integers_of(shape, _SIZES)


def type_of(shape: bytes) -> int:
    """Return the type of elements of a `ShapeProto`."""
    return integer_of(shape, _ELEMENT_TYPE)


def _called(one: Instruction) -> tuple[int, ...]:
    return integers([v for n, v in one.values if n == _CALLED])


def _needed(
    instructions: Sequence[Instruction], renamed: Mapping[int, int]
) -> list[Instruction]:
    """Return those that the last one reads at any depth, and all parameters."""
    needed = {instructions[-1].number}
    for one in reversed(instructions):
        if one.number in needed:
            needed.update(renamed.get(n, n) for n in one.operands)
    return [
        one for one in instructions if one.number in needed or one.opcode == "parameter"
    ]
