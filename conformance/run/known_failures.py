"""Known failures: `expectations.toml`, and how it changes a run's verdicts.

    [[expectation]]
    scenarios = "buckets/BUCKET-03/*"        # a scenario id or a glob of them; must match something
    verdict = "FAIL"                         # FAIL, HANG or CRASH: exactly this, nothing milder or graver
    reason = "the reducer's order depends on the rank"
    issue = "https://example.org/issues/12"
    expires = 2027-06-30                     # the last day on which it holds
    subject = "my_pkg:MyDDP"                 # this and what follows are conditions; each is optional
    backend = "gloo"
    device = "cpu"
    torch = ">=2.11,<2.14"
    world_size = [2, 4]

A known failure is not skipped: the scenario runs, and a pass, another verdict or a past expiry is a failure. Everything
here is a pure function of texts, values and a date.
"""

import dataclasses
import datetime
import json
import re
import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from packaging.specifiers import InvalidSpecifier, SpecifierSet
from packaging.version import InvalidVersion, Version

from conformance.errors import KnownFailureError, hint
from conformance.scenario import Scenario
from conformance.verdict import ScenarioResult, Verdict

EXPECTABLE = (Verdict.FAIL, Verdict.HANG, Verdict.CRASH)
MET, UNEXPECTED_PASS, UNEXPECTED_VERDICT, EXPIRED = "met", "unexpected pass", "unexpected verdict", "expired"
#: It failed where a failure was known, and in more than was known.
FAILED_IN_MORE = "more than known"

_MANDATORY = ("scenarios", "verdict", "reason", "issue", "expires")
_MOST_NEW = 6
_CONDITIONS = ("subject", "backend", "device", "torch", "world_size")


@dataclass(frozen=True, slots=True)
class Circumstances:
    """What conditions are compared with: the same for all scenarios of a run."""

    subject: str
    backend: str
    device: str
    torch: str
    without_ddp: bool = False


@dataclass(frozen=True, slots=True)
class KnownFailure:
    """One entry of the file; empty conditions hold always."""

    scenarios: str
    verdict: Verdict
    reason: str
    issue: str
    expires: datetime.date
    subject: str = ""
    backend: str = ""
    device: str = ""
    torch: str = ""
    world_size: tuple[int, ...] = ()

    def names(self, scenario_id: str, world_size: int) -> bool:
        """Whether the glob and the world sizes match a scenario."""
        return (self.scenarios == scenario_id or fnmatchcase(scenario_id, self.scenarios)) and (
            not self.world_size or world_size in self.world_size
        )

    def holds_in(self, circumstances: Circumstances) -> bool:
        """Whether the conditions on subject, backend, device and torch's version are met."""
        return (
            self.subject in ("", circumstances.subject)
            and self.backend in ("", circumstances.backend)
            and self.device in ("", circumstances.device)
            and (not self.torch or _version_in(circumstances.torch, self.torch))
        )


@dataclass(frozen=True, slots=True)
class Excuse:
    """The known failure that applied to one scenario, and its `status`: whether the scenario failed just like that.

    `new` says in a sentence each what was wrong in it beside what was known.
    """

    status: str
    verdict: Verdict
    reason: str
    issue: str
    expires: str
    new: tuple[str, ...] = ()

    @property
    def holds(self) -> bool:
        """Whether the run may be green in spite of the failure."""
        return self.status == MET

    def new_first(self, result: ScenarioResult) -> ScenarioResult:
        """Return the result that it applies to with what is new in it first; unchanged if nothing is new."""
        if not self.new or result.verdict is not Verdict.FAIL:
            return result
        more = [f"  and {len(self.new) - _MOST_NEW} more"] if len(self.new) > _MOST_NEW else []
        lines = ["New beside what was known to fail here:", *(f"- {one}" for one in self.new[:_MOST_NEW]), *more]
        return result.headed(self.new[0], "\n".join(lines))

    def describe(self, verdict: Verdict) -> str:
        """Return what was expected, that `verdict` is the result, and what to do."""
        expected = f"{self.verdict.value} was expected ({self.reason}; {self.issue})"
        if self.status == MET:
            return f"{expected}, and it is {verdict.value}"
        if self.status == FAILED_IN_MORE:
            return f"some of it was known ({self.reason}; {self.issue})"
        if self.status == EXPIRED:
            return f"{expected} until {self.expires}, which is past; it is {verdict.value}: fix it, or set a later date"
        if self.status == UNEXPECTED_PASS:
            return f"it passed, but {expected}: remove its entry from the known failures, or narrow it down"
        return f"{expected}, but it is {verdict.value}"


