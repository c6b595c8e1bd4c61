"""Scenarios of chapter unused: parameters that get no gradient, with `find_unused_parameters`."""

from collections.abc import Iterator, Sequence
from typing import Any

from conformance.chapters.grid import Axis, Grid, Worlds
from conformance.chapters.unused.hidden_layers import HIDING, PLACES
from conformance.chapters.unused.idle_ranks import USES as IDLE_USES
from conformance.chapters.unused.lost_parameters import LOSSES
from conformance.chapters.unused.outside_forward import USES
from conformance.chapters.variants import (
    EACH_ALONE,
    ENDS_SOON,
    PLAIN,
    SKIPPING_ALONE,
    STATIC,
    UNUSED,
    VIEW,
    Variant,
    arguments,
    capped,
    dashed,
    each,
    fields,
    model,
    models,
)
from conformance.programs.outputs import STRUCTURES
from conformance.scenario import Scenario, Step

_grid = Grid("unused", UNUSED.named("") | Variant(needs=("find_unused_parameters",)))
#: Of a DDP that does not search.
_without_search = Grid("unused")


def _switched(
    requirement: str, slug: str, worlds: Worlds, uses: Sequence[Sequence[str]], *axes: Axis, **given: Any
) -> Iterator[Scenario]:
    switched = {"uses": [list(step) for step in uses], **given}
    yield from _grid(requirement, slug, "unused_parameters", worlds, *axes, arguments=switched)


def scenarios() -> Iterator[Scenario]:
    """Yield every scenario of the chapter."""
    yield from _sets()
    yield from _errors()
    yield from _outputs()
    yield from _models()
    ways = (PLAIN.at(2, 3), VIEW, EACH_ALONE.at(2, 3), VIEW | EACH_ALONE, STATIC)
    yield from _grid("UNUSED-15", "", "outside_forward", 2, each("use", USES), ways, ENDS_SOON)
    late = (PLAIN.at(2, 3), VIEW, EACH_ALONE, STATIC)
    yield from _grid("UNUSED-19", "", "late_gradient", 2, late, ENDS_SOON)
    yield from _idle_ranks()
    yield from _hidden_layers()
    yield from _lost_parameters()


def _sets() -> Iterator[Scenario]:
    changing = [["a b", "c d"], ["a", "a"], ["b c d", "a"], ["d", "d c", "d b"], ["a b c d"], ["b", "c", "d"]]
    kept = [arguments(f"earlier-{way}", zero_grad=way) for way in ("zeros", "keep")]
    for way in (PLAIN, VIEW, EACH_ALONE):
        shown = way | Variant(also=("UNUSED-12",) if way is VIEW else ())
        yield from _switched("UNUSED-01", "nobody", (1, 2, 3, 4), [["a b"]] * 3, shown)
        yield from _switched("UNUSED-01", "", 2, [["a b c d"], ["a b"], ["b d"]], kept, shown)
        yield from _switched("UNUSED-02", "some", (2, 3, 4), [["a b c d", "a c", "c d a"]] * 3, shown)
        yield from _switched("UNUSED-03", "changing", (2, 3), changing, way)
        yield from _switched("UNUSED-02", "one-rank-has-all", 2, [["a b c d", "b"]] * 3, way)
    quiet = Variant("quiet", arguments={"quiet": True}, also=("GRAD-07",))
    partial = [["a b", "c d"], ["a", "a"], ["b c d", "a"], ["d", "d c"]]
    yield from _switched("UNUSED-03", "", 2, partial, quiet, (PLAIN, VIEW))
    stepping = [["a b c d"], ["a b"], ["a c", "a"], ["d", "a"]]
    for world_size in (2, 3):
        yield from _switched("UNUSED-13", "optimizer", world_size, stepping, (PLAIN, VIEW), optimizer=True)
    for world_size in (2, 3):
        yield from _switched("UNUSED-14", "detached", world_size, [["a b!"], ["a! b"], ["a b! c", "b a! d?"]])
        yield from _switched("UNUSED-14", "no-grad", world_size, [["a b?"], ["a? b"], ["c d?", "d c?"]])
    skipped = SKIPPING_ALONE.named("skipped")
    yield from _switched("UNUSED-10", "", (2, 3), [["a c"]] * 4, (skipped, skipped | VIEW), saves_traffic=True)


def _errors() -> Iterator[Scenario]:
    forgotten = (
        arguments("never-used", uses="a b d"),
        arguments("detached", uses="a b c! d"),
        arguments("not-in-loss", uses="a b d c", partial_loss=True),
        arguments("on-odd-ranks", uses=["a b c d", "a b d"]),
        arguments("on-even-ranks", uses=["a b d", "a b c d"]),
    )
    for world_size in (2, 3):
        ways = (PLAIN, VIEW)
        yield from _without_search("UNUSED-05", "", "forgotten_parameter", world_size, forgotten, ways, ENDS_SOON)


