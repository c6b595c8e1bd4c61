"""`ddp-conformance run`: judge a DDP on every scenario that is selected."""

from __future__ import annotations

import math
import os
import random
import re
import shlex
from contextlib import nullcontext
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from conformance.checkers.explanation import counted
from conformance.cli import EXIT_FAILED, EXIT_INTERRUPTED
from conformance.cli.certified import refuse_to_certify
from conformance.cli.early_zygote import early_zygote
from conformance.cli.interrupt import interrupted_once
from conformance.cli.known_failures import circumstances_here, either, excuses_from, shipped_excuses
from conformance.cli.options import NamedPath, jobs_option, selection_options, subject_options
from conformance.errors import ConformanceError, ReportError, ScenarioError
from conformance.report.certificate import check_folder, write_checksums
from conformance.report.console import make_console, say
from conformance.report.folder import (
    check_writable,
    keep_last,
    sole_writer,
    write_page,
    write_report,
)
from conformance.report.histories import Histories
from conformance.report.progress import ProgressBar
from conformance.report.read import read_report
from conformance.report.resumed import found_before
from conformance.report.terminal import print_report
from conformance.run.environment import capture_environment
from conformance.run.order import LISTED, ORDERS, Order
from conformance.run.outcome import Progress
from conformance.run.patience import MOST_HANGS, nothing_but_hangs
from conformance.run.report import Assignment, JudgedSubject, Report
from conformance.run.sources import hash_of_subject, hash_of_suite
from conformance.scenario import Scenario
from conformance.spec.catalogue import load_catalogue
from conformance.spec.profile import WITHOUT_DDP, about_ddps, in_profile
from conformance.spec.quick import QUICK, load_kills, sentence
from conformance.spec.version import known_versions, load_version
from conformance.subjects.subject import named
from conformance.suite import Selection, load_scenarios, made_to_order

if TYPE_CHECKING:
    from rich.console import Console

    from conformance.backends.backend import Backend
    from conformance.bench.ratio import Ratio
    from conformance.subjects.subject import Subject
    from conformance.workers.attached_controller import AttachedController
    from conformance.workers.zygote_process import ZygoteProcess


#: More calls than a machine can try in a minute are not drawn.
_MOST_A_MINUTE = 600


