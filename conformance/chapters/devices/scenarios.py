"""Scenarios of chapter devices: one training, on several streams and with the options that move work about."""

from collections.abc import Iterator
from typing import Any

from conformance.chapters.grid import Axis, Grid, Worlds
from conformance.chapters.variants import (
    LOCAL_BUFFERS,
    PLAIN,
    STATIC,
    UNUSED,
    VIEW,
    Variant,
    arguments,
    capped,
    fields,
    options,
)
from conformance.scenario import Scenario

_grid = Grid("devices", Variant(needs=("streams",)))


def _declared(variant: Variant) -> Variant:
    return variant | Variant(needs=tuple(variant.options))


_PLAIN = PLAIN.named("plain")
_VIEW, _STATIC, _UNUSED = _declared(VIEW), _declared(STATIC), _declared(UNUSED)
_HALF = _declared(options(mixed_precision={"param_dtype": "float16"}))
_TINY = capped("tiny", 0.00002)
_TINY_VIEW = _TINY | _VIEW
_ALL = (_PLAIN, _VIEW, _TINY.named("tiny-buckets"), _TINY_VIEW, _STATIC)
_FEW = (_PLAIN, _TINY_VIEW)

#: On which streams the training runs.
_SIDE = arguments("side", place="side")
_DEFAULT_OR_SIDE = (PLAIN, _SIDE)
_DEFAULT_OR_SIDE_EACH = (PLAIN, arguments("side", place="side_each"))
_IN_BACKWARD = Variant(arguments={"optimizer": "in_backward"}, needs=("optimizer_in_backward",))


def _hook(name: str) -> Variant:
    return Variant(arguments={"hook": name}, needs=("comm_hook",))


def _no_sync(local: int) -> Variant:
    return Variant(arguments={"local": local}, needs=("no_sync",))


def _train(requirement: str, slug: str, worlds: Worlds, *axes: Axis, **given: Any) -> Iterator[Scenario]:
    yield from _grid(requirement, slug, "on_streams", worlds, *axes, arguments=given)


def scenarios() -> Iterator[Scenario]:
    """Yield every scenario of the chapter."""
    for world_size in (1, 2, 3):
        yield from _streams(world_size)
    for world_size in (2, 3):
        yield from _user_streams(world_size)
        yield from _hooks(world_size)
        yield from _features(world_size)
        yield from _waits(world_size)
        yield from _overlap(world_size)
        yield from _places(world_size)
    for way in (*_FEW, _STATIC):
        yield from _train("DEV-42", "", 4, _DEFAULT_OR_SIDE, way)
    yield from _memory()


def _streams(world_size: int) -> Iterator[Scenario]:
    side_each = arguments("side_each", place="side_each")
    for way in _ALL:
        yield from _train("DEV-01", "", world_size, arguments("default", place="default"), way)
        yield from _train("DEV-02", "", world_size, (_SIDE, side_each), way)
        yield from _train("DEV-03", "", world_size, _DEFAULT_OR_SIDE, way, counts=0)
        yield from _train("DEV-03", "no-sync", world_size, way, _no_sync(1), counts=0)
        yield from _train("DEV-01", "no-sync", world_size, way, _no_sync(2))
        yield from _train("DEV-08", "", world_size, _DEFAULT_OR_SIDE_EACH, way, churns=True)
        if world_size > 1:
            yield from _train("DEV-06", "", world_size, _DEFAULT_OR_SIDE, way, _hook("divides"))
            yield from _train("DEV-07", "", world_size, _DEFAULT_OR_SIDE_EACH, way, buffers=True)
            if "bucket_cap_mb" in way.options:
                yield from _train("DEV-05", "", world_size, way, traces="launches_early")
    searching = _UNUSED.named("")
    ways = (
        searching | arguments(counts=0),
        searching | arguments("spare", counts=1, spare=True),
        _VIEW | searching | arguments(counts=0),
    )
    yield from _train("DEV-04", "", world_size, [arguments(place, place=place) for place in ("default", "side")], ways)


def _user_streams(world_size: int) -> Iterator[Scenario]:
    for way in (*_FEW, _UNUSED):
        yield from _train("DEV-09", "", world_size, _DEFAULT_OR_SIDE_EACH, way, forks=True)
        yield from _train("DEV-10", "", world_size, way, turns=True)
        yield from _train("DEV-11", "", world_size, way, _no_sync(2), apart=True)
        yield from _train("DEV-12", "", world_size, _DEFAULT_OR_SIDE, way, wraps=True)
        guarded = (PLAIN, arguments("side", place="side_each", forks=True))
        yield from _train("DEV-13", "", world_size, guarded, way, guards=True)


def _hooks(world_size: int) -> Iterator[Scenario]:
    for requirement, hook in (("DEV-14", "reads"), ("DEV-15", "chains"), ("DEV-16", "completes"), ("DEV-17", "fp16")):
        for way in _FEW:
            yield from _train(requirement, "", world_size, _DEFAULT_OR_SIDE, way, _hook(hook))
    for way in _FEW:
        yield from _train("DEV-18", "", world_size, way, listens=True)
        yield from _train("DEV-22", "", world_size, way, buffer_hook="sums")


