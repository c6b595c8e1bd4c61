"""Formats explanations of failures: which ranks differ, where, and how to reproduce it."""

import textwrap
from collections.abc import Iterable, Sequence

from conformance.verdict import Finding

_INDENT = " " * 6


def let_then(lets: Iterable[str], thens: Iterable[str], notes: Iterable[str] = ()) -> str:
    """Return `Let A = ... / Then ...`, and the notes below."""
    return "\n".join([*_labelled("Let", lets), *_labelled("Then", thens), *notes])


def explain(
    finding: Finding, scenario_id: str, world_size: int, seed: int, *, subject: str, backend: str, requirement: str,
    statement: str,
) -> str:  # fmt: skip
    """Return the whole text about one finding, headed by an id of a `requirement` and its sentence, if there is one."""
    lines = [
        f"{finding.verdict.value}  {requirement}  {statement or finding.summary}",
        f"{_INDENT}{scenario_id}",
        f"{_INDENT}subject={subject} backend={backend} world={world_size} seed={seed}",
    ]
    if statement and finding.summary:
        lines.append(f"{_INDENT}{finding.summary}")
    return "\n".join([*lines, finding.explanation] if finding.explanation else lines)


def block(lines: list[str]) -> str:
    """Return the lines indented, to be quoted below a sentence."""
    return textwrap.indent("\n".join(lines), _INDENT)


def shorten(text: str, width: int = 160) -> str:
    """Return the first line of a message, cut to `width`; with the second line if the first ends in a colon."""
    first, *rest = text.strip().splitlines() or [""]
    if first.endswith(":") and rest:
        first = f"{first} {rest[0].strip()}"
    return first if len(first) <= width else f"{first[: width - 4].rstrip()} ..."


def counted(number: int, noun: str, ending: str = "s") -> str:
    """Return e.g. `1 scenario` or `3 scenarios`."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}{ending}"


def some(names: Sequence[str], most: int = 5) -> str:
    """Return the first `most` names and the number of the others: `a, b and 3 more`."""
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def ranks(numbers: Iterable[int]) -> str:
    """Return `no rank`, `rank 1`, `ranks 0 and 2` or `ranks 0, 1 and 3`."""
    names = [str(number) for number in sorted(numbers)]
    if not names:
        return "no rank"
    if len(names) == 1:
        return f"rank {names[0]}"
    return f"ranks {', '.join(names[:-1])} and {names[-1]}"


def _labelled(label: str, lines: Iterable[str]) -> list[str]:
    return [f"{label if number == 0 else '':<6}{line}" for number, line in enumerate(lines)]
