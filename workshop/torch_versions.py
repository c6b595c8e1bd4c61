"""`python -m workshop versions`: what `ci/torch_versions.sh` found on several versions of torch, stored, and its page.

A file of ci/torch_versions holds what was found on one version. A later run replaces the profiles that it ran, and
no others; the page is made of all that is stored.
"""

from __future__ import annotations

import json
import re
import tomllib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path

import click
from packaging.version import Version

import workshop
from conformance.cli.options import NamedPath
from conformance.codec import decode, encode
from conformance.report.journal import JOURNAL
from conformance.report.read import read_report
from conformance.run.report import Report
from conformance.smoke.ladder import Status
from conformance.verdict import Verdict

STORED, PAGE = Path("ci/torch_versions"), Path("docs/torch_versions.md")
#: What `ddp-conformance doctor` says of it, where no checkout is.
JUDGED = Path("conformance/spec/torch_versions.toml")
#: What changed in torch where a requirement was broken first, or mended: written by hand, by requirement and version.
CHANGES = Path(__file__).with_name("torch_changes.toml")
#: The order in which profiles are shown.
_PROFILES = ("smoke", "quick", "core", "full", "backend", "compiled", "parallel", "gpu", "upstream", "mutants")
_COLUMNS = ("ddp_impl", "torch's DDP", "gloo")
_HEADLINE = re.compile(r"(\d+) of (\d+) mutants killed, (\d+) survived, (\d+) not active")
_BROKEN, _LACKS = ("FAIL", "HANG", "CRASH"), "UNSUPPORTED"
_HEAD = """\
# Versions of torch

Made by `bash ci/torch_versions.sh`, which stores what it finds on each version in `ci/torch_versions`.

`ddp_impl` supports the five latest minor versions of torch, {window}, on CPython 3.11 and newer; nothing here ran on
3.14. On another one it may work; `python -m ddp_impl.torch_internals` says, in a second and without a scenario, whether
a private name of torch that it needs is missing, and what is lost then. CI runs torch {pinned}.

What the installed torch lacks, such as an option of its DDP, is UNSUPPORTED in the column of torch's DDP. CUDA builds
ran on a machine without a GPU, too. There mixed precision and optimizers in backward of torch's DDP end with an error,
because they ask for an accelerator: 25 of the requirements that it breaks in profile quick, and 30 with a CUDA build,
whose error comes earlier. Profile `backend` judges gloo, without a DDP; `smoke` counts rungs, `upstream` torch's own
tests, `mutants` backends with a bug in what CI's torch lacks. *7 of 9* scenarios: the run ended after 7.

| torch | build | Python | profile | day | scenarios | ddp_impl | torch's DDP | gloo |
|---|---|---|---|---|--:|---|---|---|
"""


@dataclass(frozen=True, slots=True)
class Judged:
    """The result of one profile: counts of verdicts by column, and the requirements by the verdict of torch.

    These are verdicts on torch's DDP, of profile `backend` on gloo; none where neither was judged.
    """

    build: str
    python: str
    day: str
    scenarios: int
    selected: int
    counts: Mapping[str, Mapping[str, int]]
    requirements: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    @staticmethod
    def of(report: Report) -> Judged:
        """Return what a report says."""
        totals, environment = report.totals, report.environment
        names = _COLUMNS[2:] if report.is_about_backend else _COLUMNS[:2]
        counts = {
            name: {verdict: number for verdict, number in found.items() if number}
            for name, found in zip(names, (totals.subject, totals.native), strict=False) if found
        }  # fmt: skip
        verdicts = [(one.subject if report.is_about_backend else one.native, one.id) for one in report.requirements]
        return Judged(
            report.package_version("torch"), str(environment.get("python", "")), str(environment.get("date", "")),
            totals.scenarios, totals.selected, counts,
            {each.value: found for each in Verdict if (found := tuple(name for by, name in verdicts if by is each))},
        )  # fmt: skip

    @staticmethod
    def of_smoke(file: Path, head: Sequence[str]) -> Judged:
        """Return how many rungs of the ladder whose lines are in `file` have which status."""
        counted = Counter(line[:12].strip() for line in file.read_text(encoding="utf-8").splitlines())
        rungs = {each.value: counted[each.value] for each in Status if counted[each.value]}
        day = datetime.fromtimestamp(file.stat().st_mtime, UTC).date().isoformat()
        number = sum(rungs.values())
        return Judged(head[0], head[1], day, number, number, {"ddp_impl": rungs})

    @staticmethod
    def of_mutants(file: Path, head: Sequence[str]) -> Judged:
        """Return how many mutants of what not every torch has were noticed, by the headline in `file`."""
        found = _HEADLINE.search(file.read_text(encoding="utf-8"))
        killed, number, survived, inactive = map(int, found.groups()) if found else (0, 0, 0, 0)  # torch lacks it all
        counts = {"mutants noticed": killed, "survived": survived, "not active": inactive}
        day = datetime.fromtimestamp(file.stat().st_mtime, UTC).date().isoformat()
        return Judged(
            head[0], head[1], day, number, number, {"gloo": {name: count for name, count in counts.items() if count}}
        )

    @staticmethod
    def of_upstream(file: Path) -> Judged:
        """Return how many of torch's own tests both DDPs passed."""
        found = json.loads(file.read_text(encoding="utf-8"))
        outcomes = [(one["subject"]["outcome"], one["torch"]["outcome"]) for one in found["tests"]]
        counts = {name: dict(Counter(each)) for name, each in zip(_COLUMNS, zip(*outcomes, strict=True), strict=False)}
        where = found["environment"]
        return Judged(where["packages"]["torch"], where["python"], where["date"], len(outcomes), len(outcomes), counts)

    @property
    def is_whole(self) -> bool:
        """Whether the run came to its end."""
        return self.scenarios == self.selected

    @property
    def verdicts(self) -> Mapping[str, str]:
        """The verdict of torch on each requirement, `_LACKS` where it has not what the requirement is about."""
        told = ("PASS", _LACKS, *_BROKEN)
        return {name: verdict for verdict in told for name in self.requirements.get(verdict, ())}


