"""Exact comparison of facts, and the matchers that stand for more than one value."""

import math
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given

from conformance.observation import Raised
from conformance.truth.difference import difference
from conformance.truth.expected import AnyOf, Anything, Close, Raises, Satisfies, describe, mismatch

NAN = math.nan
WRONG = Raised.of(RuntimeError("sizes of fc1.weight differ"))


def rows(places: list[int], values: list[float]) -> torch.Tensor:
    """Return a sparse 3 x 2 tensor with rows of the given values in the given places."""
    repeated = torch.tensor(values, dtype=torch.float32)[:, None].expand(-1, 2)
    return torch.sparse_coo_tensor(torch.tensor([places]), repeated, (3, 2), check_invariants=True)


EQUAL = [
    (rows([0, 2], [1, 0]), rows([2, 0, 0], [0, 0.5, 0.5])),
    (None, None),
    (1, 1),
    (1, 1.0),
    (NAN, NAN),
    ([1, "a", None], (1, "a", None)),
    ({"a": [1.0]}, {"a": [1.0]}),
    (torch.tensor([1.0, NAN]), torch.tensor([1.0, NAN])),
    (torch.tensor([-0.0]), torch.tensor([-0.0])),
    (torch.tensor([0j]), torch.tensor([complex(0.0, -0.0)])),
    (torch.tensor([1 + 2j]), torch.tensor([1 + 2j])),
    (torch.tensor([]), torch.tensor([])),
    (torch.ones(2, 3).t(), torch.ones(3, 2)),
    (torch.tensor(2.0, dtype=torch.bfloat16), torch.tensor(2.0, dtype=torch.bfloat16)),
    (Raised.of(ValueError("no"), "one traceback"), Raised.of(ValueError("no"), "another")),
]

UNEQUAL = [
    (None, 0, "is 0, expected None"),
    (None, torch.zeros(2), "is a tensor (2 float32), expected None"),
    (torch.zeros(2), None, "is None, expected a tensor (2 float32)"),
    (True, 1, "is 1, expected True"),
    (1, 2, "is 2, expected 1"),
    (0.0, -0.0, "is -0.0, expected 0.0"),
    (torch.tensor([1.0, 0.0]), torch.tensor([1.0, -0.0]),
     "differs in 1 of 2 element(s), first at [1]: expected 0.0, got -0.0; largest difference 0"),
    ("a", "b", "is 'b', expected 'a'"),
    ([1, 2, 3], [1, 5, 3], "at position 1 is 5, expected 2"),
    ([1, 2], [1], "has 1 item(s), expected 2: [1] for [1, 2]"),
    ({"a": 1}, {"b": 1}, "lacks 'a'"),
    ({"a": 1}, {"a": 1, "b": 1}, "has 'b', which must not be there"),
    ({"a": 1}, {"a": 2}, "at 'a' is 2, expected 1"),
    (torch.zeros(2), torch.zeros(2, dtype=torch.float64), "has dtype float64, expected float32"),
    (torch.zeros(2), torch.zeros(2, 1), "has shape (2, 1), expected (2,)"),
    (torch.zeros(2), torch.zeros(2).to_sparse(), "has layout sparse_coo, expected strided"),
    (rows([0, 2], [1, 0]), rows([0], [1]), "has entries at [0], expected entries at [0, 2]"),
    (torch.eye(2).to_sparse(), torch.ones(1, 2).expand(2, 2).tril().to_sparse(),
     "has entries at [[0, 0], [1, 0], [1, 1]], expected entries at [[0, 0], [1, 1]]"),
    (rows([0], [1]), rows([0], [2]), "differs in 2 of 6 element(s), first at [0, 0]: expected 1.0, got 2.0; largest "
     "difference 1"),
    (
        torch.tensor([[1.0, 2.0], [3.0, 4.0]]),
        torch.tensor([[1.0, 2.5], [3.0, 7.0]]),
        "differs in 2 of 4 element(s), first at [0, 1]: expected 2.0, got 2.5; largest difference 3",
    ),
    (torch.tensor(1.0), torch.tensor(NAN), "differs in 1 of 1 element(s), first: expected 1.0, got nan; largest "
     "difference inf"),
    (Raised.of(ValueError("no")), Raised.of(ValueError("yes")), "is ValueError: yes, expected ValueError: no"),
]  # fmt: skip


@pytest.mark.parametrize(("expected", "got"), EQUAL)
def test_equal_facts_do_not_differ(expected: Any, got: Any) -> None:
    assert difference(expected, got) is None


