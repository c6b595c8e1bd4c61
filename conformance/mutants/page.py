"""What was detected, as a page in Markdown: mutants, who survived, kills per chapter, and what no mutant breaks."""

from __future__ import annotations

from collections.abc import Mapping

from rich.table import Table

from conformance.mutants.catalogue import Mutant
from conformance.mutants.detector import Fate, Found
from conformance.spec.catalogue import Catalogue, Chapter

_HEAD = """# Detection

Each of these DDPs and backends has one deliberate bug (`conformance/mutants/`, and `mutants.py` of each chapter). A
requirement *kills* a mutant if a scenario of it fails for the mutant and passes, in the same run, for what the mutant
was made from. A mutant is *not active* if its ranks never behaved differently from the original's: its bug was not
exercised, so the result proves nothing. The authors of the suite wrote the mutants. So kills show that requirements can
fail, and not how likely the suite is to find an unknown bug.

"""
_COLUMNS = "| mutant | made from | the bug | killed by | and by | survived |\n|---|---|---|---|---|---|\n"
_CHAPTERS = (
    "| chapter | requirements | killed a mutant | broken by torch's DDP only | neither | kills |\n"
    "|---|--:|--:|--:|--:|--:|\n"
)


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
