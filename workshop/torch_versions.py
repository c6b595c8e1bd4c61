"""`python -m workshop versions`: the page about the runs of `ci/torch_versions.sh` on several versions of torch."""

from __future__ import annotations

import tomllib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import click
from packaging.version import Version

from conformance.cli.options import NamedPath
from conformance.report.read import read_report
from conformance.run.report import Report
from conformance.verdict import Verdict

#: What changed in torch where a requirement was broken first, or mended: written by hand, by requirement and version.
CHANGES = Path(__file__).with_name("torch_changes.toml")
#: The order in which profiles are shown.
_PROFILES = ("quick", "core", "full", "backend", "compiled", "parallel", "gpu")
_HEAD = """\
# Versions of torch

Made by `bash ci/torch_versions.sh {versions}`.

`ddp_impl` supports the five latest minor versions of torch, {window}, on CPython 3.11 and newer. On another one it may
work; `python -m ddp_impl.torch_internals` says, in a second and without a scenario, whether a private name of torch
that it needs is missing, and what is lost then. CI runs torch {pinned}.

What the installed torch lacks, such as an option of its DDP, is UNSUPPORTED in the column of torch's DDP. A CUDA build
on a machine without a GPU stands below as what it is.

| torch | build | profile | day | scenarios | ddp_impl | torch's DDP | s |
|---|---|---|---|--:|---|---|--:|
"""


@dataclass(frozen=True, slots=True)
class Ran:
    """What ran on one version of torch: reports by profile, the build, and which private names are there."""

    version: str
    reports: Mapping[str, Report]
    names: Mapping[str, bool]
    build: str = ""

    @staticmethod
    def of(folder: Path) -> Ran:
        """Read what `ci/torch_versions.sh` left in the folder of a version."""
        listed = (folder / "names.txt").read_text().splitlines() if (folder / "names.txt").exists() else []
        words = [line.split() for line in listed]
        names = {name: there == "there" for there, name, *_ in words if there in ("there", "MISSING")}
        found = {one: read_report(folder / one) for one in _PROFILES if (folder / one / "report.json").exists()}
        return Ran(folder.name, found, names, next((build for torch, build in words[:1]), ""))

    def verdicts(self, profile: str) -> Mapping[str, Verdict]:
        """Return torch's verdict on each requirement that was judged on it in this profile."""
        judged = self.reports[profile].requirements
        return {one.id: one.native for one in judged if one.native in (Verdict.PASS, *_BROKEN)}


_BROKEN = (Verdict.FAIL, Verdict.HANG, Verdict.CRASH)


def versions_page(runs: Sequence[Ran], changes: Mapping[str, Mapping[str, str]], pinned: str) -> str:
    """Return the page in Markdown; `changes` says by requirement and version what changed in torch."""
    runs = sorted(runs, key=lambda run: Version(run.version))
    newest = Version(runs[-1].version)
    window = f"{newest.major}.{newest.minor - 4} to {newest.major}.{newest.minor}"
    head = _HEAD.format(versions=" ".join(run.version for run in runs), window=window, pinned=pinned)
    lines = [head.rstrip("\n"), *(row for run in runs for row in _rows(run)), ""]
    for profile in _PROFILES:
        judged = [run for run in runs if profile in run.reports]
        if len(judged) > 1:
            lines += _changed(profile, judged, changes)
    return "\n".join([*lines, *_names(runs)]) + "\n"


def _rows(run: Ran) -> Iterator[str]:
    if not run.reports:
        yield f"| {run.version} | | | | | no run | | |"
    for profile, report in run.reports.items():
        environment, totals = report.environment, report.totals
        counts = [_counts(each) for each in (totals.subject, totals.native)]
        cells = [run.version, run.build, profile, str(environment.get("date", "")), f"{totals.scenarios:,}", *counts]
        yield f"| {' | '.join(cells)} | {report.duration_s:.0f} |"


def _counts(verdicts: Mapping[str, int]) -> str:
    return ", ".join(f"{number} {verdict}" for verdict, number in verdicts.items() if number)


def _changed(profile: str, runs: Sequence[Ran], changes: Mapping[str, Mapping[str, str]]) -> list[str]:
    """Return what torch's DDP breaks on some of these versions and keeps on others, where a profile ran on several."""
    verdicts = {run.version: run.verdicts(profile) for run in runs}
    shared = set.intersection(*(set(found) for found in verdicts.values()))
    always = sorted(one for one in shared if all(found[one] in _BROKEN for found in verdicts.values()))
    rows = []
    for requirement in sorted(set().union(*verdicts.values())):
        seen = [(version, found[requirement]) for version, found in verdicts.items() if requirement in found]
        turns = [
            (version, verdict) for (_, before), (version, verdict) in pairwise(seen)
            if (before in _BROKEN) is not (verdict in _BROKEN)
        ]  # fmt: skip
        for version, verdict in turns:
            what = "first broken" if verdict in _BROKEN else "first mended"
            why = changes.get(requirement, {}).get(version, "not known")
            rows.append(f"| {requirement} | {what} in {version} ({verdict.value}) | {why} |")
    counted = Counter(one.partition("-")[0] for one in always)
    return [
        f"## torch's DDP, profile {profile}",
        "",
        f"On every version above it breaks {len(always)} of {len(shared)} requirements: "
        f"{', '.join(f'{number} of {prefix}' for prefix, number in counted.items())}.",
        "",
        *(["| requirement | verdict | what changed |", "|---|---|---|", *rows] if rows else ["No verdict changes."]),
        "",
    ]


def _names(runs: Sequence[Ran]) -> list[str]:
    checked = [run for run in runs if run.names]
    names = dict.fromkeys(name for run in checked for name in run.names)
    lines = [
        "## Private names of torch", "",
        "What `ddp_impl` needs that torch does not document, and the versions above in which it was seen:", "",
        "| name | seen in |", "|---|---|",
    ]  # fmt: skip
    for name in names:
        seen = [run.version for run in checked if run.names.get(name)]
        lines.append(f"| `{name}` | {'all' if len(seen) == len(checked) else ', '.join(seen) or 'none'} |")
    return lines if checked else []


@click.command("versions", short_help="Make the page about runs on several versions of torch.")
@click.argument("folder", type=NamedPath(exists=True))
@click.option("--out", "-o", type=NamedPath(), required=True, metavar="FILE", help="Write to FILE.")
def command(folder: Path, out: Path) -> None:
    """Make the page in Markdown about what `ci/torch_versions.sh` left in FOLDER, a folder of each version."""
    root = Path(__file__).parents[1]
    lines = (root / "ci" / "constraints.txt").read_text().splitlines()
    pinned = next(line.partition("==")[2] for line in lines if line.startswith("torch=="))
    runs = [Ran.of(each) for each in folder.iterdir() if each.is_dir() and each.name[0].isdigit()]
    out.write_text(versions_page(runs, tomllib.loads(CHANGES.read_text()), pinned), encoding="utf-8")