@pytest.mark.parametrize(("expected", "got", "reason"), UNEQUAL)
def test_says_how_facts_differ(expected: Any, got: Any, reason: str) -> None:
    found = difference(expected, got)
    assert found is not None
    assert found.reason == reason


@given(
    st.lists(st.floats(width=32), min_size=1, max_size=20),
    st.data(),
)
def test_finds_every_single_changed_element(values: list[float], data: st.DataObject) -> None:
    expected = torch.tensor(values, dtype=torch.float32)
    place = data.draw(st.integers(0, len(values) - 1))
    other = data.draw(st.floats(width=32).filter(lambda value: value != values[place] and not math.isnan(value)))
    got = expected.clone()
    got[place] = other
    assert difference(expected, expected.clone()) is None
    found = difference(expected, got)
    assert found is not None
    assert (found.index, found.num_differing, found.numel) == ((place,), 1, len(values))


def test_one_bit_is_a_difference() -> None:
    one = torch.tensor([1.0])
    assert difference(one, torch.nextafter(one, torch.tensor([2.0]))) is not None


@pytest.mark.parametrize(
    ("expected", "got"),
    [
        (Raises(), WRONG),
        (Raises(("RuntimeError",), ("FC1.weight",)), WRONG),
        (Raises(("ValueError", "Exception"), ("sizes", "differ")), WRONG),
        (Close(torch.tensor([1.0]), 0.1, 0.0, "why"), torch.tensor([1.05])),
        (Close(1.0, 0.0, 0.1, "why"), 1.05),
        (Close(torch.tensor([NAN]), 0.0, 0.0, "why"), torch.tensor([NAN])),
        (AnyOf(None, torch.zeros(2)), torch.zeros(2)),
        (AnyOf(1, Raises()), WRONG),
        (Anything(), None),
        (Satisfies("even", lambda value: value % 2 == 0), 4),
    ],
)
def test_matchers_accept(expected: Any, got: Any) -> None:
    assert mismatch(expected, got) is None


@pytest.mark.parametrize(
    ("expected", "got", "reason"),
    [
        (Raises(), None, "raised nothing, expected Exception"),
        (Raises(), 3, "is 3, expected Exception"),
        (Raises(("ValueError", "TypeError"), ("x",)), WRONG,
         "is RuntimeError, expected ValueError or TypeError mentioning 'x'; its message: sizes of fc1.weight differ"),
        (Raises(("RuntimeError",), ("rank 1", "fc1")), WRONG,
         "does not mention 'rank 1'; its message: sizes of fc1.weight differ"),
        (Close(torch.tensor([1.0]), 0.0, 0.01, "why"), torch.tensor([1.5]),
         "differs in 1 of 1 element(s), first at [0]: expected 1.0, got 1.5; largest difference 0.5; the tolerance is "
         "rtol 0, atol 0.01 (why)"),
        (Close(torch.tensor([1.0]), 1.0, 1.0, "why"), torch.tensor([1.0], dtype=torch.float64),
         "has dtype float64, expected float32"),
        (Close(1.0, 0.0, 0.01, "why"), 1.5, "is 1.5, expected 1.0; the tolerance is rtol 0, atol 0.01 (why)"),
        (Close(1.0, 0.0, 0.01, "why"), None, "is None, expected 1.0"),
        (AnyOf(1, 2), 3, "is none of the 2 allowed: it is 3, expected 1; it is 3, expected 2"),
        (Satisfies("even", lambda value: value % 2 == 0), 3, "is 3, expected even"),
        (Satisfies("even", lambda value: value % 2 == 0), None,
         "is None, expected even (asking raised TypeError: unsupported operand type(s) for %: 'NoneType' and 'int')"),
    ],
)  # fmt: skip
def test_matchers_refuse_and_say_why(expected: Any, got: Any, reason: str) -> None:
    found = mismatch(expected, got)
    assert found is not None
    assert found.reason == reason


def test_a_tolerance_needs_an_argument() -> None:
    with pytest.raises(ValueError, match="because"):
        Close(1.0, 0.1, 0.0, "")
    with pytest.raises(ValueError, match="at least two"):
        AnyOf(1)


def test_describes_what_is_expected() -> None:
    assert describe(Raises(("TypeError",), ("hook",))) == "TypeError mentioning 'hook'"
    assert describe(AnyOf(None, torch.zeros(2, 3))) == "None or 2x3 float32"
    assert describe(torch.tensor(3)) == "3 (scalar int64)"
    assert describe(Close(0.5, 0.0, 0.25, "data are random")) == "0.5 within rtol 0, atol 0.25 (data are random)"
    assert describe(Anything()) == "anything"