@dataclass(frozen=True, slots=True)
class OnVersion:
    """What was found on one version of torch: by profile, and which private names are there."""

    version: str
    judged: Mapping[str, Judged] = field(default_factory=dict)
    names: tuple[str, ...] = ()

    @staticmethod
    def of(folder: Path) -> OnVersion:
        """Read what `ci/torch_versions.sh` left in the folder of a version."""
        listed = (folder / "names.txt").read_text().splitlines() if (folder / "names.txt").exists() else []
        words = [line.split() for line in listed]
        names = tuple(name for there, name, *_ in words if there == "there")
        ran = [one for one in _PROFILES if any((folder / one / file).exists() for file in ("report.json", JOURNAL))]
        judged = {one: Judged.of(read_report(folder / one)) for one in ran}
        if (folder / "smoke.status").exists():
            judged["smoke"] = Judged.of_smoke(folder / "smoke.txt", words[0][1::2])
        if (folder / "mutants.status").exists():
            judged["mutants"] = Judged.of_mutants(folder / "mutants.txt", words[0][1::2])
        if (folder / "upstream.status").exists():
            judged["upstream"] = Judged.of_upstream(folder / "upstream.json")
        return OnVersion(folder.name, judged, names)

    def after(self, earlier: OnVersion) -> OnVersion:
        """Return this, with what only an earlier run found, or found in full."""
        both = {**earlier.judged, **self.judged}
        whole = {one: found for one, found in earlier.judged.items() if not both[one].is_whole and found.is_whole}
        judged = {one: {**both, **whole}[one] for one in _PROFILES if one in both}
        return replace(self, judged=judged, names=self.names or earlier.names)


def read(folder: Path) -> tuple[OnVersion, ...]:
    """Return what is stored, the oldest version first."""
    found = [decode(json.loads(file.read_text(encoding="utf-8")), OnVersion) for file in folder.glob("*.json")]
    return tuple(sorted(found, key=lambda one: (Version(one.version.partition("@")[0]), one.version)))


def store(found: OnVersion, folder: Path) -> None:
    """Store what was found on a version beside what other runs found on it."""
    folder.mkdir(parents=True, exist_ok=True)
    before = {one.version: one for one in read(folder)}
    merged = found.after(before.get(found.version, found))
    text = json.dumps(encode(merged), indent=1)
    (folder / f"{found.version}.json").write_text(f"{text}\n", encoding="utf-8")