@click.command("run")
@selection_options
@subject_options
@click.option(
    "--report",
    "folder",
    type=NamedPath(),
    default=Path("report"),
    show_default=True,
    help="Folder for report.json and one scenario file per failure.",
)
@click.option(
    "--order",
    type=click.Choice(ORDERS),
    default="listed",
    show_default=True,
    help="The order in which scenarios run; listed begins with those that find most.",
)
@click.option("--seed", type=int, metavar="N", help="How --order shuffled shuffles.  [default: random, printed]")
@click.option(
    "--profile",
    default="",
    metavar="LEVEL",
    help="Only scenarios of this level; full includes core. Profile backend has no DDP; quick is a part of full.",
)
@click.option(
    "--spec", default="", metavar="VERSION",
    help="Only scenarios of this version of the specification, such as 1.0.  [with --certified: the newest]",
)  # fmt: skip
@click.option("--last-failed", is_flag=True, help="Only the scenarios that failed in the report in --report FOLDER.")
@click.option("--resume", is_flag=True, help="Go on with the run of this command that ended early, in --report FOLDER.")
@click.option("--shard", default="", metavar="K/N", help="Only the K-th of N parts of the selection.")
@click.option("--keep-histories", is_flag=True, help="Keep what ranks issued and said too, for `report diff`.")
@click.option(
    "--expectations", "known_failures", type=NamedPath(dir_okay=False), metavar="FILE",
    help="Failures that are known, as TOML; an unexpected pass is a failure then. Also a baseline of your own.",
)  # fmt: skip
@click.option(
    "--up-to", "most_bytes", default="", metavar="SIZE",
    help="With --profile backend, messages of 1 MiB and more too, up to such a SIZE as 64MiB or 1GiB.",
)  # fmt: skip
@click.option(
    "--minutes", type=click.FloatRange(min=0), default=0.0, metavar="M",
    help="With --profile backend, newly drawn calls for so long, in place of the suite's scenarios.",
)  # fmt: skip
@click.option(
    "--baseline",
    is_flag=True,
    help="Excuse what is known of torch: with --ddp torch what its DDP breaks over gloo, with --profile backend what "
    "gloo breaks by itself, for a backend that is made from it.",
)
@click.option("--certified", is_flag=True, help="Run a whole --profile, so that `verify` can check the report.")
@click.option(
    "--attach", is_flag=True, help="Use the processes that torchrun, srun or mpirun has started, also on several hosts."
)
@click.option("--bench", is_flag=True, help="Then compare step times with torch's DDP, or of a backend with gloo.")
@jobs_option
@click.option("--fail-fast", is_flag=True, help="Stop at the first failure, or contamination.")
@click.option("--quiet", "-q", is_flag=True, help="Print failures and totals only.")
@click.option("--verbose", "-v", is_flag=True, help="Print every requirement, and the evidence of all that failed.")
def command(
    selection: Selection,
    ddp: str,
    backend: str,
    no_native: bool,
    folder: Path,
    order: str,
    seed: int | None,
    profile: str,
    spec: str,
    last_failed: bool,
    resume: bool,
    shard: str,
    keep_histories: bool,
    known_failures: Path | None,
    most_bytes: str,
    minutes: float,
    baseline: bool,
    certified: bool,
    attach: bool,
    bench: bool,
    jobs: int,
    fail_fast: bool,
    quiet: bool,
    verbose: bool,
) -> None:
    """Run the selected scenarios and report which requirements the DDP keeps.

    When nothing is selected, these are all that judge a DDP.

    NAMES are chapters, requirement ids, scenario ids, or globs of scenario ids.

    \b
    ddp-conformance run                                  all that judges a DDP, on ddp_impl over gloo
    ddp-conformance run buckets GRAD-01                  one chapter and one requirement
    ddp-conformance run 'gradients/*/mlp*' --world-size 4
    ddp-conformance run --ddp my_pkg:MyDDP --report mine
    ddp-conformance run --ddp torch -k unused            where torch's own DDP deviates
    ddp-conformance run --last-failed                    what failed in ./report, again
    ddp-conformance run --resume                         go on with the run that ended early in ./report
    ddp-conformance run --shard 3/8 --report shard3      an eighth; `report merge` puts shards together
    ddp-conformance run --certified --profile core       a report that `verify` accepts
    ddp-conformance run --ddp torch --backend acme --baseline  only what is not torch's own doing
    ddp-conformance run --profile quick                  for every push: few scenarios that kill nearly all mutants
    ddp-conformance run --spec 1.0 --profile core        what a frozen version of the specification asks
    ddp-conformance run --profile backend --backend acme what the backend owes by itself, without a DDP
    ddp-conformance run --profile backend --world-size 16 --up-to 1GiB  at other numbers of ranks, and more bytes
    ddp-conformance run --profile backend --minutes 60  newly drawn calls, for an hour
    ddp-conformance run --profile full --one-per-requirement  a first look at everything, in minutes
    ddp-conformance run --jobs 8                         eight scenarios and more side by side
    ddp-conformance run --bench                          step times beside torch's DDP, in the same report
    torchrun --nnodes 2 ... -m conformance run --attach  the ranks on several hosts: docs/hardware.md

    Exits with 0 when the DDP keeps every requirement that was exercised, 1 when it does not, 2 when a name or option
    is wrong, and 130 after Ctrl-C, with a report of what was known by then.
    """
    failed = failures_in(folder) if last_failed else ()
    if last_failed:
        selection = failed_in(folder, selection)
    if certified:
        refuse_to_certify(profile, selection, shard, order, known_failures, baseline, no_native, fail_fast)
        spec = spec or known_versions()[-1]  # a certificate names what it was measured by
    if resume and (certified or last_failed):
        raise ReportError("--resume goes on with a run: it is no whole one to certify, nor one of what failed")
    if bench and attach:
        raise ReportError("--bench compares step times on ranks of this machine; it cannot go with --attach")
    if jobs > 1 and attach:
        raise ReportError("--jobs begins ranks on this machine; it cannot go with --attach")
    request = Request(
        selection, profile, shard, order_of(order, seed), certified, known_failures, not no_native, fail_fast, bench,
        quiet, verbose, baseline, jobs, spec, resume, keep_histories, bytes_of(most_bytes), minutes,
        failed,
    )  # fmt: skip
    if (most_bytes or minutes) and (certified or profile != WITHOUT_DDP):
        raise ScenarioError("--up-to and --minutes go with --profile backend, and certify nothing")
    shard_of((), shard)  # what is none is told before torch is imported
    named(ddp)
    tested = f"{backend} by itself" if profile == WITHOUT_DDP else f"{ddp} over {backend}"
    if not quiet:
        say(f"Testing {tested} ...", err=True)  # at once: reading the scenarios imports torch
    judge = judge_attached if attach else judge_selection
    click.get_current_context().exit(judge(request, ddp, backend, folder))


