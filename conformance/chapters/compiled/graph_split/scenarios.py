"""Scenarios of chapter graph_split: compiled modules whose graphs are split where buckets end."""

from collections.abc import Iterator
from typing import Any

from conformance.chapters.compiled.compiled_scenarios import ONE_MIB, CompiledScenarios
from conformance.chapters.compiled.ways import INSIDE
from conformance.chapters.grid import Worlds
from conformance.chapters.variants import (
    EACH_ALONE,
    PLAIN,
    STATIC,
    UNUSED,
    VIEW,
    Variant,
    arguments,
    capped,
    dashed,
    fields,
    options,
)
from conformance.scenario import Scenario, Step

_make = CompiledScenarios("graph_split", "split", "callable")
_AOT = {"backend": "watched"}
#: A vector of so many float32 is 1 MiB.
_MIB = 2**18
#: How many graphs each way to compile inside of a wrapper ends in, where the layers of a module fill a bucket each.
INSIDE_GRAPHS = {
    "module": 4,
    "forward": 4,
    "methods": 4,
    "parts": 4,
    "one_part": 2,
    "nested": 4,
    "function": 4,
    "regions": 4,
    "warm": 5,
}
_SMALL = capped("", 0.0005)
_ALONE, _STATIC = EACH_ALONE.named(""), STATIC.named("")


def _bytes(num_bytes: int, slug: str = "") -> Variant:
    return capped(slug, num_bytes / 2**20)


def scenarios() -> Iterator[Scenario]:
    """Yield every scenario of the chapter."""
    yield from _training()
    yield from _cuts()
    yield from _features()
    yield from _graphs()
    ways = (PLAIN.named("default-caps"), ONE_MIB.named("one-mib"), arguments("bare", bare=True))
    shown = ("SPLIT-27", "SPLIT-28")
    yield from _make.written("SPLIT-28", "", "compiled_neighbours", way=ways, requirements=shown)
    yield from _make.written("SPLIT-27", "settings-aot", "compiled_neighbours", compile_=_AOT)
    yield from _mistakes()
    caps = (_bytes(80), _bytes(160, "two-layers"))
    runs = (PLAIN, arguments("last-first", last_first=True))
    for backend, most in (("watched", 2), ("inductor", 1)):
        marked: dict[str, Any] = {"compile_": {"backend": backend}, "way": caps[:most]}
        yield from _make.written("SPLIT-09", f"marked-{backend}", "compiled_overlap", 2, runs, **marked)
    yield from _meshes()
    yield from _ways()
    for slug, switch in (("dynamo", "+dynamo"), ("graphs", "ddp_graphs")):
        yield from _make.written("SPLIT-36", slug, "logged_cuts", way=ONE_MIB, compile_=_AOT, switch=switch)
    yield from _make.backwards("SPLIT-37")
    for reduction in ("split", "whole", "in_graph"):
        for way in ("wrapper", "in_place", "inner"):
            order = {**_AOT, "reduction": reduction, "way": way}
            yield from _make.compiled(
                "SPLIT-38", f"{reduction}-{way}".replace("_", "-"), "dropped_wrapper", compile_=order
            )
    yield from _make.written("SPLIT-32", "step", "compiled_step", way=(PLAIN, EACH_ALONE, UNUSED, STATIC))


def _train(
    requirement: str,
    slug: str,
    worlds: Worlds = 2,
    model: str = "mlp",
    schedule: tuple[Step, ...] = (Step(), Step()),
    **rest: Any,
) -> Iterator[Scenario]:
    trained = fields(dashed(model), model=model, schedule=schedule)
    yield from _make.compiled(requirement, slug, "train", worlds, trained=trained, **rest)


