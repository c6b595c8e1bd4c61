"""Scenarios of chapter traced_reducer: the compiled backward averages gradients itself."""

from __future__ import annotations

from collections.abc import Iterator

from conformance.chapters.compiled.compiled_scenarios import EACH_ALONE, FIND, ONE_MIB, STATIC, VIEW, CompiledScenarios
from conformance.scenario import Scenario, Step

_make = CompiledScenarios("traced_reducer", "in_graph", "watched")


def scenarios() -> Iterator[Scenario]:
    """Yield every scenario of the chapter."""
    yield from _numbers()
    yield from _features()
    yield from _graphs()
    yield from _others()


def _numbers() -> Iterator[Scenario]:
    for slug, options in (("", {}), ("-each-alone", EACH_ALONE), ("-view", VIEW)):
        yield _make.compiled("TRACE-01", f"tuple{slug}", "outputs", options=options, judged={"averages": "graph"},
                             arguments={"structure": "tuple"})  # fmt: skip
    for world_size in (1, 2, 3):
        yield _make.case("TRACE-02", "plain", world_size=world_size)
        arguments = {"structure": "dict"}
        yield _make.compiled("TRACE-02", "outputs", "outputs", world_size, arguments=arguments)
    for way in ("wrapper", "in_place", "before", "function"):
        yield _make.case("TRACE-03", "plain", way.replace("_", "-"), compile_={"way": way})
    for backend in ("aot_eager", "callable", "inductor"):
        yield _make.case("TRACE-03", "plain", backend.replace("_", "-"), compile_={"backend": backend})


def _features() -> Iterator[Scenario]:
    for slug, steps in (
        ("local", ["sync", "local local", "local sync", "sync"]), ("first", ["local sync", "sync sync"]),
    ):  # fmt: skip
        arguments = {"steps": [step.split() for step in steps], "zero_grad": "none", "flags": False}
        yield _make.compiled("TRACE-04", slug, "accumulation", arguments=arguments)
    arguments = {"steps": [["sync"], ["sync"], ["local", "sync"]], "zero_grad": "keep", "flags": False}
    yield _make.compiled("TRACE-04", "keep", "accumulation", arguments=arguments)
    for hook in ("fp16", "bf16", "builtin_fp16"):
        yield _make.compiled("TRACE-05", hook.replace("_", "-"), "ready_made_hook", judged={"averages": "graph"},
                             arguments={"hook": hook, "gradients": "small"})  # fmt: skip
    yield _make.compiled("TRACE-06", "calls", "hook_calls", judged={"averages": "reducer"},
                         arguments={"answer": "sum", "judge": ["raw"]})  # fmt: skip
    uses = [["a b c d", "a c"], ["a b", "c d a"], ["d", "d"]]
    yield _make.compiled("TRACE-07", "by-rank", "unused_parameters", options=FIND, arguments={"uses": uses})
    yield _make.case("TRACE-08", "plain", "static", options=STATIC)
    yield _make.case("TRACE-09", "buffer")
    yield _make.members("TRACE-09", [[0, 1], [0, 1]], 2, buffer=True)
    for dtype in ("float16", "bfloat16"):
        yield _make.mixed_precision("TRACE-10", dtype)
    yield _make.compiled("TRACE-11", "1-3", "uneven_training", model="mlp", arguments={"num_inputs": [1, 3]})
    for phases, world_size in (([[0, 1, 2], [0, 1], [0, 1, 2]], 3), ([[0, 1], [0]], 2)):
        yield _make.members("TRACE-12", phases, world_size)


def _graphs() -> Iterator[Scenario]:
    sizes = [4, 2, 7, 3, 5, 6]
    for slug, rest in (("same", {}), ("by-rank", {"by_rank": True})):
        yield _make.case("TRACE-13", "plain", slug, batches=sizes, num_steps=6, num_captured=[1, 2], **rest)
    for way in ("wrapper", "before"):
        yield _make.case("TRACE-14", "plain", f"full-{way}", compile_={"way": way, "fullgraph": True})
    yield _make.compiled("TRACE-15", "rounded", "train", model="mlp", schedule=(Step(),) * 2)
    for case in ("checkpoint", "cond", "external", "shared", "in_place"):
        yield _make.case("TRACE-18", case)


def _others() -> Iterator[Scenario]:
    yield _make.written("TRACE-16", "neighbour", "compiled_neighbours")
    yield _make.written("TRACE-16", "bare", "compiled_neighbours", bare=True)
    for mistake in ("unused_parameter", "many_graphs", "local_too_late"):
        yield _make.written("TRACE-17", mistake.replace("_", "-"), "compiled_mistake", mistake=mistake)
    for case in ("graph_break", "breaks_on_one_rank", "begins_without_parameters"):
        yield _make.case("TRACE-22", case)
    for inside, num_graphs in (("module", 1), ("forward", 1), ("parts", 4)):
        yield _make.written("TRACE-23", inside, "compiled_ways", options=ONE_MIB, inside=inside,
                            num_graphs=num_graphs)  # fmt: skip
    for slug, whole in (("", True), ("with-breaks", False)):
        order = {"compiled_autograd": True, "whole_backward": whole}
        yield _make.case("TRACE-19", "plain", slug, compile_=order, options={}, num_steps=3)
    # Of a mesh with rows of several ranks, the graphs hold the reductions of tensor parallelism too.
    for mesh, of_rows in (((2, 2), 1), ((4, 1), 0), ((1, 4), 1)):
        for fusion in ("concat", "coalesced"):
            yield _make.sharded("TRACE-20", fusion, mesh, compile_={"fusion": fusion}, model="unhooked", num_steps=3,
                                judged={"num_in_graphs": of_rows + 1})  # fmt: skip
    yield _make.sharded("TRACE-20", "inductor", (2, 2), compile_={"backend": "inductor"}, model="unhooked", num_steps=3)
    yield _make.sharded("TRACE-20", "checkpoint-to-4x1-from", (2, 2), "sharded_checkpoint", model="unhooked",
                        compile_={"way": "in_place"}, load_mesh=[4, 1])  # fmt: skip
    for fusion in ("concat", "coalesced"):
        for backend in ("watched", "inductor"):
            yield _make.written("TRACE-21", f"{fusion}-{backend}", "compiled_overlap",
                                compile_={"backend": backend, "fusion": fusion},
                                options={"bucket_cap_mb": 80 / 2**20})  # fmt: skip
