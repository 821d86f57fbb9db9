"""Compiled modules are read: cycles, exchanges, shardings."""

import pytest
from accelerators.written_hlo import (
    computation,
    instruction,
    module,
    shape,
    tuple_shape,
)

from torch_xla_pp.accelerators.compiled_program import DeviceLayout, result_bytes
from torch_xla_pp.accelerators.hlo_module import (
    CompiledModule,
    sharding_message,
    with_donors,
    with_plain_origins,
    with_shardings,
)
from torch_xla_pp.hlo import parse_sharding
from torch_xla_pp.protobuf import messages, one_field, packed

pytestmark = pytest.mark.pure

LISTED = one_field(
    87, b"".join(one_field(1, one_field(1, packed(g))) for g in ((0, 1), (2, 3)))
)
SHAPE = one_field(3, shape(8, 128))


def config(cycles: int) -> bytes:
    return one_field(43, b'{"window_config":{"estimated_cycles":"%d"}}' % cycles)


def test_an_exchange_is_read_with_its_groups_bytes_and_origin() -> None:
    metadata = one_field(2, b"aten__mm") + one_field(3, b"model.py") + one_field(4, 7)
    one = instruction("a", "all-reduce", 1, SHAPE, LISTED, one_field(7, metadata))
    (found,) = CompiledModule.of(module(computation(1, 1, one))).collectives
    assert (found.kind, found.groups) == ("all-reduce", ((0, 1), (2, 3)))
    assert found.num_bytes == 8 * 128 * 4
    assert not found.is_asynchronous
    assert found.origin == "aten__mm at model.py:7"


def test_groups_are_read_in_all_forms_that_compilers_write() -> None:
    iota = one_field(1, 2) + one_field(2, 2)
    iota += one_field(3, packed([2, 2])) + one_field(4, packed([1, 0]))
    axes = b"".join(one_field(1, one_field(1, b"a") + one_field(2, 2)) for _ in "xy")
    on_axis = one_field(1, axes) + one_field(2, b"")
    forms = {
        "listed": one_field(49, one_field(1, packed([0, 2])))
        + one_field(49, one_field(1, packed([1, 3]))),
        "iota": one_field(87, one_field(2, iota)),
        "axis": one_field(93, on_axis),
    }
    for form in forms.values():
        one = instruction("a", "all-gather", 1, SHAPE, form)
        (found,) = CompiledModule.of(module(computation(1, 1, one))).collectives
        assert found.groups == ((0, 2), (1, 3))


def test_a_permutation_has_pairs() -> None:
    pairs = b"".join(
        one_field(52, one_field(1, s) + one_field(2, t)) for s, t in ((0, 1), (1, 0))
    )
    both = one_field(3, tuple_shape(shape(8, 128), shape(8, 64), shape()))
    one = instruction("a", "collective-permute-start", 1, both, pairs)
    end = instruction("b", "collective-permute-done", 2, SHAPE)
    (found,) = CompiledModule.of(module(computation(1, 2, one, end))).collectives
    assert found.groups == ((0, 1), (1, 0))
    assert found.is_asynchronous
    assert found.num_bytes == 8 * 64 * 4


def test_an_exchange_inside_of_an_asynchronous_call_is_asynchronous() -> None:
    inner = computation(2, 1, instruction("a", "all-to-all", 1, SHAPE, LISTED))
    for name, opcode in (("s", "async-start"), ("async-collective-fusion.1", "fusion")):
        call = instruction(name, opcode, 3, SHAPE, one_field(38, packed([2])))
        found = CompiledModule.of(module(inner, computation(1, 3, call)))
        assert [c.is_asynchronous for c in found.collectives] == [True]
    call = instruction("fusion.1", "fusion", 3, SHAPE, one_field(38, packed([2])))
    found = CompiledModule.of(module(inner, computation(1, 3, call)))
    assert [c.is_asynchronous for c in found.collectives] == [False]


