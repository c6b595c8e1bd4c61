"""Operations of a backend: their data is exact, their truth is theirs alone, and what is wrong is named."""

import gzip
import itertools
import json
import random
from collections import Counter
from collections.abc import Callable
from fractions import Fraction

import pytest
import torch
from torch import Tensor

from conformance.chapters.backend.crossed.scenarios import CELLS
from conformance.programs.held import resident_bytes
from conformance.programs.operations.arithmetic import misrounded
from conformance.programs.operations.cell import AXES, REDUCTIONS, Cell, distinct
from conformance.programs.operations.data import (
    ALL,
    FLOATS,
    INTEGERS,
    MOST_RANKS,
    bits,
    dtype_of,
    extremes,
    numbers,
    reduced,
    roundings,
    sentinel,
)
from conformance.programs.operations.description import CALLED, OPERATIONS, SUMMED, Block, Operation, Place
from conformance.programs.operations.generators import Generators
from conformance.programs.operations.judging import Truth, without_reading, wrong_values
from conformance.programs.operations.memory import LAYOUTS, WHOLE, Arena, shaped
from conformance.programs.operations.pairs import covered, paired_cells, possible
from conformance.run.needs import lacks_of, needs_of
from conformance.scenario import Scenario
from conformance.spec.catalogue import load_catalogue
from conformance.spec.profile import in_profile
from conformance.suite import load_scenarios
from conformance.truth.difference import equal_values

CPU = torch.device("cpu")


def own_scenarios() -> tuple[Scenario, ...]:
    return in_profile("backend", load_scenarios(), load_catalogue())


#: What is tried with any number of ranks, and in which dtypes.
OF_MANY_RANKS = {"SUM": (*FLOATS, *INTEGERS), "MAX": (*FLOATS, *INTEGERS), "AVG": ("float32", "float64")}


@pytest.mark.parametrize("dtype", [*FLOATS, *INTEGERS])
@pytest.mark.parametrize(
    ("op", "factor"), [*((op, 4.0) for op in REDUCTIONS), ("PREMUL_SUM", 0.5), ("PREMUL_SUM", -3.0)]
)
@pytest.mark.parametrize("data", ["numbers", "extremes", "roundings"])
@pytest.mark.parametrize("size", [4, MOST_RANKS, 60])
def test_reductions_are_the_same_in_every_order(size: int, data: str, dtype: str, op: str, factor: float) -> None:
    """Otherwise a backend that adds up in another order would be called wrong."""
    if not Cell("all_reduce", dtype, op, data=data).is_possible or (
        size > MOST_RANKS and (data != "numbers" or dtype not in OF_MANY_RANKS.get(op, ()))
    ):
        return
    make = {"numbers": numbers, "extremes": extremes, "roundings": roundings}[data]
    parts = [make(dtype, op, 64, source=rank, target=ALL, turn=0, size=size) for rank in range(size)]
    expected = reduced(parts, op, factor)
    for order in ([*range(size)], [*reversed(range(size))], [3, 1, 0, 2, *range(size - 1, 3, -1)]):
        total = parts[order[0]].clone() * (factor if op == "PREMUL_SUM" else 1)
        for rank in order[1:]:
            part = parts[rank] * (factor if op == "PREMUL_SUM" else 1)
            if op in ("SUM", "AVG", "PREMUL_SUM"):
                total = total + part
            elif op == "PRODUCT":
                total = total * part
            elif op in ("MAX", "MIN"):
                total = torch.maximum(total, part) if op == "MAX" else torch.minimum(total, part)
            else:
                total = {"BAND": total & part, "BOR": total | part, "BXOR": total ^ part}[op]
        assert bool(equal_values(expected, total / size if op == "AVG" else total).all())


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(("op", "done"), [("SUM", Fraction.__add__), ("PRODUCT", Fraction.__mul__)])
def test_roundings_err_both_ways_as_often(dtype: str, op: str, done: Callable[[Fraction, Fraction], Fraction]) -> None:
    parts = [roundings(dtype, op, 1000, source=rank, target=ALL, turn=1, size=2) for rank in range(2)]
    exact = [done(*map(Fraction, pair)) for pair in zip(*(part.tolist() for part in parts), strict=True)]
    found = reduced(parts, op).tolist()
    for is_on_side in (Fraction.__lt__, Fraction.__gt__):
        assert sum(map(is_on_side, map(Fraction, found), exact)) > 400


