"""Scenarios of chapter composed: trainings from the grammar in which every pair of features occurs, and a few others.

The others are what random trainings have found: they stay, whatever the grammar draws.
"""

from collections.abc import Iterator

from conformance.chapters.grid import Grid
from conformance.chapters.variants import (
    EACH_ALONE,
    ENDS_SOON,
    NO_UNUSED,
    PLAIN,
    SKIPPING,
    STATIC,
    UNUSED,
    VIEW,
    Variant,
    fields,
)
from conformance.composed.grammar import REQUIREMENTS, cover, needs_of
from conformance.composed.simpler import renamed
from conformance.composed.training import Action, Beside, Block, Exchange, Training
from conformance.scenario import Scenario

_grid = Grid("composed")

#: Which of the many sets of trainings that cover all pairs; nightly runs draw others.
_SEED = 0

_FOUND: tuple[tuple[Training, Variant], ...] = (
    # Rank 0 alone gets a dense gradient where a sparse one was expected.
    (Training((Block("sparse"),), actions=(Action("forward", "plain"), Action("penalty", "rank_0"))), PLAIN),
    # Rank 0 alone runs a layer again, in a reentrant checkpoint: its gradients arrive twice.
    (Training((Block("shared", "rank_0", "reentrant"),), actions=(Action("forward", "plain"),)), PLAIN),
    # A gradient is accumulated and dropped, and the parameter is unused afterwards.
    (Training((Block(when="even_forwards"),), actions=(Action("no_sync", "whole"),)), PLAIN),
    # A backward raises on every rank; only on rank 0 gradients had arrived.
    (Training((Block(), Block(), Block(when="rank_0")), actions=(Action("fail", "backward"),)), PLAIN),
    # The copy of rank 0 is made while parameters are frozen there.
    (Training((Block(),), actions=(Action("freeze", "rank_0"), Action("copy", "deepcopy"))), PLAIN),
    # torch.autograd.grad reaches an output on the ranks that used parameters, and nothing on the others.
    (
        Training(
            (Block("counted"),),
            actions=(Action("forward", "plain"), Action("autograd_grad", "first_order")),
            idle="by_turns",
        ),
        SKIPPING,
    ),
    # A sparse gradient has been computed when its parameter is frozen.
    (Training((Block("sparse"),), actions=(Action("forward", "plain"), Action("freeze", "every_rank"))), PLAIN),
    # A backward raises on every rank, where rank 0 used no parameter; what follows does not communicate at first.
    (
        Training(
            (Block(), Block(), Block("sparse")),
            actions=(Action("fail", "backward"), Action("forward", "no_grad"), Action("no_sync", "exception")),
            idle="rank_0",
        ),
        PLAIN,
    ),
    # A backward raises on every rank; on rank 1 alone a gradient had arrived, which waits for what rank 0 will not use.
    (Training((Block(), Block(), Block(when="not_rank_0")), actions=(Action("fail", "backward"),)), SKIPPING),
    # A backward raises on every rank before any gradient, and the next one averages all.
    (Training((Block(),), actions=(Action("fail", "backward"),)), SKIPPING),
    # The data of a parameter are exchanged for others in another layout, and ranks without a gradient get the average.
    (Training((Block("transposed"),), actions=(Action("replace", "data"),), idle="by_turns"), PLAIN),
    # The same where gradients live in buckets, which have the layout of before.
    (
        Training(
            (Block("transposed"),),
            actions=(Action("no_sync", "backward_only"), Action("forward", "plain"), Action("replace", "data")),
        ),
        VIEW,
    ),
    # On rank 0 alone the data of a parameter are laid out again.
    (Training((Block(),), actions=(Action("relayout", "rank_0"),)), PLAIN),
    (Training((Block(),), actions=(Action("relayout", "rank_0"),)), VIEW),
    (Training((Block(),), actions=(Action("relayout", "rank_0"), Action("copy", "pickle"))), PLAIN),
    # A parameter is frozen that has a gradient of the loop's own, and no backward brings it another.
    (
        Training(
            (Block(),),
            actions=(
                Action("forward", "plain"),
                Action("gradients", "set"),
                Action("freeze", "every_rank"),
                Action("backward", "together"),
            ),
        ),
        PLAIN,
    ),
    # Gradients are missing, and the group is updated before a forward could say so.
    (
        Training(
            (Block(),),
            output="unused_tail",
            actions=(Action("forward", "plain"), Action("backward", "together"), Action("regroup", "same_ranks")),
        ),
        NO_UNUSED,
    ),
    # torch.autograd.grad returns to an earlier forward, in which only some ranks used parameters.
    (
        Training(
            (Block(),),
            actions=(
                Action("forward", "plain"),
                Action("no_sync", "backward_only"),
                Action("autograd_grad", "first_order"),
            ),
            idle="by_turns",
        ),
        PLAIN,
    ),
    # A forward reaches frozen parameters alone, and returns one of them.
    (
        Training(
            (Block(when="never"), Block("shared", trainable=False), Block()),
            output="parameter",
            actions=(Action("freeze", "every_rank", 2),),
        ),
        STATIC | NO_UNUSED,
    ),
    # After a join context buffers are again those of rank 0, and no filter of warnings is left.
    (Training((Block("counted"), Block("branch")), actions=(Action("join", "rank_0_last"),)), PLAIN),
    # A parameter is another one, behind tensors that stand in for it, and then a copy takes it for its own.
    (
        Training(
            (Block(),),
            actions=(
                Action("replace", "parameter"),
                Action("forward", "functional"),
                Action("backward", "together"),
                Action("copy", "pickle"),
            ),
        ),
        PLAIN,
    ),
    # A second wrapper, of which only the first one's ranks differ in what they use.
    (Training((Block(when="rank_0"),), beside=Beside(options=UNUSED.options)), PLAIN),
    # Two wrappers share a layer, each in a group of its own, and one hands out before the other collects.
    (Training((Block(),), beside=Beside(shares=True, own_group=True)), VIEW | NO_UNUSED),
    # The user communicates within backward; from the second step on rank 0 alone uses a block.
    (Training((Block(), Block(when="rank_0_later"), Block()), exchange=Exchange("both", 6, 0)), EACH_ALONE),
    (Training((Block(), Block(when="rank_0_later")), exchange=Exchange("backward", 4, 0)), EACH_ALONE),
)


def scenarios() -> Iterator[Scenario]:
    """Yield every scenario of the chapter."""
    yield from cover(_SEED)
    silent = ENDS_SOON | fields(min_collectives=0)
    for training, way in _FOUND:
        found = UNUSED | way | Variant(arguments=training.to_json())
        for scenario in _grid("COMPOSED-01", "", "composed", (2, 3), found, silent, requirements=REQUIREMENTS):
            yield renamed(scenario.replace(needs=needs_of(training, scenario.options)))
