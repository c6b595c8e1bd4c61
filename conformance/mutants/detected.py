"""What became of each mutant when it last ran, as a file: some mutants run again without all others.

    made = "Made by ..."
    torch = ["JOIN-12"]                       # what torch's own DDP breaks
    [killed]                                  # and so on for each fate: a mutant, and the requirements concerned
    NoDivision = ["GRAD-01", "GRAD-02"]
    [further]                                 # who kills it, too, beyond what its chapter names

`detected.toml`, beside this module, is that of this release. The pages of requirements on the site show it.
"""

import datetime
import re
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from conformance.errors import ReportError
from conformance.mutants.catalogue import Kill, Mutant
from conformance.mutants.detector import Detection, Fate, Found

DETECTED = Path(__file__).with_suffix(".toml")
_FURTHER = "further"
_OF_TORCH = re.compile(r"(?:torch|and) (\d[\w.+]*\w)")
_RENEWED = " Some rows were renewed later, the last "
_HEAD = "# Which requirements notice which mutant: `ddp-conformance mutants --out`, or --into for some mutants.\n"


def made_by_all(versions: Mapping[str, str], date: datetime.date) -> str:
    """Return how a file about a run over all mutants was made; `versions` are those of packages."""
    return f"Made by `ddp-conformance mutants --out` {_when(versions, date)}."


def made_by_some(before: str, versions: Mapping[str, str], date: datetime.date) -> str:
    """Return how a file that had been made as `before` says was made, once some mutants have run again.

    Some mutants need a newer torch than others: all versions of it that renewed rows are named.
    """
    whole, _, renewed = before.partition(_RENEWED)
    of_torch = {*_OF_TORCH.findall(renewed), versions["torch"]}
    return f"{whole}{_RENEWED}{_when({**versions, 'torch': ' and '.join(sorted(of_torch))}, date)}."


def _when(versions: Mapping[str, str], date: datetime.date) -> str:
    return f"on {date.isoformat()}, with {', '.join(f'{name} {version}' for name, version in versions.items())}"


def written(found: Found, made: str) -> str:
    """Return what was `found` as TOML; `made` is a sentence about when and with what it ran."""
    of_torch = sorted({one.kill.requirement for one in found.deviations if one.fate is Fate.KILLED})
    tables: dict[str, dict[str, list[str]]] = {fate.value: {} for fate in Fate}
    for one in found.detections:
        tables[one.fate.value].setdefault(one.mutant.name, []).append(one.kill.requirement)
    tables[_FURTHER] = {name: list(names) for name, names in found.killers.items()}
    lines = [f'made = "{made}"', f"torch = {_listed(of_torch)}"]
    for table, rows in tables.items():
        lines += ["", f'["{table}"]', *(f"{name} = {_listed(names)}" for name, names in rows.items())]
    return _HEAD + "\n".join(lines) + "\n"


def _listed(names: Iterable[str]) -> str:
    return "[" + ", ".join(f'"{name}"' for name in names) + "]"


def found_in(text: str, mutants: Iterable[Mutant], deviations: Mutant) -> Found:
    """Return what `text` says about `mutants` and torch's `deviations`; what it does not mention is left out."""
    data = _tables(text)
    known, seen = tuple(mutants), {fate: {name: [*ids] for name, ids in data[fate.value].items()} for fate in Fate}
    fates = ((mutant, kill, _take(seen, mutant, kill)) for mutant in known for kill in mutant.kills)
    names = {mutant.name for mutant in known}
    return Found(
        tuple(Detection(mutant, kill, fate) for mutant, kill, fate in fates if fate is not None),
        tuple(
            Detection(deviations, kill, Fate.KILLED) for kill in deviations.kills if kill.requirement in data["torch"]
        ),
        {name: tuple(ids) for name, ids in data[_FURTHER].items() if name in names},
    )


def _take(seen: Mapping[Fate, Mapping[str, list[str]]], mutant: Mutant, kill: Kill) -> Fate | None:
    """Return the fate of a kill, if it was tried; each mention is of one kill."""
    for fate, rows in seen.items():
        if kill.requirement in (ids := rows.get(mutant.name, [])):
            ids.remove(kill.requirement)
            return fate
    return None


def made_in(text: str) -> str:
    """Return how the file was made; raises `ReportError` for another file."""
    return str(_tables(text)["made"])


def _tables(text: str) -> dict[str, Any]:
    try:
        data = tomllib.loads(text)
    except tomllib.TOMLDecodeError:
        data = {}
    if not {"made", "torch", _FURTHER, *(fate.value for fate in Fate)} <= data.keys():
        raise ReportError("this is no file of what was detected, as `ddp-conformance mutants --out FILE` writes it")
    return data


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