def _training() -> Iterator[Scenario]:
    for world_size in (1, 2, 3):
        yield from _train("SPLIT-01", "train", world_size, schedule=(Step(),) * 3)
        yield from _train("SPLIT-01", "cut", world_size, way=_SMALL, num_captured=[2, 2])
    for model in ("frozen", "mixed_dtypes"):
        yield from _train("SPLIT-01", "cut", model=model, way=_SMALL)
    yield from _train("SPLIT-01", "cut", model="many_small_layers", way=capped("", 0.001), schedule=(Step(),))
    for way in ("wrapper", "in_place", "before", "function"):
        yield from _make.case("SPLIT-02", "plain", dashed(way), compile_={"way": way}, num_captured=[4, 4])
    yield from _make.case("SPLIT-02", "plain", "default-caps", num_captured=[2, 2], way=PLAIN)
    yield from _make.case("SPLIT-02", "plain", "inner", compile_={"way": "inner"}, num_captured=[4, 4])
    for backend in ("eager", "aot_eager", "callable", "watched"):
        order = {"backend": backend}
        yield from _make.case(
            "SPLIT-03", "plain", dashed(backend), compile_=order, way=VIEW.named(""), also=("SPLIT-25",)
        )
        yield from _train("SPLIT-03", f"train-{dashed(backend)}", compile_=order)
    yield from _make.case("SPLIT-03", "plain", "inductor-cut", compile_={"backend": "inductor"})


def _cut(requirement: str, slug: str, sizes: list[int], worlds: Worlds = 2, **rest: Any) -> Iterator[Scenario]:
    yield from _make.written(requirement, slug, "compiled_cuts", worlds, sizes=sizes, **rest)


def _cuts() -> Iterator[Scenario]:
    sizes = [4, 5, 6, 7, 8]
    yield from _cut("SPLIT-04", "", sizes, 1, way=EACH_ALONE, also=("SPLIT-06",))
    yield from _cut("SPLIT-04", "", sizes, (2, 3), way=EACH_ALONE, also=("SPLIT-06", "SPLIT-09"))
    yield from _cut("SPLIT-04", "one-mib", [_MIB, _MIB + 1, _MIB + 2], way=ONE_MIB, also=("SPLIT-09",))
    yield from _cut("SPLIT-04", "aot", sizes, way=_ALONE, compile_=_AOT)
    yield from _cut("SPLIT-05", "big-last", [5, 6, _MIB + 1, _MIB + 2])
    yield from _cut("SPLIT-05", "small-last", [_MIB + 1, _MIB + 2, 5, 6])
    yield from _cut("SPLIT-05", "one-bucket", sizes)
    caps = [_bytes(num_bytes, f"{num_bytes}-bytes") for num_bytes in (44, 60, 100)]
    yield from _cut("SPLIT-06", "", sizes, way=caps)
    for nums_bytes in ([16, 48], [44, 4, 1000]):
        caps_mb = [num_bytes / 2**20 for num_bytes in nums_bytes]
        way = options("-".join(map(str, nums_bytes)), bucket_cap_mb_list=caps_mb)
        yield from _cut("SPLIT-07", "", sizes, way=way)
    for slug, ignored, frozen in (("ignored", [0, 2], []), ("frozen", [], [3]), ("both", [4], [0, 1])):
        yield from _cut("SPLIT-08", slug, sizes, way=_ALONE, ignored=ignored, frozen=frozen)
    order, kinds = ["elements", "later", "overlap"], ["elements", "dtypes"]
    ways = (
        EACH_ALONE | arguments(judge=order),
        _bytes(44, "two-each") | arguments(judge=order),
        _ALONE | VIEW | arguments(judge=["elements", "later"]),
        _ALONE | arguments("dtypes", judge=kinds, dtypes=["float32", "float64", "float32", "float64", "float32"]),
    )
    yield from _make.compiled("SPLIT-10", "", "bucket_traffic", way=ways, sizes=sizes)


