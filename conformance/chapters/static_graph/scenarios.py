"""Scenarios of chapter static_graph: the user promises that the graph stays the same, and the DDP may rely on it."""

from collections.abc import Iterator, Sequence
from typing import Any

from conformance.chapters.grid import Axis, Grid, Worlds
from conformance.chapters.static_graph.promised_graphs import USES
from conformance.chapters.variants import (
    EACH_ALONE,
    ENDS_SOON,
    PLAIN,
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
    options,
)
from conformance.composed.training import Action, Block, Training
from conformance.errors import certain
from conformance.scenario import Scenario, Step

_grid = Grid("static_graph", ENDS_SOON | STATIC.named("") | Variant(needs=("static_graph",)))

_VARIANTS = (PLAIN, VIEW, EACH_ALONE)
#: Uses of program `outside_forward` in which a backward reaches no output of forward, before the one that does.
_OUTSIDE_FIRST = ("penalty_backward_first", "penalties_backward_first", "body_backward_first")
_NOT_PROMISED = options(static_graph=False)

#: Models whose graph is the same in every step, if not on every rank.
MODELS = (
    model("mlp").at(2, 3, 4),
    *models("cnn", "gpt", "lstm", "embedding", "sparse_embedding", "dataclass_output", "nested"),
    model("many_small_layers").at(2, 3, 4),
    *models("mixed_dtypes", "complex"),
    model("frozen").at(2, 3, 4),
    model("batchnorm_mlp"),
)


def _unsearched(name: str) -> Variant:
    return fields(dashed(name), model=name)


def _train(requirement: str, slug: str, worlds: Worlds, *axes: Axis) -> Iterator[Scenario]:
    yield from _grid(requirement, slug, "train", worlds, *axes, schedule=(Step(),) * 4)


def _use(requirement: str, use: str, worlds: Worlds, *axes: Axis) -> Iterator[Scenario]:
    yield from _grid(requirement, dashed(use), "static_use", worlds, *axes, arguments={"use": use})


def _switched(
    requirement: str,
    slug: str,
    worlds: Worlds,
    uses: Sequence[Sequence[str]],
    *axes: Axis,
    program: str = "unused_parameters",
    **rest: Any,
) -> Iterator[Scenario]:
    """Yield scenarios in which each step says what rank 0, 1, ... uses, in turn."""
    yield from _grid(requirement, slug, program, worlds, *axes, arguments(uses=[list(step) for step in uses]), **rest)


def scenarios() -> Iterator[Scenario]:
    """Yield every scenario of the chapter."""
    yield from _models()
    yield from _unused()
    yield from _accumulation()
    yield from _uses()
    losses = (PLAIN, arguments("spare", spare=True), arguments("first", loss="first"))
    for structure in each("structure", ("opaque", "dataclass", "nested_dataclass")):
        for world_size in (2, 3):
            yield from _grid("STATIC-10", "", "outputs", world_size, structure, losses)
    yield from _traffic()
    yield from _promises()
    yield from _broken_promises()


def _models() -> Iterator[Scenario]:
    yield from _train("STATIC-01", "", 2, MODELS)
    yield from _train("STATIC-01", "", 1, model("mlp"))
    layers, branch = models("many_small_layers", "mixed_dtypes"), _unsearched("rank_branch")
    small = capped("small-buckets", 0.0005)
    # One of the two heads by rank, with views alone, shows STATIC-04, below.
    yield from _train("STATIC-18", "", (2, 3), layers, VIEW)
    yield from _train("STATIC-01", "", (2, 3), (*layers, branch), small)
    yield from _train("STATIC-18", "", (2, 3), (*layers, branch), VIEW | small.named("small"))
    searched = [_unsearched(name) | UNUSED.named("") for name in ("mlp", "rank_branch", "two_heads")]
    yield from _train("STATIC-19", "", (2, 3), searched)


def _unused() -> Iterator[Scenario]:
    for way in _VARIANTS:
        for world_size in (1, 2, 3, 4):
            yield from _train("STATIC-02", "", world_size, _unsearched("unused"), way)
            yield from _switched("STATIC-02", "nobody", world_size, [["a c"]] * 4, way)
            if world_size > 1:
                yield from _train("STATIC-04", "", world_size, _unsearched("rank_branch"), way)
                yield from _switched("STATIC-04", "by-rank", world_size, [["a b", "b c", "d a"]] * 4, way)
                yield from _use("STATIC-04", "heads_by_rank", world_size, way)
        for world_size in (2, 3):
            yield from _train("STATIC-03", "", world_size, _unsearched("two_heads"), way)
            yield from _use("STATIC-03", "one_head_of_two_forwards", world_size, way)
    kept = [arguments(f"zero-grad-{way}", zero_grad=way) for way in ("zeros", "keep")]
    optimizer = arguments("optimizer", optimizer=True)
    yield from _switched("STATIC-02", "", 2, [["a c", "c b"]] * 4, (*kept, optimizer))


def _accumulation() -> Iterator[Scenario]:
    accumulate = Step(local_backwards=1)
    local = Step(local_backwards=2, synchronised=False, optimizer=False)
    schedules = (
        ("STATIC-05", "first-step", (accumulate, Step(), Step())),
        ("STATIC-05", "every-step", (accumulate,) * 4),
        ("STATIC-05", "local-step-first", (local, Step(zero_grad="keep"), Step(), Step())),
        ("STATIC-06", "later-steps", (Step(), accumulate, Step(), Step(local_backwards=3))),
        ("STATIC-06", "local-step-later", (Step(), Step(), local, Step(zero_grad="keep"))),
    )
    trained = (model("mlp"), _unsearched("rank_branch"))
    for requirement, slug, schedule in schedules:
        ways = (PLAIN.at(2, 3), VIEW)
        yield from _train(requirement, "", 2, fields(slug, schedule=schedule), trained, ways)
    yield from _use("STATIC-05", "first_local", (2, 4))


