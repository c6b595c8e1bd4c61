"""Tensors in containers of any kind are replaced, and what holds them stays what it is."""

from __future__ import annotations

import sys
from collections import Counter, OrderedDict, defaultdict, namedtuple
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from ddp_impl import DistributedDataParallel
from ddp_impl.api import distributed
from ddp_impl.base.nested_tensors import cast, find_tensors, move
from ddp_impl.tests.ranks import group_of_one


class Attributes(dict[str, Any]):
    """A dictionary that another constructor makes, and that has attributes."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name


class Named(list[Any]):
    """A list that another constructor makes, and that has attributes."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name


class Checked(NamedTuple):
    """A named tuple."""

    values: Tensor
    length: int


class Own(namedtuple("Own", ["values"])):
    """A named tuple that another constructor makes."""

    def __new__(cls, values: Tensor, factor: int) -> Own:
        return super().__new__(cls, values * factor)


@dataclass(frozen=True)
class Record:
    """A frozen dataclass."""

    values: Tensor
    name: str


def _attributes() -> Attributes:
    made = Attributes("mine")
    made["values"] = torch.ones(2)
    return made


def _named() -> Named:
    made = Named("mine")
    made.append(torch.ones(2))
    return made


@pytest.mark.parametrize(
    "value",
    [
        [torch.ones(2), "text"],
        (torch.ones(2), 1),
        {"values": torch.ones(2)},
        OrderedDict(values=torch.ones(2), other=None),
        defaultdict[str, Any](list, values=torch.ones(2)),
        Counter({"values": torch.ones(2)}),
        Checked(torch.ones(2), 1),
        Own(torch.ones(2), 3),
        Record(torch.ones(2), "mine"),
        _attributes(),
        _named(),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_container_keeps_its_type_and_all_but_its_tensors(value: Any) -> None:
    before = repr(value)
    replaced = cast({"argument": value}, torch.float64)["argument"]
    assert type(replaced) is type(value)
    assert [tensor.dtype for tensor in find_tensors(replaced)] == [torch.float64]
    assert repr(value) == before != repr(replaced)
    assert repr(replaced).replace(", dtype=torch.float64", "") == before
    assert getattr(replaced, "name", None) == getattr(value, "name", None)
    if isinstance(value, defaultdict):
        assert replaced["new"] == []


@dataclass
class Partial:
    """A dataclass with a field that nobody sets."""

    values: Tensor
    later: Any = field(init=False)


def test_a_field_that_is_not_set_stays_so() -> None:
    assert vars(cast(Partial(torch.ones(2)), torch.float64)).keys() == {"values"}


def test_what_contains_itself_still_does() -> None:
    inner: dict[str, Any] = {"values": torch.ones(2)}
    value: list[Any] = [inner, (inner,)]
    value.append(value)
    inner["all"] = value
    replaced = cast(value, torch.float64)
    assert replaced[2] is replaced is replaced[0]["all"]
    assert replaced[1][0] is replaced[0] is not inner
    assert replaced[0]["values"].dtype is torch.float64


class Slotted:
    """An object without a dictionary, one of whose attributes is missing."""

    __slots__ = ("missing", "values")

    def __init__(self, values: Any) -> None:
        self.values = values


class Holder:
    """An object of the user's, which may hold itself."""

    def __init__(self, *values: Any) -> None:
        self.values, self.me = values, self


def test_tensors_are_found_once_wherever_they_are() -> None:
    wanted = [torch.full((1,), float(number)) for number in range(6)]
    shared = [wanted[0]]
    rows = [Slotted(wanted[1]), Holder(wanted[2], Holder(wanted[3])), Record(wanted[4], "mine"), {1: (wanted[5],)}]
    found = find_tensors([shared, shared, rows, "text", None, torch.nn.Linear(2, 2), Holder, lambda: shared])
    assert sorted(int(tensor) for tensor in found) == list(range(6))


def test_rows_beside_tensors_cost_no_step_each() -> None:
    rows = [[number, str(number), {"a": number}] for number in range(3000)]
    calls = Counter[str]()
    sys.setprofile(lambda frame, event, argument: calls.update([event]))
    try:
        found = find_tensors((torch.ones(2), rows, list(range(100_000))))
    finally:
        sys.setprofile(None)
    assert len(found) == 1
    assert calls["call"] < 3 * len(rows), "containers in Python are a step each at most, their elements none"


class Lazy(dict[str, Any]):
    """A mapping whose own methods raise, as one that computes its entries may."""

    def values(self) -> Any:
        raise RuntimeError("not kept")


def test_objects_are_read_without_their_code_and_not_without_end() -> None:
    rows = [{"id": number} for number in range(100_000)]
    calls = Counter[str]()
    sys.setprofile(lambda frame, event, argument: calls.update([event]))
    try:
        found = find_tensors(Holder(torch.ones(2), Lazy(values=torch.zeros(2)), rows))
    finally:
        sys.setprofile(None)
    assert len(found) == 2
    assert calls["call"] < 2000, "an object may refer to all of a dataset"


def test_a_forward_looks_for_tensors_once(monkeypatch: pytest.MonkeyPatch) -> None:
    searched: list[Any] = []

    def search(value: Any) -> list[Tensor]:
        searched.append(value)
        return find_tensors(value)

    monkeypatch.setattr(distributed, "find_tensors", search)
    with group_of_one():
        ddps = [DistributedDataParallel(torch.nn.Linear(2, 2), find_unused_parameters=True) for _ in range(2)]
        for ddp in ddps:  # beside another its outputs are marked
            ddp(torch.ones(1, 2)).sum().backward()
    assert len(searched) == 2


def test_tensors_within_vmap_are_moved_although_nobody_can_tell_there_whether_their_memory_is_pinned() -> None:
    rows = torch.ones(3, 2)
    assert torch.equal(torch.vmap(lambda row: move([row], rows.device)[0])(rows), rows)
    assert torch.vmap(lambda row: move([row], torch.device("meta"))[0])(rows).device.type == "meta"
