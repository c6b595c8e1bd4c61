"""`ddp-conformance mutants`: whether the requirements notice DDPs and backends that are wrong on purpose."""

from __future__ import annotations

import contextlib
import datetime
import gc
import tempfile
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import click
from rich.table import Table

from conformance.cli import EXIT_FAILED
from conformance.cli.options import NamedPath, jobs_option
from conformance.errors import ReportError, SubjectError
from conformance.report.console import make_console, say

if TYPE_CHECKING:
    from conformance.mutants.catalogue import Mutant
    from conformance.mutants.definition import Verdict
    from conformance.mutants.detector import Detection, Found
    from conformance.spec.catalogue import Catalogue
    from conformance.spec.quick import Kills


_FILE = NamedPath(dir_okay=False)


@click.command("mutants")
@click.argument("names", nargs=-1)
@click.option("--chapter", default="", metavar="NAME", help="Only mutants that a requirement of this chapter notices.")
@click.option("--profile", default="", metavar="LEVEL", help="Only kills by requirements of this level.")
@click.option("--newer", is_flag=True, help="Only mutants of what not every supported torch has.")
@click.option("--all-requirements", is_flag=True, help="Also run every other scenario on every mutant; takes hours.")
@jobs_option
@click.option("--out", type=_FILE, metavar="FILE", help="Write what became of all mutants.")
@click.option("--keep", type=NamedPath(file_okay=False), metavar="FOLDER", help="Keep there what ranks saw in kills.")
@click.option("--read", type=NamedPath(file_okay=False), metavar="FOLDER", help="Judge what --keep kept, run nothing.")
@click.option("--kills", type=_FILE, metavar="FILE", help="Renew there which scenarios kill: what runs begin with.")
@click.option("--definition", is_flag=True, help="Mutants of the definition of a DDP, which a machine makes.")
@click.option("--generated", is_flag=True, help="Mutants of a DDP, which a machine makes, run by ranks.")
@click.option("--of", default="ddp_impl", show_default=True, metavar="DDP", help="Which DDP: as for `run --ddp`.")
@click.option("--sample", type=click.IntRange(min=1), metavar="N", help="Of those only N, evenly over functions.")
@click.option("--seed", type=int, default=0, show_default=True, help="Which N.")
@click.option("--swaps", is_flag=True, help="Instead: which requirements speak of what is alike in their scenarios.")
@click.option("--resume", is_flag=True, help="Go on with what --keep has in its folder of an earlier call.")
@click.option("--into", type=_FILE, metavar="FILE", help="Renew there what became of the mutants that run.")
def command(
    names: tuple[str, ...],
    chapter: str,
    profile: str,
    newer: bool,
    all_requirements: bool,
    jobs: int,
    out: Path | None,
    into: Path | None,
    kills: Path | None,
    keep: Path | None,
    read: Path | None,
    definition: bool,
    generated: bool,
    of: str,
    sample: int | None,
    seed: int,
    swaps: bool,
    resume: bool,
) -> None:
    """Show what the suite detects: run each mutant beside what it was made from.

    NAMES are mutants; all, if none is given. With --definition and --generated, parts of the names of functions.

    \b
    ddp-conformance mutants                        each against the requirements that it is known to break
    ddp-conformance mutants NoDivision StaleBuffers
    ddp-conformance mutants --profile core --all-requirements
    ddp-conformance mutants --newer                what the oldest supported torch lacks, with a newer one
    ddp-conformance mutants --out detected.toml
    ddp-conformance mutants NoDivision --into conformance/mutants/detected.toml
    ddp-conformance mutants --chapter join --into conformance/mutants/detected.toml
    ddp-conformance mutants --out detected.toml --kills conformance/spec/kills.toml
    ddp-conformance mutants --keep kept            also keep what ranks saw where a mutant was killed
    ddp-conformance mutants --read kept            what a user reads first of each, and whether it names the bug
    ddp-conformance mutants --definition --sample 200 --seed 1 --keep made
    ddp-conformance mutants --definition no_sync --profile core
    ddp-conformance mutants --definition --swaps --profile quick
    ddp-conformance mutants --generated --of my_pkg:MyDDP --sample 200 --seed 1 --keep made

    Mutants of what the installed torch lacks are left out, and named.

    Exits with 1 when a requirement no longer tells a mutant that breaks it from what it was made from, when it kills
    one that was known to survive, and when a scenario that killed also fails a subclass without a bug; with
    --definition or --generated, when a mutant survives that conformance/mutants/equivalent.toml does not explain.
    """
    say("Loading mutants ...", err=True)  # at once: torch is imported next

    from conformance.backends.gloo import GLOO
    from conformance.mutants.catalogue import deviations_of, load_deviations
    from conformance.mutants.detected import made_by_all, written
    from conformance.mutants.detector import Fate, detect_all
    from conformance.run.lanes import num_lanes
    from conformance.spec.catalogue import load_catalogue
    from conformance.spec.profile import in_profile
    from conformance.suite import load_scenarios

    if read is not None:
        _print_readings(read, names)
        return
    if definition or generated:
        with _folder(keep, resume) as folder:
            if generated:
                _judge_generated(names, of, profile, sample, seed, folder, jobs)
            else:
                _judge_definition(names, profile or "full", chapter, sample, seed, swaps, folder)
        return
    catalogue = load_catalogue()
    if out is not None and (names or profile or chapter or newer):
        raise ReportError(
            "--out writes about all mutants; leave out their names, --profile, --chapter and --newer, or say --into"
        )
    if into is not None and (profile or not (names or chapter or newer)):
        raise ReportError(
            "--into renews all that a file says of some mutants; name them, a --chapter or --newer, and no --profile"
        )
    before = "" if into is None else _read(into)
    if keep is not None:
        keep.mkdir(parents=True, exist_ok=True)
    mutants, left_out = _runnable(names, profile, catalogue, chapter, newer)
    deviations = load_deviations() if out is not None else None
    if into is not None and chapter:
        deviations = deviations_of(chapter, catalogue)
    further = load_scenarios() if all_requirements else ()
    found = detect_all(
        mutants,
        _say,
        deviations=deviations,
        further=in_profile(profile, further, catalogue) if profile else further,
        jobs=jobs or num_lanes(GLOO, processors_each=2),
        kept=keep,
    )
    console = make_console()
    table = Table("mutant", "made from", "killed by", "survived", "not active", box=None, pad_edge=False)
    for mutant in found.mutants:
        cells = [", ".join(found.requirements(mutant, fate)) for fate in Fate]
        table.add_row(mutant.name, mutant.of, *cells, style="" if cells[1:] == ["", ""] else "bold red")
    console.print(table)
    console.print(f"{found.headline}.", soft_wrap=True)
    if left_out:
        console.print(f"{left_out}.", soft_wrap=True)
    if found.false_alarms:
        for alarm in found.false_alarms:
            say(f"False alarm: {alarm}.", err=True)
        say("The verdicts above are void: a DDP or backend without a bug is told from its base.", err=True)
        click.get_current_context().exit(EXIT_FAILED)
    if out is not None:
        _write(written(found, made_by_all(*_circumstances())), out)
    if kills is not None:
        _write(_with_kills(kills, found, catalogue), kills)
    if into is not None:
        _write(_renewed(before, found), into)
    if not all(one.is_as_expected for one in (*found.detections, *found.deviations)):
        click.get_current_context().exit(EXIT_FAILED)