def test_each_wrong_rounding_has_its_words() -> None:
    parts = [roundings("bfloat16", "SUM", 1000, source=rank, target=ALL, turn=1, size=2) for rank in range(2)]
    exact = sum(part.float() for part in parts)
    words = torch.as_tensor(exact).view(torch.int32)
    for added, way in ((0, "towards zero"), (0xFFFF, "away from zero"), (0x8000, "halves away from zero")):
        got = (words + added & ~0xFFFF).view(torch.float32).bfloat16()
        assert misrounded("SUM", parts, got).endswith(way)
    assert not misrounded("SUM", parts, reduced(parts, "SUM") * 2)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int64", "uint8"])
@pytest.mark.parametrize("size", [2, 3, 5])
def test_no_reduction_can_be_taken_for_another_nor_lack_a_rank(dtype: str, size: int) -> None:
    ops = [op for op in REDUCTIONS if Cell("all_reduce", dtype, op).is_possible]
    for op in ops:
        parts = [numbers(dtype, op, 16, source=rank, target=ALL, turn=0, size=size) for rank in range(size)]
        results = {other: reduced(parts, other, 4.0) for other in ops}
        alike = [other for other in ops if other != op and torch.equal(results[other], results[op])]
        assert alike == [], f"{op} of {dtype} looks like {alike}"
        for left_out in range(size):
            rest = parts[:left_out] + parts[left_out + 1 :]
            assert not torch.equal(reduced(rest, op, 4.0), results[op]), f"{op} does not need rank {left_out}"


def test_blocks_differ_by_sender_receiver_and_round() -> None:
    blocks = [
        numbers("int32", "", 5, source=source, target=target, turn=turn, size=4)
        for source in range(4)
        for target in (ALL, 0, 1, 2, 3)
        for turn in range(3)
    ]
    assert all(not torch.equal(one, other) for one, other in itertools.combinations(blocks, 2))


