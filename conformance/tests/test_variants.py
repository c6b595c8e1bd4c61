"""A variant says what it adds and nothing twice; a grid yields the combinations; shared options are spelt once."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from conformance.chapters import variants
from conformance.chapters.grid import Grid
from conformance.chapters.variants import PLAIN, STATIC, VIEW, Variant, arguments, each
from conformance.spec.catalogue import CHAPTERS_DIR

SHARED = {name: value for name, value in vars(variants).items() if isinstance(value, Variant) and value != PLAIN}


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


def spelt_again(text: str) -> Iterator[tuple[int, str]]:
    """Yield line and name of each literal in the source `text` that is a shared variant's options or fields."""
    for node in ast.walk(ast.parse(text)):
        for spelling in _spellings(node):
            for name, shared in SHARED.items():
                if spelling and spelling in (dict(shared.options), dict(shared.fields)):
                    yield node.lineno, name  # type: ignore[attr-defined] # of expressions, which alone have spellings


def _spellings(node: ast.AST) -> Iterator[dict[str, object]]:
    """Yield the mappings that an expression spells: a dict, `name(option=...)`, `capped(slug, cap)`, a deadline."""
    try:
        if isinstance(node, ast.Dict):
            yield ast.literal_eval(node)
        if isinstance(node, ast.Call):
            if getattr(node.func, "id", "") == "capped":
                yield {"bucket_cap_mb": ast.literal_eval(node.args[1])}
            named = {keyword.arg or "": keyword.value for keyword in node.keywords}
            if "deadline_s" in named:
                yield {"deadline_s": ast.literal_eval(named["deadline_s"])}
            elif named and getattr(node.func, "id", "") == "options":
                yield {name: ast.literal_eval(value) for name, value in named.items()}
    except ValueError:
        return  # not a literal


@pytest.mark.parametrize("path", sorted(CHAPTERS_DIR.rglob("*scenarios.py")), ids=lambda path: path.parent.name)
def test_no_chapter_spells_what_a_shared_variant_says(path: Path) -> None:
    again = [f"line {line}: this is {name} of variants.py" for line, name in spelt_again(path.read_text())]
    assert not again, "\n".join(again)


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ('_VIEW: dict[str, Any] = {"gradient_as_bucket_view": True}', "VIEW"),
        ('_FIND = options("find", find_unused_parameters=True)', "UNUSED"),
        ('_ALONE = capped("alone", 0.00001)', "EACH_ALONE"),
        ('_grid("NEW-01", "slug", "train", 2, deadline_s=8.0)', "ENDS_SOON"),
    ],
)
def test_a_private_spelling_is_noticed(text: str, name: str) -> None:
    assert [found for _, found in spelt_again(text)] == [name]
    assert not list(spelt_again(text.replace("True", "None").replace("0.00001", "0.3").replace("8.0", "9.0")))
