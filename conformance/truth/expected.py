"""Matchers: expected facts other than exact values, and their comparison with observed facts."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from conformance.errors import present
from conformance.observation import Raised
from conformance.truth.difference import Difference, difference, kind, show


@dataclass(frozen=True)
class Raises:
    """An exception whose type, or one of its bases, is in `types`, and whose message contains all of `mentions`.

    Case does not matter in `mentions`. Of words in a tuple, which mean the same, one is enough.
    """

    types: tuple[str, ...] = ("Exception",)
    mentions: tuple[str | tuple[str, ...], ...] = ()

    def mismatch(self, got: Any) -> Difference | None:
        """Return None if `got` is such an exception, else why not."""
        if got is None:
            return Difference(f"raised nothing, expected {self}")
        if not isinstance(got, Raised):
            return Difference(f"is {show(got)}, expected {self}")
        if not set(self.types) & {got.type, *got.bases}:
            return Difference(f"is {got.type}, expected {self}; its message: {got.message}")
        message = got.message.lower()
        if missing := [
            words for words in map(_words, self.mentions) if not any(word.lower() in message for word in words)
        ]:
            return Difference(f"does not mention {_quoted(missing)}; its message: {got.message}")
        return None

    def __str__(self) -> str:
        """Return e.g. `RuntimeError mentioning 'fc1.weight'`."""
        mentions = f" mentioning {_quoted(map(_words, self.mentions))}" if self.mentions else ""
        return " or ".join(self.types) + mentions


@dataclass(frozen=True)
class Close:
    """A number or tensor within `atol + rtol * |value|` of `value`; `because` argues for the tolerance."""

    value: Any
    rtol: float
    atol: float
    because: str

    def __post_init__(self) -> None:
        if not self.because:
            raise ValueError("Close needs `because`: bitwise equality is the rule, a tolerance is an argued exception")

    def mismatch(self, got: Any) -> Difference | None:
        """Return None if `got` has the same dtype and shape and is close, else where and by how much it is not."""
        if isinstance(self.value, Tensor) and isinstance(got, Tensor):
            exact = difference(self.value, got)
            if exact is None or exact.num_differing == 0:
                return exact
            wanted, got = self.value.to_dense(), got.to_dense()
            close = torch.isclose(got, wanted, rtol=self.rtol, atol=self.atol, equal_nan=True)
        elif isinstance(self.value, float | int) and isinstance(got, float | int):
            close = torch.isclose(
                torch.tensor(float(got), dtype=torch.float64),
                torch.tensor(float(self.value), dtype=torch.float64),
                rtol=self.rtol, atol=self.atol, equal_nan=True,
            )  # fmt: skip
            exact = difference(self.value, got)
        else:
            return difference(self.value, got)
        if bool(close.all()):
            return None
        return Difference(f"{present(exact).reason}; the tolerance is {self._tolerance()}")

    def _tolerance(self) -> str:
        return f"rtol {self.rtol:g}, atol {self.atol:g} ({self.because})"

    def __str__(self) -> str:
        """Return e.g. `a tensor (3 float32) within rtol 1e-05, atol 0 (sums in another order)`."""
        return f"{show(self.value)} within {self._tolerance()}"


@dataclass(frozen=True, init=False)
class AnyOf:
    """One of several exact values or matchers."""

    choices: tuple[Any, ...]

    def __init__(self, *choices: Any) -> None:
        if len(choices) < 2:
            raise ValueError(f"AnyOf needs at least two choices, got {len(choices)}")
        object.__setattr__(self, "choices", choices)

    def mismatch(self, got: Any) -> Difference | None:
        """Return None if `got` is one of the choices, else why it is none."""
        reasons = []
        for choice in self.choices:
            found = mismatch(choice, got)
            if found is None:
                return None
            reasons.append(found.reason)
        if (alike := self.alike(got)) is not None:  # choices of another kind differ in nothing that helps
            others = [describe(choice) for choice in self.choices if choice is not alike]
            return Difference(f"{present(mismatch(alike, got)).reason}; allowed instead: {' or '.join(others)}")
        return Difference(f"is none of the {len(self.choices)} allowed: it " + "; it ".join(reasons))

    def alike(self, got: Any) -> Any:
        """Return the only choice of the same kind as `got`, if there is only one."""
        found = [choice for choice in self.choices if _is_alike(choice, got)]
        return found[0] if len(found) == 1 else None

    def __str__(self) -> str:
        return " or ".join(describe(choice) for choice in self.choices)


@dataclass(frozen=True)
class Anything:
    """Any value at all, as long as the fact was observed."""

    def mismatch(self, got: Any) -> Difference | None:
        """Return None."""
        return None

    def __str__(self) -> str:
        return "anything"


@dataclass(frozen=True)
class Satisfies:
    """A value for which `predicate(value, *arguments)` is true; `name` completes the sentence "the fact must be ...".

    `predicate` is a function of a module, so that another process finds it by its name (`carried`).
    """

    name: str
    predicate: Callable[..., bool]
    arguments: tuple[Any, ...] = ()

    def mismatch(self, got: Any) -> Difference | None:
        """Return None if the predicate holds; a predicate that raises does not hold."""
        try:
            holds = self.predicate(got, *self.arguments)
        except Exception as error:
            return Difference(f"is {show(got)}, expected {self.name} (asking raised {type(error).__name__}: {error})")
        return None if holds else Difference(f"is {show(got)}, expected {self.name}")

    def __str__(self) -> str:
        return self.name


def is_at_least(got: float, least: float) -> bool:
    """Return `got >= least`, a predicate of `Satisfies`."""
    return got >= least


def is_at_most(got: float, most: float) -> bool:
    """Return `got <= most`, a predicate of `Satisfies`."""
    return got <= most


def at_least(least: float, what: str = "") -> Satisfies:
    """Return a matcher of numbers >= `least`; `what` is their unit."""
    return Satisfies(f"at least {least} {what}".rstrip(), is_at_least, (least,))


def at_most(most: float, what: str = "") -> Satisfies:
    """Return a matcher of numbers <= `most`; `what` is their unit."""
    return Satisfies(f"at most {most} {what}".rstrip(), is_at_most, (most,))


@dataclass(frozen=True)
class Right:
    """The judgement of a rank that nothing is wrong: an empty text; otherwise its text is a clause.

    The text `besides` means that the rank had nothing to judge.
    """

    besides: str = ""

    def mismatch(self, got: Any) -> Difference | None:
        """Return None if `got` is an empty text, or `besides`, else its text."""
        if got in ("", self.besides):
            return None
        return Difference(got if isinstance(got, str) else f"is {show(got)}, expected a judgement")

    def __str__(self) -> str:
        return "nothing wrong"


Matcher = Raises | Close | AnyOf | Anything | Satisfies | Right


def _is_alike(choice: Any, got: Any) -> bool:
    """Whether both hold values of one kind: mappings, tensors or exceptions."""
    if isinstance(got, Raised):
        return isinstance(choice, Raises)
    return any(isinstance(choice, kind) and isinstance(got, kind) for kind in (Mapping, Tensor))


def mismatch(expected: Any, got: Any) -> Difference | None:
    """Return None if the fact `got` is what was expected (an exact value or a matcher), else how it is not."""
    return expected.mismatch(got) if isinstance(expected, Matcher) else difference(expected, got)


def describe(expected: Any) -> str:
    """Return one line about an expected fact."""
    if isinstance(expected, Matcher):
        return str(expected)
    return kind(expected) if isinstance(expected, Tensor) and expected.numel() > 1 else show(expected)


def is_open(expected: Any) -> bool:
    """Whether an expected fact names no single value."""
    return isinstance(expected, Matcher) and not isinstance(expected, Close)


def exact_value(expected: Any) -> Any:
    """Return the exact or approximate value of an expected fact; None where it is open or where None is expected."""
    if isinstance(expected, Close):
        return expected.value
    return None if isinstance(expected, Matcher) else expected


def _words(mention: str | tuple[str, ...]) -> tuple[str, ...]:
    return (mention,) if isinstance(mention, str) else mention


def _quoted(mentions: Iterable[tuple[str, ...]]) -> str:
    return ", ".join(" or ".join(map(repr, words)) for words in mentions)
