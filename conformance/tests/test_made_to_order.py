"""Scenarios of backends that are made where somebody asks for them: what they cover, and how `run` takes them."""

import pytest

from conformance.chapters.backend.made_to_order import at_world_size, soaked, up_to
from conformance.cli.run import Request, bytes_of, selected_by
from conformance.errors import ScenarioError
from conformance.programs.operation_cells import cells_of
from conformance.programs.operations.description import OPERATIONS
from conformance.spec.catalogue import load_catalogue
from conformance.suite import Selection, check_scenarios, load_scenarios


def test_any_number_of_ranks_tries_every_operation_with_sums_averages_and_groups() -> None:
    made = list(at_world_size(16))
    check_scenarios(made, load_catalogue())
    assert {one.world_size for one in made} == {16}
    cells = [cell for one in made if one.program == "operation_cells" for cell in cells_of(one)]
    assert {cell.operation for cell in cells} == set(OPERATIONS)
    for operation in ("all_reduce", "reduce_scatter_single_coalesced"):
        own = [cell for cell in cells if cell.operation == operation]
        assert {"float32", "float64", "bfloat16", "int64", "uint8"} == {cell.dtype for cell in own}
        assert {"world", "permuted", "without-0", "ends"} == {cell.group for cell in own}
        assert {"SUM", "AVG"} < {cell.reduction for cell in own}
        assert max(cell.numel for cell in own) > 4096


def test_the_longest_tensor_has_the_size_that_is_asked_for_and_one_element_more() -> None:
    made = {one.id: one.arguments for one in up_to(4 * 2**20, 2)}
    check_scenarios(up_to(4 * 2**20, 2), load_catalogue())
    assert made["layouts/LAY-01/4MiB-all-reduce-world2"]["numel"] == 2**20 + 1
    assert made["layouts/LAY-01/4MiB-all-gather-single-world2"]["numel"] == 2**19 + 1
    assert not any("16MiB" in name for name in made)


def test_every_seed_draws_other_cells_and_the_same_seed_the_same() -> None:
    first, again, other = (cells_of(next(iter(soaked(seed, 1, 3)))) for seed in (1, 1, 2))
    assert first == again != other


def test_run_selects_from_the_suite_and_from_what_is_made() -> None:
    kept = {one.id for one in load_scenarios()}
    asked = selected_by(Request(Selection(world_sizes=(6,)), profile="backend"))
    assert {one.world_size for one in asked} == {6}
    assert not kept.intersection(one.id for one in asked)
    failed = (asked[0],)
    assert selected_by(Request(Selection(names=(asked[0].id,)), failed=failed)) == failed
    drawn = selected_by(Request(Selection(), profile="backend", minutes=0.01))
    assert {one.id.split("/")[1] for one in drawn} == {"CROSS-01", "CROSS-02"}


def test_a_size_that_is_none_is_refused() -> None:
    assert (bytes_of(""), bytes_of("64MiB"), bytes_of("1GiB")) == (0, 2**26, 2**30)
    with pytest.raises(ScenarioError, match="must be a number of MiB or GiB, such as 64MiB, got '64MB'"):
        bytes_of("64MB")
