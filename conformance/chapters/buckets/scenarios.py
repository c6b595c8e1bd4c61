"""Scenarios of chapter buckets: which collectives a step issues, how large, when and in which order."""

from collections.abc import Iterator
from typing import Any

from conformance.chapters.grid import Axis, Grid, Worlds
from conformance.chapters.variants import (
    EACH_ALONE,
    NO_VIEW,
    PLAIN,
    STATIC,
    UNUSED,
    VIEW,
    Variant,
    arguments,
    capped,
    each,
    fields,
    model,
    models,
    options,
)
from conformance.scenario import Scenario, Step

_grid = Grid("buckets")

#: Lengths of vectors: every combination of them has another sum.
SIZES = (64, 129, 258, 520, 1043)

_MIB = 1024 * 1024
#: What each requirement asks of the collectives, besides right gradients.
_JUDGED = {
    "BUCKET-01": ("elements",),
    "BUCKET-02": ("first",),
    "BUCKET-03": ("elements",),
    "BUCKET-04": ("later",),
    "BUCKET-05": ("later",),
    "BUCKET-06": ("later",),
    "BUCKET-07": ("later",),
    "BUCKET-09": ("dtypes", "elements"),
    "BUCKET-10": ("overlap",),
    "BUCKET-18": ("elements",),
    "BUCKET-17": ("overlap", "full_overlap"),
}
_IGNORING = Variant(needs=("ignored_parameters",))
_AUTO = Variant(options={"bucket_cap_mb": "auto"}, needs=("auto_buckets",))


def _cap_of(num_elements: int, slug: str = "", *, bytes_each: int = 4) -> Variant:
    """Return the cap in MiB that `num_elements` reach exactly."""
    return capped(slug, num_elements * bytes_each / _MIB)


def _cap_list(slug: str, *nums_elements: int) -> Variant:
    return options(slug, bucket_cap_mb_list=[num_elements * 4 / _MIB for num_elements in nums_elements])


def _traffic(requirement: str, slug: str, worlds: Worlds, *axes: Axis, **rest: Any) -> Iterator[Scenario]:
    asked = arguments(sizes=list(SIZES), judge=list(_JUDGED[requirement]))
    yield from _grid(requirement, slug, "bucket_traffic", worlds, asked, *axes, **rest)


def scenarios() -> Iterator[Scenario]:
    """Yield every scenario of the chapter."""
    yield from _what()
    yield from _order()
    yield from _caps()
    yield from _models()
    yield from _own_collectives()
    yield from _auto()


def _what() -> Iterator[Scenario]:
    yield from _traffic("BUCKET-01", "all", (2, 3, 4))
    # A cap that one gradient reaches exactly is where "full" and "larger than the cap" meet.
    exactly = [_cap_of(size, f"exactly-{size}") for size in SIZES]
    yield from _traffic("BUCKET-01", "", 2, (_cap_of(1, "each-alone"), _cap_of(1100, "two"), *exactly))
    left_out = (
        arguments("frozen", frozen=[1, 4]),
        arguments("ignored", ignored=[0, 2]) | _IGNORING,
        arguments("both", frozen=[0], ignored=[3]) | _IGNORING,
    )
    yield from _traffic("BUCKET-01", "", 2, left_out, (NO_VIEW, VIEW))
    default_cap = PLAIN.named("default-cap")
    caps = (_cap_of(1, "one-element-cap"), default_cap, _cap_list("cap-list", 100, 700))
    yield from _traffic("BUCKET-02", "", (2, 3), caps)
    dtypes = arguments(dtypes=["float32", "float64", "float32", "float64", "float16"])
    yield from _traffic("BUCKET-09", "", (2, 3), (default_cap, _cap_of(200, "small-cap")), dtypes)


def _order() -> Iterator[Scenario]:
    each_alone = _cap_of(1, "each-alone")
    orders = each("order", ("registered", "reversed"))
    by_rank = arguments("order-by-rank", order="by_rank")
    for world_size in (2, 3, 4):
        yield from _traffic("BUCKET-03", "", world_size, by_rank, (each_alone, _cap_of(300, "pairs")))
    yield from _traffic("BUCKET-04", "", (2, 3), orders, (each_alone, _cap_of(600, "some")))
    yield from _traffic("BUCKET-10", "", 2, orders, _cap_of(1), (NO_VIEW, VIEW))
    for way in (PLAIN.named("plain"), VIEW, STATIC, UNUSED):
        for num_elements in (1, 400):
            cap = _cap_of(num_elements, f"cap-{num_elements}")
            yield from _traffic("BUCKET-17", "", 2, cap, way)
            yield from _traffic("BUCKET-18", "", 2, cap, way, arguments(turns=True))
    yield from _traffic("BUCKET-10", "", 4, _cap_of(sum(SIZES[1:]), "two-buckets"))