def _outputs() -> Iterator[Scenario]:
    spare = arguments(spare=True)
    for structure in each("structure", STRUCTURES):
        if structure.slug in ("opaque", "read-once", "computed", "refusing"):  # a DDP need not find tensors there
            continue
        yield from _grid("UNUSED-08", "", "outputs", (2, 3), structure, spare)
        if structure.slug != "tensor":
            yield from _grid("UNUSED-04", "first-of", "outputs", 2, structure, spare, arguments(loss="first"))
    opaque = arguments(structure="opaque")
    yield from _grid("UNUSED-09", "spare", "opaque_output", (2, 3), opaque, spare)
    yield from _grid("UNUSED-09", "all-used", "opaque_output", 2, opaque)
    yield from _without_search("UNUSED-09", "not-searched", "opaque_output", 2, opaque)


def _models() -> Iterator[Scenario]:
    schedule = (Step(),) * 4
    ways = (PLAIN, VIEW, capped("small-cap", 0.001))
    for requirement, name in (
        ("UNUSED-03", "moe"),
        ("UNUSED-03", "rank_branch"),
        ("UNUSED-04", "two_heads"),
        ("UNUSED-03", "unused"),
        ("UNUSED-06", "sparse_embedding_unused"),
        ("UNUSED-02", "sparse_by_turns"),
    ):
        yield from _grid(requirement, "", "train", (2, 3), model(name), ways, ENDS_SOON, schedule=schedule)
    tables, double = model("sparse_by_turns"), fields("float64", dtype="float64")
    yield from _grid("UNUSED-02", "", "train", 2, tables, double, ways, ENDS_SOON, schedule=schedule)
    used = models("mlp", "cnn", "gpt", "lstm", "mixed_dtypes", "sparse_embedding", "nested", "dataclass_output")
    yield from _grid("UNUSED-11", "", "train", (2, 3), used, schedule=schedule)
    for requirement, use in (
        ("UNUSED-07", "two_forwards"),
        ("UNUSED-11", "discarded_forward"),
        ("UNUSED-11", "forward_under_no_grad"),
    ):
        yield from _grid(requirement, "", "autograd_use", 2, each("use", [use]), VIEW)
    twice = arguments("2-forwards", forwards=2)
    branching = models("two_heads", "moe", "unused", "nested")
    yield from _grid("UNUSED-07", "", "forwards_before_backward", (2, 3), branching, twice, ENDS_SOON)


def _idle_ranks() -> Iterator[Scenario]:
    # The ranks that are idle in each step. Every rank is idle equally often, so that the collectives of a DDP that
    # forgets idle ranks still pair up, wrongly, and its verdict is a difference rather than a hang.
    idle_of_2 = arguments(idle=[[], [0], [], [1], []])
    idle_of_3 = arguments(idle=[[], [0, 1], [1, 2], [], [2, 0]])
    ways = (PLAIN, VIEW, EACH_ALONE, VIEW | EACH_ALONE, SKIPPING_ALONE)
    of_ranks = (idle_of_2, idle_of_3.at(3), *(way | idle_of_2 for way in ways[1:]))
    yield from _grid("UNUSED-16", "", "idle_ranks", 2, each("use", IDLE_USES), of_ranks, ENDS_SOON)
    first = arguments("from-the-first-step", use="outer_head", idle=[[0], [1], [], [0], [1]])
    every = arguments("every-rank", use="learnt_input", idle=[[0, 1], [], [0, 1], []])
    for way in ways:
        yield from _grid("UNUSED-16", "", "idle_ranks", 2, (first, every), way, ENDS_SOON)
    always = arguments(use="outer_head", idle=[[0]] * 3)
    yield from _grid("UNUSED-16", "", "idle_ranks", 2, (STATIC, STATIC | VIEW), always, deadline_s=6.0)


def _hidden_layers() -> Iterator[Scenario]:
    skips_of_2 = arguments(skips=[[], [0], [1], [0, 1], []])
    skips_of_3 = arguments(skips=[[2], [0], [], [1, 2], [0]])
    ways = (
        *(way | skips_of_2 for way in (PLAIN, VIEW, EACH_ALONE)),
        (EACH_ALONE | skips_of_3).at(3),
        VIEW | EACH_ALONE | skips_of_2,
    )
    for hiding in HIDING:
        given = {"hiding": hiding}
        places = each("place", PLACES)
        yield from _grid("UNUSED-17", dashed(hiding), "hidden_layers", 2, places, ways, ENDS_SOON, arguments=given)


def _lost_parameters() -> Iterator[Scenario]:
    ways = (PLAIN.at(2, 3), VIEW, EACH_ALONE)
    yield from _grid("UNUSED-18", "", "lost_parameters", 2, each("loss", LOSSES), ways, ENDS_SOON)
