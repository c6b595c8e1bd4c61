"""Draws what a command printed as a picture of a terminal."""

from __future__ import annotations

import io
import re
from pathlib import Path

from rich.console import Console
from rich.text import Text

_COLUMNS = 100
_STYLES = ((r"\$ ", "bold"), (r"FAIL|regressed|.*: \d+ FAIL|.*Error: ", "red"), (r"PASS|ok |Every rung", "green"))
#: A font from another site would be a request for every reader; the viewer's own will do.
_REMOTE_FONTS = re.compile(r"@font-face \{.*?\}\s*", re.DOTALL)


def terminal_picture(text: str, name: str) -> str:
    """Return an SVG of `text`, whose first line is the command; `name` keeps its styles apart from other pictures'."""
    console = Console(record=True, width=_COLUMNS, file=io.StringIO(), force_terminal=True)
    for line in text.rstrip().splitlines():
        style = next((style for pattern, style in _STYLES if re.match(pattern, line)), "")
        console.print(Text(line, style=style))
    return _REMOTE_FONTS.sub("", console.export_svg(title="", unique_id=name))


def draw_terminals(folder: Path) -> tuple[Path, ...]:
    """Write beside each `*.txt` below `folder` the picture of it, take the text away, and return the pictures."""
    pictures = []
    for file in sorted(folder.rglob("*.txt")):
        picture = file.with_suffix(".svg")
        picture.write_text(terminal_picture(file.read_text(encoding="utf-8"), file.stem), encoding="utf-8")
        file.unlink()
        pictures.append(picture)
    return tuple(pictures)
