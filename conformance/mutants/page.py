"""What was detected, as a page in Markdown: mutants, who survived, kills per chapter, and what no mutant breaks."""

from __future__ import annotations

import datetime
from collections.abc import Mapping

from rich.table import Table

from conformance.mutants.catalogue import Mutant
from conformance.mutants.detector import Fate, Found
from conformance.spec.catalogue import Catalogue, Chapter

_HEAD = """# Detection

What a suite is worth shows in what it detects. These DDPs and backends are wrong on purpose, each in one way
(`conformance/mutants/`). A mutant is *killed* by a requirement if a scenario of it fails for the mutant and passes for
what the mutant was made from, in the same run. It was *not active* if in no scenario its ranks saw anything that those
of the unmodified one did not: then the bug was never met, and nothing is shown. Mutants were written by the authors of
the suite, so that the share of those killed says that requirements can fail, not how likely an unknown bug is found.

"""
_COLUMNS = "| mutant | made from | the bug | killed by | and by | survived |\n|---|---|---|---|---|---|\n"
_RENEWED = " Some rows were renewed later, the last "
_CHAPTERS = (
    "| chapter | requirements | killed a mutant | broken by torch's DDP only | neither | kills |\n"
    "|---|--:|--:|--:|--:|--:|\n"
)


def made_by_all(versions: Mapping[str, str], date: datetime.date) -> str:
    """Return how a page about a run over all mutants was made; `versions` are those of packages."""
    return f"Made by `ddp-conformance mutants --out docs/detection.md` {_when(versions, date)}."


def made_by_some(before: str, versions: Mapping[str, str], date: datetime.date) -> str:
    """Return how a page that had been made as `before` says was made, once some of its rows are renewed."""
    whole = before.partition(_RENEWED)[0]
    return f"{whole}{_RENEWED}{_when(versions, date)}."


def detection_page(catalogue: Catalogue, found: Found, made: str) -> str:
    """Return the page about all mutants; `made` is a sentence about when and with what they were run."""
    shown = shown_by(found)
    of_torch = {one.kill.requirement for one in found.deviations if one.fate is Fate.KILLED}
    chapters = "".join(_chapter_row(chapter, shown, of_torch) for chapter in catalogue.chapters)
    bare = "".join(_bare(chapter, shown, of_torch) for chapter in catalogue.chapters)
    rows = "".join(_row(mutant, found) for mutant in found.mutants)
    return (
        f"{_HEAD}**{found.headline}.** {made}\n\n{_gaps(found)}## Chapters\n\n{_CHAPTERS}{chapters}\n"
        f"torch's own DDP was not changed, and breaks {len(of_torch)} of these requirements, which `ddp_impl` keeps: "
        f"{', '.join(sorted(of_torch))}.\n\n## Requirements that nothing here breaks\n\n"
        f"Their scenarios pass; that they could fail is not shown here.\n\n{bare}\n## Mutants\n\n{_COLUMNS}{rows}"
    )


def _when(versions: Mapping[str, str], date: datetime.date) -> str:
    return f"on {date.isoformat()}, with {', '.join(f'{name} {version}' for name, version in versions.items())}"


def detection_table(found: Found) -> Table:
    """Return the mutants and their fates, as a terminal shows them."""
    table = Table("mutant", "made from", "killed by", "survived", "not active", box=None, pad_edge=False)
    for mutant in found.mutants:
        cells = [", ".join(_requirements(mutant, found, fate)) for fate in Fate]
        table.add_row(mutant.name, mutant.of, *cells, style="" if cells[1:] == ["", ""] else "bold red")
    return table


def shown_by(found: Found) -> dict[str, set[str]]:
    """Return for each requirement that killed some mutant the names of these."""
    shown: dict[str, set[str]] = {}
    for mutant in found.mutants:
        for requirement in (*_requirements(mutant, found, Fate.KILLED), *found.killers.get(mutant.name, ())):
            shown.setdefault(requirement, set()).add(mutant.name)
    return shown


def _requirements(mutant: Mutant, found: Found, fate: Fate) -> list[str]:
    return [one.kill.requirement for one in found.detections if one.mutant == mutant and one.fate is fate]


def _gaps(found: Found) -> str:
    gaps = [one for one in found.detections if one.fate is not Fate.KILLED]
    lines = "".join(
        f"- {one.mutant.name}, {one.kill.requirement}: {one.fate.value}. {one.mutant.bug}\n" for one in gaps
    )
    head = "## Survivors\n\nEach is a gap in the suite, or a freedom that requirements leave.\n\n"
    return f"{head}{lines}\n" if lines else ""


def _chapter_row(chapter: Chapter, shown: Mapping[str, set[str]], of_torch: set[str]) -> str:
    ids = [requirement.id for requirement in chapter.requirements]
    mutated = [one for one in ids if one in shown]
    torch_only = [one for one in ids if one in of_torch and one not in shown]
    kills = sum(len(shown[one]) for one in mutated)
    rest = len(ids) - len(mutated) - len(torch_only)
    return f"| {chapter.title} | {len(ids)} | {len(mutated)} | {len(torch_only)} | {rest} | {kills} |\n"


def _bare(chapter: Chapter, shown: Mapping[str, set[str]], of_torch: set[str]) -> str:
    bare = [one.id for one in chapter.requirements if one.id not in shown and one.id not in of_torch]
    return f"- {chapter.title}: {', '.join(bare)}\n" if bare else ""


def _row(mutant: Mutant, found: Found) -> str:
    killed = _requirements(mutant, found, Fate.KILLED)
    further = [name for name in found.killers.get(mutant.name, ()) if name not in killed]
    survived = _requirements(mutant, found, Fate.SURVIVED) + _requirements(mutant, found, Fate.INACTIVE)
    cells = (mutant.name, mutant.of, mutant.bug, ", ".join(killed), ", ".join(further), ", ".join(survived))
    return f"| {' | '.join(cells)} |\n"
