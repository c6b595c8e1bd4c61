"""Scenarios of chapter buffers: a forward after a synchronised one starts with rank 0's, without side effects."""

from collections.abc import Iterator

from conformance.chapters.buffers.changed_buffers import CHANGES
from conformance.chapters.grid import Grid
from conformance.chapters.variants import (
    LOCAL_BUFFERS,
    PLAIN,
    UNUSED,
    VIEW,
    Variant,
    arguments,
    each,
    model,
    models,
    options,
)
from conformance.scenario import Scenario, Step

_grid = Grid("buffers")

_VARIANTS = (PLAIN, VIEW, UNUSED)
_OFF = LOCAL_BUFFERS.named("off")


def scenarios() -> Iterator[Scenario]:
    """Yield every scenario of the chapter."""
    yield from _drifting()
    yield from _due()
    one, two, three = (arguments(f"{count}-forwards", forwards=count) for count in (1, 2, 3))
    norm, cnn = model("batchnorm_mlp").named("batchnorm"), model("cnn")
    for way in _VARIANTS:
        yield from _grid("BUFFER-03", "saved", "saved_buffer", 2, (one, two.at(2, 3), three), way)
        yield from _grid("BUFFER-03", "", "forwards_before_backward", (2, 3), norm, two, way)
    yield from _grid("BUFFER-03", "", "forwards_before_backward", 2, cnn, three)
    nothing, ignored, off = each("kind", ("no_buffers", "ignored", "off"))
    kinds = (nothing, ignored | Variant(needs=("ignored_parameters",)), off | LOCAL_BUFFERS.named(""))
    yield from _grid("BUFFER-09", "", "silent_forward", (2, 3), kinds)
    yield from _batch_norm()
    alike = [arguments(change, first=change, others=change) for change in CHANGES]
    yield from _grid("BUFFER-08", "changed", "changed_buffers", (1, 2, 3), alike)
    pairs = [(first, others) for first in CHANGES for others in CHANGES if first != others]
    apart = [arguments(f"{first}-{others}", first=first, others=others) for first, others in pairs]
    yield from _grid("BUFFER-14", "changed", "changed_buffers", (2, 3), apart, deadline_s=5.0)
    at_once = arguments("at-once", at_once=True) | Variant(options={"init_sync": False}, needs=("init_sync",))
    yield from _grid("BUFFER-14", "changed", "changed_buffers", 2, apart, at_once, deadline_s=5.0, min_collectives=0)
    lone = [
        arguments("-".join([*starts_with, change]), change=change, starts_with=starts_with)
        for starts_with, change in (([], "larger"), (["count"], "larger"), (["mean"], "dtype"), (["mean"], "gone"))
    ]
    for size, odd in ((2, 0), (2, 1), (3, 1)):
        rank = arguments(f"rank{odd}", odd=odd)
        yield from _grid("BUFFER-15", "lone", "lone_change", size, lone, rank, deadline_s=20.0)
    again = arguments("later", later=True, odd=1)
    yield from _grid("BUFFER-15", "lone", "lone_change", 2, lone[0], again, deadline_s=20.0)


def _drifting() -> Iterator[Scenario]:
    yield from _grid("BUFFER-01", "every-kind", "buffer_sync", (1, 2, 3, 4), also=("BUFFER-02",))
    # One float32 buffer alone: the parameters are of the same dtype, but only construction sends them.
    alone = [arguments(f"alone-{name}", only=[name]) for name in ("table", "turned", "unlike", "spaced")]
    yield from _grid("BUFFER-02", "", "buffer_sync", 2, alone)
    yield from _grid("BUFFER-02", "dtypes-left-out", "uncarried_buffers", (2, 3), min_collectives=0)
    explicit = options("explicit", forward_sync_buffers=True)
    yield from _grid("BUFFER-01", "", "buffer_sync", 2, (VIEW, UNUSED, explicit))
    ignored = (
        arguments("ignored-root", ignored=["table", "count"]),
        arguments("ignored-child", ignored=["state.mask", "state.hidden", "state.turned"]),
    )
    unsynchronised = options("off", broadcast_buffers=False)
    for world_size in (2, 3):
        yield from _grid("BUFFER-04", "", "buffer_sync", world_size, _OFF)
        yield from _grid("BUFFER-05", "", "buffer_sync", world_size, unsynchronised)
        yield from _grid("BUFFER-07", "", "buffer_sync", world_size, ignored, needs=("ignored_parameters",))
        yield from _grid("BUFFER-08", "replaced", "buffer_sync", world_size, arguments(replaces=True))
        yield from _grid("BUFFER-08", "registered", "buffer_sync", world_size, arguments(registers_later=True))
    both = (
        options("both-given", broadcast_buffers=False, forward_sync_buffers=True),
        options("both-given-off", broadcast_buffers=True, forward_sync_buffers=False),
    )
    yield from _grid("BUFFER-06", "", "buffer_sync", 2, both)
    forwards = ["synchronised", "local", "local", "synchronised", "synchronised"]
    announced = arguments(mode="train", asks=True, forwards=forwards)
    for way in (PLAIN, _OFF):
        yield from _grid("BUFFER-10", "asked", "buffer_sync", 2, way, arguments(asks=True))
        yield from _grid("BUFFER-10", "announced", "due_buffers", 2, way, announced, needs=("no_sync",))
    nothing = announced | arguments("announced-none", registers_later=True)
    yield from _grid("BUFFER-10", "", "due_buffers", 2, nothing, needs=("no_sync",))
    yield from _grid("BUFFER-11", "", "buffer_sync", (2, 4), each("mode", ["eval"]))
    yield from _grid("BUFFER-06", "warning", "wrapper_surface", (1, 2), arguments(aspect="deprecated_broadcast"))


def _due() -> Iterator[Scenario]:
    orders = {
        "in-turn": "synchronised synchronised local local synchronised synchronised",
        "first-local": "local synchronised synchronised local synchronised",
        "evaluated": "synchronised no_grad no_grad synchronised local no_grad synchronised local",
    }
    forwards = [arguments(slug, forwards=order.split()) for slug, order in orders.items()]
    training = arguments(mode="train")
    ways = (training.at(2, 3), arguments("eval", mode="eval"), training | VIEW, training | UNUSED)
    yield from _grid("BUFFER-13", "", "due_buffers", 2, forwards, ways, needs=("no_sync",))


def _batch_norm() -> Iterator[Scenario]:
    schedule = (Step(),) * 4
    norm, cnn = models("batchnorm_mlp", "cnn")
    for normalising, ways in ((norm, (VIEW, _OFF, UNUSED)), (cnn, (VIEW, _OFF))):
        yield from _grid("BUFFER-12", "", "train", 2, normalising, (PLAIN.at(1, 2, 3, 4), *ways), schedule=schedule)
        yield from _grid("BUFFER-11", "evaluation", "evaluation", (2, 3), normalising)