#: Says which known failure applies to a scenario in which the subject came to a result, if any.
Excuses = Callable[[Scenario, ScenarioResult], Excuse | None]


def parse_toml(text: str) -> dict[str, Any]:
    """Return what a TOML text holds; raises `KnownFailureError` if it is none, or its lists or numbers are too long."""
    try:
        return tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        raise KnownFailureError(f"not valid TOML: {error}") from error


def read_known_failures(text: str) -> tuple[KnownFailure, ...]:
    """Return the entries of a file's text; raises `KnownFailureError` naming entry and key of the first mistake."""
    data = parse_toml(text)
    if extra := sorted(set(data) - {"expectation"}):
        raise KnownFailureError(f"unknown table or key {extra[0]!r}; entries are written [[expectation]]")
    entries = data.get("expectation", [])
    if not isinstance(entries, list):
        raise KnownFailureError("entries are written [[expectation]], with two brackets")
    return tuple(_known_failure(f"expectation {number}", entry) for number, entry in enumerate(entries, start=1))


def check_names(known: Iterable[KnownFailure], world_sizes: Mapping[str, int]) -> None:
    """Raise `KnownFailureError` unless every entry names a scenario; `world_sizes` holds all that exist, by id."""
    for number, failure in enumerate(known, start=1):
        if not any(failure.names(scenario_id, size) for scenario_id, size in world_sizes.items()):
            sizes = f" at world size {_sizes_text(failure.world_size)}" if failure.world_size else ""
            raise KnownFailureError(
                f"expectation {number}: {failure.scenarios!r} matches no scenario{sizes}"
                f"{hint(failure.scenarios, world_sizes)}"
            )


def excuse_for(
    known: Iterable[KnownFailure],
    circumstances: Circumstances,
    today: datetime.date,
    scenario_id: str,
    world_size: int,
    verdict: Verdict,
) -> Excuse | None:
    """Return the known failure that applies to a scenario and whether `verdict` meets it; None when none applies.

    Raises `KnownFailureError` when two apply: which of them counts must not depend on their order.
    """
    applying = [one for one in known if one.names(scenario_id, world_size) and one.holds_in(circumstances)]
    if not applying:
        return None
    if len(applying) > 1:
        raise KnownFailureError(
            f"{scenario_id} is named by {len(applying)} expectations that hold here:"
            f" {', '.join(repr(one.scenarios) for one in applying)}; narrow them down so that one is left"
        )
    failure = applying[0]
    if today > failure.expires:
        status = EXPIRED
    elif verdict is failure.verdict:
        status = MET
    else:
        status = UNEXPECTED_PASS if verdict is Verdict.PASS else UNEXPECTED_VERDICT
    return Excuse(status, failure.verdict, failure.reason, failure.issue, failure.expires.isoformat())


def updated(
    known: Sequence[KnownFailure],
    circumstances: Circumstances,
    verdicts: Mapping[str, Verdict],
    world_sizes: Mapping[str, int],
    new: Callable[[str, Verdict], KnownFailure],
) -> tuple[KnownFailure, ...]:
    """Return the known failures that a run with these `verdicts` would have met.

    Entries whose conditions do not hold in `circumstances` stay as they are. An entry that some scenario of its glob
    contradicts is replaced by an entry for each scenario that still fails, with its verdict. A scenario that fails and
    is not expected to gets `new(id, verdict)`; one whose verdict has changed keeps its reason, issue and expiry.
    """
    kept: list[KnownFailure] = []
    covered: set[str] = set()
    for entry in known:
        if not entry.holds_in(circumstances):
            kept.append(entry)
            continue
        matched = [id_ for id_, size in world_sizes.items() if entry.names(id_, size)]
        if all(verdicts.get(id_, entry.verdict) is entry.verdict for id_ in matched):
            kept.append(entry)
            covered.update(matched)
            continue
        for id_ in matched:
            verdict = verdicts.get(id_, entry.verdict)
            if verdict in EXPECTABLE:
                kept.append(dataclasses.replace(entry, scenarios=id_, verdict=verdict))
                covered.add(id_)
    for id_, verdict in verdicts.items():
        if verdict in EXPECTABLE and id_ not in covered:
            kept.append(new(id_, verdict))
    return tuple(kept)


