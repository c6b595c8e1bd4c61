"""Scenarios of chapter graph_split: compiled modules whose graphs are split where buckets end."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from conformance.chapters.compiled.compiled_scenarios import EACH_ALONE, FIND, ONE_MIB, STATIC, VIEW, CompiledScenarios
from conformance.chapters.compiled.ways import INSIDE
from conformance.scenario import Scenario, Step

_make = CompiledScenarios("graph_split", "split", "callable")
_AOT: dict[str, Any] = {"backend": "watched"}
#: A vector of so many float32 is 1 MiB.
_MIB = 2**18
#: How many graphs each way to compile inside of a wrapper ends in, where the layers of a module fill a bucket each.
INSIDE_GRAPHS = {
    "module": 4, "forward": 4, "parts": 4, "one_part": 2, "nested": 4, "function": 4, "training_step": 4,
    "replaced_parts": 4, "warm": 5,
}  # fmt: skip
_SMALL: dict[str, Any] = {"bucket_cap_mb": 0.0005}


def scenarios() -> Iterator[Scenario]:
    """Yield every scenario of the chapter."""
    yield from _training()
    yield from _cuts()
    yield from _features()
    yield from _graphs()
    yield from _neighbours()
    yield from _mistakes()
    yield from _overlap()
    yield from _meshes()
    yield from _ways()
    for suffix, options in (("", {}), ("-each-alone", EACH_ALONE), ("-unused", FIND), ("-static", STATIC)):
        yield _make.written("SPLIT-32", f"step{suffix}", "compiled_step", options=options)


def _train(requirement: str, slug: str, world_size: int = 2, model: str = "mlp", **rest: Any) -> Scenario:
    return _make.compiled(requirement, f"{slug}-{model.replace('_', '-')}", "train", world_size, model=model, **rest)


def _training() -> Iterator[Scenario]:
    for world_size in (1, 2, 3):
        yield _train("SPLIT-01", "train", world_size, schedule=(Step(),) * 3)
        yield _train("SPLIT-01", "cut", world_size, options=_SMALL, judged={"num_captured": [2, 2]})
    for model in ("frozen", "mixed_dtypes"):
        yield _train("SPLIT-01", "cut", model=model, options=_SMALL)
    yield _train("SPLIT-01", "cut", model="many_small_layers", options={"bucket_cap_mb": 0.001}, schedule=(Step(),))
    for way in ("wrapper", "in_place", "before", "function"):
        slug = way.replace("_", "-")
        yield _make.case("SPLIT-02", "plain", slug, compile_={"way": way}, num_captured=[4, 4])
    yield _make.case("SPLIT-02", "plain", "default-caps", num_captured=[2, 2], options={})
    yield _make.case("SPLIT-02", "plain", "inner", compile_={"way": "inner"}, num_captured=[4, 4])
    for backend in ("eager", "aot_eager", "callable", "watched"):
        slug = backend.replace("_", "-")
        yield _make.case("SPLIT-03", "plain", slug, compile_={"backend": backend}, options=VIEW).replace(
            requirements=("SPLIT-03", "SPLIT-25")
        )
        yield _train("SPLIT-03", f"train-{slug}", compile_={"backend": backend})
    yield _make.case("SPLIT-03", "plain", "inductor-cut", compile_={"backend": "inductor"})


def _cut(requirement: str, slug: str, sizes: list[int], world_size: int = 2, **rest: Any) -> Scenario:
    return _make.written(requirement, slug, "compiled_cuts", world_size, sizes=sizes, **rest)


def _cuts() -> Iterator[Scenario]:
    sizes = [4, 5, 6, 7, 8]
    for world_size in (1, 2, 3):
        scenario = _cut("SPLIT-04", "each-alone", sizes, world_size, options=EACH_ALONE)
        yield scenario.replace(requirements=("SPLIT-04", "SPLIT-06", *(("SPLIT-09",) if world_size > 1 else ())))
    yield _cut("SPLIT-04", "one-mib", [_MIB, _MIB + 1, _MIB + 2], options={"bucket_cap_mb": 1}).replace(
        requirements=("SPLIT-04", "SPLIT-09")
    )
    yield _cut("SPLIT-04", "aot", sizes, options=EACH_ALONE, compile_=_AOT)
    yield _cut("SPLIT-05", "big-last", [5, 6, _MIB + 1, _MIB + 2])
    yield _cut("SPLIT-05", "small-last", [_MIB + 1, _MIB + 2, 5, 6])
    yield _cut("SPLIT-05", "one-bucket", sizes)
    for num_bytes in (44, 60, 100):
        yield _cut("SPLIT-06", f"{num_bytes}-bytes", sizes, options={"bucket_cap_mb": num_bytes / 2**20})
    for caps in ([16, 48], [44, 4, 1000]):
        caps_mb = [num_bytes / 2**20 for num_bytes in caps]
        yield _cut("SPLIT-07", "-".join(map(str, caps)), sizes, options={"bucket_cap_mb_list": caps_mb})
    for slug, ignored, frozen in (("ignored", [0, 2], []), ("frozen", [], [3]), ("both", [4], [0, 1])):
        yield _cut("SPLIT-08", slug, sizes, options=EACH_ALONE, ignored=ignored, frozen=frozen)
    for slug, options, judge in (
        ("each-alone", EACH_ALONE, ["elements", "later", "overlap"]),
        ("two-each", {"bucket_cap_mb": 44 / 2**20}, ["elements", "later", "overlap"]),
        ("view", {**EACH_ALONE, **VIEW}, ["elements", "later"]),
        ("dtypes", EACH_ALONE, ["elements", "dtypes"]),
    ):
        dtypes = {"dtypes": ["float32", "float64"] * 2 + ["float32"]} if slug == "dtypes" else {}
        yield _make.compiled("SPLIT-10", slug, "bucket_traffic", options=options,
                             arguments={"sizes": sizes, "judge": judge, **dtypes})  # fmt: skip


def _features() -> Iterator[Scenario]:
    for slug, steps in (("local", ["sync", "local local", "local sync"]), ("first", ["local sync", "sync"]),
                        ("inside", ["forward_inside sync", "backward_inside", "sync"])):  # fmt: skip
        arguments = {"steps": [step.split() for step in steps], "zero_grad": "none", "flags": False}
        yield _make.compiled("SPLIT-11", slug, "accumulation", arguments=arguments)
    yield _train("SPLIT-11", "schedule", schedule=(Step(local_backwards=2), Step(zero_grad="keep"), Step()))
    yield _make.members("SPLIT-12", [[0, 1], [0, 1]], 2, buffer=True)
    yield _train("SPLIT-12", "batch-norm", model="batchnorm_mlp")
    yield _make.case("SPLIT-12", "buffer")
    uses = [["a b c d", "a c"], ["a b", "c d a"], ["d", "d"]]
    for suffix, options in (("", {}), ("-view", VIEW)):
        yield _make.compiled("SPLIT-13", f"by-rank{suffix}", "unused_parameters", options={**FIND, **options},
                             arguments={"uses": uses})  # fmt: skip
    yield _train("SPLIT-13", "branches", model="two_heads", options=FIND)
    yield _train("SPLIT-14", "static", options=STATIC, schedule=(Step(),) * 3)
    yield _make.case("SPLIT-14", "checkpoint", "static", options=STATIC)
    for aspect, answer in (("raw", "sum"), ("order", "average")):
        yield _make.compiled("SPLIT-15", f"calls-{aspect}", "hook_calls",
                             arguments={"answer": answer, "judge": [aspect]})  # fmt: skip
    for hook in ("fp16", "bf16"):
        yield _make.compiled("SPLIT-15", hook, "ready_made_hook", arguments={"hook": hook, "gradients": "small"})
    yield _make.mixed_precision("SPLIT-16", "float16")
    yield _make.mixed_precision("SPLIT-16", "bfloat16")
    for inputs in ([1, 3], [2, 2, 1]):
        slug = "-".join(map(str, inputs))
        yield _make.compiled("SPLIT-17", slug, "uneven_training", len(inputs), model="mlp",
                             arguments={"num_inputs": inputs})  # fmt: skip
    yield _make.members("SPLIT-18", [[0, 1, 2], [0, 1], [0, 1, 2]], 3)
    yield _make.members("SPLIT-18", [[0, 1], [0]], 2)


def _graphs() -> Iterator[Scenario]:
    sizes = [4, 2, 7, 3, 5, 6]
    for slug, rest in (("same", {}), ("by-rank", {"by_rank": True})):
        yield _make.case("SPLIT-19", "plain", slug, batches=sizes, num_steps=6, num_captured=[4, 8], **rest)
    yield _make.case("SPLIT-19", "sizes", batches=sizes, num_steps=6, num_captured=[2, 12])
    yield _make.case("SPLIT-19", "plain", "dynamic", batches=sizes, num_steps=6, num_captured=[4, 4],
                compile_={"dynamic": True})  # fmt: skip
    for way in ("wrapper", "in_place", "before"):
        order = {"way": way, "fullgraph": True}
        yield _make.case("SPLIT-20", "plain", f"full-{way.replace('_', '-')}", compile_=order, num_captured=[4, 4])
    for case, backend in (("checkpoint", "callable"), ("checkpoint", "watched"), ("cond", "callable")):
        yield _make.case("SPLIT-21", case, backend, compile_={"backend": backend})
    for case in ("graph_break", "begins_without_parameters"):
        yield _make.case("SPLIT-22", case)
        yield _make.case("SPLIT-22", case, "default-caps", options={})
    for case in ("external", "passes_input_on", "dict", "dataclass"):
        yield _make.case("SPLIT-23", case)
    for structure in ("tuple", "named_tuple", "nested", "nested_dataclass"):
        slug = structure.replace("_", "-")
        yield _make.compiled("SPLIT-23", slug, "outputs", arguments={"structure": structure})
    for case in ("shared", "in_place", "sizes", "no_grad", "method"):
        yield _make.case("SPLIT-24", case)
    yield _make.case("SPLIT-24", "in_place", "aot", compile_=_AOT)
    yield _make.case("SPLIT-24", "plain", "frozen", frozen=["a.layer.weight", "b.layer.bias"])
    yield _train("SPLIT-25", "view", options=VIEW, schedule=(Step(),) * 3)
    whole = {"reduction": "whole"}
    yield _make.case("SPLIT-26", "plain", compile_=whole, num_captured=[1, 1])
    yield _train("SPLIT-26", "whole", compile_=whole, options=_SMALL, judged={"num_captured": [1, 1]})


def _neighbours() -> Iterator[Scenario]:
    for slug, rest in (("default-caps", {}), ("one-mib", {"options": ONE_MIB}), ("bare", {"bare": True})):
        scenario = _make.written("SPLIT-28", slug, "compiled_neighbours", **rest)
        yield scenario.replace(requirements=("SPLIT-27", "SPLIT-28"))
    yield _make.written("SPLIT-27", "settings-aot", "compiled_neighbours", compile_=_AOT)


def _mistakes() -> Iterator[Scenario]:
    for requirement, mistake in (
        ("SPLIT-29", "raising_backend"), ("SPLIT-30", "added_parameter"), ("SPLIT-30", "replaced_parameter"),
        ("SPLIT-30", "thawed_parameter"), ("SPLIT-31", "no_parameter"), ("SPLIT-31", "mixed_devices"),
        ("SPLIT-31", "two_groups"),
    ):  # fmt: skip
        yield _make.written(requirement, mistake.replace("_", "-"), "compiled_mistake", mistake=mistake)


def _overlap() -> Iterator[Scenario]:
    one_layer = {"bucket_cap_mb": 80 / 2**20}
    for backend in ("watched", "inductor"):
        yield _make.written("SPLIT-09", f"marked-{backend}", "compiled_overlap", compile_={"backend": backend},
                            options=one_layer)  # fmt: skip


def _way(slug: str, num_graphs: int | None = None, *also: str, compile_: Any = None, **arguments: Any) -> Scenario:
    """Return a training whose module, or what is inside of it, is compiled in one of many ways."""
    pinned = {} if num_graphs is None else {"num_graphs": num_graphs}
    scenario = _make.written("SPLIT-34", slug.replace("_", "-"), "compiled_ways", options=ONE_MIB,
                             compile_={**_AOT, **(compile_ or {})}, **pinned, **arguments)  # fmt: skip
    return scenario.replace(requirements=("SPLIT-34", "SPLIT-35", *also))


def _ways() -> Iterator[Scenario]:
    for way in ("wrapper", "in_place", "before", "inner", "function"):
        yield _way(f"way-{way}", 4, compile_={"way": way})
    for inside, num_graphs in INSIDE_GRAPHS.items():
        # Only the second half of "one_part" is compiled; autograd runs the first one layer by layer.
        yield _way(inside, num_graphs, inside=inside)
        if inside in INSIDE:
            yield _way(f"{inside}-after", num_graphs, inside=inside, when="after")
    yield _way("module-breaks", 2, inside="module", breaks=True)
    yield _way("module-full", 4, inside="module", compile_={"fullgraph": True})
    for slug, dynamic, num_graphs in (("dynamic", True, 4), ("sizes", None, 8)):
        yield _way(f"module-{slug}", num_graphs, inside="module", compile_={"dynamic": dynamic}, batches=[4, 2, 7])
    yield _way("module-view", 4, inside="module").replace(options={**ONE_MIB, **VIEW})
    for inside, backend in (("module", "aot_eager"), ("module", "inductor"), ("parts", "inductor")):
        yield _way(f"{inside}-{backend}", inside=inside, compile_={"backend": backend})


def _meshes() -> Iterator[Scenario]:
    for mesh in ((2, 2), (4, 1), (1, 4)):
        for backend in ("eager", "watched"):
            yield _make.sharded("SPLIT-33", f"cut-{backend}", mesh, compile_={"backend": backend}, options=EACH_ALONE,
                                num_steps=3)  # fmt: skip
    yield _make.sharded("SPLIT-33", "whole", (2, 2), compile_={"reduction": "whole", **_AOT}, num_steps=3)
    yield _make.sharded("SPLIT-33", "inductor", (2, 2), compile_={"backend": "inductor"}, options=EACH_ALONE,
                        num_steps=3)  # fmt: skip
    yield _make.sharded("SPLIT-33", "uneven", (2, 2), compile_=_AOT, model="uneven", num_steps=3)
    yield _make.sharded("SPLIT-33", "checkpoint-to-4x1-from", (2, 2), "sharded_checkpoint",
                        compile_={"way": "in_place"}, load_mesh=[4, 1])  # fmt: skip
