"""What the page of detection says already, read back: so that some mutants can be run again without all others."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import replace

from conformance.errors import ReportError
from conformance.mutants.catalogue import Kill, Mutant
from conformance.mutants.detector import Detection, Fate, Found

_ROW = re.compile(r"^\| (?P<name>\w+) \| \w+ \| .* \| (?P<killed>[^|]*) \| (?P<further>[^|]*) \| (?P<lived>[^|]*) \|$")
_GAP = re.compile(r"^- (?P<name>\w+), (?P<requirement>[A-Z0-9-]+): (?P<fate>[a-z ]+)\. ")
_OF_TORCH = re.compile(r"which `ddp_impl` keeps: (?P<requirements>[A-Z0-9, -]+)\.$")
_MADE = re.compile(r"\*\* (?P<made>Made by .*)$")


def found_on(page: str, mutants: Iterable[Mutant], deviations: Mutant) -> Found:
    """Return what `page` says about `mutants` and torch's `deviations`; what it does not mention is left out."""
    rows, gaps, of_torch = {}, {}, set()
    for line in page.splitlines():
        if row := _ROW.match(line):
            rows[row["name"]] = row
        elif gap := _GAP.match(line):
            gaps[gap["name"], gap["requirement"]] = Fate(gap["fate"])
        elif broken := _OF_TORCH.search(line):
            of_torch = set(_listed(broken["requirements"]))
    known = tuple(mutant for mutant in mutants if mutant.name in rows)
    return Found(
        tuple(one for mutant in known for one in _detections(mutant, rows[mutant.name], gaps)),
        tuple(Detection(deviations, kill, Fate.KILLED) for kill in deviations.kills if kill.requirement in of_torch),
        {mutant.name: _listed(rows[mutant.name]["further"]) for mutant in known if rows[mutant.name]["further"]},
    )


def made_on(page: str) -> str:
    """Return how the page was made, as it says it in its first lines; raises `ReportError` for another page."""
    for line in page.splitlines():
        if found := _MADE.search(line):
            return found["made"]
    raise ReportError("this is no page of detection; `ddp-conformance mutants --out docs/detection.md` writes one")


def merged(old: Found, new: Found, order: Sequence[Mutant]) -> Found:
    """Return `old` with what `new` says of its mutants and of torch's deviations, in the order of the mutants."""
    place = {mutant.name: number for number, mutant in enumerate(order)}
    again = {one.mutant.name for one in new.detections}
    kept = [one for one in old.detections if one.mutant.name not in again]
    judged = {one.kill for one in new.deviations}
    return replace(
        old,
        detections=tuple(sorted((*kept, *new.detections), key=lambda one: place[one.mutant.name])),
        deviations=(*(one for one in old.deviations if one.kill not in judged), *new.deviations),
        killers={**{name: names for name, names in old.killers.items() if name not in again}, **new.killers},
    )


def not_tried(found: Found, mutants: Iterable[Mutant]) -> tuple[Mutant, ...]:
    """Return the mutants of which `found` does not know what became of each of their kills."""
    tried = {(one.mutant.name, one.kill) for one in found.detections}
    return tuple(mutant for mutant in mutants if any((mutant.name, kill) not in tried for kill in mutant.kills))


def _detections(mutant: Mutant, row: re.Match[str], gaps: dict[tuple[str, str], Fate]) -> Iterable[Detection]:
    """Yield the fates of those of the mutant's kills that its row mentions; each mention is of one kill."""
    killed, lived = list(_listed(row["killed"])), list(_listed(row["lived"]))
    for kill in mutant.kills:
        fate = _mentioned(kill, killed, lived, gaps.get((mutant.name, kill.requirement), Fate.SURVIVED))
        if fate is not None:
            yield Detection(mutant, kill, fate)


def _mentioned(kill: Kill, killed: list[str], lived: list[str], gap: Fate) -> Fate | None:
    for names, fate in ((killed, Fate.KILLED), (lived, gap)):
        if kill.requirement in names:
            names.remove(kill.requirement)
            return fate
    return None


def _listed(cell: str) -> tuple[str, ...]:
    return tuple(filter(None, cell.split(", ")))
