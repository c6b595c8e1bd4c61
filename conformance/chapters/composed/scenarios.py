"""Scenarios of chapter composed: trainings from the grammar in which every pair of features occurs, and a few others.

The others are what random trainings have found: they stay, whatever the grammar draws.
"""

from __future__ import annotations

from collections.abc import Iterator

from conformance.composed.grammar import REQUIREMENTS, cover, needs_of
from conformance.composed.simpler import renamed
from conformance.composed.training import Action, Beside, Block, Exchange, Training
from conformance.scenario import Scenario

#: Which of the many sets of trainings that cover all pairs; nightly runs draw others.
_SEED = 0

_FOUND: tuple[tuple[Training, dict[str, object]], ...] = (
    # Rank 0 alone gets a dense gradient where a sparse one was expected.
    (Training((Block("sparse"),), actions=(Action("forward", "plain"), Action("penalty", "rank_0"))), {}),
    # Rank 0 alone runs a layer again, in a reentrant checkpoint: its gradients come twice.
    (Training((Block("shared", "rank_0", "reentrant"),), actions=(Action("forward", "plain"),)), {}),
    # A gradient is accumulated and dropped, and the parameter is unused afterwards.
    (Training((Block(when="even_forwards"),), actions=(Action("no_sync", "whole"),)), {}),
    # A backward raises on every rank; only on rank 0 gradients had come.
    (Training((Block(), Block(), Block(when="rank_0")), actions=(Action("fail", "backward"),)), {}),
    # The copy of rank 0 is made while parameters are frozen there.
    (Training((Block(),), actions=(Action("freeze", "rank_0"), Action("copy", "deepcopy"))), {}),
    # torch.autograd.grad reaches an output on the ranks that used parameters, and nothing on the others.
    (
        Training(
            (Block("counted"),),
            actions=(Action("forward", "plain"), Action("autograd_grad", "first_order")),
            idle="by_turns",
        ),
        {"skip_all_reduce_unused_params": True},
    ),
    # A sparse gradient has been computed when its parameter is frozen.
    (Training((Block("sparse"),), actions=(Action("forward", "plain"), Action("freeze", "every_rank"))), {}),
    # A backward raises on every rank, where rank 0 used no parameter; what follows does not communicate at first.
    (
        Training(
            (Block(), Block(), Block("sparse")),
            actions=(Action("fail", "backward"), Action("forward", "no_grad"), Action("no_sync", "exception")),
            idle="rank_0",
        ),
        {},
    ),
    # A backward raises on every rank; on rank 1 alone a gradient had come, which waits for what rank 0 will not use.
    (
        Training((Block(), Block(), Block(when="not_rank_0")), actions=(Action("fail", "backward"),)),
        {"skip_all_reduce_unused_params": True},
    ),
    # A backward raises on every rank before any gradient, and the next one averages all.
    (Training((Block(),), actions=(Action("fail", "backward"),)), {"skip_all_reduce_unused_params": True}),
    # The data of a parameter are exchanged for others in another layout, and ranks without a gradient get the average.
    (Training((Block("transposed"),), actions=(Action("replace", "data"),), idle="by_turns"), {}),
    # The same where gradients live in buckets, which have the layout of before.
    (
        Training(
            (Block("transposed"),),
            actions=(Action("no_sync", "backward_only"), Action("forward", "plain"), Action("replace", "data")),
        ),
        {"gradient_as_bucket_view": True},
    ),
    # On rank 0 alone the data of a parameter are laid out anew.
    (Training((Block(),), actions=(Action("relayout", "rank_0"),)), {}),
    (Training((Block(),), actions=(Action("relayout", "rank_0"),)), {"gradient_as_bucket_view": True}),
    (Training((Block(),), actions=(Action("relayout", "rank_0"), Action("copy", "pickle"))), {}),
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
        {},
    ),
    # Gradients are missing, and the group is updated before a forward could say so.
    (
        Training(
            (Block(),),
            output="unused_tail",
            actions=(Action("forward", "plain"), Action("backward", "together"), Action("regroup", "same_ranks")),
        ),
        {"find_unused_parameters": False},
    ),
    # torch.autograd.grad comes back to an earlier forward, in which only some ranks used parameters.
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
        {},
    ),
    # A forward reaches frozen parameters alone, and returns one of them.
    (
        Training(
            (Block(when="never"), Block("shared", trainable=False), Block()),
            output="parameter",
            actions=(Action("freeze", "every_rank", 2),),
        ),
        {"static_graph": True, "find_unused_parameters": False},
    ),
    # After a join context buffers are again those of rank 0, and no filter of warnings is left.
    (Training((Block("counted"), Block("branch")), actions=(Action("join", "rank_0_last"),)), {}),
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
        {},
    ),
    # A second wrapper, of which only the first one's ranks differ in what they use.
    (Training((Block(when="rank_0"),), beside=Beside(options={"find_unused_parameters": True})), {}),
    # Two wrappers share a layer, each in a group of its own, and one hands out before the other collects.
    (
        Training((Block(),), beside=Beside(shares=True, own_group=True)),
        {"gradient_as_bucket_view": True, "find_unused_parameters": False},
    ),
    # The user communicates within backward; from the second step on rank 0 alone uses a block.
    (
        Training((Block(), Block(when="rank_0_later"), Block()), exchange=Exchange("both", 6, 0)),
        {"bucket_cap_mb": 0.00001},
    ),
    (Training((Block(), Block(when="rank_0_later")), exchange=Exchange("backward", 4, 0)), {"bucket_cap_mb": 0.00001}),
)


def scenarios() -> Iterator[Scenario]:
    """Yield every scenario of the chapter."""
    yield from cover(_SEED)
    for training, more in _FOUND:
        for world_size in (2, 3):
            yield renamed(
                Scenario(
                    "composed/COMPOSED-01/found", REQUIREMENTS, "composed", world_size=world_size,
                    options={"find_unused_parameters": True, **more}, arguments=training.to_json(), min_collectives=0,
                    needs=needs_of(training, {"find_unused_parameters": True, **more}), deadline_s=8.0,
                )
            )  # fmt: skip
