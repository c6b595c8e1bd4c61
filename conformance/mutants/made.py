"""What ranks load as a DDP with a mistake that a machine makes, or to write down which lines of it they execute.

Python asks `__getattr__` of this module for what it does not hold: a subject whose target is here has its DDP's own
class, and its processes a mistake in the code below. Each rank serves one subject only.
"""

import dataclasses
import functools
import importlib
import json
import os
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from conformance.mutants.mistakes import Mistake, make
from conformance.subjects.subject import Subject


def with_mistake(subject: Subject, mistake: Mistake) -> Subject:
    """Return the subject whose ranks make this mistake before they load it."""
    return _subject(subject, "mistake", mistake.module, str(mistake.number))


def traced(subject: Subject, file: Path, modules: Sequence[str]) -> Subject:
    """Return the subject whose ranks write into `file` the lines of `modules` that they execute: see `take_lines`."""
    return _subject(subject, "traced", str(file.absolute()), *modules)


def take_lines(file: Path) -> dict[str, list[int]]:
    """Return the lines by module that ranks have written into `file`, which they hold open, since the last call."""
    found: dict[str, set[int]] = {}
    for line in file.read_text(encoding="utf-8").splitlines() if file.exists() else ():
        module, _, number = line.partition(" ")
        found.setdefault(module, set()).add(int(number))
    if file.exists():
        os.truncate(file, 0)
    return {module: sorted(lines) for module, lines in found.items()}


def _subject(subject: Subject, *words: str) -> Subject:
    attribute = json.dumps((subject.target, *words)).encode().hex()  # what has dots is looked up part by part
    return dataclasses.replace(subject, target=f"{__name__}:{attribute}")


def __getattr__(name: str) -> Any:
    try:
        target, kind, *words = json.loads(bytes.fromhex(name))
    except ValueError:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}") from None
    module, _, attribute = target.partition(":")
    found = getattr(importlib.import_module(module), attribute)
    if kind == "mistake":
        _make_once(words[0], int(words[1]))
    else:
        _trace(words[0], tuple(words[1:]))
    return found


@functools.cache
def _make_once(module: str, number: int) -> None:
    make(importlib.import_module(module), number)


_seen: set[tuple[str, int]] = set()


def _trace(file: str, modules: tuple[str, ...]) -> None:
    """Trace this thread and those that it starts, from the next call on; each load of the DDP begins anew."""
    _seen.clear()
    _begin_tracing(file, modules)


@functools.cache
def _begin_tracing(file: str, modules: tuple[str, ...]) -> None:
    module_of = {importlib.import_module(name).__file__: name for name in modules}
    out = os.open(file, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC)

    def trace(frame: Any, *_: Any) -> Any:
        if (module := module_of.get(frame.f_code.co_filename)) is None:
            return None
        if (module, frame.f_lineno) not in _seen:
            _seen.add((module, frame.f_lineno))
            os.write(out, f"{module} {frame.f_lineno}\n".encode())
        return trace

    threading.settrace(trace)
    sys.settrace(trace)
