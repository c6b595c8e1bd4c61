"""The command `ddp-conformance`.

Exit codes: 0 the subject conforms, 1 it does not (or a rank hung or crashed, or the run is incomplete), 2 usage error,
130 interrupted. Subcommands import torch only when they need it, so that `--help` is quick.
"""

import contextlib
import importlib
import sys
from typing import Any

import click

from conformance.cli.lasting_output import LastingOutput
from conformance.cli.search_path import search_working_directory
from conformance.errors import ConformanceError, ReportError, ScenarioError, instance
from conformance.report.console import printable, say
from conformance.run.interpreter import check_interpreter, check_working_directory

EXIT_FAILED, EXIT_USAGE, EXIT_INTERRUPTED = 1, 2, 130

#: The subcommands, the most used first, and what each does, so that `--help` need not import them.
COMMANDS = {
    "run": "Judge a DDP and write the report.",
    "list": "Print requirements or scenarios.",
    "explore": "Run composed trainings; shrink a failure to the simplest one.",
    "replay": "Run the scenario of a file again.",
    "report": "Pages, merges and diffs of finished reports.",
    "verify": "Check a certified report.",
    "sign": "Sign a certified report.",
    "doctor": "Check what this machine can run.",
    "smoke": "Check a backend's adapter, from its import to a training step.",
    "new": "Write a commented package to start your backend, device or DDP from.",
    "parity": "Compare a training step on N ranks with one process.",
    "bench": "Compare step times with torch's DDP.",
    "upstream": "Run torch's own DDP tests on a DDP.",
    "mutants": "Run DDPs that are wrong on purpose, and say which requirements notice.",
}
#: `<name>.py` defines each, but for what Python has a word for.
_MODULES = {"list": "listing"}


#: These write what they find into files, too; their exit codes are verdicts, whatever becomes of their output.
WITH_FILES = ("run",)


class UsageError(click.ClickException):
    """An error that the user can correct; click prints it as one paragraph without a traceback."""

    exit_code = EXIT_USAGE


class LazyGroup(click.Group):
    """Imports a subcommand when the user names it, and turns the harness's errors into exit codes."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names of the subcommands, the most used first."""
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import and return a subcommand."""
        if cmd_name not in COMMANDS:
            return None
        module = importlib.import_module(f"conformance.cli.{_MODULES.get(cmd_name, cmd_name)}")
        return instance(module.command, click.Command)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Import the subcommand, and only then let it find what the user names in the shell's folder."""
        name, command, rest = super().resolve_command(ctx, args)
        search_working_directory(name or "", rest)
        return name, command, rest

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write what each subcommand does."""
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))

    def invoke(self, ctx: click.Context) -> Any:
        """Run the subcommand; whatever becomes of its output, the exit code says what came of it."""
        output = LastingOutput(sys.stdout)
        with contextlib.redirect_stdout(output):
            try:
                check_interpreter()
                check_working_directory()
                return super().invoke(ctx)
            except ConformanceError as error:
                read = isinstance(error, ReportError | ScenarioError)  # what is quoted of a file breaks no line
                raise UsageError(printable(str(error), lines=not read)) from error
            except KeyboardInterrupt:
                say("Interrupted.", err=True)
                ctx.exit(EXIT_INTERRUPTED)
            finally:
                output.flush()
                if output.complaint:
                    say(output.complaint, err=True)
                    if ctx.invoked_subcommand not in WITH_FILES:
                        ctx.exit(EXIT_USAGE)


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(package_name="ddp-conformance")
def main() -> None:
    """Test which requirements a DistributedDataParallel implementation, a c10d backend or a device keeps.

    \b
    ddp-conformance run                           test ddp_impl, with torch's own DDP beside it
    ddp-conformance run --ddp my_pkg:MyDDP        test your DDP
    ddp-conformance run --backend my_pkg:backend  test a c10d backend or device
    ddp-conformance list                          print the requirements
    ddp-conformance replay report/failures/x.json run one failed scenario again
    ddp-conformance report html report -o x.html  write a finished report as an HTML page
    ddp-conformance doctor                        check what this machine can run
    ddp-conformance smoke --backend my_pkg:it     check a backend's adapter, up to the first failure
    ddp-conformance new backend acme              write a package to start from
    ddp-conformance parity my_training            compare a training step on N ranks with one process
    ddp-conformance upstream                      run torch's own DDP tests on ddp_impl
    ddp-conformance mutants                       test the suite: which requirements detect which bug?

    Ranks are processes on this machine, unless `run --attach` takes those of a launcher. They talk over the loopback
    interface and rendezvous through a file.
    """