def test_an_exchange_beside_several_fusions_is_counted_once() -> None:
    channel = one_field(26, 7)
    calls, insides = [], []
    for number, name in enumerate(("async-collective-start", "f", "f.1"), 2):
        one = instruction("a", "all-gather", number, SHAPE, LISTED, channel)
        insides.append(computation(number, number, one))
        callee = one_field(38, packed([number]))
        calls.append(instruction(name, "fusion", 10 + number, SHAPE, callee))
    alone = [instruction(n, "all-gather", 20, SHAPE, LISTED) for n in "bc"]
    entry = computation(1, 10, *calls, *alone)
    found = CompiledModule.of(module(entry, *insides)).collectives
    assert [c.is_asynchronous for c in found] == [False, False, True]


def test_shardings_are_given_to_the_parameters_of_the_entry() -> None:
    old = one_field(40, sharding_message("{devices=[4,1]0,1,2,3}"))
    inner = computation(2, 1, instruction("p", "parameter", 1, SHAPE))
    entry = computation(
        1,
        1,
        instruction("p1", "parameter", 2, one_field(9, 1), SHAPE),
        instruction("p0", "parameter", 1, SHAPE, old),
        instruction("r", "add", 3, SHAPE),
    )
    texts = ["{replicated}", "{devices=[2,1,2]0,2,1,3 last_tile_dim_replicate}"]
    found = messages(with_shardings(module(inner, entry), texts), 3)
    assert found[0] == inner
    given = [messages(row, 40) for row in messages(found[1], 2)]
    assert given == [[sharding_message(texts[1])], [sharding_message(texts[0])], []]


@pytest.mark.parametrize(
    "text",
    [
        "{replicated}",
        "{devices=[4,1]0,1,2,3}",
        "{devices=[2,1,2]0,2,1,3 last_tile_dim_replicate}",
    ],
)
def test_a_sharding_is_written_and_read(text: str) -> None:
    written = module(more=one_field(12, sharding_message(text)))
    assert CompiledModule.of(written).output_shardings == (text,)


def test_a_sharding_over_unlisted_devices_is_refused() -> None:
    with pytest.raises(ValueError, match="expected {replicated} or listed devices"):
        sharding_message("{manual}")


def test_cycles_are_those_of_what_runs_without_the_insides_of_fusions() -> None:
    inside = computation(2, 1, instruction("a", "convolution", 1, SHAPE, config(1000)))
    body = computation(3, 2, instruction("b", "fusion", 2, SHAPE, config(20)))
    called = one_field(38, packed([2]))
    entry = computation(
        1,
        3,
        instruction("f", "fusion", 3, SHAPE, called, config(300)),
        instruction("g", "fusion", 4, SHAPE, called),
        instruction("w", "while", 5, SHAPE, one_field(38, packed([3]))),
        instruction("t", "tuple", 6, SHAPE),
    )
    found = CompiledModule.of(module(inside, body, entry))
    assert (found.cycles, found.num_timed, found.num_untimed) == (320, 2, 1)


def test_shardings_of_results_are_texts_that_are_read_again() -> None:
    rows = one_field(1, 3) + one_field(3, packed([2, 1, 2]))
    rows += one_field(4, packed(range(4))) + one_field(6, 1)
    turned = one_field(1, 3) + one_field(3, packed([2, 2]))
    turned += one_field(9, packed([2, 2])) + one_field(10, packed([1, 0]))
    both = one_field(1, 2) + b"".join(one_field(5, s) for s in (rows, turned, b""))
    found = CompiledModule.of(module(more=one_field(12, both))).output_shardings
    assert found == (
        "{devices=[2,1,2]0,1,2,3 last_tile_dim_replicate}",
        "{devices=[2,2]0,2,1,3}",
        "{replicated}",
    )
    tiles = [parse_sharding(text).tile_of_device(4) for text in found]
    assert tiles == [(0, 0, 1, 1), (0, 2, 1, 3), (0, 0, 0, 0)]


def test_donated_parameters_are_added_to_a_module() -> None:
    plain = module()
    assert with_donors(plain, []) == plain
    (donors,) = messages(with_donors(plain, [0, 300]), 18)
    assert messages(donors, 1) == [one_field(1, 0), one_field(1, 300)]


