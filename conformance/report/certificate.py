"""Certified runs: one whole profile with nothing left out and nothing excused, in a folder that can be checked again.

A certified run leaves `SHA256SUMS` in its folder, in the format of `sha256sum`, over every other file in it. The
checksums show that nothing was damaged. Whoever can write the folder can write them too: an unsigned certificate is
worth as much as the place that it was fetched from, and a signed one (`signature`) as much as the signer's word.
"""

import hashlib
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from conformance.checkers.explanation import some
from conformance.errors import ReportError
from conformance.report.folder import CHECKSUMS, PUBLIC_KEY, REPORT, SIGNATURE, strange_files
from conformance.report.plain_file import read_plain, write_plain
from conformance.report.read import report_in
from conformance.run.environment import package_version
from conformance.run.outcome import Outcome, evidence_of
from conformance.run.report import Report, counts, summarise
from conformance.run.sources import hash_of_suite
from conformance.scenario import Scenario
from conformance.spec.version import known_versions, load_version
from conformance.verdict import Verdict, decisive

_LINE = re.compile(r"^(?P<sum>[0-9a-f]{64})  (?P<name>[^\0\n]+)$")
#: Without these, nobody can tell where a verdict holds.
_ENVIRONMENT = ("python", "platform", "machine", "cores", "packages", "accelerators", "variables", "sources")
#: No statement about the subject: in a certificate each would be a gap.
_GAPS = (Verdict.UNSUPPORTED, Verdict.UNKNOWN, Verdict.HARNESS_ERROR)


def check_folder(folder: Path) -> None:
    """Raise `ReportError` if a report's folder holds what no run puts there: a certificate speaks of every file."""
    if strange := strange_files(folder):
        raise ReportError(f"{folder} cannot be certified: {some(list(strange))}; choose an empty folder with --report")


def write_checksums(folder: Path) -> Path:
    """Write the checksums of every file in a report's folder and return their path; raises `ReportError`."""
    check_folder(folder)
    lines = [f"{_sha256(read_plain(file, follow=False))}  {name}" for name, file in sorted(_files(folder).items())]
    write_plain(folder / CHECKSUMS, "\n".join(lines) + "\n")
    return folder / CHECKSUMS


def changed_files(folder: Path, report: bytes) -> tuple[str, ...]:
    """Return a sentence for every file in `folder` that is not what the checksums say.

    `report` is what `report.json` holds: what is compared must be what is read. Raises `ReportError` when there are no
    checksums or they are malformed.
    """
    try:
        text = read_plain(folder / CHECKSUMS, follow=False).decode("utf-8")
    except ReportError as error:
        raise ReportError(f"{error}; was the run certified?") from error
    except UnicodeDecodeError as error:
        raise ReportError(f"{folder / CHECKSUMS} is not UTF-8 text") from error
    if strange := strange_files(folder):
        return strange
    sums: dict[str, str] = {}
    for number, line in enumerate(text.splitlines(), start=1):
        match = _LINE.match(line)
        if match is None:
            raise ReportError(f"{folder / CHECKSUMS}, line {number}: expected a checksum and a file's name")
        sums[match["name"]] = match["sum"]
    present = _files(folder)
    canonical = "".join(f"{sums[name]}  {name}\n" for name in sorted(sums))
    return (
        *(f"{name} is in the checksums, but not in the folder" for name in sorted(sums.keys() - present.keys())),
        *(f"{name} is in the folder, but not in the checksums" for name in sorted(present.keys() - sums.keys())),
        *(
            f"{name} was changed: its checksum differs"
            for name in sorted(sums.keys() & present.keys())
            if _sha256(report if name == REPORT else read_plain(present[name], follow=False)) != sums[name]
        ),
        *([] if text == canonical else [f"{CHECKSUMS} was changed: it is not laid out as a run writes it"]),
    )


def objections(report: Report, profiles: Mapping[str, tuple[Scenario, ...]]) -> tuple[str, ...]:
    """Return why `report` is no certificate of what it says, one sentence each; nothing for a valid one.

    `profiles` are the scenarios of every profile in the installed release. That something failed is no objection: such
    a report certifies that the subject does not conform.
    """
    if not report.certified:
        return ("the run was not certified: run again with --certified",)
    return (
        *_problems_of_run(report),
        *_problems_of_list(report, profiles),
        *problems_of_counts(report),
    )


def verify(folder: Path, profiles: Callable[[], Mapping[str, tuple[Scenario, ...]]]) -> Report:
    """Return the report in `folder` if it is a valid certificate, whatever its verdict.

    `profiles` takes seconds: it is not called for what is no report, or has changed.

    Raises:
        ReportError: a file is not what the run wrote, or the report is no certificate; says everything that is wrong.

    """
    folder = folder.parent if folder.name == "report.json" else folder
    content = read_plain(folder / REPORT, follow=False)
    report = report_in(content, folder / REPORT)
    if not (wrong := changed_files(folder, content) or objections(report, profiles())):
        return report
    raise ReportError(f"{folder} is no valid certificate: " + "; ".join(wrong))


