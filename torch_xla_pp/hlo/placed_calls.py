"""Let calls of handlers write their results, and read their operands, in larger values.

Each result and each parameter of a program costs some time. So results that calls make
may be pieces of one flat value, and so may parameters that calls read: handlers get an
address, and need not know what lies around it. Nothing is copied.

A flat value that calls write to goes through all of them, in the order of the module:
each takes it, and returns it in the same memory. A call that only reads a piece passes
it on as well, so that XLA need not ask whether it reads before others write, where it
would copy the whole value. So a result is a piece only if nothing but calls reads it.

Results may also replace pieces of a parameter, whose memory the flat value then keeps:
a call that takes the memory of such a piece for its result writes it where it lies, and
what others make is copied there at the end.

A call that notes when a program has ended reads none of its operands, but waits for
them. It waits for a flat value where it waits for pieces of it, and comes last.

Numbers of fields are those of xla/service/hlo.proto of OpenXLA.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from torch_xla_pp.hlo.entry import (
    Entry,
    HandlerCall,
    Instruction,
    ValueReader,
    sizes_of,
    type_of,
)
from torch_xla_pp.hlo.written_call import (
    CallShape,
    aliasing_message,
    shape_message,
    tuple_message,
)

# HloInstructionProto.
_METADATA, _TARGET, _CONFIG, _IS_LAID_OUT = 7, 28, 43, 56
_LAYOUTS, _ALIASES, _API = 57, 74, 77
_FLOAT, _TYPED_FFI = 11, 4
# See csrc/abi.h.
_WHOLE = -1
# Numbers in a line of the processor's caches, at which values of their own begin, too.
_LINE = 16


class Handlers(NamedTuple):
    """The handlers whose calls may read and write pieces.

    Attributes:
        prefix: What their names begin with; the name of an op and a dot follow.
        ops: Name of each op → its number.
        placed: The name of the handler that calls another op on pieces.
        copying: The number of an op that copies its operand to its only result.
        waiting: The name of a handler that waits for its operands, and reads none.
    """

    prefix: str
    ops: Mapping[str, int]
    placed: str
    copying: int
    waiting: str

    def op_of(self, target: str) -> int | None:
        """Return the number of a handler's op, None if it is another handler."""
        if not target.startswith(self.prefix):
            return None
        return self.ops.get(target.removeprefix(self.prefix).split(".")[0])


class Placed(NamedTuple):
    """A module whose calls read and write pieces of flat values of float32.

    Attributes:
        module: An `HloModuleProto`. Its parameters are those from before, then one for
            each new flat value, whose memory that takes; all of them in reverse, as
            torch_xla numbers parameters of a program from the last operand of a call
            on. Its results are the new flat values, those in the memory of parameters,
            then those from before that are no pieces.
        pieces: For each new flat value, which results it has → where they begin.
        sizes: For each, how many numbers it has, none if there are no pieces.
    """

    module: bytes
    pieces: list[dict[int, int]]
    sizes: list[int]


def place_calls(
    module: bytes,
    handlers: Handlers,
    written: Sequence[Sequence[int]],
    read: Iterable[int],
    updated: Mapping[int, Mapping[int, int]],
) -> Placed | None:
    """Let calls of a module for one device write and read pieces of flat values.

    Args:
        module: An `HloModuleProto`, whose result is a tuple.
        handlers: What may be called on pieces.
        written: For each flat value that it may make, which results may be its pieces.
            Less than two are not worth it.
        read: Numbers of the flat parameters.
        updated: Number of a flat parameter → the results that replace pieces of it →
            where these begin.

    Returns:
        The new module, None if it would be the same.
    """
    places = _Places(Entry(module), handlers)
    for results in written:
        places.write(results)
    for number in read:
        places.read(number)
    for number, begins in updated.items():
        places.update(number, begins)
    if not places.operands and not places.results and not updated:
        return None
    return Placed(_Writer(places).module(), places.pieces, places.sizes)


class _Piece(NamedTuple):
    """Where an operand or a result lies.

    Attributes:
        whole: The number of the parameter, or that of a new flat value, as
            `_written_to` returns it.
        offset: Its first number.
        sizes: Its dimensions.
    """

    whole: int
    offset: int
    sizes: tuple[int, ...]