def test_a_loop_counts_as_often_as_it_runs() -> None:
    inner = computation(2, 1, instruction("a", "fusion", 1, SHAPE, config(10)))
    exchange = instruction("b", "all-gather", 2, SHAPE, LISTED)
    called = one_field(38, packed([2]))
    known = one_field(43, b'{"known_trip_count":{"n":"3"}}')
    loop = instruction("w", "while", 3, SHAPE, called, known)
    outer = computation(3, 3, loop, exchange)
    twice = one_field(43, b'{"known_trip_count":{"n":"2"}}')
    whole = instruction("x", "while", 4, SHAPE, one_field(38, packed([3])), twice)
    found = CompiledModule.of(module(inner, outer, computation(1, 4, whole)))
    assert (found.cycles, found.num_timed) == (60, 1)
    assert [one.times for one in found.collectives] == [2]


def test_exchanges_and_names_for_values_are_not_missed_among_cycles() -> None:
    inner = computation(2, 1, instruction("a", "all-gather", 1, SHAPE, LISTED))
    free = one_field(28, b"ConcatBitcast")
    entry = computation(
        1,
        5,
        instruction("f", "fusion", 2, SHAPE, one_field(38, packed([2]))),
        instruction("async-collective-done", "fusion", 3, SHAPE),
        instruction("c", "custom-call", 4, SHAPE, free),
        instruction("g", "gather", 5, SHAPE),
    )
    found = CompiledModule.of(module(inner, entry))
    assert (found.num_untimed, found.untimed_bytes) == (1, 8 * 128 * 4)


def test_a_sum_that_is_cut_at_once_is_a_reduce_scatter() -> None:
    whole = instruction("a", "all-reduce", 1, SHAPE, LISTED)
    inner = one_field(1, b"all-reduce-scatter.1") + computation(2, 1, whole)
    call = instruction("f", "fusion", 2, SHAPE, one_field(38, packed([2])))
    (found,) = CompiledModule.of(module(inner, computation(1, 2, call))).collectives
    assert (found.kind, found.num_bytes) == ("reduce-scatter", 8 * 128 * 4 // 2)


def test_layouts_of_arguments_and_results_are_read_with_their_tiles() -> None:
    tiles = one_field(6, one_field(1, packed([8, 128])))
    tiles += one_field(6, one_field(1, packed([2, 1])))
    tiled = one_field(2, 16) + one_field(3, packed([3, 200]))
    tiled += one_field(5, one_field(1, packed([1, 0])) + tiles)
    signature = one_field(1, tiled) + one_field(1, shape(5))
    signature += one_field(2, tuple_shape(shape(5, 7), tiled))
    found = CompiledModule.of(module(more=one_field(4, signature)))
    padded = DeviceLayout(bits=16, order=(1, 0), tile=(8, 128))
    assert found.argument_layouts == (padded, DeviceLayout(bits=32, order=(0,)))
    assert found.result_layouts == (DeviceLayout(bits=32, order=(1, 0)), padded)


def test_an_array_takes_whole_tiles() -> None:
    rows = DeviceLayout(bits=16, order=(1, 0), tile=(8, 128))
    assert rows.num_bytes((3, 200)) == 8 * 256 * 2
    turned = DeviceLayout(bits=32, order=(0, 1), tile=(8, 128))
    assert turned.num_bytes((200, 3)) == 8 * 256 * 4
    assert DeviceLayout(bits=32, order=(), tile=(128,)).num_bytes(()) == 128 * 4
    assert DeviceLayout(bits=8, order=(0, 1)).num_bytes((3, 5)) == 15


def test_several_results_have_a_table() -> None:
    assert result_bytes([5], 512) == 5
    assert result_bytes([1024, 1024], 512) == 2048 + 512
    assert result_bytes([0] * 11, 32) == 64
    assert result_bytes([0] * 129, 512) == 1024


def test_names_of_operations_lose_what_differs_between_equal_programs() -> None:
    metadata = one_field(1, b"aten__mm") + one_field(2, b"op7.19/aten__add.1/aten__mm")
    metadata += one_field(3, b"lowering.py") + one_field(4, 12)
    one = instruction("a", "all-gather", 1, SHAPE, LISTED, one_field(7, metadata))
    bare = instruction("b", "all-gather", 2, SHAPE, LISTED)
    plain = with_plain_origins(module(computation(1, 2, one, bare)))
    found = CompiledModule.of(plain).collectives
    assert [c.origin for c in found] == ["op7/aten__add/aten__mm", ""]
