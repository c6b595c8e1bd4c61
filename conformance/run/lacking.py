"""Which capabilities a subject lacks though it declares them, as a failed scenario shows it."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from conformance.subjects.subject import CAPABILITIES, METHODS, capabilities_of
from conformance.verdict import ScenarioResult

_MISSING = re.compile(r"AttributeError: (?!'NoneType').* has no attribute '(\w+)'")

#: A function that stands beside a wrapper's class has the name of the capability that it comes with.
_NO_FUNCTION = re.compile(r"AttributeError: expected a function (\w+) in a package of the wrapper's class")

#: What a constructor raises for an option that it does not have.
_REFUSALS = ("TypeError", "ValueError")


@dataclass(frozen=True, slots=True)
class Lacking:
    """The capabilities that a subject declares and does not have, and how that shows: a clause."""

    names: tuple[str, ...]
    why: str

    @property
    def declaration(self) -> str:
        """The declaration without them, to be pasted."""
        names = ", ".join(f'"{name}"' for name in self.names)
        return f"Subject(..., capabilities=CAPABILITIES - {{{names}}})"


def lacking(result: ScenarioResult, scenario: Mapping[str, Any] | None = None) -> Lacking | None:
    """Return what the subject lacks or refuses though it declares it; None where nothing shows that.

    `scenario` is what `result` is about, as an outcome keeps it of failures.
    """
    texts = [f"{one.summary}\n{one.explanation}" for one in result.deciding_findings]
    method = next((match[1] for text in texts if (match := _MISSING.search(text)) and match[1] in METHODS), "")
    if method:
        return Lacking((METHODS[method],), f"has no method {method}")
    function = next((match[1] for text in texts if (match := _NO_FUNCTION.search(text))), "")
    if function in CAPABILITIES:
        return Lacking((function,), f"has no function {function} beside its class")
    refused = _refused(result, _asked_of(scenario or {}))
    return Lacking(tuple(refused), "refuses it") if refused else None


def _asked_of(scenario: Mapping[str, Any]) -> frozenset[str]:
    sparse = {"sparse_gradients"} if "sparse" in f"{scenario.get('model')} {scenario.get('arguments')}" else set()
    return capabilities_of(scenario.get("options", {})) | CAPABILITIES & {*scenario.get("needs", ()), *sparse}


def _refused(result: ScenarioResult, asked: frozenset[str]) -> list[str]:
    """Return those capabilities that a rank's error says are missing: by its type, or a constructor's by its words."""
    for rank in result.ranks:
        kind, _, message = rank.fate.partition(": ")
        named = sorted(name for name in asked if name.removesuffix("_gradients") in message)
        if kind == "NotImplementedError" and (named or rank.phase == "construct"):  # else torch may have raised it
            return named or sorted(asked)
        if named and ((rank.phase == "construct" and kind in _REFUSALS) or named == ["sparse_gradients"]):
            return named
    return []