def test_bits_hold_what_floating_point_numbers_can_lose() -> None:
    for name in ("float32", "float64"):
        values = bits(name, 300, source=1, target=ALL, turn=0)
        assert values.isnan().any()
        assert values.isinf().any()
        assert ((values == 0) & values.signbit()).any()
        assert ((values != 0) & (values.abs() < torch.finfo(values.dtype).tiny)).any()


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", ["float32", "uint8", "complex64", "bfloat16"])
def test_a_tensor_lies_in_its_arena_and_what_happens_round_it_is_seen(layout: str, dtype: str) -> None:
    arena = Arena.of(shaped(24, layout), dtype_of(dtype), layout, CPU)
    numel = arena.tensor.numel()
    values = numbers(dtype, "", numel, source=0, target=ALL, turn=0, size=2)
    if layout == "expanded":
        values = values[: numel // 5].repeat(5) if numel % 5 == 0 else values[: numel // 4].repeat(4)
    arena.fill(values)
    assert torch.equal(arena.tensor.reshape(-1), values.view(-1))
    assert (arena.changed(), arena.touched()) == ("", "")
    last = arena.tensor[tuple(length - 1 for length in arena.tensor.shape)]
    last.add_(1)
    assert "elements changed" in arena.changed()
    assert arena.touched() == ""
    arena.memory[-1] ^= 0x11
    assert "outside of it changed" in arena.touched()


@pytest.mark.parametrize(("layout", "apart"), [("in-one-piece", (3, 2)), ("all-but-the-last", (3, None))])
def test_those_of_a_list_may_lie_in_one_piece_but_the_last(layout: str, apart: tuple[int | None, ...]) -> None:
    arenas = Arena.list_of([(3,), (2,), (4,)], torch.float32, layout, CPU)
    starts = [one.tensor.data_ptr() // one.tensor.element_size() for one in arenas]
    assert [
        after - before == numel
        for (before, after), numel in zip(itertools.pairwise(starts), apart, strict=True)
        if numel is not None
    ] == [True] * (len(apart) - apart.count(None))
    assert (arenas[2].memory is arenas[0].memory) is (layout == "in-one-piece")


def test_those_of_a_list_may_lie_backwards_in_one_piece() -> None:
    first, second = Arena.list_of([(3,), (2,)], torch.float32, "backwards", CPU)
    assert first.tensor.data_ptr() - second.tensor.data_ptr() == 2 * first.tensor.element_size()
    for one, values in ((first, torch.ones(3)), (second, torch.ones(2))):
        one.fill(values)
    first.tensor.add_(1)
    assert ("elements changed" in first.changed(), second.changed(), second.touched()) == (True, "", "")
    assert first.tensor.untyped_storage().nbytes() == 5 * first.tensor.element_size()
    third, fourth = Arena.list_of([(3,), (2,)], torch.float32, "in-one-piece", CPU)
    third.memory[0] ^= 0x11
    assert "outside of it changed" in fourth.touched()


def test_a_tensor_may_have_all_of_its_storage() -> None:
    tensor = Arena.of((3, 2), torch.float16, WHOLE, CPU).tensor
    assert (tensor.storage_offset(), tensor.untyped_storage().nbytes()) == (0, 12)


def test_every_output_of_every_operation_is_sent_by_somebody() -> None:
    """What a rank must get is what the others' inputs hold, so that nothing right is called wrong."""
    for operation in OPERATIONS.values():
        cell = Cell(operation.name, "int64")
        for rank in range(3):
            place = Place(rank, 3, 1)
            sent = {
                (block.source, block.target, block.length)
                for other in range(3)
                for blocks in operation.inputs(Place(other, 3, 1))
                for block in blocks
            }
            for blocks in operation.outputs(place):
                assert Truth(cell, place).received(blocks).numel() == sum(7 * block.length for block in blocks)
                for block in blocks:
                    sources = [block.source] if block.source >= 0 else [0, 1, 2] if block.source == -2 else []
                    assert {(source, block.target, block.length) for source in sources} <= sent


@pytest.mark.parametrize("operation", CALLED.values(), ids=CALLED)
def test_a_call_without_the_last_rank_is_one_that_some_other_rank_cannot_end(operation: Operation) -> None:
    """Else nobody would wait for the rank that a scenario lets die, or come late."""
    for size in (2, 3):
        root = operation.root_needing(size - 1)
        assert any(operation.needs_rank(Place(rank, size, root), size - 1) for rank in range(size - 1))


def test_a_wrong_result_is_reported_by_number_index_and_actual_value() -> None:
    cell = Cell("all_reduce", "int32", "BOR", numel=4)
    truth = Truth(cell, Place(0, 3))
    (blocks,) = cell.what.outputs(truth.place)
    parts = truth.all_parts(blocks[0])
    right = truth.received(blocks)
    assert wrong_values(truth, blocks, right, "the result") == ""
    told = wrong_values(truth, blocks, reduced(parts, "SUM"), "the result")
    assert told.startswith("the result: ")
    assert told.endswith("it holds the SUM instead")
    assert "4 elements are wrong, the first at [0]: expected" in wrong_values(truth, blocks, right + 1, "the result")
    assert wrong_values(truth, blocks, torch.full_like(right, -1), "x").endswith("nothing was written")
    summed = Truth(Cell("all_reduce", "int64", numel=1), Place(0, 2))
    twice = reduced([*summed.all_parts(blocks[0]), summed.of_rank(1, blocks[0])], "SUM")
    assert wrong_values(summed, blocks, twice, "x").endswith("it holds the SUM with rank 1's part in it twice")
    assert "is 3 int32, expected 4 int32" in wrong_values(truth, blocks, right[:3], "the result")
    gather = Truth(Cell("all_gather", "int32", numel=4), Place(0, 3))
    slot = gather.cell.what.outputs(gather.place)[1]
    other = gather.received(gather.cell.what.outputs(gather.place)[2])
    assert wrong_values(gather, slot, other, "output 1").endswith("it holds rank 2's own part")
    moved = wrong_values(gather, slot, gather.received(slot).flip(0), "x")
    assert moved.endswith("; the right values stand in wrong places")
    assert without_reading(moved) + "; the right values stand in wrong places" == moved


@pytest.mark.parametrize(("cell", "mistake", "words"), [
    (Cell("all_reduce", "float64", "AVG", numel=1), lambda right: right / 2, "the sum divided by 6, not by 3, the"),
    (Cell("all_reduce", "bfloat16", "AVG"), lambda right: right * 3 / 4, "the sum divided by 4, not by 3, the group's"),
    (Cell("all_reduce", "float32"), lambda right: right * 3, "it holds the sum multiplied by 3"),
    (Cell("all_reduce", "float32"), lambda right: right / 5, "it holds the sum divided by 5"),
    (Cell("all_reduce", "int64", "MAX"), lambda right: right.double().long(), "converted to float64 and back"),
    (Cell("broadcast", "int64", numel=1), lambda right: right.int().long(), "converted to int32 and back"),
    (Cell("broadcast", "complex128"), lambda right: right.to(torch.complex64).to(right.dtype), "to complex64 and back"),
])  # fmt: skip
def test_wrong_arithmetic_is_named(cell: Cell, mistake: Callable[[torch.Tensor], torch.Tensor], words: str) -> None:
    truth = Truth(cell, Place(0, 3))
    (blocks,) = cell.what.outputs(truth.place)
    right = truth.received(blocks)
    told = wrong_values(truth, blocks, mistake(right).to(right.dtype), "x")
    assert words in told
    one_off = mistake(right).to(right.dtype)
    one_off[-1] = 3
    assert words not in wrong_values(truth, blocks, one_off, "x")  # it must explain every element


@pytest.mark.parametrize("dtype", ["uint8", "int8", "int16"])
def test_a_sum_that_stops_at_the_limits_is_not_said_to_be_unwritten(dtype: str) -> None:
    """The greatest uint8 is what outputs are filled with."""
    truth = Truth(Cell("reduce_scatter", dtype, numel=200), Place(0, 3))
    (blocks,) = truth.cell.what.outputs(truth.place)
    limits = torch.iinfo(dtype_of(dtype))
    total = torch.stack([part.long() for part in truth.all_parts(blocks[0])]).sum(0)
    told = wrong_values(truth, blocks, total.clamp(limits.min, limits.max).to(dtype_of(dtype)), "x")
    assert told.endswith("it holds the sum, clamped to the dtype's limits, where it must wrap")


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "bfloat16"])
def test_an_average_may_be_rounded_where_the_number_of_ranks_is_no_power_of_two(dtype: str) -> None:
    """A backend may multiply each part by one over their number, as NCCL does; it may not do anything else."""
    for size in (2, 3, 6):
        truth = Truth(Cell("all_reduce", dtype, "AVG", numel=200), Place(0, size))
        block = Block(SUMMED)
        parts = truth.all_parts(block)
        multiplied = torch.zeros_like(parts[0])
        for part in parts:
            multiplied += part * (1 / size)
        assert not wrong_values(truth, (block,), multiplied, "it"), (size, multiplied)
        exact = truth.received((block,))
        for mistake in (exact * size, exact + parts[0] / size, exact * size / (size + 1)):
            assert wrong_values(truth, (block,), mistake, "it")


