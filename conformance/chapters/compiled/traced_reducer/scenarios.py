"""Scenarios of chapter traced_reducer: the compiled backward averages gradients itself."""

from collections.abc import Iterator

from conformance.chapters.compiled.compiled_scenarios import ONE_MIB, CompiledScenarios
from conformance.chapters.variants import EACH_ALONE, PLAIN, STATIC, UNUSED, VIEW, arguments, capped, dashed
from conformance.scenario import Scenario

_make = CompiledScenarios("traced_reducer", "in_graph", "watched")


def scenarios() -> Iterator[Scenario]:
    """Yield every scenario of the chapter."""
    yield from _numbers()
    yield from _features()
    yield from _graphs()
    yield from _others()
    yield from _make.backwards("TRACE-25", whole=True)


def _numbers() -> Iterator[Scenario]:
    ways = (PLAIN, EACH_ALONE, VIEW)
    yield from _make.compiled("TRACE-01", "tuple", "outputs", way=ways, averages="graph", structure="tuple")
    for world_size in (1, 2, 3):
        yield from _make.case("TRACE-02", "plain", "", world_size)
        yield from _make.compiled("TRACE-02", "outputs", "outputs", world_size, structure="dict")
    for way in ("wrapper", "in_place", "before", "function"):
        yield from _make.case("TRACE-03", "plain", dashed(way), compile_={"way": way})
    for backend in ("aot_eager", "callable", "inductor"):
        yield from _make.case("TRACE-03", "plain", dashed(backend), compile_={"backend": backend})


def _features() -> Iterator[Scenario]:
    for slug, steps, zero_grad in (
        ("local", ["sync", "local local", "local sync", "sync"], "none"),
        ("first", ["local sync", "sync sync"], "none"),
        ("keep", ["sync", "sync", "local sync"], "keep"),
    ):
        split = [step.split() for step in steps]
        yield from _make.compiled("TRACE-04", slug, "accumulation", steps=split, zero_grad=zero_grad, flags=False)
    for hook in ("fp16", "bf16", "builtin_fp16"):
        given = arguments(averages="graph", gradients="small", hook=hook)
        yield from _make.compiled("TRACE-05", dashed(hook), "ready_made_hook", way=given)
    yield from _make.compiled("TRACE-06", "calls", "hook_calls", averages="reducer", answer="sum", judge=["raw"])
    uses = [["a b c d", "a c"], ["a b", "c d a"], ["d", "d"]]
    yield from _make.compiled("TRACE-07", "by-rank", "unused_parameters", way=UNUSED.named(""), uses=uses)
    yield from _make.case("TRACE-08", "plain", way=STATIC)
    yield from _make.case("TRACE-09", "buffer")
    yield from _make.members("TRACE-09", [[0, 1], [0, 1]], 2, buffer=True)
    for dtype in ("float16", "bfloat16"):
        yield from _make.mixed_precision("TRACE-10", dtype)
    yield from _make.compiled("TRACE-11", "1-3", "uneven_training", num_inputs=[1, 3])
    yield from _make.members("TRACE-12", [[0, 1, 2], [0, 1], [0, 1, 2]], 3)
    yield from _make.members("TRACE-12", [[0, 1], [0]], 2)
    yield from _make.compiled("TRACE-24", "removed", "removed_hooks", uses=["b", "b"])


def _graphs() -> Iterator[Scenario]:
    sizes = ONE_MIB | arguments(batches=[4, 2, 7, 3, 5, 6], num_steps=6, num_captured=[1, 2])
    ways = (sizes.named("same"), sizes | arguments("by-rank", by_rank=True))
    yield from _make.case("TRACE-13", "plain", way=ways)
    for way in ("wrapper", "before"):
        yield from _make.case("TRACE-14", "plain", f"full-{way}", compile_={"way": way, "fullgraph": True})
    yield from _make.compiled("TRACE-15", "rounded", "train")
    for case in ("checkpoint", "cond", "external", "shared", "in_place"):
        yield from _make.case("TRACE-18", case)