def _runnable(
    names: tuple[str, ...], profile: str, catalogue: Catalogue, chapter: str, newer: bool
) -> tuple[tuple[Mutant, ...], str]:
    """Return the mutants to run, and a sentence about those of what the installed torch lacks, empty if there are none.

    Raises `SubjectError` with that sentence if no others are left.
    """
    from conformance.backends.backend import UNKNOWN_TO_TORCH
    from conformance.mutants.catalogue import chosen
    from conformance.mutants.detector import of_newer_torch
    from conformance.run.environment import package_version

    mutants = chosen(names, profile, catalogue, chapter)
    needs = of_newer_torch(mutants)
    lacking = {name: needed & UNKNOWN_TO_TORCH for name, needed in needs.items() if needed & UNKNOWN_TO_TORCH}
    runnable = tuple(one for one in mutants if one.name not in lacking and (one.name in needs or not newer))
    if not lacking:
        return runnable, ""
    lacked = ", ".join(sorted(frozenset[str]().union(*lacking.values())))
    sentence = f"torch {package_version('torch')} has no {lacked}, so these mutants are left out: {', '.join(lacking)}"
    if not runnable:
        raise SubjectError(sentence)
    return runnable, sentence


@contextlib.contextmanager
def _folder(keep: Path | None, resume: bool) -> Iterator[Path]:
    """Provide the folder for what is found out: a new one, or that of an earlier call of this suite."""
    from conformance.spec.kept_scenarios import fingerprint

    with contextlib.ExitStack() as stack:
        folder = keep or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        folder.mkdir(parents=True, exist_ok=True)
        made_of = folder / "made_of"
        if not resume and any(folder.iterdir()):
            raise ReportError(f"{folder} is not empty; --resume goes on")
        if resume and not (made_of.exists() and made_of.read_text(encoding="utf-8") == fingerprint()):
            raise ReportError(f"{folder} is of another suite, or of none; begin in an empty folder")
        made_of.write_text(fingerprint(), encoding="utf-8")
        yield folder