#: Requirement -> uses that show it; each is run with the variants of options below.
_USES = {
    "STATIC-06": ("local_on_one_rank",),
    "STATIC-07": ("checkpoint_reentrant", "reentrant_three_times", "reentrant_inside_each_other"),
    "STATIC-08": ("checkpoint", "checkpoint_twice", "reentrant_and_not"),
    "STATIC-09": ("two_forwards", "heads_of_forwards"),
    "STATIC-11": ("gradient_penalty", "autograd_grad_first"),
    "STATIC-12": ("retain_graph",),
    "STATIC-22": ("validation_first", "discarded_forward"),
    "STATIC-23": ("two_wrappers", "stacked_wrappers"),
    "STATIC-25": (
        "tensor_hooks",
        "module_hooks",
        "create_graph",
        "tied",
        "used_twice",
        "gradient_set_before",
        "odd_shapes",
    ),
    "STATIC-26": ("local_elsewhere",),
}


def _uses() -> Iterator[Scenario]:
    for requirement, uses in _USES.items():
        for use in uses:
            yield from _use(requirement, use, 2, (PLAIN.at(2, 3, 4), VIEW, EACH_ALONE))
    covered = {use for uses in _USES.values() for use in uses}
    elsewhere = {"ordinary", "first_local", "heads_by_rank", "one_head_of_two_forwards"}
    certain(set(USES) == covered | elsewhere, "every use is tried")
    recoveries = each("recovery", ("none", "update_process_group"))
    outside = arguments("", trains=True)
    ways = (PLAIN.at(2, 3), VIEW, EACH_ALONE)
    yield from _grid("STATIC-27", "", "outside_forward", 2, each("use", _OUTSIDE_FIRST), outside, ways)
    yield from _grid("STATIC-24", "recovery", "exception_in_backward", 2, recoveries, (PLAIN, VIEW))


def _traffic() -> Iterator[Scenario]:
    sizes = arguments(sizes=[40, 30, 20, 50, 10, 60])
    judged = arguments(judge=["first", "elements"])
    caps = [capped(f"cap{cap}", cap) for cap in (0.0001, 0.0004)]
    for order in each("order", ("registered", "reversed")):
        for world_size in (2, 3):
            yield from _grid("STATIC-13", "", "bucket_traffic", world_size, sizes, judged, order, caps)
    two_dtypes = arguments("dtypes", dtypes=["float32", "float64"] * 3, judge=["first", "dtypes"])
    yield from _grid("STATIC-13", "", "bucket_traffic", 2, sizes, two_dtypes, capped("", 0.0001))
    spares = [arguments(f"spare{spare}", spare=spare) for spare in (0, 1, 3)]
    shown = ("STATIC-02", "STATIC-13", "STATIC-14")
    yield from _grid("STATIC-14", "", "learnt_unused", (2, 3, 4), spares, capped("", 0.0004), requirements=shown)


def _promises() -> Iterator[Scenario]:
    late = arguments("late", late=True) | _NOT_PROMISED
    for use in ("ordinary", "reentrant_three_times", "heads_by_rank"):
        yield from _use("STATIC-15", use, (2, 3), late)
    for world_size in (1, 2):
        yield from _grid("STATIC-15", "", "static_promise", world_size, each("when", ["twice"]))
        yield from _grid("STATIC-16", "", "static_promise", world_size, each("when", ["too_late"]), _NOT_PROMISED)
    undecided = _NOT_PROMISED | UNUSED.named("")
    for slug, uses, way in (
        ("promised", [["a b"]] * 3, PLAIN),
        ("constant", [["a b"]] * 3, undecided),
        ("everything", [["a b c d"]] * 3, undecided),
        ("changing", [["a b"], ["a b"], ["b c"], ["a b"]], undecided),
    ):
        yield from _switched("STATIC-17", slug, (1, 2), uses, way, program="static_logging")


def _broken_promises() -> Iterator[Scenario]:
    ways = (PLAIN.at(2, 3), VIEW, EACH_ALONE)
    for slug, uses, changed in (
        ("goes-unused", [["a b c"]] * 2 + [["a b"]] * 2, "c"),
        ("comes-into-use", [["a b"]] * 2 + [["a b c"]] * 2, "c"),
        ("exchanged", [["a b"]] * 2 + [["a c"]] * 2, "bc"),
        ("unused-in-second-step", [["a b c"], ["a b"], ["a b c"]], "c"),
        ("all-else", [["a b"]] * 2 + [["c d"]] * 2, "abcd"),
    ):
        names = arguments(changed=list(changed))
        yield from _switched("STATIC-20", slug, 2, uses, ways, names, program="changing_graph")
    c_changes = arguments(changed=["c"])
    frozen = arguments("frozen", freezes="c.weight") | c_changes
    yield from _switched("STATIC-20", "", 2, [["a b c"]] * 4, frozen, program="changing_graph")
    # The first iteration has two forwards, and a checkpoint brings the gradients of each by themselves.
    blocks, twice = (Block(checkpoint="reentrant"),), (Action("forward", "functional"),)
    fewer = Training(blocks, output="unused_tail", actions=twice).to_json()
    yield from _grid("STATIC-20", "fewer-gradients", "composed", (2, 3), arguments=fewer, needs=("no_sync",))
    uses = [["a b c"]] * 2 + [["a b c", "a b", "a b c"]] * 2
    hanging: dict[str, Any] = {"program": "changing_graph", "deadline_s": 4.0}
    yield from _switched("STATIC-21", "goes-unused-on-rank-1", 2, uses, ways, c_changes, **hanging)
