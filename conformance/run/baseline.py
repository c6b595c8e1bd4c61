"""Baselines: what torch's own DDP breaks, so that on another backend only that backend's faults are shown.

    torch = "2.13.0"
    backend = "gloo"

    [[requirement]]
    id = "UNUSED-02"
    reason = "12 FAIL of 120 scenarios, such as: step0/grad/fc.weight on rank 1: zeros where None was expected"
    source = ["pytorch/pytorch#28294"]
    scenarios = ["mlp-world2", "cnn-world2"]     # unused/UNUSED-02/mlp-world2, ...

Where torch's DDP breaks by itself, a scenario shows nothing about the backend: FAIL, HANG and CRASH are excused alike,
and a PASS is welcome. Every other scenario of the requirement counts. A baseline of a backend without a DDP is finer,
because a scenario holds up to 40 operations: behind its name stands a hash for each known mistake,
`"reduce-world2 1f0c2a 9b03e7"`, and every other mistake is reported. `conformance/baselines/` holds the shipped
baselines; everything here but `shipped_baseline` is a pure function.
"""

import json
import textwrap
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from packaging.version import Version

from conformance.errors import KnownFailureError
from conformance.run.known_failures import EXPECTABLE, FAILED_IN_MORE, MET, Excuse, parse_toml
from conformance.run.outcome import NATIVE, Outcome, counts_text
from conformance.run.report import Report
from conformance.scenario import Scenario
from conformance.spec.catalogue import Catalogue
from conformance.verdict import ScenarioResult, Verdict

#: Follows the name of a backend in its baseline without a DDP.
_ALONE = "-alone"
#: What the baseline of gloo without a DDP is called.
ALONE = f"gloo{_ALONE}"
FOLDER = Path(__file__).parent.parent / "baselines"
_KEYS = {"id": str, "reason": str, "source": list, "scenarios": list}


