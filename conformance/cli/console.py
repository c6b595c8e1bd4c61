"""The console that every subcommand prints to."""

from __future__ import annotations

from rich.console import Console

_PIPED_WIDTH = 140


def make_console() -> Console:
    """Return a console of the terminal's width; where stdout is no terminal, one that is wide enough for tables."""
    console = Console()
    return console if console.is_terminal else Console(width=_PIPED_WIDTH)
