"""A page for each requirement, at an address that stays: `requirements/GRAD-01/`."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from conformance.mutants.catalogue import Mutant
from conformance.mutants.detector import Fate, Found
from conformance.report.causes import causes_in
from conformance.report.markdown import as_code, as_text
from conformance.run.baseline import Baseline
from conformance.run.report import Report
from conformance.scenario import Scenario
from conformance.spec.catalogue import Catalogue, Requirement
from conformance.spec.version import Version, since_text
from conformance.verdict import Verdict
from workshop.site.passages import Passage, defining

_MOST_OPTIONS, _MOST_REMEDIES = 20, 6


@dataclass(frozen=True, slots=True)
class Evidence:
    """What is known of requirements: what was found of mutants, baselines, reports, versions, passages."""

    found: Found
    baselines: Sequence[Baseline] = ()
    reports: Sequence[Report] = ()
    versions: Sequence[Version] = ()
    passages: Sequence[Passage] = ()


def requirement_pages(catalogue: Catalogue, scenarios: Iterable[Scenario], evidence: Evidence) -> Mapping[str, str]:
    """Return the pages in Markdown by path: one per requirement, and an index of all chapters."""
    of: dict[str, list[Scenario]] = defaultdict(list)
    for scenario in scenarios:
        for name in scenario.requirements:
            of[name].append(scenario)
    pages = {f"requirements/{one.id}.md": _page(one, of[one.id], evidence, catalogue) for one in catalogue}
    return {"requirements/index.md": _index(catalogue), **pages}


def _index(catalogue: Catalogue) -> str:
    lines = ["# Requirements", "", f"{len(catalogue)} requirements in {len(catalogue.chapters)} chapters."]
    for chapter in catalogue.chapters:
        lines += ["", f"## {chapter.title} {{ #{chapter.name} }}", ""]
        lines += [f"- [{one.id}]({one.id}.md): {one.statement}" for one in chapter.requirements]
    return "\n".join(lines) + "\n"


def _page(one: Requirement, scenarios: Sequence[Scenario], evidence: Evidence, catalogue: Catalogue) -> str:
    chapter = catalogue.chapter(one.chapter)
    note = ["", one.note] if one.note else []
    parts = [
        f"# {one.id}",
        "",
        f"> {one.statement}",
        *note,
        "",
        f"Chapter [{chapter.title}](index.md#{chapter.name}), level `{one.level}`,"
        f" {since_text(one.id, evidence.versions)}.",
        *_versions(one, evidence.versions),
        "",
        "## Where it comes from",
        "",
        *(f"- {source_link(source)}" for source in one.source),
        "",
        "## What defines it",
        "",
        *_passages(one, evidence.passages),
        "",
        "## Scenarios",
        "",
        *_scenarios(one, scenarios),
        "",
        "## Mutants that break it",
        "",
        *_mutants(one, evidence.found),
        "",
        "## Who keeps it",
        "",
        *_keepers(one, evidence),
        "",
        "## What to do when it fails",
        "",
        *_remedies(one, evidence.reports),
    ]
    return "\n".join(parts) + "\n"


def source_link(source: str) -> str:
    """Return the source of a requirement in Markdown, an issue as a link to it."""
    repository, _, number = source.partition("#")
    return f"[{source}](https://github.com/{repository}/issues/{number})" if number.isdigit() else source


def _versions(one: Requirement, versions: Sequence[Version]) -> list[str]:
    names = [version.name + " (draft)" * (not version.released) for version in versions if one.id in version.digests]
    return [f"Versions of the specification that hold it: {', '.join(names) or 'none yet'}."] if versions else []


def _passages(one: Requirement, passages: Sequence[Passage]) -> list[str]:
    """Return links to the passages of the definition; a DDP may keep much that the plainest one leaves open."""
    found = defining(one, passages)
    if not found:
        return ["The plainest DDP leaves it open: the scenarios say what is compared."]
    links = ", ".join(f"[{passage.name}](../definition.md#{passage.anchor})" for passage in found)
    return [f"In the [definition of DDP](../definition.md): {links}."]


def _scenarios(one: Requirement, scenarios: Sequence[Scenario]) -> list[str]:
    if not scenarios:
        return ["No scenario tests it."]
    sizes = Counter(scenario.world_size for scenario in scenarios)
    told = ", ".join(f"{number} at world size {size}" for size, number in sorted(sizes.items()))
    options = Counter(_options(scenario) for scenario in scenarios)
    rows = [f"| {as_code(text)} | {number} |" for text, number in options.most_common(_MOST_OPTIONS)]
    more = len(options) - _MOST_OPTIONS
    return [
        f"{len(scenarios)} in all: {told}. Run them on your DDP:",
        "",
        f"    ddp-conformance run {one.id} --ddp my_pkg:MyDDP",
        "",
        "| options of the DDP | scenarios |",
        "|---|--:|",
        *rows,
        *(["", f"{more} more sets of options are in the list of `ddp-conformance list {one.id}`."] if more > 0 else []),
    ]


def _options(scenario: Scenario) -> str:
    return ", ".join(f"{name}={value}" for name, value in scenario.options.items()) or "the defaults"


def _mutants(one: Requirement, found: Found) -> list[str]:
    killed: dict[str, Mutant] = {
        each.mutant.name: each.mutant
        for each in found.detections
        if each.kill.requirement == one.id and each.fate is Fate.KILLED
    }
    for mutant in found.mutants:
        if one.id in found.killers.get(mutant.name, ()):
            killed.setdefault(mutant.name, mutant)
    if not killed:
        return ["No mutant of this suite breaks it: that its scenarios can fail is not shown."]
    rows = [f"| `{name}` | {mutant.of} | {mutant.bug} |" for name, mutant in killed.items()]
    return ["| mutant | made from | the bug |", "|---|---|---|", *rows]


def _keepers(one: Requirement, evidence: Evidence) -> list[str]:
    rows = []
    for report in evidence.reports:
        for summary in report.requirements:
            if summary.id == one.id:
                torch = report.package_version("torch")
                cells = (report.subject.name, report.backend, torch, summary.subject.value, str(summary.scenarios))
                rows.append(f"| {' | '.join(map(as_text, cells))} |")
    for baseline in evidence.baselines:
        for broken in baseline.broken:
            if broken.requirement == one.id:
                cells = ("torch", baseline.backend, baseline.torch, "breaks it (baseline)", str(len(broken.scenarios)))
                rows.append(f"| {' | '.join(map(as_text, cells))} |")
    if not rows:
        return ["No stored report and no shipped baseline of torch's DDP speaks of it."]
    return ["| DDP | backend | torch | verdict | scenarios |", "|---|---|---|---|--:|", *dict.fromkeys(rows)]


def _remedies(one: Requirement, reports: Sequence[Report]) -> list[str]:
    failures = [
        outcome
        for report in reports
        for outcome in report.scenarios
        if outcome.subject.verdict.is_failure
        and outcome.subject.verdict is not Verdict.HARNESS_ERROR
        and one.id in outcome.broken
    ]
    told = dict.fromkeys(
        f"- {cause.title} {cause.remedy}".rstrip()
        for cause in causes_in(failures, {one.id: one.statement})
        if cause.remedy
    )
    seen = ["What made it fail in the stored reports:", "", *list(told)[:_MOST_REMEDIES], ""] if told else []
    return [*seen, "[Read a failure](../howto/read_a_failure.md) says how to read what a run prints."]