class _Made(NamedTuple):
    """A result that a call makes.

    Attributes:
        call: The call's number.
        place: Which of its results it is.
        sizes: Its dimensions.
        readers: All that reads it.
    """

    call: int
    place: int
    sizes: tuple[int, ...]
    readers: list[ValueReader]


class _Places:
    """Where calls of a module read and write.

    Attributes:
        entry: The module's entry.
        handlers: What may be called.
        calls: The calls, by number.
        pieces: See `Placed`.
        sizes: See there.
        operands: A call and which of its operands → where that lies, if in another
            value.
        results: Likewise for results.
        updated: Numbers of the parameters of which pieces are replaced.
        copied: A result of the module → where it is copied to at the end.
        waiting: A call that waits and which of its operands → the flat value that it
            waits for in its place.
        gone: The results of the module that are pieces.
        dropped: Numbers of instructions that nothing needs then.
    """

    def __init__(self, entry: Entry, handlers: Handlers) -> None:
        self.entry, self.handlers = entry, handlers
        found = {one.number: entry.handler_call(one) for one in entry.instructions}
        self.calls: dict[int, HandlerCall] = {
            number: call
            for number, call in found.items()
            if call is not None and handlers.op_of(call.target) is not None
        }
        self.pieces: list[dict[int, int]] = []
        self.sizes: list[int] = []
        self.operands: dict[tuple[int, int], _Piece] = {}
        self.results: dict[tuple[int, int], _Piece] = {}
        self.updated: list[int] = []
        self.copied: dict[int, _Piece] = {}
        self.waiting: dict[tuple[int, int], int] = {}
        self.gone: set[int] = set()
        self.dropped: set[int] = set()

    def write(self, results: Sequence[int]) -> None:
        """Let results be pieces of a flat value, if only calls make and read them."""
        whole, begins, size = _written_to(len(self.pieces)), dict[int, int](), 0
        found = {result: made for result in results if (made := self._made(result))}
        for result, made in found.items() if len(found) > 1 else ():
            self._place(made, _Piece(whole, size, made.sizes))
            begins[result] = size
            size += -(-math.prod(made.sizes) // _LINE) * _LINE
        self.pieces.append(begins)
        self.sizes.append(size)
        self.gone.update(begins)

    def read(self, number: int) -> None:
        """Let calls read what they can of a flat parameter where it lies."""
        whole = self._parameter(number)
        for begin, readers in self._cuts(whole).items():
            for reader in readers:
                if self._reads_anywhere(reader):
                    read = reader.instruction.number
                    sizes = sizes_of(self.calls[read].operands[reader.place])
                    self.operands[read, reader.place] = _Piece(whole, begin, sizes)

    def update(self, number: int, begins: Mapping[int, int]) -> None:
        """Let results replace pieces of a flat parameter.

        Args:
            number: That of the parameter.
            begins: Which results → where they begin.
        """
        whole = self._parameter(number)
        cuts = self._cuts(whole)
        self.updated.append(whole)
        self.gone.update(begins)
        for result, begin in begins.items():
            made = self._made(result, is_in_place=True)
            if made is not None and self._takes(made.call, cuts.get(begin, ())):
                piece = _Piece(whole, begin, made.sizes)
                self._place(made, piece)
                last = len(self.calls[made.call].operands) - 1
                self.operands[made.call, last] = piece
            else:
                sizes = sizes_of(self.entry.result_shapes()[result])
                self.copied[result] = _Piece(whole, begin, sizes)

    def ordered(self) -> list[Instruction]:
        """Return all instructions but the last ones, in an order in which they can run.

        Calls that replace pieces run one after the other, so each comes as soon as what
        it reads is there, which would wait for the others, too.
        """
        replacing = {
            call for (call, _), piece in self.results.items() if piece.whole >= 0
        }
        found: dict[int, tuple[int, int]] = {}
        for place, one in enumerate(self.entry.instructions):
            is_cheap = one.opcode in ("parameter", "slice") or one.is_view
            behind = max((found[n][0] for n in one.operands), default=-1)
            is_early = is_cheap or one.number in replacing
            found[one.number] = (behind if is_early else place, place)
        for number in (self.entry.root.number, *self.last):
            del found[number]
        return [self.entry.by_number[n] for n in sorted(found, key=found.__getitem__)]

    @property
    def last(self) -> list[int]:
        """Return the calls that wait for flat values."""
        return list(dict.fromkeys(number for number, _ in self.waiting))

    def has(self, number: int) -> bool:
        """Return whether a call reads or writes pieces."""
        call = self.calls.get(number)
        if call is None:
            return False
        operands = ((number, i) in self.operands for i in range(len(call.operands)))
        results = ((number, i) in self.results for i in range(len(call.results)))
        return any(operands) or any(results)

    def _place(self, made: _Made, piece: _Piece) -> None:
        """Let a result be a piece, also where calls read it."""
        self.results[made.call, made.place] = piece
        for reader in made.readers:
            self.dropped.update(reader.views)
            read = reader.instruction.number, reader.place
            if self._waits(reader):
                self.waiting[read] = piece.whole
            elif reader.instruction is not self.entry.root:
                self.operands[read] = piece

    def _takes(self, call: int, readers: Sequence[ValueReader]) -> bool:
        """Return whether a call that takes memory takes that of a piece.

        Not if others read the piece: they would read the new one.

        Args:
            call: The call's number.
            readers: What reads the piece.
        """
        last = len(self.calls[call].operands) - 1
        found = [(x.instruction.number, x.place, x.is_all) for x in readers]
        return found == [(call, last, True)]

    def _parameter(self, number: int) -> int:
        """Return the instruction of a parameter."""
        (found,) = (
            one.number
            for one in self.entry.instructions
            if one.opcode == "parameter" and one.place == number
        )
        return found

    def _cuts(self, whole: int) -> dict[int, list[ValueReader]]:
        """Return where pieces of a value begin → what reads them."""
        found: dict[int, list[ValueReader]] = {}
        for cut in self.entry.users(whole):
            if cut.cut_at is not None:
                readers = self.entry.readers(cut.number)
                found.setdefault(cut.cut_at, []).extend(readers)
        return found

    def _made(self, result: int, *, is_in_place: bool = False) -> _Made | None:
        """Return how a result is made and read, None if it cannot be a piece.

        Args:
            result: Which one.
            is_in_place: Whether its call must take the memory of its last operand; if
                not, it must not.
        """
        entry = self.entry
        source = entry.source(entry.root.operands[result])
        is_element = source.opcode == "get-tuple-element"
        number = source.operands[0] if is_element else source.number
        call, place = self.calls.get(number), source.place if is_element else 0
        if call is None or call.is_in_place != is_in_place:
            return None
        if type_of(call.results[place]) != _FLOAT:
            return None
        if is_element and [one.place for one in entry.users(number)].count(place) > 1:
            return None
        readers = [*entry.readers(source.number)]
        for reader in readers:
            if reader.instruction is entry.root:
                if reader.place != result or not reader.is_all:
                    return None
            elif not self._reads_anywhere(reader) and not self._waits(reader):
                return None
        return _Made(number, place, sizes_of(call.results[place]), readers)

    def _waits(self, reader: ValueReader) -> bool:
        """Return whether it only waits for the value."""
        one = reader.instruction
        is_call = one.opcode == "custom-call" and reader.is_all
        return is_call and one.text(_TARGET) == self.handlers.waiting

    def _reads_anywhere(self, reader: ValueReader) -> bool:
        """Return whether it is a call that may read a piece of another value."""
        call = self.calls.get(reader.instruction.number)
        if call is None or not reader.is_all:
            return False
        is_written = call.is_in_place and reader.place == len(call.operands) - 1
        return type_of(call.operands[reader.place]) == _FLOAT and not is_written


class _Writer:
    """A module in the making, whose calls read and write pieces."""

    def __init__(self, places: _Places) -> None:
        self._places, self._entry = places, places.entry
        self._next = self._entry.last_number
        self._found: list[Instruction] = []
        # What stands for an instruction, for one of the results of a call, and for a
        # flat value that is written to.
        self._renamed: dict[int, int] = {}
        self._elements: dict[tuple[int, int], int] = {}
        self._current: dict[int, int] = {}
        self._shapes = {
            _written_to(place): _flat_shape(size)
            for place, size in enumerate(places.sizes)
            if size
        }
        for whole in places.updated:
            self._current[whole] = whole
            (size,) = sizes_of(self._entry.by_number[whole].shape)
            self._shapes[whole] = _flat_shape(size)

    def module(self) -> bytes:
        """Return the module."""
        entry = self._entry
        new = [whole for whole in self._shapes if whole < 0]
        shapes = [*entry.parameters, *map(self._shapes.__getitem__, new)]
        for place, whole in enumerate(new, len(entry.parameters)):
            self._current[whole] = self._new_number()
            self._add_parameter(self._current[whole], shapes, place)
        for one in self._places.ordered():
            if one.opcode == "parameter":
                self._add_parameter(one.number, shapes, one.place)
            elif one.number not in self._places.dropped:
                self._add(one)
        for result, piece in self._places.copied.items():
            self._copy(result, piece)
        for (number, place), whole in self._places.waiting.items():
            operand = entry.by_number[number].operands[place]
            self._renamed[operand] = self._current[whole]
        self._found += map(entry.by_number.__getitem__, self._places.last)
        results = [(self._current[w], shape) for w, shape in self._shapes.items()]
        results += [
            (number, shape)
            for i, (number, shape) in enumerate(
                zip(entry.root.operands, entry.result_shapes(), strict=True)
            )
            if i not in self._places.gone
        ]
        return entry.module(self._found, shapes[::-1], results, self._renamed)

    def _copy(self, result: int, piece: _Piece) -> None:
        """Copy a result of the module to where a piece lies."""
        whole, number = piece.whole, self._new_number()
        shape = self._shapes[whole]
        places = [self._places.handlers.copying, *_placed([None], {}, 0)]
        places += _placed([piece], {whole: 2}, 2)
        self._add_placed(
            number,
            [shape],
            [self._entry.root.operands[result], self._current[whole]],
            [self._entry.result_shapes()[result], shape],
            _with_places("", places),
            [(0, 1)],
        )
        self._current[whole] = number

    def _add_placed(
        self,
        number: int,
        made: Sequence[bytes],
        read: Sequence[int],
        read_shapes: Iterable[bytes],
        config: str,
        aliased: Iterable[tuple[int, int]],
        origins: Iterable[bytes] = (),
    ) -> None:
        """Add a call of the handler that calls another op on pieces.

        Args:
            number: The call's own.
            made: A `ShapeProto` of each result.
            read: Numbers of the operands.
            read_shapes: A `ShapeProto` of each.
            config: The attributes.
            aliased: Results and the operands whose memory they take.
            origins: What the call comes from, each an `OpMetadata`.
        """
        self._found.append(
            Instruction.new(
                "custom-call",
                number,
                tuple_message(made),
                read,
                (_TARGET, self._places.handlers.placed.encode()),
                (_CONFIG, config.encode()),
                (_IS_LAID_OUT, 1),
                *((_LAYOUTS, shape) for shape in read_shapes),
                *((_METADATA, origin) for origin in origins),
                *(
                    (_ALIASES, aliasing_message([result] * (len(made) > 1), operand))
                    for result, operand in aliased
                ),
                (_API, _TYPED_FFI),
            )
        )

    def _new_number(self) -> int:
        self._next += 1
        return self._next

    def _add_parameter(self, number: int, shapes: Sequence[bytes], place: int) -> None:
        reversed_place = len(shapes) - 1 - place
        one = Instruction.parameter(number, shapes[place], reversed_place)
        self._found.append(one)

    def _add(self, one: Instruction) -> None:
        key = None
        if one.opcode == "get-tuple-element":
            key = one.operands[0], one.place
        if self._places.has(one.number):
            self._add_call(one, self._places.calls[one.number])
        elif one.is_view and one.opcode == "custom-call":
            operand = one.operands[0]
            self._renamed[one.number] = self._renamed.get(operand, operand)
        elif key in self._elements:
            self._renamed[one.number] = self._elements[key]
        elif key not in self._places.results:
            self._found.append(one)

    def _add_call(self, one: Instruction, call: HandlerCall) -> None:
        """Add a call on pieces, and note what stands for its results."""
        operands, results = (
            [known.get((one.number, i)) for i in range(len(shapes))]
            for known, shapes in (
                (self._places.operands, call.operands),
                (self._places.results, call.results),
            )
        )
        wholes = {p.whole for p in (*operands, *results) if p is not None}
        written = sorted(wholes.intersection(self._shapes))
        # What is written to is the last of the operands, and of the results.
        flats = [*sorted(wholes.difference(written)), *written]
        plain = [i for i, piece in enumerate(operands) if piece is None]
        left = [i for i, piece in enumerate(results) if piece is None]
        read = [one.operands[i] for i in plain]
        read += [self._current.get(whole, whole) for whole in flats]
        read_shapes = [call.operands[i] for i in plain] + [*map(self._shape, flats)]
        made = [call.results[i] for i in left] + [*map(self._shape, written)]
        order = {whole: len(plain) + i for i, whole in enumerate(flats)}
        order |= {w: len(read) + len(left) + i for i, w in enumerate(written)}
        op = self._places.handlers.op_of(call.target)
        assert op is not None
        places = [op, *_placed(operands, order, 0), *_placed(results, order, len(read))]
        aliased = [
            (len(left) + i, len(read) - len(written) + i) for i in range(len(written))
        ]
        if call.is_in_place and left:
            aliased.append((0, len(plain) - 1))
        number = one.number if not written else self._new_number()
        config, origins = _with_places(call.config, places), one.messages(_METADATA)
        self._add_placed(number, made, read, read_shapes, config, aliased, origins)
        if written:
            self._take_apart(one, call, number, made, [*left, *written])

    def _take_apart(
        self,
        one: Instruction,
        call: HandlerCall,
        number: int,
        shapes: Sequence[bytes],
        which: Sequence[int],
    ) -> None:
        """Note what stands for results of a call that has been replaced.

        Args:
            one: It.
            call: What it called.
            number: That of the new one.
            shapes: Shapes of the new one's results.
            which: For each, which result it was, or the flat value that it is.
        """
        for place, (shape, result) in enumerate(zip(shapes, which, strict=True)):
            element = number
            if len(shapes) > 1:
                element = self._new_number()
                taken = Instruction.element(element, shape, number, place)
                self._found.append(taken)
            if result in self._shapes:
                self._current[result] = element
            elif len(call.results) == 1:
                self._renamed[one.number] = element
            else:
                self._elements[one.number, result] = element

    def _shape(self, whole: int) -> bytes:
        found = self._shapes.get(whole)
        return self._entry.by_number[whole].shape if found is None else found


def _written_to(place: int) -> int:
    """Return the number of a new flat value; no instruction has it."""
    return -1 - place


def _flat_shape(size: int) -> bytes:
    return shape_message(CallShape("float32", (size,)))


def _placed(
    pieces: Sequence[_Piece | None], order: Mapping[int, int], first: int
) -> list[int]:
    """Write the places of operands or of results, see csrc/abi.h.

    Args:
        pieces: Where they lie, None for values of their own.
        order: Number of a larger value → which operand or result it is.
        first: Which is the first of those that are values of their own.
    """
    found = [len(pieces)]
    for piece in pieces:
        if piece is None:
            found += [first, _WHOLE, 0]
            first += 1
        else:
            own = order[piece.whole], piece.offset, len(piece.sizes)
            found += [*own, *piece.sizes]
    return found


def _with_places(config: str, places: Sequence[int]) -> str:
    """Return attributes with one more."""
    text = f"places = array<i64: {', '.join(map(str, places))}>"
    rest = config.removeprefix("{").removesuffix("}")
    return f"{{{rest}, {text}}}" if rest else f"{{{text}}}"
