"""What every subcommand prints with: no terminal obeys what others wrote, nor does rich, which has markup."""

import unicodedata
from collections.abc import Iterator

import click
from rich.console import Console, ConsoleOptions, ConsoleRenderable, RenderableType, RenderHook
from rich.measure import Measurement
from rich.segment import Segment

_PIPED_WIDTH = 140


def printable(text: str, *, lines: bool = False) -> str:
    r"""Return `text` with an escape such as `\x1b` for what a terminal would obey, or show in another order.

    Line breaks are among that, unless `text` has several `lines`.
    """
    kept = "\n\t" if lines else ""
    return "".join(one if one.isprintable() or one in kept or not _is_obeyed(one) else _escape(one) for one in text)


def say(text: str, *, err: bool = False) -> None:
    """Print one line, on standard output or standard error."""
    click.echo(printable(text), err=err)


def make_console(*, stderr: bool = False) -> Console:
    """Return a console of the terminal's width; where that is no terminal, one that is wide enough for tables."""
    console = Console(stderr=stderr, markup=False, emoji=False, highlight=False)
    if not console.is_terminal:
        console.width = _PIPED_WIDTH
    console.push_render_hook(_Printable())
    return console


class _Printable(RenderHook):
    def process_renderables(self, renderables: list[ConsoleRenderable]) -> list[ConsoleRenderable]:
        return [_Shown(one) for one in renderables]


class _Shown:
    """Shows another renderable, whose text is printable."""

    def __init__(self, shown: RenderableType) -> None:
        self._shown = shown

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Segment]:
        for segment in console.render(self._shown, options):
            yield segment if segment.control else Segment(printable(segment.text, lines=True), segment.style)

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        return Measurement.get(console, options, self._shown)


def _is_obeyed(character: str) -> bool:
    category = unicodedata.category(character)
    return category.startswith("C") or category in ("Zl", "Zp")


def _escape(character: str) -> str:
    return character.encode("unicode_escape").decode("ascii")
