"""What a scenario needs of a backend and of a subject."""

from collections.abc import Iterator, Mapping
from typing import Any

from conformance.backends.backend import CAPABILITIES, UNKNOWN_TO_TORCH, Backend
from conformance.models.catalogue import get_fixture
from conformance.run.environment import package_version
from conformance.scenario import DTYPES, Scenario
from conformance.subjects.subject import CAPABILITIES as OF_SUBJECTS
from conformance.subjects.subject import Subject, capabilities_of

#: What a scenario needs of a backend that names one of these in its arguments.
_DECLARED = frozenset(DTYPES) & CAPABILITIES


def needs_of(scenario: Scenario) -> frozenset[str]:
    """Return what a scenario needs: what it lists, and what follows from its options, its model and its dtypes.

    Subjects declare options, backends dtypes; what sparse gradients need of both follows, so that no chapter must
    think of it.
    """
    # Where some cells may need what is not declared, these are not tried, and the others are.
    named = {scenario.dtype, *(() if scenario.arguments.get("has_undeclared") else _texts(scenario.arguments))}
    has_sparse = get_fixture(scenario.model).sparse or "sparse" in named or "sparse_gradients" in scenario.needs
    sparse = {"sparse", "sparse_gradients"} if has_sparse else set()
    needs = {*scenario.needs, *capabilities_of(scenario.options), *named & _DECLARED, *sparse}
    return frozenset(needs) - lacks_of(scenario)


def lacks_of(scenario: Scenario) -> frozenset[str]:
    """Return the capabilities that a backend must not declare if the scenario is to be about it: its refusals."""
    return frozenset(scenario.arguments.get("undeclared", ()))


def why_unsupported(scenario: Scenario, subject: Subject, backend: Backend) -> str:
    """Return why `subject` cannot be put through `scenario` over `backend`; empty if it can."""
    if unknown := sorted((needs_of(scenario) | lacks_of(scenario)) & UNKNOWN_TO_TORCH):
        return f"torch {package_version('torch')} has no {', '.join(unknown)}"
    limit = backend.max_world_size()
    if limit is not None and scenario.world_size > limit:
        return f"backend {backend.name} serves at most {limit} rank(s) here"
    if declared := sorted(lacks_of(scenario) & backend.capabilities):
        return f"{backend.name} declares {', '.join(declared)}, so that it refuses nothing of it"
    if missing := sorted(needs_of(scenario) - backend.capabilities - subject.capabilities):
        theirs = [name for name in missing if name in OF_SUBJECTS]
        others = [name for name in missing if name not in OF_SUBJECTS]
        lacks = ((subject.name, theirs), (backend.name, others))
        return " and ".join(f"{who} declares no {', '.join(names)}" for who, names in lacks if names)
    return ""


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        yield from (text for one in value.values() for text in _texts(one))
    elif isinstance(value, (list, tuple)):
        yield from (text for one in value for text in _texts(one))
