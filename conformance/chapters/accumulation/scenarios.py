"""Scenarios of chapter accumulation: `no_sync`, from its plain use to unusual ones."""

from collections.abc import Iterator, Sequence

from conformance.chapters.accumulation.changed_outputs import BACKWARDS, OUTPUTS
from conformance.chapters.grid import Axis, Grid, Worlds
from conformance.chapters.variants import (
    ENDS_SOON,
    PLAIN,
    SKIPPING_ALONE,
    STATIC,
    UNUSED,
    VIEW,
    Variant,
    arguments,
    dashed,
    each,
    fields,
    model,
    models,
)
from conformance.composed.training import ACTIONS, Action, Block, Training
from conformance.scenario import Scenario, Step

_grid = Grid("accumulation", Variant(needs=("no_sync",)))

_VARIANTS = (PLAIN, VIEW, UNUSED)
_ZERO_GRAD = ("zeros", "keep")


def _steps(
    requirement: str, slug: str, worlds: Worlds, steps: tuple[str, ...], *axes: Axis, zero_grad: str = "none"
) -> Iterator[Scenario]:
    """Yield scenarios of program `accumulation`. Each step is a text: its micro-batches, with blanks in between.

    A micro-batch is one of `micro_batches.KINDS`, and may name the branches that its forward uses: `local:b`.
    """
    given = {"steps": [step.split() for step in steps], "zero_grad": zero_grad, "flags": requirement == "ACCUM-11"}
    yield from _grid(requirement, slug, "accumulation", worlds, *axes, arguments=given)


def scenarios() -> Iterator[Scenario]:
    """Yield every scenario of the chapter."""
    yield from _plain()
    yield from _twisted()
    yield from _schedules()
    yield from _in_between()
    yield from _changed_outputs()


def _changed_outputs() -> Iterator[Scenario]:
    """Yield outputs that are changed before their backward: no hook on the tensor, or on its node, sees it."""
    outputs, backwards = each("output", OUTPUTS), each("backward", BACKWARDS)
    yield from _grid("ACCUM-13", "", "changed_outputs", (2, 3), (PLAIN, VIEW, UNUSED), outputs, backwards)
    yield from _grid("ACCUM-13", "", "changed_outputs", 2, STATIC, outputs, arguments("alone", backward="alone"))


def _plain() -> Iterator[Scenario]:
    for way in _VARIANTS:
        yield from _steps("ACCUM-01", "local", (2, 3, 4), ("sync", "local local", "local", "sync"), way)
        for world_size in (2, 3):
            yield from _steps("ACCUM-07", "uneven", world_size, ("local_by_rank sync",) * 2, way)
            yield from _steps("ACCUM-08", "first", world_size, ("local local sync", "local sync", "sync"), way)
    yield from _steps("ACCUM-07", "uneven-first", 4, ("sync", "local_by_rank local sync"))
    for zero_grad in _ZERO_GRAD:
        steps = ("local sync", "local sync", "sync")
        yield from _steps("ACCUM-03", zero_grad, 2, steps, (PLAIN, VIEW), zero_grad=zero_grad)


def _twisted() -> Iterator[Scenario]:
    for way in (PLAIN.at(2, 3), VIEW, UNUSED):
        for requirement, slug, steps in (
            ("ACCUM-04", "nested", ("sync", "after_inner sync", "after_inner", "sync")),
            ("ACCUM-05", "forward-inside", ("sync", "forward_inside sync", "forward_inside forward_inside sync")),
            ("ACCUM-05", "backward-inside", ("backward_inside", "local backward_inside", "backward_inside sync")),
            ("ACCUM-05", "joint-local-first", ("joint_local_first", "local joint_local_first", "sync")),
            ("ACCUM-05", "joint-local-last", ("joint_local_last", "local joint_local_last", "sync")),
            ("ACCUM-05", "threads", ("sync_in_thread", "local_in_thread sync_in_thread", "local_in_thread sync")),
            ("ACCUM-06", "exception", ("after_exception", "local after_exception", "sync")),
            ("ACCUM-11", "empty", ("after_empty", "local after_empty after_empty", "sync")),
            ("ACCUM-11", "every-kind", ("local after_inner sync", "forward_inside backward_inside", "after_exception")),
        ):
            yield from _steps(requirement, slug, 2, steps, way)
    by_turns = ("sync:ab", "local:b sync:a", "local:a local:b sync:a", "local:a sync:b sync:a", "sync:b")
    ways = (PLAIN, VIEW, SKIPPING_ALONE.at(2, 3))
    yield from _steps("ACCUM-09", "only-local", (2, 3, 4), by_turns, UNUSED.named(""), ways)


def _local(num_local: int, zero_grad: str = "none") -> tuple[Step, ...]:
    return (Step(local_backwards=num_local, zero_grad=zero_grad),) * 3


def _schedules() -> Iterator[Scenario]:
    # None of them has buffers: which forwards copy those around `no_sync` is BUFFER-13.
    layered = models("mlp", "channels_last_cnn", "gpt", "lstm", "many_small_layers", "mixed_dtypes", "moe")
    one, two, three = (fields(f"{count}-local", schedule=_local(count)) for count in (1, 2, 3))
    counts = (one, three, two.at(3))
    yield from _grid("ACCUM-02", "", "train", 2, (*layered, model("sparse_embedding")), counts)
    mlp = model("mlp")
    yield from _grid("ACCUM-02", "", "train", (1, 4), mlp, two)
    zeroing = [fields(way, schedule=_local(1, zero_grad=way)) for way in _ZERO_GRAD]
    yield from _grid("ACCUM-03", "", "train", 2, models("mlp", "gpt"), zeroing, (PLAIN, VIEW))
    only_local = Step(local_backwards=2, synchronised=False)
    stepping = fields(schedule=(Step(), only_local, only_local, Step(local_backwards=1)))
    paused, kept = Step(local_backwards=1, synchronised=False, optimizer=False), Step(zero_grad="keep")
    apart = fields(schedule=(paused, kept, paused, paused, kept))
    for way in (PLAIN, VIEW):
        for world_size in (2, 3):
            yield from _grid("ACCUM-10", "local-optimizer", "train", world_size, mlp.named(""), way, stepping)
            yield from _grid("ACCUM-08", "steps-apart", "train", world_size, mlp.named(""), way, apart)


def _in_between() -> Iterator[Scenario]:
    """Local backwards between a synchronised forward and its backward, and after a backward that failed."""
    for turn, how in enumerate(ACTIONS["no_sync"]):
        containers = ("dict", "dataclass", "tuple", "slots") * 2
        for forward in ("plain", "eval_mode"):
            actions = (Action("forward", forward), Action("no_sync", how), Action("backward", "together"))
            yield from _composed(f"in-between-{how}-{forward}", (2, 3), containers[turn % 4 :], *actions)
        # A loss of two outputs, which no dataclass holds here, reaches one of them before the failure.
        failing = (Action("fail", "backward"), Action("no_sync", how))
        yield from _composed(f"after-failure-{how}", 2, ("dict", "tuple", "dict"), *failing)


def _composed(slug: str, worlds: Worlds, containers: Sequence[str], *actions: Action) -> Iterator[Scenario]:
    for way, container in zip(_VARIANTS, containers, strict=False):
        last = Block(when="even_forwards" if way is UNUSED else "always")
        training = Training((last, Block()), output=container, actions=actions).to_json()
        # A DDP may refuse, and every rank may raise before anything is sent.
        silent = ENDS_SOON | fields(min_collectives=0)
        yield from _grid("ACCUM-12", dashed(slug), "composed", worlds, way, silent, arguments=training)