def failed_in(folder: Path, selection: Selection) -> Selection:
    """Return the selection of the scenarios that failed in the report in `folder`; raises `ReportError` if none did."""
    if selection.names:
        raise ReportError("--last-failed names the scenarios itself; leave out the names, or --last-failed")
    failed = tuple(outcome.id for outcome in read_report(folder).failures)
    if not failed:
        raise ReportError(f"nothing failed in the report in {folder}; run without --last-failed")
    return replace(selection, names=failed)


def bytes_of(text: str) -> int:
    """Return how many bytes a text such as `64MiB` or `1GiB` means; 0 if it is empty."""
    match = re.fullmatch(r"([0-9]{1,6})([MG])iB", text)
    if text and match is None:
        raise ScenarioError(f"--up-to must be a number of MiB or GiB, such as 64MiB, got {text!r}")
    return int(match[1]) * {"M": 2**20, "G": 2**30}[match[2]] if match else 0


def failures_in(folder: Path) -> tuple[Scenario, ...]:
    """Return the scenarios that failed in the report in `folder`: some may have been made for that run."""
    return tuple(Scenario.from_json(one.replay) for one in read_report(folder).failures if one.replay)


def order_of(name: str, seed: int | None) -> Order:
    """Return the order that was asked for; a seed that was not given is drawn."""
    if name != "shuffled":
        if seed is not None:
            raise ScenarioError("--seed says how scenarios are shuffled; it goes with --order shuffled")
        return Order(name)
    return Order(name, random.SystemRandom().randrange(1_000_000) if seed is None else seed)


@dataclass(frozen=True, slots=True)
class Request:
    """What a run is to do: which scenarios in which order, and how they count."""

    selection: Selection
    profile: str = ""
    shard: str = ""
    order: Order = LISTED
    certified: bool = False
    known_failures: Path | None = None
    native: bool = True
    fail_fast: bool = False
    bench: bool = False
    quiet: bool = False
    verbose: bool = False
    baseline: bool = False
    jobs: int = 1  #: 0 for what the machine has
    spec: str = ""  #: the version of the specification; empty for that of the release
    resume: bool = False
    keep_histories: bool = False
    most_bytes: int = 0  #: of a message; 0 for no more than the suite's
    minutes: float = 0.0  #: for which newly drawn calls are tried
    failed: tuple[Scenario, ...] = ()  #: which are to be tried again, also where they are none of the suite's


def shard_of(scenarios: tuple[Scenario, ...], shard: str) -> tuple[Scenario, ...]:
    """Return the scenarios of a shard such as `3/8`: every eighth, so that shards take about equally long."""
    if not shard:
        return scenarios
    match = re.fullmatch(r"([0-9]{1,6})/([0-9]{1,6})", shard)
    if match is None or not 1 <= int(match[1]) <= int(match[2]):
        raise ScenarioError(f"--shard must be K/N with 1 <= K <= N, got {shard!r}")
    if scenarios and not scenarios[int(match[1]) - 1 :: int(match[2])]:
        raise ScenarioError(f"shard {shard} of {len(scenarios)} scenario(s) is empty")
    return scenarios[int(match[1]) - 1 :: int(match[2])]


def judge_attached(request: Request, ddp: str, backend_name: str, folder: Path) -> int:
    """Do `judge_selection` in the first of the processes that a launcher has started, on ranks held by all of them.

    All of them must call it.
    """
    selected = selected_by(request)

    from conformance.programs.registry import preloads_of
    from conformance.workers.attached import attach
    from conformance.workers.attached_place import place_of
    from conformance.workers.finder import find_backend

    place = place_of(os.environ)
    try:
        return attach(
            place,
            find_backend(backend_name),
            preloads_of(selected),
            lambda controller: judge_selection(request, ddp, backend_name, folder, controller),
        )
    except ConformanceError as error:
        if place.index == 0:
            raise
        say(str(error), err=True)  # nothing was asked wrongly here: the others are gone
        return EXIT_FAILED