def page_of(root: Path) -> str:
    """Return the page of what a checkout has stored."""
    lines = (root / "ci" / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pinned = next(line.partition("==")[2] for line in lines if line.startswith("torch=="))
    return versions_page(read(root / STORED), tomllib.loads(CHANGES.read_text(encoding="utf-8")), pinned)


def judged_of(root: Path) -> str:
    """Return by version and Python which profiles ran and when, in TOML, of what a checkout has stored."""
    lines = ["# Which profiles ran with which torch, and when: `python -m workshop renew` writes it.\n"]
    for one in read(root / STORED):
        days = {
            day: [name + " in part" * (not each.is_whole) for name, each in one.judged.items() if each.day == day]
            for day in sorted(each.day for each in one.judged.values())
        }
        ran = "; ".join(f"{', '.join(names)} on {day}" for day, names in days.items())
        lines += [f'"{one.version}" = "{ran}"\n'] if ran else []
    return "".join(lines)


def versions_page(found: Sequence[OnVersion], changes: Mapping[str, Mapping[str, str]], pinned: str) -> str:
    """Return the page in Markdown; `changes` says by requirement, or chapter, and version what changed in torch."""
    newest = Version(found[-1].version.partition("@")[0])
    window = f"{newest.major}.{newest.minor - 4} to {newest.major}.{newest.minor}"
    lines = [_HEAD.format(window=window, pinned=pinned).rstrip("\n"), *(row for one in found for row in _rows(one)), ""]
    plain = [one for one in found if "@" not in one.version]  # on the Python of CI
    for profile in _PROFILES:
        judged = {one.version: one.judged[profile].verdicts for one in plain if profile in one.judged}
        judged = {version: verdicts for version, verdicts in judged.items() if verdicts}
        if len(judged) > 1:
            lines += _changed(profile, judged, changes)
    return "\n".join([*lines, *_names(plain)]) + "\n"


def _rows(found: OnVersion) -> Iterator[str]:
    if not found.judged:
        yield f"| {found.version} | | | | | no run | | | |"
    for profile, one in found.judged.items():
        scenarios = f"{one.scenarios:,}" + ("" if one.is_whole else f" of {one.selected:,}")
        counts = [
            ", ".join(f"{number:,} {verdict}" for verdict, number in one.counts.get(column, {}).items())
            for column in _COLUMNS
        ]
        cells = [found.version.partition("@")[0], one.build, one.python, profile, one.day, scenarios, *counts]
        yield f"| {' | '.join(cells)} |".replace("|  |", "| |").replace("|  |", "| |")


def _changed(
    profile: str, verdicts: Mapping[str, Mapping[str, str]], changes: Mapping[str, Mapping[str, str]]
) -> list[str]:
    """Return what torch breaks, keeps or lacks on some of these versions only, where a profile ran on several."""
    shared = set.intersection(*({one for one in found if found[one] != _LACKS} for found in verdicts.values()))
    always = sorted(one for one in shared if all(found[one] in _BROKEN for found in verdicts.values()))
    rows: dict[str, list[str]] = {}
    for requirement in sorted(set().union(*verdicts.values())):
        seen = [(version, found[requirement]) for version, found in verdicts.items() if requirement in found]
        chapter = requirement.partition("-")[0]
        for (_, before), (version, verdict) in pairwise(seen):
            if what := _turn(before, verdict):
                why = {**changes.get(chapter, {}), **changes.get(requirement, {})}.get(version, "not known")
                rows.setdefault(f"{what} in {version} ({verdict}) | {why} |", []).append(requirement)
    counted = Counter(one.partition("-")[0] for one in always)
    return [
        f"## {_COLUMNS[2 if profile == 'backend' else 1]}, profile {profile}",
        "",
        f"On {', '.join(verdicts)} it breaks {len(always)} of {len(shared)} requirements each time: "
        f"{', '.join(f'{number} of {prefix}' for prefix, number in counted.items()) or 'none'}.",
        "",
        *(["| requirements | verdict | what changed |", "|---|---|---|"] if rows else ["No verdict changes."]),
        *(f"| {', '.join(requirements)} | {row}" for row, requirements in rows.items()),
        "",
    ]


def _turn(before: str, verdict: str) -> str:
    """Return how the page names the step from one version's verdict to the next one's; empty if it is none."""
    if _LACKS in (before, verdict):
        return "" if before == verdict else "first judged" if before == _LACKS else "not judged"
    if (before in _BROKEN) is (verdict in _BROKEN):
        return ""
    return "first broken" if verdict in _BROKEN else "first mended"


def _names(found: Sequence[OnVersion]) -> list[str]:
    checked = [one for one in found if one.names]
    names = dict.fromkeys(name for one in checked for name in one.names)
    lines = [
        "## Private names of torch", "",
        "What `ddp_impl` needs that torch does not document, and the versions above in which it was seen:", "",
        "| name | seen in |", "|---|---|",
    ]  # fmt: skip
    for name in names:
        seen = [one.version for one in checked if name in one.names]
        lines.append(f"| `{name}` | {'all' if len(seen) == len(checked) else ', '.join(seen)} |")
    return lines if checked else []


@click.command("versions", short_help="Store what was found on several versions of torch, and make the page.")
@click.argument("folder", type=NamedPath(exists=True))
def command(folder: Path) -> None:
    """Store what `ci/torch_versions.sh` left in FOLDER, a folder of each version, and make docs/torch_versions.md."""
    for each in sorted(folder.iterdir()):
        if each.is_dir() and each.name[0].isdigit():
            store(OnVersion.of(each), workshop.ROOT / STORED)
    (workshop.ROOT / PAGE).write_text(page_of(workshop.ROOT), encoding="utf-8")