def _features(world_size: int) -> Iterator[Scenario]:
    sgd = arguments("sgd", optimizer="sgd")
    for way in _FEW:
        yield from _train("DEV-19", "", world_size, _DEFAULT_OR_SIDE_EACH, way, optimizer="sgd")
        yield from _train("DEV-20", "", world_size, _DEFAULT_OR_SIDE, way, _IN_BACKWARD)
        yield from _train("DEV-21", "", world_size, (*_DEFAULT_OR_SIDE, sgd), way, _HALF)
    divisors = (PLAIN.named("early"), arguments("by-active", divide_by_initial_world_size=False))
    inputs = arguments(num_inputs=[1, 3, 2][:world_size])
    yield from _grid("DEV-23", "", "uneven_training", world_size, divisors, inputs, model="mlp", needs=("join",))
    dropped = fields(min_collectives=0, deadline_s=5.0)
    yield from _grid("DEV-51", "", "dropped_backward", world_size, (_PLAIN, _UNUSED), dropped)
    for place in (arguments("plain", side=False), arguments("side", side=True)):
        yield from _grid("DEV-31", "", "synchronised_norm", world_size, place)
        yield from _grid("DEV-32", "", "synchronised_norm", world_size, place, arguments(counts=0))
        yield from _grid("DEV-50", "", "synchronised_norm", world_size, place, arguments(counts=0, own=True))


def _waits(world_size: int) -> Iterator[Scenario]:
    joined = LOCAL_BUFFERS.named("") | Variant(arguments={"joins": True}, needs=("join",))
    logged = Variant(arguments={"logs": True}, needs=("logging_data",))
    for way in _FEW:
        yield from _train("DEV-24", "", world_size, way, joined, counts=0)
        yield from _train("DEV-25", "", world_size, way, _HALF, counts=0)
        yield from _train("DEV-26", "", world_size, way, _hook("chains"), counts=0)
        yield from _train("DEV-27", "", world_size, way, _IN_BACKWARD, counts=0)
        yield from _train("DEV-28", "", world_size, way, counts=0, buffers=True)
        yield from _train("DEV-29", "", world_size, way, _STATIC.named(""), counts=0, spare=True)
        yield from _train("DEV-30", "", world_size, way, logged, counts=0)


def _overlap(world_size: int) -> Iterator[Scenario]:
    tiny = _TINY.named("")
    for way in (_TINY, tiny | _VIEW, tiny | _UNUSED, tiny | _STATIC):
        yield from _train("DEV-48", "", world_size, way, traces="late")
        yield from _train("DEV-49", "", world_size, way, traces="waits_early")
    yield from _train("DEV-48", "hook", world_size, tiny, _hook("divides"), traces="late")
    yield from _train("DEV-48", "no-sync", world_size, tiny, _no_sync(1), traces="late")
    yield from _train("DEV-49", "hook", world_size, tiny, _hook("divides"), traces="waits_early")


def _places(world_size: int) -> Iterator[Scenario]:
    for way in _FEW:
        for requirement, place in _PLACES:
            least = fields(min_collectives=0 if "refused" in place.arguments else 1)
            yield from _grid(requirement, "", "on_devices", world_size, place, way, least)


_PLACES = (
    ("DEV-33", arguments("host", inputs="host")),
    ("DEV-33", arguments("nested", inputs="host", nested=True)),
    ("DEV-33", arguments("current", inputs="host", nested=True, current="other")),
    ("DEV-34", arguments("host", inputs="host", ids="none")),
    ("DEV-34", arguments("here", inputs="here", ids="none")),
    ("DEV-35", arguments("other", inputs="host", ids="other")),
    ("DEV-35", arguments("from-here", inputs="here", ids="other")),
    ("DEV-36", arguments("host", inputs="host", reused=True)),
    ("DEV-36", arguments("pinned", inputs="pinned", reused=True)),
    ("DEV-36", arguments("side", inputs="pinned", reused=True, side=True)),
    ("DEV-37", arguments("plain", inputs="other")),
    ("DEV-37", arguments("side", inputs="other", side=True)),
    ("DEV-38", arguments("plain", layers="other", ids="none")),
    ("DEV-38", arguments("side", layers="other", ids="none", side=True)),
    ("DEV-39", arguments("module", layers="other", ids="here", refused=True)),
    ("DEV-39", arguments("ids", ids="both", refused=True)),
    ("DEV-40", arguments("plain", current="other")),
    ("DEV-40", arguments("side", current="other", side=True, inputs="host")),
    ("DEV-41", arguments("plain", elsewhere=True, inputs="host")),
    ("DEV-41", arguments("current", elsewhere=True, current="other")),
    ("DEV-43", arguments("plain", host_buffer=True)),
    ("DEV-43", arguments("side", host_buffer=True, side=True)),
)


def _memory() -> Iterator[Scenario]:
    one_layer_each = capped("", 0.02)
    unrecorded = fields(recorded=False)  # a recorder keeps works, and works keep tensors
    for way in (_PLAIN, _VIEW, _STATIC, _UNUSED):
        for requirement, asks in (("DEV-44", "over_torch"), ("DEV-46", "growth"), ("DEV-47", "left")):
            asked = arguments(asks=asks)
            yield from _grid(requirement, "", "device_memory", 2, one_layer_each, way, asked, unrecorded)
    in_buckets = _VIEW.named("")
    ways = (in_buckets.named("plain"), in_buckets | _TINY, in_buckets | _UNUSED)
    yield from _grid("DEV-45", "", "device_memory", 2, ways, arguments(asks="beside_gradients"), unrecorded)
