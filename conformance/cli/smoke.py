"""`ddp-conformance smoke`: checks a backend's adapter, before `run` judges anything with it."""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING

import click
from rich.console import Console
from rich.text import Text

from conformance.cli import EXIT_FAILED
from conformance.cli.interrupt import interrupted_once
from conformance.errors import present
from conformance.report.console import make_console, say
from conformance.report.lines import broken, print_evidence, print_sentence

if TYPE_CHECKING:
    from conformance.smoke.ladder import Footing

_STYLES = {
    "ok": "green",
    "undeclared": "yellow",
    "absent": "dim",
    "unclean": "yellow",
    "lacking": "yellow",
    "gloo's": "yellow",
    "BROKEN": "bold red",
}
#: The module that a declaration is to be saved as: beside the DDP, not in it, which shall not need this suite.
_DECLARATION = "declared_ddp"
_ADVICE = (
    f"A class counts as having every capability. Declare what it lacks: save these lines as {_DECLARATION}.py in this"
    " folder."
)
_WIDTH_OF_CODE = 79
_WIDTH_OF_WORD, _WIDTH_OF_RUNG = 12, 30


@click.command("smoke")
@click.option(
    "--backend", default="gloo", show_default=True, help="gloo, nccl, an installed backend's name, or module:attr."
)
@click.option(
    "--ddp", default="ddp_impl", show_default=True, help="DDP of the last rung: ddp_impl, torch, or module:Class."
)
@click.option(
    "--world-size",
    type=click.IntRange(min=1),
    metavar="N",
    help="Number of ranks.  [default: 3, or the backend's limit]",
)
@click.option(
    "--deadline",
    "deadline_s",
    type=click.FloatRange(min=0, min_open=True),
    default=30.0,
    show_default=True,
    metavar="SECONDS",
    help="Deadline of one rung.",
)
@click.option("--keep-going", is_flag=True, help="Try all rungs of the backend, and explain every one that breaks.")
def command(backend: str, ddp: str, world_size: int | None, deadline_s: float, *, keep_going: bool) -> None:
    """Check a backend's adapter, rung by rung, and stop at the first rung that breaks.

    \b
    ddp-conformance smoke --backend my_pkg.adapter:BACKEND
    ddp-conformance smoke --backend my_pkg.adapter:BACKEND --keep-going
    ddp-conformance smoke --ddp my_pkg:MyDDP

    Each rung checks one thing: the import, the rendezvous, one collective, one training step. Its data encode which
    rank sent each value to which rank. For a broken rung, the command prints the rank, the expected and the received
    values, and what to look at. It also tries capabilities that the backend does not declare and reports whether they
    work; these cannot break the ladder. Nor can a mistake of torch's own gloo: it is named, and the climb goes on. Of a
    DDP that is named by its class it tries every capability, and ends with the declaration that leaves out what it
    lacks. Exits with 1 when a rung breaks.
    """
    say(f"Checking {backend} with {ddp} ...", err=True)  # at once: torch is imported next

    from conformance.smoke.ladder import Status, climb

    console = make_console()
    lacking: list[str] = []
    breakages: list[Footing] = []
    gloos = 0
    with interrupted_once():
        for footing in climb(backend, ddp, world_size=world_size, deadline_s=deadline_s, keep_going=keep_going):
            _print_footing(console, footing)
            if footing.status is Status.LACKING:
                lacking.append(footing.rung)
            gloos += footing.status is Status.GLOOS
            if footing.status is Status.BROKEN:
                breakages.append(footing)
    for footing in breakages:
        _print_breakage(console, footing, names=keep_going)
    if breakages:
        click.get_current_context().exit(EXIT_FAILED)
    if lacking:
        console.print()
        print_sentence(console, _ADVICE)
        console.print(f"\n{_declaration(ddp, lacking)}", soft_wrap=True)
    options = _options(backend, f"{_DECLARATION}:SUBJECT" if lacking else ddp)
    held = f"Every rung holds but {gloos}, which torch's gloo breaks." if gloos else "Every rung holds."
    print_evidence(console, f"{held} {_next(backend, options)}")


def _next(backend: str, options: str) -> str:
    """Return what to type next: of a backend that is not this suite's own its own requirements come first."""
    on_ddp = f"few scenarios, which find most mistakes:\n    ddp-conformance run --profile quick{options}"
    and_all = f"Then all that every DDP owes:\n    ddp-conformance run --profile core{options}"
    if backend == "gloo":
        return f"Next, {on_ddp}\n{and_all}"
    by_itself = f"ddp-conformance run --profile backend --fail-fast --backend {backend}"
    return (
        "Every dtype and reduction that it declares was tried once in each operation. Next, up to the first mistake:"
        f"\n    {by_itself}\nThen a DDP on it, {on_ddp}\n{and_all}"
    )


def _declaration(ddp: str, lacking: list[str]) -> str:
    """Return what to save, and to name after --ddp, for a class that lacks these capabilities."""
    left_out = ", ".join(f'"{name}"' for name in lacking)
    names = textwrap.fill(f"{left_out},", _WIDTH_OF_CODE, initial_indent=" " * 8, subsequent_indent=" " * 8)
    return (
        "from conformance.subjects.subject import CAPABILITIES, Subject\n\n"
        "SUBJECT = Subject(\n"
        f'    "{ddp.rpartition(":")[2]}",\n'
        f'    "{ddp}",\n'
        f"    CAPABILITIES\n    - {{\n{names}\n    }},\n"
        ")\n"
    )


def _options(backend: str, ddp: str) -> str:
    given = (("--backend", backend, "gloo"), ("--ddp", ddp, "ddp_impl"))
    return "".join(f" {option} {value}" for option, value, default in given if value != default)


def _print_footing(console: Console, footing: Footing) -> None:
    word = footing.status.value
    text = footing.detail if word != "ok" else f"{footing.asks}{f' ({footing.detail})' if footing.detail else ''}"
    space = "\N{NO-BREAK SPACE}" if console.is_terminal else " "
    duration = f"  {footing.duration_ms:.0f}{space}ms" if footing.duration_ms else ""
    line = f"{word:<{_WIDTH_OF_WORD}}{footing.rung:<{_WIDTH_OF_RUNG}}{text}{duration}"
    if console.is_terminal:  # off it a rung is a line, for those who search
        line = broken(console, line, _WIDTH_OF_WORD + _WIDTH_OF_RUNG)
    shown = Text(line)
    shown.stylize(_STYLES[word], 0, len(word))
    shown.stylize("dim", len(line) - len(duration))
    console.print(shown, soft_wrap=True)


def _print_breakage(console: Console, footing: Footing, *, names: bool) -> None:
    breakage = present(footing.breakage)
    rows = (
        ("rung", footing.rung if names else ""), ("asked", footing.asks), ("do", breakage.advice),
        ("evidence", breakage.evidence),
    )  # fmt: skip
    console.print()
    for label, text in rows:
        if text:
            for number, line in enumerate(text.splitlines()):
                label_of_line = label if number == 0 else ""
                print_sentence(console, f"{label_of_line:<{_WIDTH_OF_WORD}}{line}", indent=_WIDTH_OF_WORD)
