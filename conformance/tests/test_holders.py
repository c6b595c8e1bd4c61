"""Who keeps an object alive is told by the name that leads to it."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from conformance.programs.holders import holder_of


class Remembers(nn.Module):
    """Is in a list of its class if it is asked, or holds itself."""

    known: list[Any] = []

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module


@contextmanager
def _without_collection() -> Iterator[None]:
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def _wrapped() -> Remembers:
    return Remembers(nn.Sequential(nn.Linear(2, 2)))


def test_what_a_class_keeps_in_a_list_is_held_by_its_attribute() -> None:
    def parameter() -> Tensor:
        wrapper = _wrapped()
        Remembers.known.append([wrapper])
        return next(wrapper.parameters())

    assert holder_of(parameter()) == "attribute known of class Remembers"
    Remembers.known.clear()


def test_what_is_in_a_cycle_is_held_by_no_name() -> None:
    def parameter() -> Tensor:
        wrapper = _wrapped()
        wrapper.__dict__["itself"] = wrapper
        return next(wrapper.parameters())

    with _without_collection():
        found = holder_of(parameter())
    assert found == "an object of Remembers to which no name leads: a cycle of references, or code in C++ holds it"


def test_a_holder_that_does_not_count_is_passed_over() -> None:
    own = {"weight": torch.ones(1)}
    assert holder_of(own["weight"], [own]) == "nothing that Python sees"
