"""Words of memory tell every change of a dictionary, a class and a function, and nothing else."""

from collections.abc import Callable
from types import FunctionType

import pytest

from conformance.errors import present
from conformance.surroundings.memory import Words, tells_changes

pytestmark = pytest.mark.skipif(not tells_changes(), reason="this interpreter keeps no version of dictionaries")


class Some:
    """A class to change."""

    value = 1


def function(one: int = 1, *, other: int = 2) -> int:
    return one + other


def another(one: int = 1, *, other: int = 2) -> int:
    return one - other


NAMES = {"one": 1, "other": 2}


def set_code() -> None:
    function.__code__ = another.__code__


def set_defaults() -> None:
    function.__defaults__ = (3,)


def set_other_defaults_again() -> None:
    """Free the first ones: what comes later may lie where they lay."""
    for number in range(100, 200):
        function.__defaults__ = None
        function.__defaults__ = (number,)


def set_a_keyword_default() -> None:
    present(function.__kwdefaults__)["other"] = 5


def set_keyword_defaults() -> None:
    function.__kwdefaults__ = {"other": 4}


def set_attribute() -> None:
    Some.value = 2


def put_back() -> None:
    """Leave what there was: whoever compares names afterwards finds nothing."""
    NAMES["one"] = 2
    NAMES["one"] = 1


@pytest.mark.parametrize(
    ("change", "group"),
    [
        (lambda: NAMES.update(one=3), 0), (lambda: NAMES.pop("other"), 0), (lambda: NAMES.setdefault("new", 0), 0),
        (put_back, 0), (set_attribute, 1), (set_code, 2), (set_defaults, 2), (set_other_defaults_again, 2),
        (set_keyword_defaults, 2), (set_a_keyword_default, 2),
        (lambda: (NAMES.get("one"), Some.value, function(), str(function)), None),
    ],
)  # fmt: skip
def test_what_has_changed_is_told(change: Callable[[], object], group: int | None) -> None:
    before = dict(NAMES), Some.value, function.__code__, (1,), {"other": 2}
    functions = [one for one in (another, function) if isinstance(one, FunctionType)]
    words = Words([(NAMES, ()), (vars(Some), ()), ({}, functions)])
    try:
        assert words.changed() == []
        change()
        assert words.changed() == ([] if group is None else [group])
    finally:
        NAMES.clear()
        NAMES.update(before[0])
        Some.value, function.__code__, function.__defaults__, function.__kwdefaults__ = before[1:]
