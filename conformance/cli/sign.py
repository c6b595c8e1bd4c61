"""`ddp-conformance sign`: put a signature beside the checksums of a report."""

from pathlib import Path

import click

from conformance.cli.options import NamedPath
from conformance.report.console import say


@click.command("sign")
@click.argument("report", type=NamedPath())
@click.option(
    "--key",
    type=NamedPath(),
    required=True,
    metavar="FILE",
    help="An Ed25519 private key (PEM): openssl genpkey -algorithm ed25519 -out FILE",
)
def command(report: Path, key: Path) -> None:
    """Sign the folder REPORT of a run; that of a certified run after checking it as `verify` does.

    Another run gets its checksums here: its signature says who ran it, and it is no certificate all the same.

    The signature is over SHA256SUMS, so over every file. Publish the public key where the report is not:
    `openssl pkey -in FILE -pubout`. Needs the package cryptography.
    """
    from conformance.cli.verify import profiles
    from conformance.report.certificate import verify, write_checksums
    from conformance.report.read import read_report
    from conformance.report.signature import sign

    report = report.parent if report.name == "report.json" else report
    if read_report(report).certified:
        verify(report, profiles)
    else:
        write_checksums(report)
    say(f"Signed by {sign(report, key)}.")