def _problems_of_run(report: Report) -> Iterable[str]:
    if not report.complete or report.interrupted:
        yield "the run was not completed"
    if report.selection.order != "listed":
        yield f"its scenarios ran {report.selection.order}, not in their order"
    if report.selection.shard:
        yield f"it holds one shard ({report.selection.shard}) of a run"
    if any(scenario.expectation is not None for scenario in report.scenarios):
        yield "known failures excuse some of its scenarios"
    if missing := [name for name in _ENVIRONMENT if name not in report.environment]:
        yield f"the environment was not captured: {', '.join(missing)}"
    elif not report.package_version("torch"):
        yield "the environment was not captured: the version of torch"
    without = [one for one in report.scenarios if one.subject.verdict in _GAPS]
    if gaps := [f"{one.id} ({one.subject.verdict.value})" for one in without]:
        yield f"{len(gaps)} scenario(s) say nothing of the subject: {some(gaps)}"


def _problems_of_list(report: Report, profiles: Mapping[str, tuple[Scenario, ...]]) -> Iterable[str]:
    made_by, installed = report.package_version("ddp-conformance"), package_version("ddp-conformance")
    if made_by != installed:
        yield f"it was made by ddp-conformance {made_by or 'unknown'}; verify it with that release, not {installed}"
        return
    if report.source_hash("suite") != hash_of_suite():
        yield "it was made by a suite with other files than the one installed here"
    if report.selection.profile not in profiles:
        yield f"profile {report.selection.profile!r} does not exist"
        return
    if report.specification and report.specification not in known_versions():
        yield f"version {report.specification!r} of the specification does not exist"
        return
    scenarios = profiles[report.selection.profile]
    if report.specification:
        scenarios = load_version(report.specification).scenarios(scenarios)
    yield from problems_of_scenarios(report, scenarios, f"profile {report.selection.profile}")


def problems_of_scenarios(report: Report, wanted: Iterable[Scenario], of: str) -> Iterable[str]:
    """Yield how the scenarios of `report` differ from those `wanted`, all those `of` something."""
    ours = {scenario.id: scenario for scenario in wanted}
    ran = {scenario.id: scenario for scenario in report.scenarios}
    if repeated := [id_ for id_, count in Counter(one.id for one in report.scenarios).items() if count > 1]:
        yield f"{len(repeated)} scenario(s) are listed twice: {some(repeated)}"
    if missing := [id_ for id_ in ours if id_ not in ran]:
        yield f"{len(missing)} scenario(s) of {of} are missing: {some(missing)}"
    if strangers := [id_ for id_ in ran if id_ not in ours]:
        yield f"{len(strangers)} scenario(s) are not in {of}: {some(strangers)}"
    if altered := [id_ for id_, one in ran.items() if id_ in ours and not _is_of(one, ours[id_])]:
        yield f"{len(altered)} scenario(s) are not those of this release: {some(altered)}"
    if set(report.selection.ids) != set(ours):
        yield f"its selection is not {of}"


def _is_of(outcome: Outcome, scenario: Scenario) -> bool:
    told = (outcome.sha256, outcome.requirements, outcome.world_size, outcome.seed)
    return told == (scenario.digest, scenario.requirements, scenario.world_size, scenario.seed)


def problems_of_counts(report: Report) -> Iterable[str]:
    """Yield where a report contradicts itself: counts, answers and findings follow from each other."""
    totals = report.totals
    if (totals.selected, totals.scenarios) != (len(report.selection.ids), len(report.scenarios)):
        yield "its totals do not count its scenarios"
    elif (totals.subject, totals.native) != (counts(report.verdicts), counts(report.native_verdicts)):
        yield "its totals do not count its verdicts"
    if report.green != report.is_green:
        yield f"it says green = {str(report.green).lower()}, but its scenarios say otherwise"
    evidence = evidence_of(report.scenarios)
    for requirement in report.requirements:
        if requirement != summarise(requirement, evidence.get(requirement.id, [])):
            yield f"what it says of {requirement.id} is not what its scenarios say"
    if unsound := [" ".join(map(str, one.compared)) for one in report.performance if not one.is_sound]:
        yield f"{len(unsound)} ratio(s) of step times cannot be: {some(unsound)}"
    for scenario in report.scenarios:
        if any(result.verdict is not decisive(result.findings) for result in scenario.results):
            yield f"the findings on {scenario.id} do not give its verdict"


def _files(folder: Path) -> dict[str, Path]:
    files = {path.relative_to(folder).as_posix(): path for path in folder.rglob("*") if path.is_file()}
    return {name: path for name, path in files.items() if name not in (CHECKSUMS, SIGNATURE, PUBLIC_KEY)}


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
