"""Tensors in containers of any kind are replaced, and what holds them stays what it is."""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict, namedtuple
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from ddp_impl.nested_tensors import cast, find_tensors


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
