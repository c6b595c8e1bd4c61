"""Finds out what the DDP under test is without importing it here: a process of its own does, and says what it found.

An import is the subject's code. It may end the process, change torch, start threads or never return; the process that
judges must not depend on it. Run as a module, this is that other process.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
from functools import cache

from msgspec import Struct

from conformance.errors import SubjectError
from conformance.subjects.subject import KNOWN, Subject, get_subject, named
from conformance.workers.autopsy import death
from conformance.workers.channel import Channel, MessageError
from conformance.workers.interpreter import start_interpreter

#: How long an import may take; the largest take half a minute on a busy machine.
IMPORT_TIMEOUT_S = 120.0
_END_TIMEOUT_S = 5.0


class Found(Struct, frozen=True, tag=True):
    """What the text names: a subject, or why it names none."""

    subject: Subject | None
    error: str = ""


@cache
def find_subject(text: str) -> Subject:
    """Return the subject called `text`, as `get_subject` does, without importing its module in this process.

    Raises:
        SubjectError: as `get_subject`, or the import ends the process or takes too long.

    """
    subject = named(text)
    if subject in KNOWN.values():
        return subject
    module = subject.target.partition(":")[0]
    process, channel = start_interpreter(__name__, text, expects=Found, environment={})
    try:
        found: Found = channel.receive(IMPORT_TIMEOUT_S)
    except TimeoutError as error:
        raise SubjectError(f"DDP {text!r}: the import of {module} did not end within {IMPORT_TIMEOUT_S:g} s") from error
    except (EOFError, OSError, MessageError) as error:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_END_TIMEOUT_S)
        how = death(process.returncode) if process.returncode is not None else str(error) or "closed its connection"
        raise SubjectError(f"DDP {text!r}: the process that imported {module} {how}") from error
    finally:
        channel.close()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    if found.subject is None:
        raise SubjectError(found.error)
    return found.subject


def main(arguments: list[str]) -> None:
    """Tell the process at the other end of the file descriptor `arguments[0]` what `arguments[1]` names."""
    channel = Channel(socket.socket(fileno=int(arguments[0])), None)
    try:
        found = Found(get_subject(arguments[1]))
    except SubjectError as error:
        found = Found(None, str(error))
    except BaseException as error:
        found = Found(None, f"DDP {arguments[1]!r}: its import raised {type(error).__name__}")
    channel.send(found)
    os._exit(0)  # whatever threads the import has started


if __name__ == "__main__":
    main(sys.argv[1:])
