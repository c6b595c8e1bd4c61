"""What is not documented and called all the same."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import nn

from ddp_impl import DistributedDataParallel
from ddp_impl.tests.ranks import group_of_one


@pytest.fixture
def ddp() -> Iterator[DistributedDataParallel]:
    """Wrap, in a group of one rank: a sparse embedding, an ignored layer, a frozen bias and a shared weight."""
    model = nn.ModuleDict({"rows": nn.Embedding(5, 3, sparse=True), "own": nn.Linear(3, 3), "out": nn.Linear(3, 3)})
    model["again"] = nn.Linear(3, 3, bias=False)
    model["again"].weight = model["out"].weight
    model["out"].bias.requires_grad_(False)
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ["own.weight", "own.bias"])
    with group_of_one():
        yield DistributedDataParallel(model)


def test_parameters_of_the_reducer_and_their_names(ddp: DistributedDataParallel) -> None:
    parameters, sparse = ddp._build_params_for_reducer()
    model = ddp.module
    assert isinstance(model, nn.ModuleDict)
    assert [id(parameter) for parameter in parameters] == [id(model["rows"].weight), id(model["out"].weight)]
    assert sparse == [True, False]
    names = ddp._build_debug_param_to_name_mapping(parameters)
    assert names == {0: "rows.weight", 1: "out.weight"}
    assert ddp._build_debug_param_to_name_mapping(parameters[::-1]) == {0: "out.weight", 1: "rows.weight"}


def test_names_of_other_parameters_are_refused_and_the_error_is_logged(ddp: DistributedDataParallel) -> None:
    parameters, _ = ddp._build_params_for_reducer()
    with pytest.raises(ValueError, match=r"Param with name out\.weight is averaged, but is not among the 1"):
        ddp._build_debug_param_to_name_mapping(parameters[:1])
    assert "out.weight" in str(ddp._get_ddp_logging_data()["error"])
    with pytest.raises(ValueError, match=r"Expected param to name mapping .* places \[2\]"):
        ddp._build_debug_param_to_name_mapping([*parameters, nn.Parameter(torch.ones(1))])
    assert "places [2]" in str(ddp._get_ddp_logging_data()["error"])
