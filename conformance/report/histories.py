"""What ranks issued, said and printed in each scenario, in short: whether a DDP that was rewritten does the same.

`histories.json.gz` beside a report holds it by kind, scenario and rank, as lines of text without times and addresses.
"""

import gzip
import json
import math
import re
import tempfile
from collections.abc import Iterator, Mapping
from difflib import SequenceMatcher
from pathlib import Path
from typing import Any

from conformance.checkers.explanation import counted
from conformance.codec import parse_object
from conformance.errors import ReportError
from conformance.observation import Collective, Observation, Raised
from conformance.report.folder import HISTORIES
from conformance.report.plain_file import read_plain, write_plain
from conformance.scenario import Scenario

#: By kind, scenario and rank. What ranks print is that of the whole run: Python gives a warning once per process.
_OfRanks = Mapping[str, Mapping[str, list[str]]]
Kept = Mapping[str, _OfRanks]
_KINDS = {"issued": "collectives", "said": "texts", "printed": "printed warnings and errors"}
#: So many lines of an example are shown.
_MOST_LINES = 8
#: What differs from one run to the next.
_VARYING = (
    (r"0x[0-9a-fA-F]+", "ADDRESS"),
    (r"(?<![\w.<])/[\w.@+~-]+(/[\w.@+~-]+)+", "PATH"),
    (r"(PATH|\.[a-z]{1,4}):\d+", r"\1:LINE"),
    (r"(?i)\b(pid|port|process|thread|line)([ =:]{1,2})\d+", r"\1\2N"),
    (r"(\]|localhost|\d+\.\d+\.\d+\.\d+):\d+", r"\1:PORT"),
    (r"\b\d+(\.\d+)?(e[-+]?\d+)? ?(ns|us|µs|ms|s|seconds?|minutes?)\b", r"TIME \3"),
)
_PRINTED = re.compile(r"\b\w*(?:Warning|Error): .*")
_NUMBER = re.compile(r"\d+(\.\d+)?")


class Histories:
    """Gathers, unless not `kept`, what is observed in a run, from lanes too: all of them write into one open file."""

    def __init__(self, *, kept: bool) -> None:
        self._file = tempfile.TemporaryFile(buffering=0) if kept else None  # noqa: SIM115

    def keep(self, scenario: Scenario, observations: Mapping[int, Observation]) -> None:
        """Keep what the ranks did in the attempt at `scenario` that counts; one line, in one write."""
        if self._file is not None:
            lines = {rank: (issued(one), said(one), printed(one)) for rank, one in observations.items()}
            self._file.write(json.dumps([scenario.id, lines]).encode() + b"\n")

    def write(self, folder: Path) -> None:
        """Write the file beside the report; equal runs write equal bytes."""
        if self._file is None:
            return
        self._file.seek(0)
        runs = dict(sorted(map(json.loads, self._file)))
        kept: dict[str, Any] = {
            kind: {one: {rank: lines[place] for rank, lines in ranks.items()} for one, ranks in runs.items()}
            for place, kind in enumerate(("issued", "said"))
        }
        everything = {line for ranks in runs.values() for _, _, lines in ranks.values() for line in lines}
        kept["printed"] = {"the whole run": {"any": sorted(everything)}}
        write_plain(folder / HISTORIES, gzip.compress(json.dumps(kept, indent=0).encode(), mtime=0))


def issued(observation: Observation) -> list[str]:
    """Return a line for each collective, such as `0 backward: all_reduce 2048 float32 sum`, in the order of issue.

    Groups but the default one are numbered as they first occur, because c10d names one by how many the process made.
    """
    groups = list(dict.fromkeys(one.group for one in observation.history if one.group != "default"))

    def line(one: Collective) -> str:
        sizes, dtypes = "+".join(str(math.prod(shape)) for shape in one.shapes), "/".join(dict.fromkeys(one.dtypes))
        root = f"root {one.root}" if one.root >= 0 else ""
        group = f"in group {groups.index(one.group)} of {list(one.members)}" if one.group in groups else ""
        words = (one.op, sizes, dtypes, one.reduce_op, root, group, "" if one.sync else "in no_sync")
        return f"{one.step} {one.phase}: {' '.join(filter(None, words))}" + (
            "" if one.finished else ", unfinished or not awaited"
        )

    return [line(one) for one in observation.history]


