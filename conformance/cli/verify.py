"""`ddp-conformance verify`: check a certified report again, and with --rerun some of its verdicts."""

from __future__ import annotations

import random
from pathlib import Path
from typing import TYPE_CHECKING

import click

from conformance.checkers.explanation import counted
from conformance.cli import EXIT_FAILED
from conformance.cli.options import NamedPath
from conformance.errors import ReportError
from conformance.report.console import say

if TYPE_CHECKING:
    from conformance.run.report import Report
    from conformance.scenario import Scenario

_FILE = NamedPath()


@click.command("verify")
@click.argument("report", type=_FILE)
@click.option("--key", type=_FILE, metavar="FILE", help="The public key (PEM) that must have signed it.")
@click.option("--rerun", type=click.IntRange(min=1), metavar="N", help="Run N random scenarios again, and compare.")
@click.option("--seed", type=int, metavar="N", help="Which scenarios --rerun draws.  [default: random, printed]")
@click.option("--ddp", default="", metavar="NAME", help="What --rerun runs, where the report names no DDP of ours.")
@click.option("--backend", default="", metavar="NAME", help="Likewise the backend.")
def command(report: Path, key: Path | None, rerun: int | None, seed: int | None, ddp: str, backend: str) -> None:
    """Check the folder REPORT of a certified run.

    Every file must be as the run wrote it; the list of scenarios must be that of the profile in this release, complete,
    each with a verdict; the environment must be there; counts and answers must follow from the verdicts. The last line
    says whether anybody vouches for that: without a signature, whoever can write the folder can have made it up.

    \b
    ddp-conformance verify report                     checksums, and the signature if there is one
    ddp-conformance verify report --key vendor.pem    refuse it unless this key has signed it
    ddp-conformance verify report --rerun 20          also run 20 of its scenarios here

    --rerun imports the DDP and the backend; only those that come with this package are taken from the report's word,
    others you name with --ddp and --backend. Exits with 0 for a valid certificate of conformance, 1 for a valid one
    that says that the subject does not conform, 2 for none.
    """
    from conformance.report.certificate import verify
    from conformance.report.headline import headline
    from conformance.report.signature import signer

    checked = verify(report, profiles)
    signed_by = signer(report.parent if report.name == "report.json" else report, key)
    torch_version = checked.package_version("torch")
    say(f"{checked.subject.name} on {checked.backend}, torch {torch_version}: {headline(checked)}.")
    say(_about_the_subject(checked))
    if rerun is not None:
        seed = random.randrange(2**32) if seed is None else seed
        _run_again(checked, rerun, seed, ddp, backend)
        say(f"Run again here (--seed {seed}): {counted(rerun, 'scenario')}, the same verdicts.")
    if not signed_by:
        say("Checked: checksums only, unsigned.")
    elif key is None:
        say(f"Checked: checksums, signed by {signed_by}. Whose key that is, only --key can tell.")
    else:
        say(f"Checked: checksums, signed by {signed_by}, which is {key}.")
    if not checked.is_green:
        click.get_current_context().exit(EXIT_FAILED)


def profiles() -> dict[str, tuple[Scenario, ...]]:
    """Return the scenarios of every profile in this release."""
    say("Reading the scenarios ...", err=True)  # at once: torch is imported next

    from conformance.spec.catalogue import LEVELS, load_catalogue
    from conformance.spec.profile import in_profile
    from conformance.suite import load_scenarios

    scenarios, catalogue = load_scenarios(), load_catalogue()
    return {level: in_profile(level, scenarios, catalogue) for level in LEVELS}


def _about_the_subject(report: Report) -> str:
    from conformance.errors import SubjectError
    from conformance.run.sources import hash_of_subject

    name, certified = report.subject.target.partition(":")[0].partition(".")[0], report.source_hash("subject")
    try:
        here = hash_of_subject(report.subject.target)
    except SubjectError:
        return f"The files of {name} were sha256 {certified}; it is not installed here."
    same = "those installed here" if here == certified else f"not those installed here, which are {here}"
    return f"The files of {name} were sha256 {certified}, {same}."


def _run_again(report: Report, number: int, seed: int, ddp: str, backend_name: str) -> None:
    """Run `number` random scenarios of the report; raises `ReportError` if a verdict is another one."""
    from conformance.backends.backend import BUILT_IN
    from conformance.run import runner
    from conformance.subjects.subject import KNOWN
    from conformance.workers.finder import find_judged

    ddp = ddp or (report.subject.name if report.subject.name in KNOWN else "")
    backend_name = backend_name or (report.backend if report.backend in BUILT_IN else "")
    if not backend_name or not (ddp or report.is_about_backend):
        named = "" if report.is_about_backend else f"--ddp {report.subject.name} "
        raise ReportError(
            f"to run {report.tested} is to import code that the report names; say that you "
            f"want that: {named}--backend {report.backend}"
        )
    known = {scenario.id: scenario for scenario in profiles()[report.selection.profile]}
    chosen = random.Random(seed).sample(report.scenarios, min(number, len(report.scenarios)))
    scenarios = [known[one.id] for one in chosen]
    subject, backend = find_judged(scenarios, ddp, backend_name)
    if subject.target != report.subject.target:
        raise ReportError(f"the report is about {report.subject.target}, and --ddp {ddp} is {subject.target}")
    again = runner.run(scenarios, subject, backend)
    before = {one.id: one.subject.verdict for one in chosen}
    differ = [
        f"{one.id} was {before[one.id].value} and is {one.subject.verdict.value}"
        for one in again.scenarios
        if one.subject.verdict is not before[one.id]
    ]
    if differ or not again.is_complete:
        raise ReportError(
            f"the certificate does not hold here: {len(differ)} of {len(again.scenarios)} scenario(s) that were run "
            f"again (--seed {seed}) have another verdict: {'; '.join(differ[:5])}"
        )
