"""A fact is what it was when the program observed it, and travels as it is."""

from typing import Any, cast

import numpy as np
import pytest
import torch

from conformance.models.catalogue import get_fixture
from conformance.programs.rank_context import RankContext
from conformance.scenario import Scenario
from conformance.workers.tensors import portable_facts

PLAIN = Scenario("gradients/GRAD-01/plain", ("GRAD-01",), "train", world_size=1)


@pytest.fixture
def context() -> RankContext:
    nothing = cast(Any, None)
    return RankContext(
        PLAIN, rank=0, device=torch.device("cpu"), process_group=nothing, fixture=get_fixture("mlp"), wrap=nothing
    )


@pytest.mark.parametrize("value", [[1, 2], [1, [2]], [torch.zeros(1)], {"a": [1]}, [[1], [2]]], ids=str)
def test_a_fact_does_not_change_with_what_it_was_taken_from(context: RankContext, value: Any) -> None:
    before = str(value)
    context.observe("fact", value)
    for one in value if isinstance(value, list) else value.values():
        if isinstance(one, torch.Tensor):
            one.fill_(7)
        elif isinstance(one, list):
            one.append(7)
    if isinstance(value, list):
        value.append(7)
    assert str(context.facts["fact"]) == before


def test_a_number_of_numpy_travels_as_a_number() -> None:
    facts = portable_facts({"fact": [np.float64(1.5), 2], "one": np.float64(2.5), "none": None})
    assert [type(one) for one in (*facts["fact"], facts["one"])] == [float, int, float]
    assert facts["none"] is None


def test_what_is_no_data_is_refused(context: RankContext) -> None:
    with pytest.raises(TypeError, match="facts are tensors"):
        context.observe("fact", [1, object()])
    with pytest.raises(TypeError, match="facts are tensors"):
        portable_facts({"fact": [1, object()]})