def test_what_was_not_written_is_said_only_where_the_fill_is_no_value() -> None:
    for dtype, is_said in (("bool", False), ("int8", False), ("float32", True), ("int64", True)):
        truth = Truth(Cell("all_gather", dtype, numel=9), Place(0, 2))
        blocks = truth.cell.what.outputs(truth.place)[1]
        filled = Arena.of((9,), dtype_of(dtype), "contiguous", CPU).tensor
        right = truth.received(blocks)
        got = right.clone()
        place = int((right != filled).nonzero()[0])
        got[place] = filled[place]
        assert ("1 of them were not written" in wrong_values(truth, blocks, got, "x")) is is_said, dtype


def test_another_reduction_is_named_only_where_it_alone_explains_every_element() -> None:
    truth = Truth(Cell("all_reduce", "int8", "MAX", numel=30), Place(0, 2))
    (blocks,) = truth.cell.what.outputs(truth.place)
    parts = truth.all_parts(blocks[0])
    assert wrong_values(truth, blocks, reduced(parts, "MIN"), "x").endswith("holds the MIN instead")
    as_unsigned = reduced([part.view(torch.uint8) for part in parts], "MAX").view(torch.int8)
    assert wrong_values(truth, blocks, as_unsigned, "x")
    assert "instead" not in wrong_values(truth, blocks, as_unsigned, "x")


def test_a_cell_comes_back_from_json_and_its_name_says_all_that_matters() -> None:
    cells = [Cell.from_json(data) for one in own_scenarios() for data in one.arguments.get("cells", ())]
    assert len(cells) > 5000
    assert all(Cell.from_json(cell.to_json()) == cell for cell in cells)
    for scenario in own_scenarios():
        named = Counter(Cell.from_json(data).describe() for data in scenario.arguments.get("cells", ()))
        assert [name for name, number in named.items() if number > 1] == []