def _judge_generated(
    names: tuple[str, ...], of: str, profile: str, sample: int | None, seed: int, folder: Path, jobs: int
) -> None:
    """Judge mutants of the DDP called `of`, by profile quick and then by more of `profile`; of all, if it is empty."""
    from conformance.backends.gloo import GLOO
    from conformance.mutants.definition import sampled
    from conformance.mutants.generated import Campaign
    from conformance.run.lanes import num_lanes
    from conformance.spec.catalogue import load_catalogue
    from conformance.spec.cheapest import one_per_requirement
    from conformance.spec.profile import about_ddps, in_profile
    from conformance.spec.quick import QUICK
    from conformance.subjects.subject import get_subject
    from conformance.suite import load_scenarios

    catalogue, subject = load_catalogue(), get_subject(of)
    every = about_ddps(load_scenarios(), catalogue)
    further = in_profile(profile, every, catalogue) if profile else every
    level = {one.id for one in further}
    quick = [one for one in in_profile(QUICK, every, catalogue) if one.id in level]
    first = {one.id: one for one in (*quick, *(() if profile == QUICK else one_per_requirement(further)))}
    with Campaign(subject, folder, tuple(first.values()), further) as campaign:
        campaign.trace(lambda text: say(text, err=True))
        num_made = len(sampled(names, None, seed, campaign.modules))
        executed = sampled(names, None, seed, campaign.modules, campaign.is_executed)
        say(f"{len(executed)} of {num_made} mistakes are in lines that the scenarios execute", err=True)
        with _printing_verdicts(subject.name) as take:
            campaign.judge_all(executed[:sample], jobs or num_lanes(GLOO, processors_each=2), take)


def _judge_definition(
    names: tuple[str, ...], profile: str, chapter: str, sample: int | None, seed: int, swaps: bool, folder: Path
) -> None:
    from conformance.mutants.definition import Judge, judge_all, sampled, traces_of
    from conformance.mutants.swaps import SWAPS, unnoticed
    from conformance.spec.catalogue import load_catalogue
    from conformance.spec.profile import in_profile
    from conformance.suite import load_scenarios

    catalogue = load_catalogue()
    in_level = in_profile(profile, load_scenarios(), catalogue)
    scenarios = {one.id: one for one in in_level if chapter in ("", one.chapter)}
    if not scenarios:
        raise ReportError(f"profile {profile} has no scenario of chapter {chapter}")
    mistakes = sampled(names, sample, seed)
    traces = traces_of(scenarios, folder, lambda text: say(text, err=True))
    if swaps:
        for swap in SWAPS:
            ids = list(unnoticed(swap, catalogue, traces, scenarios))
            say(f"{swap.name}: {', '.join(ids) or 'noticed wherever it is spoken of'}")
        return
    gc.freeze()  # each mistake is judged in a fork, which would walk, and copy, all of torch
    try:
        with _printing_verdicts("the definition") as take:
            for one in judge_all(mistakes, Judge(traces, scenarios).judge, folder):
                take(one)
    finally:
        gc.unfreeze()


