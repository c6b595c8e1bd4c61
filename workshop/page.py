"""A generated file of the repository, and what has to happen to it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

#: What brings a stale page up to date; every test that finds one says it.
RENEW = "run `python -m workshop renew`"


@dataclass(frozen=True, slots=True)
class Made:
    """What a page must hold, as far as that is known without running a rank.

    `text` is None for a page that must not be there. `lacks` says what only a run can fill in, and which command does.
    """

    text: str | None
    lacks: str = ""


#: How a page is made: from what its file holds now, "" for none.
Make = Callable[[str], Made]


@dataclass(frozen=True, slots=True)
class Page:
    """A generated file of the repository, by its path there."""

    path: str
    make: Make


class State(Enum):
    """How a page compares with what it must be."""

    FRESH = "fresh"
    STALE = "stale"
    GONE = "gone"
    LACKING = "lacking"


@dataclass(frozen=True, slots=True)
class Comparison:
    """A page, the text that it holds and the one that it must hold."""

    path: str
    before: str | None
    made: Made

    @property
    def state(self) -> State:
        """Whether the page is as it must be; one that lacks what only a run can tell is not, whatever else holds."""
        if self.made.lacks:
            return State.LACKING
        if self.before == self.made.text:
            return State.FRESH
        return State.GONE if self.made.text is None else State.STALE

    @property
    def explanation(self) -> str:
        """One line: the page, what is the matter with it, and what to do."""
        return f"{self.path} {self.made.lacks}" if self.made.lacks else f"{self.path} is stale: {RENEW}"


def compare(root: Path, pages: Iterable[Page]) -> tuple[Comparison, ...]:
    """Make every page and compare it with what is in the repository; changes nothing."""
    found = []
    for page in pages:
        file = root / page.path
        before = file.read_text(encoding="utf-8") if file.is_file() else None
        found.append(Comparison(page.path, before, page.make(before or "")))
    return tuple(found)


def write(root: Path, page: Comparison) -> bool:
    """Bring a page's file up to what is known; returns whether that changed it."""
    file = root / page.path
    if page.before == page.made.text:
        return False
    if page.made.text is None:
        file.unlink()
    else:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(page.made.text, encoding="utf-8")
    return True