@dataclass(frozen=True, slots=True)
class Broken:
    """One requirement that torch's DDP breaks, in the scenarios with these ids.

    `ways` are words for what may be wrong there, see `ScenarioResult.ways`; of a scenario without any, everything may.
    """

    requirement: str
    reason: str
    source: tuple[str, ...]
    scenarios: tuple[str, ...]
    ways: Mapping[str, frozenset[str]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Baseline:
    """What torch's DDP breaks with one version of torch over one backend."""

    torch: str
    backend: str
    broken: tuple[Broken, ...]

    def excuse(self, scenario: Scenario, result: ScenarioResult) -> Excuse | None:
        """Return the excuse for `result` if torch's DDP itself breaks this scenario, or the backend does.

        It does not hold for what is wrong beside that which the backend is known to break; it says what that is.
        """
        if result.verdict not in EXPECTABLE:
            return None
        for one in self.broken:
            if scenario.id not in one.scenarios:
                continue
            known = one.ways.get(scenario.id, result.ways)
            new = tuple(sentence for word, sentence in result.ways.items() if word not in known)
            reason = f"torch {self.torch} breaks it over {self.backend}: {one.reason}"
            return Excuse(FAILED_IN_MORE if new else MET, result.verdict, reason, ", ".join(one.source), "", new)
        return None


def shipped_baseline(torch: str, backend: str = "gloo") -> Baseline:
    """Return the baseline for this version of torch; raises `KnownFailureError`, which says how to make one."""
    release = Version(torch).base_version
    path = FOLDER / f"torch-{release}-{backend}.toml"
    if not path.is_file():
        there = ", ".join(sorted(each.stem for each in FOLDER.glob("*.toml"))) or "none"
        raise KnownFailureError(
            f"no baseline for torch {release} over {backend} is shipped (there is: {there}). Make one: ddp-conformance"
            " run --ddp torch --report torch; ddp-conformance report baseline torch --out mine.toml; then pass"
            " --expectations mine.toml"
        )
    return read_baseline(path.read_text(encoding="utf-8"))


def read_baseline(text: str) -> Baseline:
    """Return the baseline in a file's text; raises `KnownFailureError` naming entry and key of the first mistake."""
    data = parse_toml(text)
    if extra := sorted(set(data) - {"torch", "backend", "requirement"}):
        raise KnownFailureError(f"unknown table or key {extra[0]!r} in a baseline")
    for key in ("torch", "backend"):
        if not isinstance(data.get(key), str):
            raise KnownFailureError(f"a baseline says its {key}, a text; got {data.get(key)!r}")
    entries = data.get("requirement", [])
    if not isinstance(entries, list):
        raise KnownFailureError("entries of a baseline are written [[requirement]], with two brackets")
    return Baseline(data["torch"], data["backend"], tuple(map(_broken, entries)))


def is_baseline(text: str) -> bool:
    """Whether a file of known failures is a baseline, of nothing perhaps; what is no TOML is none."""
    try:
        return not {"requirement", "backend"}.isdisjoint(parse_toml(text))
    except KnownFailureError:
        return False


def check_baseline(baseline: Baseline, scenario_ids: Iterable[str]) -> None:
    """Raise `KnownFailureError` if it names a scenario that does not exist."""
    known = set(scenario_ids)
    for one in baseline.broken:
        for scenario_id in one.scenarios:
            if scenario_id not in known:
                raise KnownFailureError(
                    f"{one.requirement}: there is no scenario {scenario_id!r}; make the baseline again"
                )


def baseline_of(reports: Iterable[Report], catalogue: Catalogue, digests: Mapping[str, str]) -> Baseline:
    """Return what torch's DDP broke in at least one of `reports`, as their subject or beside it.

    `digests` are those of the scenarios that exist, by id: an outcome of a scenario that has changed since is left out.
    Raises `KnownFailureError` unless the reports are of one torch and one backend, and torch's DDP ran in each.
    """
    reports = tuple(reports)
    results: dict[str, list[ScenarioResult]] = {}
    for report in reports:
        found = _of_torch(report, digests)
        if not found:
            raise KnownFailureError("torch's DDP ran no scenario of this release in a report; a baseline is about it")
        for scenario_id, result in found.items():
            results.setdefault(scenario_id, []).append(result)
    versions = {(Version(one.package_version("torch")).base_version, _over(one)) for one in reports}
    if len(versions) != 1:
        raise KnownFailureError(f"a baseline is of one torch over one backend, got {sorted(versions)}")
    broken: dict[str, dict[str, ScenarioResult]] = {}
    ways: dict[str, frozenset[str]] = {}
    for scenario_id, several in results.items():
        if failed := [one for one in several if one.verdict in EXPECTABLE]:
            broken.setdefault(scenario_id.split("/")[1], {})[scenario_id] = failed[-1]
            ways[scenario_id] = frozenset(word for one in failed for word in one.ways)
    ran = Counter(scenario_id.split("/")[1] for scenario_id in results)
    torch, backend = versions.pop()
    entries = (
        Broken(
            one.id,
            _reason(broken[one.id].values(), ran[one.id]),
            one.source,
            tuple(sorted(broken[one.id])),
            {each: ways[each] for each in broken[one.id]} if backend.endswith(_ALONE) else {},
        )
        for one in catalogue
        if one.id in broken
    )
    return Baseline(torch, backend, tuple(entries))


def union(earlier: Baseline, later: Baseline, catalogue: Catalogue, scenario_ids: Iterable[str]) -> Baseline:
    """Return what is in one of both, less what exists no more: torch's DDP does not break the same every night.

    Raises `KnownFailureError` if they are of different versions of torch, or of different backends.
    """
    if (earlier.torch, earlier.backend) != (later.torch, later.backend):
        raise KnownFailureError(
            f"a baseline is of one torch over one backend; got torch {earlier.torch} over {earlier.backend}, and"
            f" torch {later.torch} over {later.backend}"
        )
    known = set(scenario_ids)
    both: dict[str, Broken] = {}
    for one in (*earlier.broken, *later.broken):
        first = both.setdefault(one.requirement, one)
        scenarios = known.intersection((*first.scenarios, *one.scenarios))
        told = one if scenarios.issubset(one.scenarios) else first  # the last reason that speaks of all of them
        ways = {
            each: first.ways.get(each, frozenset()) | one.ways.get(each, frozenset())
            for each in scenarios.intersection((*first.ways, *one.ways))
        }
        both[one.requirement] = replace(told, scenarios=tuple(sorted(scenarios)), ways=ways)
    return replace(later, broken=tuple(both[one.id] for one in catalogue if one.id in both and both[one.id].scenarios))


def baseline_to_toml(baseline: Baseline) -> str:
    """Return the file's text; `read_baseline` gives back an equal baseline."""
    count = sum(len(one.scenarios) for one in baseline.broken)
    alone = baseline.backend.removesuffix(_ALONE)
    who = f"{alone} by itself" if alone != baseline.backend else "torch's own DDP"
    lines = [
        f"# What {who} breaks: {count} scenarios of {len(baseline.broken)} requirements. Made by",
        "# `ddp-conformance report baseline`; docs/known_failures.md says what it is for.",
        f"torch = {_quoted(baseline.torch)}",
        f"backend = {_quoted(baseline.backend)}",
    ]
    for one in baseline.broken:
        named = [" ".join([each.split("/", 2)[2], *sorted(one.ways.get(each, ()))]) for each in one.scenarios]
        lines += [
            "",
            "[[requirement]]",
            f"id = {_quoted(one.requirement)}",
            f"chapter = {_quoted(one.scenarios[0].split('/')[0])}",
            f"reason = {_quoted(one.reason)}",
            f"source = [{', '.join(map(_quoted, one.source))}]",
            "scenarios = [",
            *_wrapped(map(_quoted, named)),
            "]",
        ]
    return "\n".join(lines) + "\n"


def _wrapped(texts: Iterable[str]) -> list[str]:
    """Return the texts with commas between, in lines; a text that has spaces is not cut."""
    whole = ", ".join(text.replace(" ", "\0") for text in texts)
    lines = textwrap.wrap(
        whole, 116, initial_indent="    ", subsequent_indent="    ", break_on_hyphens=False, break_long_words=False
    )
    return [line.replace("\0", " ") for line in lines]


def _over(report: Report) -> str:
    """Return the backend as a baseline names it: `gloo-alone` where no DDP was judged."""
    return f"{report.backend}{_ALONE}" if report.is_about_backend else report.backend


def _of_torch(report: Report, digests: Mapping[str, str]) -> dict[str, ScenarioResult]:
    is_torch = report.is_about_backend or report.subject.name == NATIVE
    results = ((one, _seen(one) if is_torch else one.native) for one in report.scenarios)
    return {one.id: result for one, result in results if result is not None and digests.get(one.id) == one.sha256}


def _seen(outcome: Outcome) -> ScenarioResult:
    """Return what torch's DDP came to; where it fails now and then, fresh ranks may show a pass."""
    if outcome.contaminated_by and not outcome.subject.verdict.is_failure:
        return replace(outcome.subject, verdict=Verdict.FAIL)
    return outcome.subject


def _reason(results: Iterable[ScenarioResult], ran: int) -> str:
    results = tuple(results)
    verdicts = Counter(result.verdict for result in results)
    example = next((" ".join(result.summary.split()) for result in results if result.summary), "no checker says why")
    return f"{counts_text(verdicts)} of {ran} scenarios, such as: {textwrap.shorten(example, 140, placeholder=' ...')}"


def _quoted(text: str) -> str:
    return json.dumps(text.encode("utf-8", "replace").decode(), ensure_ascii=False).replace("\x7f", "\\u007f")


def _broken(entry: Any) -> Broken:
    where = f"requirement {entry.get('id', '?')}" if isinstance(entry, dict) else "an entry"
    keys = {**_KEYS, "chapter": str}
    if not isinstance(entry, dict) or set(entry) != set(keys):
        raise KnownFailureError(f"{where}: an entry of a baseline has the keys {', '.join(keys)}")
    for name, kind in keys.items():
        texts = entry[name] if kind is list else [entry[name]]
        if not isinstance(entry[name], kind) or not all(isinstance(text, str) for text in texts):
            raise KnownFailureError(f"{where}: {name} must be {'a list of texts' if kind is list else 'a text'}")
    named = [text.split(" ") for text in entry["scenarios"]]
    ways = {f"{entry['chapter']}/{entry['id']}/{slug}": frozenset(ways) for slug, *ways in named}
    told = {each: several for each, several in ways.items() if several}
    return Broken(entry["id"], entry["reason"], tuple(entry["source"]), tuple(ways), told)
