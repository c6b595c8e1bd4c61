"""The command `ddp-conformance`.

Exit codes: 0 the subject conforms, 1 it does not (or something hung, crashed or was not completed), 2 the question
itself was wrong, 130 interrupted. Subcommands import torch only when they need it, so that `--help` is quick.
"""

from __future__ import annotations

import importlib
import sys
from typing import Any

import click

from conformance.errors import ConformanceError

EXIT_FAILED, EXIT_USAGE, EXIT_INTERRUPTED = 1, 2, 130

#: Where each subcommand is defined; imported when it is called or its help is shown.
COMMANDS = {
    "run": "conformance.cli.run:command",
    "list": "conformance.cli.listing:command",
    "specification": "conformance.cli.specification:command",
    "explore": "conformance.cli.explore:command",
    "replay": "conformance.cli.replay:command",
    "report": "conformance.cli.report:command",
    "verify": "conformance.cli.verify:command",
    "doctor": "conformance.cli.doctor:command",
    "smoke": "conformance.cli.smoke:command",
    "new": "conformance.cli.new:command",
    "bench": "conformance.cli.bench:command",
    "upstream": "conformance.cli.upstream:command",
    "mutants": "conformance.cli.mutants:command",
    "renew": "conformance.cli.renew:command",
}


class UsageError(click.ClickException):
    """A user's mistake, printed as one paragraph without a traceback."""

    exit_code = EXIT_USAGE


class LazyGroup(click.Group):
    """A group that imports a subcommand when it is wanted, and turns the harness's errors into exit codes."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names of the subcommands in the order in which people need them."""
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import and return a subcommand."""
        if cmd_name not in COMMANDS:
            return None
        module, _, attribute = COMMANDS[cmd_name].partition(":")
        command = getattr(importlib.import_module(module), attribute)
        assert isinstance(command, click.Command)
        return command

    def invoke(self, ctx: click.Context) -> Any:
        """Run the subcommand; modules named as `module:Class` are looked for in the current folder too."""
        if "" not in sys.path:
            sys.path.insert(0, "")
        try:
            return super().invoke(ctx)
        except ConformanceError as error:
            raise UsageError(str(error)) from error
        except KeyboardInterrupt:
            click.echo("Interrupted.", err=True)
            ctx.exit(EXIT_INTERRUPTED)


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(package_name="ddp-conformance")
def main() -> None:
    """Tell, with evidence, which promises of DistributedDataParallel an implementation keeps.

    \b
    ddp-conformance run                           judge ddp_impl, torch's own DDP in the next column
    ddp-conformance run --ddp my_pkg:MyDDP        judge yours
    ddp-conformance run --backend my_pkg:backend  judge a c10d backend or device
    ddp-conformance list                          the requirements
    ddp-conformance replay report/failures/x.json run one failure again
    ddp-conformance report html report -o x.html  a page of a finished report
    ddp-conformance doctor                        what this machine can run
    ddp-conformance smoke --backend my_pkg:it     is a backend's adapter right? The first broken rung
    ddp-conformance new backend acme              a package to start from
    ddp-conformance upstream                      torch's own DDP tests, run on ddp_impl
    ddp-conformance mutants                       DDPs that are wrong on purpose, and who notices
    ddp-conformance renew                         the generated pages of a checkout

    Ranks are processes of this machine that talk over the loopback interface; no port is used.
    """
