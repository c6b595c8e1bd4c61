"""The catalogue of mutants: which there are, what each is made from, and which requirements must detect it.

A chapter keeps its mutants in its folder, in `mutants.py`, and says about them in `mutants.toml`:

    [torch]                                 # what these are made from: torch or ddp_impl
    NoDivision = {GRAD-01 = "grad", words = ["divide"]}

That is a mutant, the requirement that it breaks with a word that the explanation must hold, and the words by which what
a user reads first names the bug.

A mutant stands in the chapter of the requirement that it breaks first. Backends that are wrong belong to no chapter:
they are in `backends.py`, beside this module, made from gloo, and `catalogue.toml` speaks of them.

A key may also be the id of one scenario, if only that one detects it. `survives` is a requirement that one might
expect to notice and that is known not to: a gap, or a freedom that a DDP has. `deviations` are what torch's own DDP
breaks.
"""

import importlib
import inspect
import tomllib
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

from conformance.backends.backend import Backend, get_backend
from conformance.errors import SubjectError, certain, hint
from conformance.spec.catalogue import LEVELS, Catalogue, chapter_packages, load_catalogue
from conformance.spec.profile import levels_of
from conformance.subjects.subject import Subject, get_subject

PATH = Path(__file__).with_suffix(".toml")
IN_CHAPTER = "mutants.toml"
_BUG = "BUG: "

#: Where DDPs and a backend without a bug are, and which of them is made like the mutants of a base.
UNCHANGED = "conformance.mutants.unchanged"
CONTROLS = {"torch": "SubclassOfTorch", "ddp_impl": "Subclass"}


@dataclass(frozen=True, slots=True)
class Kill:
    """A requirement, or one scenario of it, that detects a mutant; some finding must hold `evidence`.

    With `survived` the mutant is known to survive it.
    """

    where: str
    evidence: str = ""
    survived: bool = False

    @property
    def requirement(self) -> str:
        """The id of the requirement."""
        return self.where.split("/")[1] if "/" in self.where else self.where


@dataclass(frozen=True, slots=True)
class Trial:
    """A DDP on a backend."""

    subject: Subject
    backend: Backend


@dataclass(frozen=True, slots=True)
class Mutant:
    """A DDP or backend that is wrong on purpose; `of` is what it was before: torch, ddp_impl or gloo.

    A `backend` that is made from gloo, and a mutant from that, is its own control. What a user reads first names the
    bug if each of `words` occurs in it, which are written from the docstring; `a|b` stands for a or b.
    """

    name: str
    target: str
    of: str
    kills: tuple[Kill, ...]
    backend: str = "gloo"
    words: tuple[str, ...] = ()

    @property
    def trial(self) -> Trial:
        """The mutant in its place: a DDP on gloo, or a backend under `ddp_impl`."""
        if self.of == "gloo":
            return Trial(get_subject("ddp_impl"), get_backend(self.target))
        return Trial(get_subject(self.target), get_backend(self.backend))

    @property
    def base(self) -> Trial:
        """The same without the bug."""
        return Trial(get_subject("ddp_impl" if self.of == "gloo" else self.of), get_backend(self.backend))

    @property
    def control(self) -> Trial:
        """The base, made into a mutant that has no bug: a scenario that detects it is wrong."""
        if self.of == "gloo":
            relayed = f"{UNCHANGED}:RELAYED" if self.backend == "gloo" else self.backend
            return Trial(self.base.subject, get_backend(relayed))
        name = CONTROLS[self.of]
        return Trial(replace(self.base.subject, name=name, target=f"{UNCHANGED}:{name}"), self.base.backend)

    @property
    def bug(self) -> str:
        """What is wrong, as its docstring says it in one sentence."""
        module, _, attribute = self.target.partition(":")
        found = getattr(importlib.import_module(module), attribute)
        text = inspect.getdoc(found.create if isinstance(found, Backend) else found) or ""
        certain(text.startswith(_BUG), f"the docstring of {self.target} must begin with {_BUG!r}")
        return " ".join(text.removeprefix(_BUG).split("\n\n")[0].split())


