"""What is not documented and called all the same."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from ddp_impl import DistributedDataParallel
from ddp_impl.api import torch_names
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


class Half(nn.Module):
    """Two layers, of which forward uses one."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = nn.Linear(2, 2), nn.Linear(2, 2)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.used(inputs)
        return output


@pytest.mark.parametrize("name", ["find_unused_parameters", "static_graph"])
def test_an_option_that_is_set_before_the_first_forward_counts(name: str) -> None:
    with group_of_one():
        ddp = DistributedDataParallel(Half())
        setattr(ddp, name, True)
        assert getattr(ddp, name) is True
        for _ in range(3):
            ddp(torch.ones(1, 2)).sum().backward()
        setattr(ddp, name, True)
        with pytest.raises(AttributeError, match=f"{name} is True .* once training has begun.*Wrap the module anew"):
            setattr(ddp, name, False)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("gradient_as_bucket_view", True),
        ("lazy_bucket_allocation", True),
        ("bucket_bytes_cap", 5),
        ("bucket_bytes_cap_list", [1, 2]),
    ],
)
def test_what_construction_decides_is_refused_with_what_to_do(name: str, value: object) -> None:
    with group_of_one():
        ddp = DistributedDataParallel(Half())
        setattr(ddp, name, getattr(ddp, name))
        with pytest.raises(AttributeError, match=f"{name} is .* cannot be changed after construction"):
            setattr(ddp, name, value)


def test_every_attribute_of_torchs_that_is_a_property_here_can_be_set_or_says_why_not() -> None:
    with group_of_one():
        torchs = nn.parallel.DistributedDataParallel(nn.Linear(2, 2))
        plain = {name for name, value in vars(torchs).items() if isinstance(value, (bool, int)) and name[0] != "_"}
        settable = {name for name in plain if isinstance(getattr(DistributedDataParallel, name, None), property)}
    assert {"find_unused_parameters", "static_graph", "bucket_bytes_cap"} <= settable
    assert [name for name in settable if getattr(DistributedDataParallel, name).fset is None] == []


def test_a_group_that_is_none_is_refused_at_construction() -> None:
    backend = dist.ProcessGroupGloo(dist.HashStore(), 0, 1)  # type: ignore[attr-defined, call-arg]
    cases: tuple[tuple[Any, type[Exception], str], ...] = (
        (backend, TypeError, "got ProcessGroupGloo, which is the backend of one"),
        ("gloo", TypeError, "got str"),
        (dist.GroupMember.NON_GROUP_MEMBER, ValueError, "this rank is not in the group"),
    )
    for group, error, words in cases:
        with group_of_one(), pytest.raises(error, match=words):
            DistributedDataParallel(nn.Linear(2, 2), process_group=group)


class Newer(nn.parallel.DistributedDataParallel):
    """What a later torch may have."""

    def __init__(self, module: nn.Module, lazy: bool = False) -> None:
        super().__init__(module)
        self.require_more = lazy

    def finalize(self) -> None:
        """Do more."""


class Older(DistributedDataParallel):
    """Ours, before it knows of that."""


def test_attributes_are_found_whose_number_takes_more_than_a_byte() -> None:
    source = "def __init__(self):\n" + "".join(f"    self.read{n}\n" for n in range(300)) + "    self.assigned = 1\n"
    scope: dict[str, Any] = {}
    exec(source, scope)
    theirs = type("Theirs", (), {"__init__": scope["__init__"]})
    assert torch_names.refuse_absent(type("Ours", (), {}), theirs) == {"assigned"}


def test_what_the_installed_torch_has_and_we_have_not_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """On every version of torch: arguments, attributes and methods are there, or refused with a sentence."""
    theirs, ours = (set(inspect.signature(cls).parameters) for cls in (torch_names.TORCH_DDP, DistributedDataParallel))
    absent = torch_names.refuse_absent(DistributedDataParallel)
    assert not theirs - ours
    assert absent == {"buffer_hook"}  # which only a registration sets
    monkeypatch.setattr(torch_names, "TORCH_DDP", Newer)
    assert torch_names.refuse_absent(Older, Newer) == {"require_more", "finalize"}
    with group_of_one():
        ddp: Any = Older(Half())
        for name in (*absent, "require_more", "finalize"):
            with pytest.raises(AttributeError, match=f"DistributedDataParallel of torch .* has {name}"):
                setattr(ddp, name, True)
            assert not hasattr(ddp, name)
        wrap: Any = DistributedDataParallel
        with pytest.raises(TypeError, match=r"'lazy'\. DistributedDataParallel of torch .* has lazy"):
            wrap(Half(), lazy=True)
        with pytest.raises(TypeError, match=r"unexpected keyword argument 'lasy'$"):
            wrap(Half(), lasy=True)