@contextlib.contextmanager
def _printing_verdicts(of: str) -> Iterator[Callable[[Verdict], None]]:
    """Provide what prints a verdict, on standard output if it is open; print figures in the end, and exit with 1."""
    from conformance.mutants.definition import headline

    verdicts: list[Verdict] = []

    def take(one: Verdict) -> None:
        verdicts.append(one)
        say(f"{len(verdicts):>5}  {one}", err=not one.is_open)

    yield take
    say(f"{headline(of, verdicts)}.")
    if any(one.is_open for one in verdicts):
        click.get_current_context().exit(EXIT_FAILED)


def _print_readings(folder: Path, names: tuple[str, ...]) -> None:
    """Print what is read first of each mutant (of those called `names`, if there are any) that `folder` keeps."""
    from conformance.mutants.kept import kept_in
    from conformance.mutants.reading import headline, reading_table, readings

    found = readings(one for one in kept_in(folder) if not names or one.mutant in names)
    if not found:
        raise ReportError(f"{folder} keeps nothing of {', '.join(names)}")
    console = make_console()
    console.print(reading_table(found))
    console.print(f"{headline(found)}.", soft_wrap=True)


def _renewed(before: str, found: Found) -> str:
    """Return the file `before` with what was `found` now in the place of what it had about the same mutants."""
    from conformance.mutants.catalogue import load_deviations, load_mutants
    from conformance.mutants.detected import found_in, made_by_some, made_in, merged, written

    mutants = load_mutants()
    whole = merged(found_in(before, mutants, load_deviations()), found, mutants)
    return written(whole, made_by_some(made_in(before), *_circumstances()))


def _with_kills(file: Path, found: Found, catalogue: Catalogue) -> str:
    """Return the text of `file` with what was `found` now, for every mutant that some profile in it is to kill."""
    from conformance.mutants.catalogue import chosen
    from conformance.spec.profile import in_profile
    from conformance.spec.quick import PROFILES, known_kills, written
    from conformance.suite import load_scenarios

    before = tomllib.loads(file.read_text(encoding="utf-8")) if file.exists() else {}

    def of_profile(profile: str) -> Kills:
        of_mutant = {**before.get(profile, {}), **found.kills}
        names = [mutant.name for mutant in chosen((), profile, catalogue)]
        return known_kills(
            in_profile(profile, load_scenarios(), catalogue), {name: of_mutant.get(name, {}) for name in names}
        )

    return written({profile: of_profile(profile) for profile in PROFILES})


def _circumstances() -> tuple[dict[str, str], datetime.date]:
    from conformance.run.environment import package_version

    versions = {name: package_version(name) for name in ("ddp-conformance", "torch")}
    return versions, datetime.datetime.now(datetime.UTC).date()


def _read(page: Path) -> str:
    from conformance.mutants.detected import made_in

    try:
        text = page.read_text(encoding="utf-8")
    except OSError as error:
        raise ReportError(f"cannot read {page}: {error.strerror}; --out writes it anew") from error
    made_in(text)  # before hours of work: is it such a file?
    return text


def _write(text: str, page: Path) -> None:
    try:
        page.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ReportError(f"cannot write {page}: {error.strerror}") from error


def _say(done: int, total: int, detection: Detection) -> None:
    """Say on standard error how far it got, where a table is to follow."""
    fate, requirement = detection.fate.value, detection.kill.requirement
    say(f"{done:>4}/{total}  {fate:<10}  {detection.mutant.name}, {requirement}", err=True)