def _features() -> Iterator[Scenario]:
    for slug, steps in (
        ("local", ["sync", "local local", "local sync"]),
        ("first", ["local sync", "sync"]),
        ("inside", ["forward_inside sync", "backward_inside", "sync"]),
    ):
        split = [step.split() for step in steps]
        yield from _make.compiled("SPLIT-11", slug, "accumulation", steps=split, zero_grad="none", flags=False)
    accumulating = (Step(local_backwards=2), Step(zero_grad="keep"), Step())
    yield from _train("SPLIT-11", "schedule", schedule=accumulating)
    yield from _make.members("SPLIT-12", [[0, 1], [0, 1]], 2, buffer=True)
    yield from _train("SPLIT-12", "batch-norm", model="batchnorm_mlp")
    yield from _make.case("SPLIT-12", "buffer")
    searching = UNUSED.named("")
    uses = [["a b c d", "a c"], ["a b", "c d a"], ["d", "d"]]
    ways = (searching, searching | VIEW)
    yield from _make.compiled("SPLIT-13", "by-rank", "unused_parameters", way=ways, uses=uses)
    yield from _train("SPLIT-13", "branches", model="two_heads", way=searching)
    yield from _train("SPLIT-14", "static", way=_STATIC, schedule=(Step(),) * 3)
    yield from _make.case("SPLIT-14", "checkpoint", way=STATIC)
    for aspect, answer in (("raw", "sum"), ("order", "average")):
        yield from _make.compiled("SPLIT-15", f"calls-{aspect}", "hook_calls", answer=answer, judge=[aspect])
    for hook in ("fp16", "bf16"):
        yield from _make.compiled("SPLIT-15", hook, "ready_made_hook", hook=hook, gradients="small")
    yield from _make.mixed_precision("SPLIT-16", "float16")
    yield from _make.mixed_precision("SPLIT-16", "bfloat16")
    for inputs in ([1, 3], [2, 2, 1]):
        slug = "-".join(map(str, inputs))
        yield from _make.compiled("SPLIT-17", slug, "uneven_training", len(inputs), num_inputs=inputs)
    yield from _make.members("SPLIT-18", [[0, 1, 2], [0, 1], [0, 1, 2]], 3)
    yield from _make.members("SPLIT-18", [[0, 1], [0]], 2)


def _graphs() -> Iterator[Scenario]:
    sizes: dict[str, Any] = {"batches": [4, 2, 7, 3, 5, 6], "num_steps": 6}
    yield from _make.case("SPLIT-19", "plain", "same", num_captured=[4, 8], **sizes)
    yield from _make.case("SPLIT-19", "plain", "by-rank", num_captured=[4, 8], by_rank=True, **sizes)
    yield from _make.case("SPLIT-19", "sizes", num_captured=[2, 12], **sizes)
    yield from _make.case("SPLIT-19", "plain", "dynamic", num_captured=[4, 4], compile_={"dynamic": True}, **sizes)
    for way in ("wrapper", "in_place", "before"):
        order = {"way": way, "fullgraph": True}
        yield from _make.case("SPLIT-20", "plain", f"full-{dashed(way)}", compile_=order, num_captured=[4, 4])
    for case, backend in (("checkpoint", "callable"), ("checkpoint", "watched"), ("cond", "callable")):
        yield from _make.case("SPLIT-21", case, backend, compile_={"backend": backend})
    for case in ("graph_break", "begins_without_parameters"):
        yield from _make.case("SPLIT-22", case, way=(ONE_MIB, PLAIN.named("default-caps")))
    for case in ("external", "passes_input_on", "dict", "dataclass"):
        yield from _make.case("SPLIT-23", case)
    for structure in ("tuple", "named_tuple", "nested", "nested_dataclass"):
        yield from _make.compiled("SPLIT-23", dashed(structure), "outputs", structure=structure)
    for case in ("shared", "in_place", "sizes", "no_grad", "method"):
        yield from _make.case("SPLIT-24", case)
    yield from _make.case("SPLIT-24", "in_place", "aot", compile_=_AOT)
    yield from _make.case("SPLIT-24", "plain", "frozen", frozen=["a.layer.weight", "b.layer.bias"])
    yield from _train("SPLIT-25", "view", way=VIEW.named(""), schedule=(Step(),) * 3)
    whole = {"reduction": "whole"}
    yield from _make.case("SPLIT-26", "plain", compile_=whole, num_captured=[1, 1])
    yield from _train("SPLIT-26", "whole", compile_=whole, way=_SMALL, num_captured=[1, 1])