def selected_by(request: Request) -> tuple[Scenario, ...]:
    """Return the scenarios of all shards of `request`."""
    catalogue, everything = load_catalogue(), load_scenarios()
    if request.profile:
        everything = in_profile(request.profile, everything, catalogue)
    elif request.selection == Selection():
        everything = about_ddps(everything, catalogue)
    if request.spec:
        everything = load_version(request.spec).scenarios(everything)
    if request.profile == WITHOUT_DDP or request.failed:
        everything = _with_made(request, everything)
    return request.selection.apply(everything, catalogue, request.profile)


def _with_made(request: Request, suite: tuple[Scenario, ...]) -> tuple[Scenario, ...]:
    """Return the scenarios about backends from which `request` selects: the suite's, and those made at its order."""
    asked = request.selection.world_sizes
    if not (request.most_bytes or request.minutes or asked):
        return tuple({one.id: one for one in (*request.failed, *suite)}.values())
    orders = made_to_order()
    if request.minutes:
        seed, most = random.SystemRandom().randrange(10**9), math.ceil(_MOST_A_MINUTE * request.minutes)
        return tuple(one for size in asked or (3,) for one in orders.soaked(seed, most, size))
    made = [orders.at_world_size(size) for size in asked if size not in orders.OF_ALL_CHAPTERS]
    made += [orders.up_to(request.most_bytes, size) for size in asked or (2,)]
    return tuple({one.id: one for one in (*suite, *chain(*made))}.values())


def judge_selection(
    request: Request,
    ddp: str,
    backend_name: str,
    folder: Path,
    controller: AttachedController | None = None,
) -> int:
    """Run what `request` says, print and write the report, and return the exit code.

    Ranks are this machine's, unless a `controller` of others is given.
    """
    with sole_writer(folder), nullcontext() if controller else early_zygote() as zygote:
        return _judge(request, ddp, backend_name, folder, controller, zygote)


