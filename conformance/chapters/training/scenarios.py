"""Scenarios of chapter training: whole trainings, compared with the same trainings without DDP."""

from collections.abc import Iterator

from conformance.chapters.grid import Axis, Grid, Worlds
from conformance.chapters.variants import (
    LOCAL_BUFFERS,
    NO_VIEW,
    UNUSED,
    VIEW,
    Variant,
    arguments,
    capped,
    dtypes,
    each,
    fields,
    model,
    models,
    options,
)
from conformance.models.catalogue import load_fixtures
from conformance.scenario import Scenario, Step

_BASICS = ("TRAIN-01", "TRAIN-02", "TRAIN-03")
_grid = Grid("training", fields(min_collectives=1))

_DIGITS = arguments("digits", task="digits", epochs=4)
_TEXT = arguments(task="text", epochs=1, batch_size=8)
#: Result demanded of the long trainings only.
_LEARNT_DIGITS = arguments(minimum_accuracy=0.95, maximum_loss_ratio=0.25)
_LEARNT_TEXT = arguments(maximum_loss_ratio=0.85)
#: 209 bytes: buckets so small that every model has several of them.
_SMALL_BUCKETS = capped("small-buckets", 0.0002)
#: Long enough for every optimizer's state and every schedule to matter, and for a second epoch.
_SHORT = arguments(epochs=2, max_steps=8, batch_size=16)


def _accumulate(num_batches: int) -> Variant:
    return Variant(arguments={"accumulate": num_batches}, needs=("no_sync",))


def _training(
    requirement: str, slug: str, name: str, worlds: Worlds, *axes: Axis, also: tuple[str, ...] = ()
) -> Iterator[Scenario]:
    shown = tuple(dict.fromkeys((requirement, *_BASICS, *also)))
    # Far above what they take (a second or two), so that a loaded machine is no hang.
    deadline_s = 60.0
    for world_size in (worlds,) if isinstance(worlds, int) else worlds:
        seeded = fields(model=name, seed=world_size, deadline_s=deadline_s)
        yield from _grid(requirement, slug, "training", world_size, seeded, *axes, requirements=shown)


def scenarios() -> Iterator[Scenario]:
    """Yield all scenarios of the chapter."""
    yield from _digits()
    yield from _text()
    yield from _optimizers()
    yield from _restarts()
    yield from _options()
    yield from _families()
    training = fields(schedule=(Step(),) * 4, seed=17)
    low_and_high = dtypes("float64", "float16", "bfloat16")
    trained = models("mlp", "many_small_layers")
    yield from _grid("TRAIN-17", "", "train", (2, 3, 4), trained, low_and_high, training, also=_BASICS)