def said(observation: Observation) -> list[str]:
    """Return how the rank ended, and the texts in its facts: errors and warnings that its program caught, say."""
    return [_steady(f"ended: {observation.fate}"), *map(_steady, _texts("", observation.facts))]


def printed(observation: Observation) -> list[str]:
    """Return the warnings and errors that the rank printed."""
    return list(map(_steady, _PRINTED.findall(observation.stderr)))


def _texts(name: str, value: Any) -> Iterator[str]:
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from _texts(f"{name}/{key}", item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _texts(name, item)
    elif isinstance(value, (str, Raised)):
        yield f"{name.removeprefix('/')}: {value}"


def _steady(text: str) -> str:
    for pattern, replacement in _VARYING:
        text = re.sub(pattern, replacement, text)
    return text


def read_histories(report: Path) -> Kept | None:
    """Return what the file beside a report holds, None where there is none; raises `ReportError`."""
    path = (report if report.is_dir() else report.parent) / HISTORIES
    if not path.exists():
        return None
    try:
        return parse_object(read_plain(path).decode(), "histories")
    except ValueError as error:
        raise ReportError(f"{path} holds no histories: {error}") from error


def history_lines(before: Kept, after: Kept, again: Kept | None = None) -> list[str]:
    """Return what differs in the scenarios that both have: each change once, the most frequent first.

    A change is the set of added and removed lines, whatever their numbers. What differs between `before` and `again`,
    which are runs of the same files, is only counted: it differs by itself.
    """
    lines = []
    for kind, name in _KINDS.items():
        found = _differing(before[kind], after[kind])
        unsteady = found.keys() & (_differing(before[kind], again[kind]) if again is not None else {}).keys()
        groups: dict[tuple[str, ...], list[str]] = {}
        for scenario in sorted(found.keys() - unsteady):
            alike = (_NUMBER.sub("N", line) for changes in found[scenario].values() for line in changes)
            groups.setdefault(tuple(dict.fromkeys(alike)), []).append(scenario)
        apart = f", {len(unsteady)} more in any two runs" if unsteady else ""
        both = len(before[kind].keys() & after[kind].keys())
        lines += ["", f"{name} differ in {len(found) - len(unsteady)} of {both}{apart}"]
        for scenarios in sorted(groups.values(), key=len, reverse=True):
            rank, changes = next(iter(found[scenarios[0]].items()))
            lines.append(f"  {counted(len(scenarios), 'scenario')}, such as {scenarios[0]}, rank {rank}:")
            lines += [f"    {line}" for line in changes[:_MOST_LINES]]
            lines += [f"    and {len(changes) - _MOST_LINES} more"] * (len(changes) > _MOST_LINES)
    return lines


def _differing(before: _OfRanks, after: _OfRanks) -> dict[str, dict[str, list[str]]]:
    """Return for each scenario that differs the added (`+`) and removed (`-`) lines, by rank."""
    found: dict[str, dict[str, list[str]]] = {}
    for scenario in before.keys() & after.keys():
        left, right = before[scenario], after[scenario]
        for rank in sorted(left.keys() | right.keys()):
            if changes := list(_changes(left.get(rank, []), right.get(rank, []))):
                found.setdefault(scenario, {})[rank] = changes
    return found


def _changes(before: list[str], after: list[str]) -> Iterator[str]:
    for kind, start, end, first, last in SequenceMatcher(None, before, after, autojunk=False).get_opcodes():
        if kind != "equal":
            yield from (f"- {line}" for line in before[start:end])
            yield from (f"+ {line}" for line in after[first:last])
