"""A replay told step by step: what all ranks did alike is short, what differs and what is wrong is named."""

from dataclasses import replace

import torch

from conformance.observation import Carried, Collective, Ending, Observation
from conformance.report.steps import step_listing


def issued(index: int, step: int, numel: int = 32) -> Collective:
    return Collective(index, "all_reduce", "default", ((numel,),), ("float32",), "sum", phase="backward", step=step)


def test_every_step_shows_its_collectives_and_its_wrong_facts() -> None:
    right, wrong = torch.tensor([1.0, 2.0]), torch.tensor([2.0, 4.0])
    observations = {
        0: Observation(0, Ending("returned"), {"step0/grad/w": right, "step1/grad/w": right},
                       history=(*(issued(n, 0) for n in range(7)), issued(7, 1))),
        1: Observation(1, Ending("returned"), {"step0/grad/w": right, "step1/grad/w": wrong},
                       history=(*(issued(n, 0) for n in range(7)), issued(7, 1, 24))),
    }  # fmt: skip
    expected = {rank: {"step0/grad/w": right, "step1/grad/w": right} for rank in (0, 1)}
    assert step_listing(observations, expected) == [
        "step 0",
        "  backward    ranks 0 and 1: all_reduce #0 (32 x float32, sum)",
        "              ... 5 more, alike on all ranks",
        "              ranks 0 and 1: all_reduce #6 (32 x float32, sum)",
        "  facts       1 of 1 right",
        "step 1",
        "  backward    rank 0: all_reduce #7 (32 x float32, sum)   <- differs",
        "              rank 1: all_reduce #7 (24 x float32, sum)   <- differs",
        "  facts       0 of 1 right",
        "              wrong: step1/grad/w on rank 1: differs in 2 of 2 element(s), first at [0]: expected 1.0, got"
        " 2.0; largest difference 2",
    ]


def test_a_rank_that_did_not_return_is_not_blamed_for_what_it_could_not_observe() -> None:
    observations = {
        0: Observation(0, Ending("returned"), {"step0/loss": 1.0}, history=(issued(0, 0),)),
        1: Observation(1, Ending("killed", detail="killed by SIGABRT"), history=(), phase="backward"),
    }
    assert step_listing(observations, {0: {"step0/loss": 1.0}, 1: {"step0/loss": 1.0}}) == [
        "step 0",
        "  backward    rank 0: all_reduce #0 (32 x float32, sum)   <- differs",
        "              rank 1: nothing in place of #0   <- differs",
        "  facts       1 of 1 right",
        "rank 1 ended in backward: killed by SIGABRT",
    ]


def test_backwards_under_no_sync_are_marked_and_one_step_can_be_asked_for() -> None:
    right, wrong = torch.tensor([1.0]), torch.tensor([3.0])
    leaked = replace(issued(0, 0), sync=False)
    names = ("step0/local0/grad/w", "step0/grad/w", "step1/grad/w")
    observations = {
        rank: Observation(rank, Ending("returned"), dict.fromkeys(names, right) | {"step0/grad/w": wrong},
                          history=(leaked, issued(1, 0), issued(2, 1)))
        for rank in (0, 1)
    }  # fmt: skip
    expected = {rank: dict.fromkeys(names, right) for rank in (0, 1)}
    told = step_listing(observations, expected, 0)
    assert told[:6] == [
        "step 0",
        "  backward, under no_sync  ranks 0 and 1: all_reduce #0 (32 x float32, sum)",
        "  backward    ranks 0 and 1: all_reduce #1 (32 x float32, sum)",
        "  facts       micro-step 0, under no_sync: 1 of 1 right",
        "  facts       0 of 1 right",
        told[5],
    ]
    assert told[5].strip().startswith("wrong: step0/grad/w on ranks 0 and 1")
    assert "step 1" not in told
    assert step_listing(observations, expected, 7) == ["no step 7 was observed; there are 0, 1"]


def test_a_step_alone_shows_what_its_collectives_carried() -> None:
    def seen(rank: int, own: str, place: str) -> Observation:
        given = Carried(place, own, "[3]"), Carried(place, own)
        return Observation(rank, Ending("returned"), history=(issued(0, 0), issued(1, 0)), carried=given)

    observations = {rank: seen(rank, f"[{rank + 1}]", "my/ddp.py:7 in send") for rank in (0, 1)}
    assert step_listing(observations, None, 0) == [
        "step 0",
        "  backward    ranks 0 and 1: all_reduce #0 (32 x float32, sum), at my/ddp.py:7 in send",
        "                rank 0 gave [1], got [3]",
        "                rank 1 gave [2], got [3]",
        "              ranks 0 and 1: all_reduce #1 (32 x float32, sum), at my/ddp.py:7 in send",
        "                rank 0 gave [1], and has not got its result",
        "                rank 1 gave [2], and has not got its result",
    ]
    later = {rank: replace(one, history=(replace(issued(0, 0), phase="after backward"),), carried=one.carried[:1])
             for rank, one in observations.items()}  # fmt: skip
    assert step_listing(later, None)[1].startswith("  after backward  ranks 0 and 1: all_reduce #0")
    assert not any("gave" in line for line in step_listing(observations, None))
    elsewhere = {0: observations[0], 1: seen(1, "[2]", "my/ddp.py:9 in send_late")}
    assert step_listing(elsewhere, None)[1:3] == [
        "  backward    rank 0: all_reduce #0 (32 x float32, sum), at my/ddp.py:7 in send",
        "              rank 1: all_reduce #0 (32 x float32, sum), at my/ddp.py:9 in send_late",
    ]