def _caps() -> Iterator[Scenario]:
    lengths = (1, 64, 200, 400, 1043, 1044, 1600, 2013, 2014, 100_000)
    yield from _traffic("BUCKET-05", "", 2, [_cap_of(length, f"cap-{length}") for length in lengths])
    double = [_cap_of(length, f"double-cap-{length}", bytes_each=8) for length in (200, 1044)]
    yield from _traffic("BUCKET-05", "", 3, double, dtype="float64")
    yield from _traffic("BUCKET-05", "", 2, capped("cap-zero", 0))
    large = arguments(sizes=[200_000] * 4)  # 0.76 MiB each: the second one passes 1 MiB
    caps = (PLAIN.named("default-first-cap"), capped("explicit-cap", 25), capped("explicit-small-cap", 0.5))
    yield from _traffic("BUCKET-06", "", 2, caps, large)
    lists = (_cap_list("growing", 100, 300, 1000), _cap_list("shrinking", 1300, 600, 1), _cap_list("single", 400))
    yield from _traffic("BUCKET-07", "", (2, 3), lists, needs=("bucket_cap_mb_list",))
    small, tiny = capped("cap-small", 0.004), EACH_ALONE.named("cap-tiny")
    large, several = capped("cap-25", 25), options("cap-list", bucket_cap_mb_list=[0.001, 0.0001])
    trained = models("mlp", "gpt", "many_small_layers", "mixed_dtypes", "lstm")
    three_steps = fields(schedule=(Step(),) * 3)
    yield from _grid("BUCKET-08", "", "train", 2, trained, (tiny, small, large, several), three_steps)
    yield from _grid("BUCKET-08", "", "train", 3, model("gpt"), small, three_steps)
    yield from _grid("BUCKET-08", "", "train", 4, model("mlp"), tiny, VIEW, three_steps)


def _models() -> Iterator[Scenario]:
    trained = (
        *models("mlp", "gpt", "lstm", "many_small_layers", "channels_last_cnn"),
        model("frozen") | Variant(also=("GRAD-19",)),
        *models("mixed_dtypes", "embedding"),
    )
    for way in trained:
        shown = ("BUCKET-01", "BUCKET-11", "BUCKET-12", *way.also)
        caps = (PLAIN, capped("small-cap", 0.002))
        yield from _grid("BUCKET-11", "", "model_traffic", 2, way, caps, requirements=shown)
    yield from _grid("BUCKET-12", "", "model_traffic", 3, models("mlp", "gpt"))
    many = (
        fields("many-small-layers", model="many_small_layers").at(2, 3, 4),
        fields("mixed-dtypes", model="mixed_dtypes"),
    )
    yield from _grid("BUCKET-14", "", "model_traffic", 2, many, arguments(few=True), needs=("bucket_cap_mb",))


def _own_collectives() -> Iterator[Scenario]:
    caps = (PLAIN.named("default-cap"), _cap_of(8, "pairs"), capped("one-bucket", 1))
    by_rank = [
        arguments(f"b-on-{'-'.join(map(str, ranks))}", ranks_with_b=ranks).at(world_size) | UNUSED.named("")
        for world_size, ranks in ((2, [0]), (2, [1]), (3, [0, 2]), (4, [1, 3]))
    ]
    everywhere = arguments("b-everywhere", ranks_with_b=[0, 1])
    routed = Variant(needs=("all_to_all",), fields={"deadline_s": 5.0})
    yield from _grid("BUCKET-13", "", "routed_activations", (), caps, by_rank, routed)
    yield from _grid("BUCKET-13", "", "routed_activations", 2, caps, everywhere, routed)


def _auto() -> Iterator[Scenario]:
    steps = (Step(),) * 6  # caps are chosen after three
    trained = models("many_small_layers", "mixed_dtypes")
    for way in (PLAIN, VIEW, UNUSED, STATIC):
        yield from _grid("BUCKET-15", "", "train", 2, _AUTO, trained, way, schedule=steps)
    accumulating = (Step(), Step(local_backwards=1), Step(synchronised=False, optimizer=False), *steps)
    yield from _grid("BUCKET-15", "accumulating", "train", 3, _AUTO, schedule=accumulating)
    measured = Variant(needs=("logging_data",), also=("BUCKET-15",))
    yield from _grid("BUCKET-16", "slow-rank", "auto_caps", (1, 2, 4), _AUTO | measured)
