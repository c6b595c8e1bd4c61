"""Sentences of Markdown: how many words each has, so that a test can refuse those that are too long to read."""

from __future__ import annotations

import re
from collections.abc import Iterator

_NOT_PROSE = re.compile(r"^(```|~~~).*?^\1\s*$|<!--.*?-->", re.DOTALL | re.MULTILINE)
_NEW_BLOCK = re.compile(r"\s*(?:[-*]|\d+\.)\s|#|\s*\|")
_LINK = re.compile(r"!?\[([^\]]*)\]\([^)]*\)")
_END = re.compile(r"(?<=[.!?])[)*_\"]*\s+(?=\S)")
#: Ends that are no end of a sentence.
_ABBREVIATION = re.compile(r"\b(e\.g|i\.e|etc|vs)\.")


def sentences(page: str) -> Iterator[str]:
    """Yield the sentences of a page, without its code; code in backticks counts as one word, a cell as a paragraph."""
    for block in _blocks(_NOT_PROSE.sub("", page)):
        text = re.sub(r"`[^`]*`", "x", _LINK.sub(r"\1", block))
        yield from filter(None, _END.split(_ABBREVIATION.sub(r"\1", text)))


def num_words(sentence: str) -> int:
    """Return how many words a sentence has."""
    return len(sentence.split())


def _blocks(page: str) -> Iterator[str]:
    block: list[str] = []
    for line in [*page.splitlines(), ""]:
        code = line.startswith("    ") and not block
        if block and (not line.strip() or _NEW_BLOCK.match(line)):
            yield " ".join(" ".join(block).split())
            block = []
        if line.lstrip().startswith("|"):
            yield from (cell.strip() for cell in line.split("|"))
        elif line.strip() and not code:
            block.append(line)