def _backwards_alone() -> Iterator[Scenario]:
    """Yield trainings of which compiled autograd captures the backwards, and nothing else is compiled."""
    alone = {"way": "backward", "backend": "aot_eager", "compiled_autograd": True, "whole_backward": False}
    frozen = [[names] * 2 for names in ([], ["two."], [], ["one.", "three."])]
    moments = [arguments(moment, moment=moment, frozen=frozen) for moment in ("forward", "backward")]
    yield from _make.compiled("TRACE-19", "frozen", "frozen_parameters", way=moments, compile_=alone)
    passed = arguments("passed-on", way="kept", passes_on=True, may_warn=True)
    yield from _make.compiled("TRACE-19", "bare", "backward_without_wrapper", way=passed, compile_=alone)
    for mistake in ("captured_find_unused_parameters", "captured_static_graph"):
        yield from _make.written("TRACE-17", dashed(mistake), "compiled_mistake", compile_=alone, mistake=mistake)


def _others() -> Iterator[Scenario]:
    yield from _make.written("TRACE-16", "neighbour", "compiled_neighbours")
    yield from _make.written("TRACE-16", "bare", "compiled_neighbours", bare=True)
    for mistake in ("unused_parameter", "many_graphs", "local_too_late"):
        yield from _make.written("TRACE-17", dashed(mistake), "compiled_mistake", mistake=mistake)
    for case in ("graph_break", "breaks_on_one_rank", "begins_without_parameters"):
        yield from _make.case("TRACE-22", case)
    # What is one graph averages in it; parts are cut instead.
    for inside, num_graphs in (
        ("module", 1),
        ("forward", 1),
        ("methods", 1),
        ("nested", 1),
        ("parts", 4),
        ("one_part", 2),
        ("regions", 4),
    ):
        for when in ("before", "after"):
            way = ONE_MIB | arguments(f"{dashed(inside)}-{when}", inside=inside, when=when, num_graphs=num_graphs)
            yield from _make.written("TRACE-23", "", "compiled_ways", way=way)
    for when in ("before", "after"):
        redirected = arguments(f"redirected-{when}", inside="methods", when=when, redirected=True, num_graphs=1)
        yield from _make.written("TRACE-23", "", "compiled_ways", way=ONE_MIB | redirected)
    for slug, whole, backend in (
        ("", True, "watched"),
        ("with-breaks", False, "watched"),
        ("inductor", True, "inductor"),
    ):
        order = {"compiled_autograd": True, "whole_backward": whole, "backend": backend}
        yield from _make.case("TRACE-19", "plain", slug, compile_=order, way=PLAIN, num_steps=3)
    for case in ("graph_break", "breaks_on_one_rank"):
        order = {"backend": "aot_eager", "compiled_autograd": True, "whole_backward": False}
        yield from _make.case("TRACE-19", case, compile_=order, num_steps=3)
    yield from _backwards_alone()
    unhooked = arguments(model="unhooked", num_steps=3)
    # Of a mesh with rows of several ranks, the graphs hold the reductions of tensor parallelism too.
    for mesh, of_rows in (((2, 2), 1), ((4, 1), 0), ((1, 4), 1)):
        for fusion in ("concat", "coalesced"):
            num = unhooked | arguments(num_in_graphs=of_rows + 1)
            yield from _make.sharded("TRACE-20", fusion, mesh, compile_={"fusion": fusion}, way=num)
    yield from _make.sharded("TRACE-20", "inductor", (2, 2), compile_={"backend": "inductor"}, way=unhooked)
    moved = {"model": "unhooked", "compile_": {"way": "in_place"}, "load_mesh": [4, 1]}
    yield from _make.sharded("TRACE-20", "checkpoint-to-4x1-from", (2, 2), "sharded_checkpoint", **moved)
    caps = (capped("", 80 / 2**20), capped("two-layers", 160 / 2**20))
    for fusion in ("concat", "coalesced"):
        for backend, most in (("watched", 2), ("inductor", 1)):
            both = {"backend": backend, "fusion": fusion}
            slug = f"{fusion}-{backend}"
            run = (PLAIN, arguments("last-first", last_first=True))
            yield from _make.written("TRACE-21", slug, "compiled_overlap", 2, run, compile_=both, way=caps[:most])
