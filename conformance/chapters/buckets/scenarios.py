"""Scenarios of chapter buckets: which collectives a step issues, how large, when and in which order."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from conformance.chapters.in_chapter import in_chapter
from conformance.models.catalogue import get_fixture
from conformance.scenario import Scenario, Step

_scenario = in_chapter("buckets")

#: Lengths of vectors that tell every combination of them apart by their sum.
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

_FIND: dict[str, Any] = {"find_unused_parameters": True}


def cap_of(num_elements: int, *, bytes_each: int = 4) -> float:
    """Return the cap in MiB that `num_elements` reach exactly."""
    return num_elements * bytes_each / _MIB


def _traffic(requirement: str, slug: str, world_size: int, options: dict[str, Any], **arguments: Any) -> Scenario:
    arguments.setdefault("sizes", list(SIZES))
    arguments["judge"] = list(_JUDGED[requirement])
    dtype = arguments.pop("dtype", "float32")
    return _scenario(requirement, slug, "bucket_traffic", world_size, options=options, arguments=arguments, dtype=dtype)


def scenarios() -> Iterator[Scenario]:
    """Yield every scenario of the chapter."""
    yield from _what()
    yield from _order()
    yield from _caps()
    yield from _models()
    yield from _own_collectives()
    yield from _auto()


def _what() -> Iterator[Scenario]:
    for world_size in (2, 3, 4):
        yield _traffic("BUCKET-01", "all", world_size, {})
    for slug, cap in (("each-alone", 1), ("two", 1100)):
        yield _traffic("BUCKET-01", slug, 2, {"bucket_cap_mb": cap_of(cap)})
    for slug, arguments in (
        ("frozen", {"frozen": [1, 4]}), ("ignored", {"ignored": [0, 2]}), ("both", {"frozen": [0], "ignored": [3]}),
    ):  # fmt: skip
        for as_view in (False, True):
            yield _traffic(
                "BUCKET-01", f"{slug}{'-view' * as_view}", 2, {"gradient_as_bucket_view": as_view}, **arguments
            )
    for slug, options in (
        ("one-element-cap", {"bucket_cap_mb": cap_of(1)}), ("default-cap", {}),
        ("cap-list", {"bucket_cap_mb_list": [cap_of(100), cap_of(700)]}),
    ):  # fmt: skip
        for world_size in (2, 3):
            yield _traffic("BUCKET-02", slug, world_size, options)
    dtypes = ["float32", "float64", "float32", "float64", "float16"]
    for slug, options in (("default-cap", {}), ("small-cap", {"bucket_cap_mb": cap_of(200)})):
        for world_size in (2, 3):
            yield _traffic("BUCKET-09", slug, world_size, options, dtypes=dtypes)


def _order() -> Iterator[Scenario]:
    for world_size in (2, 3, 4):
        for slug, options in (("each-alone", {"bucket_cap_mb": cap_of(1)}), ("pairs", {"bucket_cap_mb": cap_of(300)})):
            yield _traffic("BUCKET-03", f"order-by-rank-{slug}", world_size, options, order="by_rank")
    for order in ("registered", "reversed"):
        for slug, options in (("each-alone", {"bucket_cap_mb": cap_of(1)}), ("some", {"bucket_cap_mb": cap_of(600)})):
            for world_size in (2, 3):
                yield _traffic("BUCKET-04", f"{order}-{slug}", world_size, options, order=order)
    for order in ("registered", "reversed"):
        for as_view in (False, True):
            options = {"bucket_cap_mb": cap_of(1), "gradient_as_bucket_view": as_view}
            yield _traffic("BUCKET-10", f"{order}{'-view' * as_view}", 2, options, order=order)
    for slug, more in (
        ("plain", {}), ("view", {"gradient_as_bucket_view": True}), ("static", {"static_graph": True}),
        ("unused", _FIND),
    ):  # fmt: skip
        for num_elements in (1, 400):
            options = {"bucket_cap_mb": cap_of(num_elements), **more}
            yield _traffic("BUCKET-17", f"cap-{num_elements}-{slug}", 2, options)
            yield _traffic("BUCKET-18", f"cap-{num_elements}-{slug}", 2, options, turns=True)
    yield _traffic("BUCKET-10", "two-buckets", 4, {"bucket_cap_mb": cap_of(sum(SIZES[1:]))})


def _caps() -> Iterator[Scenario]:
    for num_elements in (1, 64, 200, 400, 1043, 1044, 1600, 2013, 2014, 100_000):
        yield _traffic("BUCKET-05", f"cap-{num_elements}", 2, {"bucket_cap_mb": cap_of(num_elements)})
    for num_elements in (200, 1044):
        cap = {"bucket_cap_mb": cap_of(num_elements, bytes_each=8)}
        yield _traffic("BUCKET-05", f"double-cap-{num_elements}", 3, cap, dtype="float64")
    yield _traffic("BUCKET-05", "cap-zero", 2, {"bucket_cap_mb": 0})
    large = [200_000] * 4  # 0.76 MiB each: the second one passes 1 MiB
    yield _traffic("BUCKET-06", "default-first-cap", 2, {}, sizes=large)
    yield _traffic("BUCKET-06", "explicit-cap", 2, {"bucket_cap_mb": 25}, sizes=large)
    yield _traffic("BUCKET-06", "explicit-small-cap", 2, {"bucket_cap_mb": 0.5}, sizes=large)
    for slug, caps in (("growing", [100, 300, 1000]), ("shrinking", [1300, 600, 1]), ("single", [400])):
        options: dict[str, Any] = {"bucket_cap_mb_list": [cap_of(cap) for cap in caps]}
        for world_size in (2, 3):
            yield _traffic(
                "BUCKET-07", slug, world_size, options
            ).replace(needs=("bucket_cap_mb_list",))  # fmt: skip
    for model in ("mlp", "gpt", "many_small_layers", "mixed_dtypes", "lstm"):
        for slug, options in (
            ("cap-tiny", {"bucket_cap_mb": 0.00001}), ("cap-small", {"bucket_cap_mb": 0.004}),
            ("cap-25", {"bucket_cap_mb": 25}), ("cap-list", {"bucket_cap_mb_list": [0.001, 0.0001]}),
        ):  # fmt: skip
            yield _train("BUCKET-08", f"{model.replace('_', '-')}-{slug}", model, 2, options)
    yield _train("BUCKET-08", "gpt-cap-small", "gpt", 3, {"bucket_cap_mb": 0.004})
    yield _train(
        "BUCKET-08", "mlp-cap-tiny-view", "mlp", 4, {"bucket_cap_mb": 0.00001, "gradient_as_bucket_view": True}
    )


def _train(requirement: str, slug: str, model: str, world_size: int, options: dict[str, Any]) -> Scenario:
    schedule = (Step(), Step(), Step())
    dtype = get_fixture(model).dtypes[0]
    return _scenario(
        requirement, slug, "train", world_size, model=model, options=options, schedule=schedule, dtype=dtype
    )


def _models() -> Iterator[Scenario]:
    for model in (
        "mlp",
        "gpt",
        "lstm",
        "many_small_layers",
        "channels_last_cnn",
        "frozen",
        "mixed_dtypes",
        "embedding",
    ):
        for slug, options in (("", {}), ("-small-cap", {"bucket_cap_mb": 0.002})):
            scenario = _scenario(
                "BUCKET-11", f"{model.replace('_', '-')}{slug}", "model_traffic", 2, model=model, options=options,
                dtype=get_fixture(model).dtypes[0],
            )  # fmt: skip
            also = ("GRAD-19",) if model == "frozen" else ()
            yield scenario.replace(requirements=("BUCKET-01", "BUCKET-11", "BUCKET-12", *also))
    for model in ("mlp", "gpt"):
        yield _scenario("BUCKET-12", model, "model_traffic", 3, model=model)
    for model, world_sizes in (("many_small_layers", (2, 3, 4)), ("mixed_dtypes", (2,))):
        for world_size in world_sizes:
            yield _scenario(
                "BUCKET-14", model.replace("_", "-"), "model_traffic", world_size, model=model, arguments={"few": True}
            )


def _own_collectives() -> Iterator[Scenario]:
    caps: dict[str, dict[str, Any]] = {
        "default-cap": {},
        "pairs": {"bucket_cap_mb": cap_of(8)},
        "one-bucket": {"bucket_cap_mb": 1},
    }
    for slug, options in caps.items():
        for world_size, ranks_with_b in ((2, [0]), (2, [1]), (3, [0, 2]), (4, [1, 3])):
            yield _scenario(
                "BUCKET-13", f"{slug}-b-on-{'-'.join(map(str, ranks_with_b))}", "routed_activations", world_size,
                options={**_FIND, **options}, arguments={"ranks_with_b": ranks_with_b}, needs=("all_to_all",),
                deadline_s=5.0,
            )  # fmt: skip
    for slug, options in caps.items():
        yield _scenario(
            "BUCKET-13", f"{slug}-b-everywhere", "routed_activations", 2, options=options,
            arguments={"ranks_with_b": [0, 1]}, needs=("all_to_all",), deadline_s=5.0,
        )  # fmt: skip


def _auto() -> Iterator[Scenario]:
    steps = (Step(),) * 6  # caps are chosen after three
    for slug, options in (
        ("", {}),
        ("-view", {"gradient_as_bucket_view": True}),
        ("-unused", _FIND),
        ("-static", {"static_graph": True}),
    ):
        for model in ("many_small_layers", "mixed_dtypes"):
            yield _scenario(
                "BUCKET-15", f"{model.replace('_', '-')}{slug}", "train", 2, model=model, schedule=steps,
                options={"bucket_cap_mb": "auto", **options}, needs=("auto_buckets",),
            )  # fmt: skip
    accumulating = (Step(), Step(local_backwards=1), Step(synchronised=False, optimizer=False), *steps)
    yield _scenario(
        "BUCKET-15", "accumulating", "train", 3, schedule=accumulating, options={"bucket_cap_mb": "auto"},
        needs=("auto_buckets",),
    )  # fmt: skip
    for world_size in (1, 2, 4):
        chosen = _scenario(
            "BUCKET-16", "slow-rank", "auto_caps", world_size, options={"bucket_cap_mb": "auto"},
            needs=("auto_buckets", "logging_data"),
        )  # fmt: skip
        yield chosen.replace(requirements=("BUCKET-16", "BUCKET-15"))
