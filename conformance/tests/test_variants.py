"""A variant says what it adds and nothing twice; a grid yields the combinations."""

from conformance.chapters.grid import Grid
from conformance.chapters.variants import PLAIN, STATIC, VIEW, Variant, arguments, each


def test_both_at_once_is_what_each_adds_and_the_later_one_decides() -> None:
    both = VIEW | Variant("off", options={"gradient_as_bucket_view": False}, needs=("join",), worlds=(3,))
    assert both.slug == "view-off"
    assert both.options == {"gradient_as_bucket_view": False}
    assert (both.needs, both.worlds, (both | STATIC).worlds) == (("join",), (3,), (3,))


def test_a_grid_yields_every_combination_and_the_last_axis_varies_fastest() -> None:
    grid = Grid("gradients", Variant(needs=("comm_hook",)))
    made = list(grid("GRAD-01", "mean", "train", (1, 2), (PLAIN, VIEW.at(4)), each("use", ("a_b", "c")), also=("X",)))
    assert [scenario.id.split("/")[-1] for scenario in made] == [
        "mean-a-b-world1",
        "mean-a-b-world2",
        "mean-c-world1",
        "mean-c-world2",
        "mean-view-a-b-world4",
        "mean-view-c-world4",
    ]
    assert {scenario.needs for scenario in made} == {("comm_hook",)}
    assert {scenario.requirements for scenario in made} == {("GRAD-01", "X")}
    assert [scenario.min_collectives for scenario in made] == [0, 1, 0, 1, 1, 1]
    assert (made[-1].world_size, made[-1].arguments) == (4, {"use": "c"})
    assert next(grid("GRAD-01", "", "train", 2, arguments(use="c"))).id == "gradients/GRAD-01/world2"
