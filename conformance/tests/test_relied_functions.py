"""A function on which verdicts rest is told when somebody has replaced it, and only then."""

import os
from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from conformance.errors import present
from conformance.surroundings.relied_functions import ReliedFunctions, inherited, inherited_now


@pytest.fixture(params=["words", "names"])
def relied(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> ReliedFunctions:
    """Return the functions as they are before the test, compared by their words first, or by their names alone."""
    if request.param == "names":
        monkeypatch.setattr("conformance.surroundings.relied_functions.tells_changes", lambda: False)
    return ReliedFunctions()


@pytest.fixture
def nothing_inherited() -> Iterator[None]:
    inherited.cache_clear()
    yield
    inherited.cache_clear()


def other(*args: object, **kwargs: object) -> torch.Tensor:
    return torch.zeros(())


def test_a_function_that_was_replaced(relied: ReliedFunctions, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(F, "linear", other)
    assert relied.changes() == ("function replaced: torch.nn.functional.linear",)
    assert relied.changes() != ()  # still, until somebody puts it back


def test_a_method_that_a_class_did_not_have(relied: ReliedFunctions, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nn.Linear, "__call__", other, raising=False)
    assert relied.changes() == ("function replaced: torch.nn.modules.linear.Linear.__call__",)


def test_code_that_was_replaced_inside_a_function(relied: ReliedFunctions, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nn.Linear.forward, "__code__", nn.Identity.forward.__code__)
    assert relied.changes() == ("function replaced: torch.nn.modules.linear.Linear.forward",)


@pytest.mark.parametrize("default", [1.0, torch.ones(2)], ids=["equal", "tensor"])
def test_a_default_that_was_replaced(relied: ReliedFunctions, default: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nn.Module.train, "__defaults__", (default,))
    assert relied.changes() == ("function replaced: torch.nn.modules.module.Module.train",)


def test_a_default_of_a_keyword_that_was_replaced_in_its_place(
    relied: ReliedFunctions, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(present(os.fwalk.__kwdefaults__), "follow_symlinks", True)
    assert relied.changes() == ("function replaced: os.fwalk",)


def test_what_has_replaced_a_function_without_harm_is_still_looked_at(
    relied: ReliedFunctions, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It stands for the same at first, and something else later."""
    equal = list(os.makedirs.__defaults__ or ())
    monkeypatch.setattr(os.makedirs, "__defaults__", tuple(equal))
    assert relied.changes() == ()
    for number in range(100):
        os.makedirs.__defaults__ = None
        os.makedirs.__defaults__ = (number, number)
    assert relied.changes() == ("function replaced: os.makedirs",)


def test_a_new_name_that_hides_nothing_is_none_of_them(
    relied: ReliedFunctions, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(F, "a_name_of_nobody", 3, raising=False)
    assert relied.changes() == ()
    monkeypatch.setattr(nn.Linear, "forward", other)
    assert relied.changes() == ("function replaced: torch.nn.modules.linear.Linear.forward",)


@pytest.mark.usefixtures("nothing_inherited")
def test_what_an_import_has_replaced_is_where_a_rank_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    before = inherited()
    assert inherited_now() is before
    monkeypatch.setattr(F, "linear", other)
    assert inherited().changes() != ()
    assert inherited_now().changes() == ()
    assert inherited() is not before