def _mistakes() -> Iterator[Scenario]:
    for requirement, mistake in (
        ("SPLIT-29", "raising_backend"),
        ("SPLIT-30", "added_parameter"),
        ("SPLIT-30", "replaced_parameter"),
        ("SPLIT-30", "thawed_parameter"),
        ("SPLIT-31", "no_parameter"),
        ("SPLIT-31", "mixed_devices"),
        ("SPLIT-31", "two_groups"),
    ):
        yield from _make.written(requirement, dashed(mistake), "compiled_mistake", mistake=mistake)


def _way(
    slug: str,
    num_graphs: int | None = None,
    *,
    compile_: dict[str, Any] | None = None,
    way: Variant = ONE_MIB,
    **given: Any,
) -> Iterator[Scenario]:
    """Yield a training whose module, or what is inside of it, is compiled in one of many ways."""
    pinned = {} if num_graphs is None else {"num_graphs": num_graphs}
    asked = {"compile_": {**_AOT, **(compile_ or {})}, "way": way, "also": ("SPLIT-35",), **pinned, **given}
    yield from _make.written("SPLIT-34", dashed(slug), "compiled_ways", **asked)


def _ways() -> Iterator[Scenario]:
    for way in ("wrapper", "in_place", "before", "inner", "function"):
        yield from _way(f"way-{way}", 4, compile_={"way": way}, counts_modules=True)
    for inside, num_graphs in INSIDE_GRAPHS.items():
        # Only the second half of "one_part" is compiled; autograd runs the first one layer by layer.
        yield from _way(inside, num_graphs, inside=inside)
        if inside in INSIDE:
            yield from _way(f"{inside}-after", num_graphs, inside=inside, when="after")
    yield from _way("regions-after", 4, inside="regions", when="after")
    for slug, given in (
        ("methods", {"inside": "methods"}),
        ("methods-after", {"inside": "methods", "when": "after"}),
        ("module-after", {"inside": "module", "when": "after"}),
        ("wrapper", {}),
        ("in-place", {"compile_": {"way": "in_place"}}),
    ):
        yield from _way(f"redirected-{slug}", 4, redirected=True, **given)
    for inside in ("module", "forward", "parts", "regions", "nested"):
        yield from _way(f"{inside}-breaks", 2, inside=inside, breaks=True)
    yield from _way("wrapper-breaks", 2, breaks=True)
    yield from _way("module-full", 4, inside="module", compile_={"fullgraph": True})
    for slug, dynamic, num_graphs in (("dynamic", True, 4), ("sizes", None, 8)):
        order = {"dynamic": dynamic}
        yield from _way(f"module-{slug}", num_graphs, inside="module", compile_=order, batches=[4, 2, 7])
    yield from _way("module", 4, inside="module", way=ONE_MIB | VIEW)
    for backend in ("aot_eager", "inductor"):
        for way in ("wrapper", "before", "inner"):
            yield from _way(f"way-{way}-{backend}", 4, compile_={"way": way, "backend": backend})
        for inside in ("module", "forward", "methods", "parts", "one_part", "nested", "regions"):
            named = {"backend": backend}
            yield from _way(f"{inside}-{backend}", INSIDE_GRAPHS[inside], inside=inside, compile_=named)


def _meshes() -> Iterator[Scenario]:
    alone = _ALONE | arguments(num_steps=3)
    for mesh in ((2, 2), (4, 1), (1, 4)):
        for backend in ("eager", "watched"):
            yield from _make.sharded("SPLIT-33", f"cut-{backend}", mesh, compile_={"backend": backend}, way=alone)
    yield from _make.sharded("SPLIT-33", "whole", (2, 2), compile_={"reduction": "whole", **_AOT}, num_steps=3)
    yield from _make.sharded("SPLIT-33", "inductor", (2, 2), compile_={"backend": "inductor"}, way=alone)
    yield from _make.sharded("SPLIT-33", "uneven", (2, 2), compile_=_AOT, model="uneven", num_steps=3)
    moved = {"compile_": {"way": "in_place"}, "load_mesh": [4, 1]}
    yield from _make.sharded("SPLIT-33", "checkpoint-to-4x1-from", (2, 2), "sharded_checkpoint", **moved)
