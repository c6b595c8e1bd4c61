"""Whether the first thing that a user reads of a mutant names its bug: the first cause, and its first line of evidence.

A mutant has the words that must occur in it.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from rich.table import Table
from rich.text import Text

from conformance.mutants.catalogue import load_mutants
from conformance.mutants.kept import Kept
from conformance.report.blame import blamed
from conformance.report.causes import Kind, causes_in
from conformance.spec.catalogue import load_catalogue


@dataclass(frozen=True, slots=True)
class Reading:
    """What is read first of a mutant, and the words that `cause` and `requirement` lack, each with its synonyms.

    `cause` is the first cause with its evidence, `requirement` the sentence that is broken there, which a terminal
    prints between the two.
    """

    mutant: str
    cause: str
    requirement: str
    words: tuple[str, ...]

    @property
    def missing(self) -> tuple[str, ...]:
        """The words that neither has."""
        return _missing(self.words, f"{self.cause} {self.requirement}")

    @property
    def cause_names_the_bug(self) -> bool:
        """Whether the cause has all words by itself."""
        return not _missing(self.words, self.cause)


def _missing(words: tuple[str, ...], text: str) -> tuple[str, ...]:
    return tuple(each for each in words if not any(word in text.lower() for word in each.lower().split("|")))


def readings(kept: Iterable[Kept]) -> list[Reading]:
    """Return what is read first of each mutant of which something was `kept`, judged anew."""
    words = {mutant.name: mutant.words for mutant in load_mutants()}
    statements = load_catalogue().statements
    by_mutant: dict[str, list[Kept]] = {}
    for one in kept:
        by_mutant.setdefault(one.mutant, []).append(one)
    found = []
    for mutant, own in by_mutant.items():
        if mutant not in words:  # torch's own DDP, of which a requirement says what it deviates in
            continue
        failures = (outcome for one in own if (outcome := one.outcome()).is_failure)
        first = next(iter(causes_in(failures, statements)), None)
        cause = "" if first is None else f"{first.title} {first.best.why}"
        broken = "" if first is None or first.kind is Kind.OURS else blamed(first.best)
        found.append(Reading(mutant, cause, statements.get(broken, ""), words[mutant]))
    return found


def reading_table(found: Iterable[Reading]) -> Table:
    """Return mutants, what is read first, and whether it names the bug."""
    table = Table("mutant", "read first", "missing", box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for one in found:
        cells = map(Text, (one.mutant, one.cause, ", ".join(one.missing)))  # no markup: they quote what ranks said
        table.add_row(*cells, style="red" if one.missing else "")
    return table


def headline(found: list[Reading]) -> str:
    """Return e.g. `What is read first names the bug of 590 of 624 mutants (94.6 %), the cause by itself of 500`."""
    named, by_cause = sum(not one.missing for one in found), sum(one.cause_names_the_bug for one in found)
    share = f"{named} of {len(found)} mutants ({100 * named / len(found):.1f} %)"
    return f"What is read first names the bug of {share}, the cause by itself of {by_cause}"