def test_the_cells_of_a_scenario_need_what_it_says() -> None:
    """Otherwise a backend that lacks a capability would be judged by it, or a cell be left out for another's sake."""
    for scenario in own_scenarios():
        for data in scenario.arguments.get("cells", ()):
            cell, said = Cell.from_json(data), {*scenario.needs, *lacks_of(scenario)}
            if scenario.arguments.get("has_undeclared"):  # then what is not declared is not tried
                assert {cell.what.needs} - {""} == said == needs_of(scenario), scenario.id
            else:
                assert cell.needs == said, scenario.id


@pytest.mark.nightly  # it takes ten seconds to make them anew
def test_all_pairs_of_values_on_the_axes_are_tried_in_every_operation() -> None:
    cells = paired_cells()
    written = [Cell.from_json(data) for data in json.loads(gzip.decompress(CELLS.read_bytes()))]
    advice = "write it anew: python -m conformance.programs.operations.pairs | gzip -9n >"
    assert written == list(cells), f"{advice} {CELLS}"
    assert covered(cells) >= possible()
    assert len(cells) < 3400
    assert len(possible()) > 20_000
    assert {*AXES} - {"operation"} == {axis for _, pair in possible() for axis, _ in pair}


def test_only_what_is_possible_is_tried() -> None:
    assert distinct([Cell("all_reduce", "complex64", "MAX"), Cell("all_reduce", "float32", "BOR")]) == ()
    assert distinct([Cell("all_gather"), Cell("all_gather", root=1), Cell("all_gather", op="MAX")]) == (
        Cell("all_gather", op="MAX"),
    )


@pytest.mark.parametrize(("cell", "spoil", "words"), [
    (Cell("all_gather", numel=9), lambda right: torch.cat([right[:1], right[:-1]]), "stand 1 place too late"),
    (Cell("all_gather", numel=9), lambda right: torch.cat([right[2:], right[:2]]), "stand 2 places too early"),
    (Cell("reduce_scatter", "int64"), lambda right: right - 1, "the SUM with values that the output held before in it"),
    (Cell("reduce_scatter"), lambda right: right + filled(right), "or values that the output held before are in the"),
    (Cell("all_gather"), lambda right: right * torch.tensor(torch.nan), "may be in the result"),
])  # fmt: skip
def test_values_that_moved_and_what_the_output_held_before_are_recognised(
    cell: Cell, spoil: Callable[[Tensor], Tensor], words: str
) -> None:
    truth = Truth(cell, Place(0, 3))
    blocks = cell.what.outputs(truth.place)[0]
    assert words in wrong_values(truth, blocks, spoil(truth.received(blocks)), "the result")


def filled(like: Tensor) -> Tensor:
    return torch.full_like(like.view(torch.uint8), sentinel(like.dtype)).view(like.dtype)


@pytest.mark.parametrize(("cell", "words"), [
    (Cell("all_reduce", numel=1), "of float32, 1 element"),
    (Cell("all_gather_single", numel=7), "7 elements for each rank"),
    (Cell("all_to_all_uneven", numel=7), "0, 1 or 2 times 7 elements for each rank"),
    (Cell("all_reduce_coalesced", numel=7), "3 tensors of 7, 21, 14 elements"),
    (Cell("all_gather_single_coalesced", numel=1, tensors=9), "9 tensors of 1, 3, 2, 1, ... elements for each rank"),
])  # fmt: skip
def test_a_cell_says_how_many_elements_its_tensors_have(cell: Cell, words: str) -> None:
    assert words in cell.describe()


def test_who_draws_a_random_number_is_told() -> None:
    generators = Generators()
    torch.rand(1)
    random.random()
    assert [generators.drawn(), generators.drawn()] == [
        "the random generator of torch and of Python stands elsewhere",
        "",
    ]


def test_another_reduction_of_bool_is_recognised_and_not_taken_for_reused_memory() -> None:
    truth, sums = (Truth(Cell("reduce_scatter", "bool", op, numel=9), Place(0, 2)) for op in ("PRODUCT", "SUM"))
    blocks = truth.cell.what.outputs(truth.place)[0]
    told = wrong_values(truth, blocks, sums.received(blocks), "the result")
    assert told.endswith("it holds the SUM or MAX or BOR instead")


def test_memory_that_is_free_and_only_kept_by_the_c_library_does_not_count() -> None:
    blocks = [b"x" * (50_000 + number % 2) for number in range(2_000)]
    last, before = blocks[-1], resident_bytes()
    del blocks
    assert before - resident_bytes() > 50_000_000
    assert len(last) == 50_001  # what lies behind it all, so that nothing shrinks by itself