#: A table of `mutants.toml` is called by what its mutants are made from, `ddp_impl`, or `ddp_impl on sim`; backends are
#: made from `gloo`, or from a relay over it, `gloo on conformance.mutants.modest:MODEST`.
_ON = " on "

#: The key of a mutant that is no requirement.
_WORDS = "words"

#: torch's own DDP, where it deviates: judged as a mutant of `ddp_impl`, and not counted as one.
DEVIATING = "torch"


@cache
def load_mutants() -> tuple[Mutant, ...]:
    """Return every mutant: those of the chapters in the chapters' order, then the backends."""
    packages = chapter_packages()
    found: list[Mutant] = []
    for chapter in load_catalogue().chapters:
        package = packages[chapter.name]
        path = resources.files(package).joinpath(IN_CHAPTER)
        if path.is_file():
            found += _mutants(f"{package}.mutants", tomllib.loads(path.read_text(encoding="utf-8")))
    backends = {"gloo": tomllib.loads(PATH.read_text(encoding="utf-8"))["gloo"]}
    found += _mutants("conformance.mutants.backends", backends)
    twice = [name for name, count in Counter(mutant.name for mutant in found).items() if count > 1]
    certain(not twice, f"two mutants have the name {', '.join(twice)}")
    return tuple(found)


def _mutants(module: str, tables: dict[str, dict[str, dict[str, Any]]]) -> list[Mutant]:
    found = []
    for heading, table in tables.items():
        base, _, backend = heading.partition(_ON)
        for name, told in table.items():
            found.append(
                Mutant(name, f"{module}:{name}", base, _kills(told), backend or "gloo", words=tuple(told[_WORDS]))
            )
    return found


@cache
def load_deviations() -> Mutant:
    """Return torch's own DDP with the requirements that it breaks, as if it were made from `ddp_impl`."""
    return Mutant(DEVIATING, "torch", "ddp_impl", _kills(tomllib.loads(PATH.read_text())["deviations"]))


def deviations_of(chapter: str, catalogue: Catalogue) -> Mutant | None:
    """Return torch's own DDP with the requirements of one chapter that it breaks; None where it breaks none."""
    own = {requirement.id for requirement in catalogue.chapter(chapter).requirements}
    torch = load_deviations()
    kills = tuple(kill for kill in torch.kills if kill.requirement in own)
    return Mutant(torch.name, torch.target, torch.of, kills) if kills else None


def _kills(table: dict[str, Any]) -> tuple[Kill, ...]:
    known = table.get("survives")
    kills = tuple(Kill(where, evidence) for where, evidence in table.items() if where not in ("survives", _WORDS))
    return kills if known is None else (*kills, Kill(known, survived=True))


def chosen(names: Iterable[str], profile: str, catalogue: Catalogue, chapter: str = "") -> tuple[Mutant, ...]:
    """Return the mutants called `names` (all, if none) with those of their kills that are in `profile` (all, if empty).

    With a `chapter` only mutants that a requirement of the chapter must detect are returned, with all of their kills.

    Raises `SubjectError` for a name that does not exist and when nothing is left, `SpecificationError` for a profile or
    chapter.
    """
    mutants = load_mutants()
    known = {mutant.name for mutant in mutants}
    if unknown := [name for name in names if name not in known]:
        raise SubjectError(f"unknown mutant {unknown[0]!r}{hint(unknown[0], known)}")
    levels = levels_of(profile) if profile else LEVELS
    if chapter:
        own = {requirement.id for requirement in catalogue.chapter(chapter).requirements}
        mutants = tuple(mutant for mutant in mutants if any(kill.requirement in own for kill in mutant.kills))
    found = []
    for mutant in mutants:
        kills = tuple(kill for kill in mutant.kills if catalogue.requirement(kill.requirement).level in levels)
        if kills and (not names or mutant.name in names):
            found.append(replace(mutant, kills=kills))
    if not found:
        asked = f"profile {profile}" if profile else f"a requirement of chapter {chapter}"
        raise SubjectError(f"no mutant is to be killed by {asked}")
    return tuple(found)