def known_failures_to_toml(known: Iterable[KnownFailure]) -> str:
    """Return the text of a file with these entries; `read_known_failures` gives back equal ones."""
    return "\n".join(_entry_to_toml(entry) for entry in known)


def _entry_to_toml(entry: KnownFailure) -> str:
    lines = ["[[expectation]]"]
    for name in _MANDATORY + _CONDITIONS:
        value = getattr(entry, name)
        if name == "expires":
            lines.append(f"expires = {value.isoformat()}")
        elif name == "world_size":
            lines += [f"world_size = [{_sizes_text(value)}]"] if value else []
        elif text := value.value if isinstance(value, Verdict) else value:
            lines.append(f"{name} = {_toml_string(text)}")
    return "\n".join(lines) + "\n"


def _toml_string(text: str) -> str:
    # A JSON string is a TOML string, but for DEL, which TOML wants escaped, and halves of surrogate pairs.
    return json.dumps(text.encode("utf-8", "replace").decode(), ensure_ascii=False).replace("\x7f", "\\u007f")


def _sizes_text(sizes: tuple[int, ...]) -> str:
    return ", ".join(map(str, sizes))


def _version_in(version: str, specifier: str) -> bool:
    try:
        return SpecifierSet(specifier).contains(Version(version), prereleases=True)
    except InvalidVersion as error:
        raise KnownFailureError(f"cannot compare torch {version!r} with {specifier!r}: it is no version") from error


def _known_failure(where: str, entry: Any) -> KnownFailure:
    if not isinstance(entry, dict):
        raise KnownFailureError(f"{where}: expected a table, got {type(entry).__name__}")
    if isinstance(entry.get("scenarios"), str):
        where = f"{where} ({entry['scenarios']})"
    if unknown := sorted(set(entry) - {*_MANDATORY, *_CONDITIONS}):
        raise KnownFailureError(f"{where}: unknown key {unknown[0]!r}{hint(unknown[0], _MANDATORY + _CONDITIONS)}")
    if missing := [name for name in _MANDATORY if name not in entry]:
        raise KnownFailureError(f"{where}: missing key(s): {', '.join(missing)}")
    fields = dict(entry)
    for name in fields:
        if name not in ("expires", "world_size") and (not isinstance(fields[name], str) or not fields[name].strip()):
            raise KnownFailureError(f"{where}: {name} must be a non-empty string, got {fields[name]!r}")
    if type(fields["expires"]) is not datetime.date:
        raise KnownFailureError(f"{where}: expires must be a date such as 2027-06-30, got {fields['expires']!r}")
    if fields["verdict"] not in [verdict.value for verdict in EXPECTABLE]:
        allowed = ", ".join(verdict.value for verdict in EXPECTABLE)
        raise KnownFailureError(f"{where}: verdict must be one of {allowed}, got {fields['verdict']!r}")
    fields["verdict"] = Verdict(fields["verdict"])
    if "torch" in fields:
        try:
            SpecifierSet(fields["torch"])
        except InvalidSpecifier as error:
            raise KnownFailureError(f"{where}: torch must be a range such as '>=2.11,<2.14': {error}") from error
    if "world_size" in fields:
        fields["world_size"] = _world_sizes(where, fields["world_size"])
    if re.search(r"[\r\n]", fields["scenarios"]):
        raise KnownFailureError(f"{where}: scenarios must be one line")
    return KnownFailure(**fields)


def _world_sizes(where: str, value: Any) -> tuple[int, ...]:
    sizes = value if isinstance(value, list) else [value]
    if not sizes or any(type(size) is not int or size < 1 for size in sizes):
        raise KnownFailureError(f"{where}: world_size must be an integer >= 1 or a list of them, got {value!r}")
    return tuple(sizes)
