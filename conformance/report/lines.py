"""Lines of text on a console: sentences are broken between words, what is there to be copied is not."""

import textwrap

from rich.console import Console
from rich.text import Text

from conformance.report.console import printable

#: How lines begin that are there to be copied.
_COPIED = ("Replay", 'File "', "ddp-conformance ")
#: Sentences are broken after so many columns off a terminal, in a CI log say; paths and commands are not.
_WIDTH_OF_LOGS = 100
_EVIDENCE_INDENT = 6  # that of the lines below `Let   A = ...`


def print_evidence(console: Console, text: str) -> None:
    """Print the text of a failure; its lines are broken between words, below their beginning."""
    for line in text.splitlines():
        print_sentence(console, line, indent=len(line) - len(line.lstrip()) or _EVIDENCE_INDENT)


def print_sentence(console: Console, text: str, *, indent: int = 0) -> None:
    """Print `text`, broken between words; what follows the first break is indented."""
    console.print(Text(broken(console, text, indent)), soft_wrap=True)


def broken(console: Console, line: str, indent: int) -> str:
    """Return `line` broken between words where the console ends; what follows the first break is indented.

    A command stays one line, however long, and so does a place in a file: they are there to be copied.
    """
    line = printable(line)
    width = console.width if console.is_terminal else min(console.width, _WIDTH_OF_LOGS)
    if len(line) <= width or line.lstrip().startswith(_COPIED):
        return line
    return textwrap.fill(line, width, subsequent_indent=" " * indent, break_on_hyphens=False, break_long_words=False)