def _digits() -> Iterator[Scenario]:
    """All of the data, several epochs, an evaluation after each; the batch over all ranks is about the same."""
    digits = _DIGITS.named("")
    for world_size in (1, 2, 3, 4):
        also = ("TRAIN-06", "TRAIN-13", "TRAIN-15") if world_size == 1 else ("TRAIN-06", "TRAIN-13")
        batches = arguments(batch_size=64 // world_size)
        yield from _training("TRAIN-04", "digits-cnn", "cnn", world_size, digits, batches, _LEARNT_DIGITS, also=also)
    two_epochs = digits | arguments(epochs=2)
    unevaluated, uneven = arguments("no-evaluation", evaluate=False), arguments("uneven-last-batch", batch_size=50)
    local = options("local-buffers", broadcast_buffers=False)
    for world_size in (2, 4):
        yield from _training("TRAIN-06", "", "cnn", world_size, two_epochs, (unevaluated, local))
        yield from _training("TRAIN-13", "", "cnn", world_size, two_epochs, uneven)
    yield from _training("TRAIN-15", "digits-cnn-plain", "cnn", 1, digits, arguments(epochs=1, optimizer="adamw"))


def _text() -> Iterator[Scenario]:
    """One epoch of the text, with the loss falling."""
    for world_size, batch_size in ((1, 16), (2, 8), (3, 6), (4, 4)):
        also = ("TRAIN-06", "TRAIN-13", "TRAIN-15") if world_size == 1 else ("TRAIN-06", "TRAIN-13")
        batches = arguments(batch_size=batch_size, optimizer="adam")
        yield from _training("TRAIN-05", "small-gpt", "gpt", world_size, _TEXT, batches, _LEARNT_TEXT, also=also)
    lstm = arguments(max_steps=20, optimizer="adam")
    gpt = arguments(batch_size=4, max_steps=15, optimizer="adamw")
    cnn = _SHORT | arguments(batch_size=8, evaluate=False)
    for world_size in (2, 4):
        yield from _training("TRAIN-05", "tied-lstm", "lstm", world_size, _TEXT, lstm)
        accumulating = [_accumulate(count).named(f"accumulate{count}") for count in (2, 4)]
        yield from _training("TRAIN-10", "small-gpt", "gpt", world_size, _TEXT, gpt, accumulating)
        # Which forwards copy buffers around `no_sync` is BUFFER-13.
        accumulating = [_accumulate(3) | LOCAL_BUFFERS.named("")]
        yield from _training(
            "TRAIN-10", "digits-cnn-accumulate3", "cnn", world_size, _DIGITS.named(""), cnn, accumulating
        )


def _optimizers() -> Iterator[Scenario]:
    """Optimizers, learning-rate schedules and clipping."""
    clipping = arguments("clipped", clip_norm=0.25)
    warm = arguments(max_steps=12, clip_norm=0.5, optimizer="adamw", schedule="warmup") | _accumulate(2)
    for world_size in (2, 4):
        optimizers = each("optimizer", ("sgd", "nesterov", "adam", "adamw"))
        yield from _training("TRAIN-09", "", "cnn", world_size, _DIGITS, _SHORT, optimizers)
        schedules = each("schedule", ("step", "cosine", "warmup"))
        yield from _training("TRAIN-08", "", "cnn", world_size, _DIGITS, _SHORT, schedules)
        gradients = (NO_VIEW.named("copies"), VIEW.named("views"))
        yield from _training("TRAIN-07", "", "cnn", world_size, _DIGITS, _SHORT, clipping, gradients)
        also = ("TRAIN-08", "TRAIN-09", "TRAIN-10")
        yield from _training("TRAIN-07", "gpt-clipped-warmup", "gpt", world_size, _TEXT, warm, also=also)


def _restarts() -> Iterator[Scenario]:
    """Take a checkpoint in the middle of an epoch; the truth has none."""
    for requirement, restart in (("TRAIN-11", "every_rank"), ("TRAIN-12", "rank_0")):
        digits = arguments("adam", restart=restart, restart_after=11, optimizer="adam")
        yield from _training(requirement, "", "cnn", (1, 2, 4), _DIGITS, _SHORT, digits)
        text = arguments(max_steps=12, restart=restart, restart_after=5, schedule="cosine")
        yield from _training(requirement, "gpt-cosine", "gpt", 2, _TEXT, text, _accumulate(2))


def _options() -> Iterator[Scenario]:
    """Options that must not change a training."""
    views = VIEW.named("bucket-views")
    small_views = (VIEW | _SMALL_BUCKETS).named("small-bucket-views")
    for way in (_SMALL_BUCKETS, views, small_views, UNUSED.named("find-unused")):
        yield from _training("TRAIN-14", "", "cnn", (2, 4), _DIGITS, _SHORT, way)
        yield from _training("TRAIN-14", "gpt", "gpt", 2, _TEXT, arguments(max_steps=8, batch_size=4), way)


def _families() -> Iterator[Scenario]:
    """Five steps of every model fixture, and buckets small enough to have several.

    The third accumulates, unless the model has buffers: which forwards copy those around `no_sync` is BUFFER-13.
    """
    for name, fixture in load_fixtures().items():
        third = Step(local_backwards=int(not fixture.uses_buffers))
        training = fields(schedule=(Step(), Step(), third, Step(zero_grad="zeros"), Step()), seed=16)
        worlds = (2, 4) if fixture.has_unused or fixture.uses_buffers else 3
        small = _SMALL_BUCKETS.named("")
        yield from _grid("TRAIN-16", "", "train", worlds, model(name), small, training, also=_BASICS)