def _judge(
    request: Request,
    ddp: str,
    backend_name: str,
    folder: Path,
    controller: AttachedController | None,
    zygote: ZygoteProcess | None,
) -> int:
    catalogue, everything = load_catalogue(), load_scenarios()
    selected = selected_by(request)
    scenarios = shard_of(selected, request.shard)
    check_writable(folder)
    if request.certified:
        check_folder(folder)

    # From here on torch is needed; what was said wrongly so far is answered without waiting for its import.
    from conformance.report.html import html_page
    from conformance.run import runner
    from conformance.run.lanes import num_lanes
    from conformance.workers.finder import find_judged

    subject, backend = find_judged(scenarios, ddp, backend_name)
    if controller is not None:
        num_ranks = controller.num_ranks
        backend = replace(backend, max_world_size=lambda: num_ranks)
    runner.check_world_sizes(request.selection.world_sizes, backend)
    how: dict[str, Any] = {"native": request.native, "fail_fast": request.fail_fast}
    circumstances = circumstances_here(subject, backend)
    excuses = []
    if request.known_failures is not None:
        excuses.append(excuses_from(request.known_failures, everything, circumstances))
    if request.baseline:
        excuses.append(shipped_excuses(circumstances))
    if request.selection == Selection():
        how["most_hangs"] = MOST_HANGS
    if request.minutes:
        how["seconds"] = 60 * request.minutes
    how["excuses"] = either(*excuses)
    assignment = Assignment(
        request.profile, request.shard, tuple(one.id for one in selected), request.order.name, request.order.seed
    )
    begun = replace(Report.of(
        (), (), subject=JudgedSubject.of(subject), interrupted=True,
        backend=backend.source or backend.name, num_selected=len(scenarios), selection=assignment, duration_s=0.0,
        environment={**capture_environment(), "device_type": backend.device_type},
    ), specification=request.spec)  # fmt: skip
    earlier = found_before(folder, begun, scenarios) if request.resume else ()
    known = list(earlier)
    done = {one.id for one in earlier}
    scenarios = tuple(one for one in scenarios if one.id not in done) or scenarios[-1:]
    sources = sources_of(subject) if request.certified else {}
    console = make_console()
    if request.profile == QUICK and not request.quiet:
        console.print(sentence(selected, load_kills()), soft_wrap=True)
    if request.order != LISTED:
        console.print(f"Scenarios are {request.order}.")
    if earlier:
        console.print(f"{counted(len(earlier), 'scenario')} had been judged; the others follow.")
    if not request.quiet:
        say("Starting ranks ...", err=True)
    histories = Histories(kept=request.keep_histories)
    with interrupted_once("; the report will hold the results so far") as ignore_signals:
        with ProgressBar(console, scenarios, catalogue.statements, quiet=request.quiet) as progress:

            def on_event(event: Progress) -> None:
                if (outcome := event.outcome) is not None:
                    known.append(outcome)
                    keep_last(known, begun, catalogue, folder, is_first=len(known) == len(earlier) + 1)
                progress(event)

            report = runner.run(
                scenarios,
                subject,
                backend,
                order=request.order,
                on_event=on_event,
                controller=controller,
                one_at_a_time=controller is not None,  # as agents run ranks
                zygote=zygote,
                jobs=request.jobs or num_lanes(backend, len(scenarios)),
                on_observed=histories.keep,
                **how,
            )
        if request.minutes:  # as many as there was time for
            ids = tuple(one.id for one in report.scenarios)
            begun = replace(
                begun, totals=replace(begun.totals, selected=len(ids)), selection=replace(assignment, ids=ids)
            )
        report = replace(
            begun, interrupted=report.interrupted, environment=report.environment, duration_s=report.duration_s
        ).extended((*earlier, *report.scenarios), catalogue)
        report = replace(report, certified=request.certified)
        if request.certified:
            if sources != sources_of(subject):
                raise ReportError("files of the suite or of the DDP under test were changed during the run")
            report = replace(report, environment={**report.environment, "sources": sources})
        if request.bench and not report.interrupted:
            report = replace(report, performance=measured(subject, backend, console))
        ignore_signals()  # what is written now is the report of all
        if not report.scenarios and (folder / "report.json").exists():
            console.print(f"No scenario had ended; the report in {folder} is that of an earlier run.")
            return EXIT_INTERRUPTED
        path = write_report(report, catalogue, folder)
        histories.write(folder)
        print_report(console, report, catalogue, folder, verbose=request.verbose, quiet=request.quiet)
        if not request.fail_fast and not report.is_complete and (hung := nothing_but_hangs(report.scenarios)):
            hangs = f"all {counted(hung, 'scenario')} that had ended hung"
            console.print(f"Stopped, because {hangs}. What is selected by name runs to its end.")
        if report.failures and backend.name != "gloo" and not report.is_about_backend:
            smoke = f"ddp-conformance smoke --backend {shlex.quote(backend_name)}"
            console.print(f"To check the backend by itself: {smoke}", soft_wrap=True)
        page = write_page(html_page([report], [folder]), folder)
        if request.certified:
            write_checksums(folder)
    console.print(f"Report: {path}, as a page: {page}", soft_wrap=True)
    if report.interrupted:
        return EXIT_INTERRUPTED
    return 0 if report.is_green and bool(report.performance) == request.bench else EXIT_FAILED


def sources_of(subject: Subject) -> dict[str, str]:
    """Return the hashes of the files that a certificate rests on; raises `SubjectError`."""
    return {"suite": hash_of_suite(), "subject": hash_of_subject(subject.target)}


def measured(subject: Subject, backend: Backend, console: Console) -> tuple[Ratio, ...]:
    """Return ratios of times; none, and say why, when they cannot be had: verdicts must not get lost by that."""
    from conformance.bench import measure as bench
    from conformance.bench import operations
    from conformance.workers.finder import find_backend

    world_size = min(2, backend.max_world_size() or 2)
    try:
        if not subject.is_ddp:
            timed = operations.run(
                backend, find_backend("gloo"), world_sizes=(world_size,),
                progress=lambda text: console.print(f"measuring {text} ..."),
            )  # fmt: skip
            return tuple(ratio for one in timed for ratio in one.ratios())
        return bench.run(
            subject,
            backend,
            world_size=world_size,
            progress=lambda workload: console.print(f"measuring {workload} ..."),
        )
    except ConformanceError as error:
        say(f"Step times could not be compared: {error}", err=True)
    except KeyboardInterrupt:
        say("Step times were not compared.", err=True)
    return ()
