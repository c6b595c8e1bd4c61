"""Finds out what the DDP and the backend under test are without importing them here.

An import is a stranger's code. It may end the process, change torch, start threads or never return; the process that
judges must not depend on it. So another process, which has imported torch, forks one for each question, and that one
imports the module and says what it found. Run as a module, this is that other process.
"""

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterable
from functools import cache
from typing import Any, NoReturn

from msgspec import Struct

from conformance import plugins
from conformance.backends.backend import BUILT_IN, Backend, get_backend
from conformance.errors import BackendError, ConformanceError, SubjectError
from conformance.programs.registry import get_program
from conformance.scenario import Scenario
from conformance.subjects.subject import KNOWN, Subject, by_itself, get_subject, named
from conformance.waiting.limits import IMPORT_TIMEOUT_S, START_TIMEOUT_S
from conformance.workers.autopsy import death
from conformance.workers.channel import Channel, MessageError
from conformance.workers.forked import die_with, end_process, lead_own_group, signal_group
from conformance.workers.interpreter import start_interpreter


class Question(Struct, frozen=True):
    """What does this text name? `path` is where the asking process looks for modules."""

    text: str
    backend: bool
    path: tuple[str, ...]


class Description(Struct, frozen=True):
    """What a `Backend` says of itself here, as data."""

    name: str
    device_type: str
    capabilities: frozenset[str]
    most_ranks: int | None
    device_bytes: int | None
    simulated: bool
    unavailable: str


class Found(Struct, frozen=True):
    """The subject or backend, or the error of the look-up, or how the process that looked it up has ended."""

    subject: Subject | None = None
    backend: Description | None = None
    error: str = ""
    ended: str = ""


@cache
def find_subject(text: str) -> Subject:
    """Return the subject called `text`, as `get_subject` does, without importing its module in this process.

    Raises:
        SubjectError: as `get_subject`, or the import ends the process or takes too long.

    """
    subject = named(text)
    if subject in KNOWN.values():
        return subject
    found = _ask(text, backend=False)
    if found.subject is None:
        raise SubjectError(found.error or f"DDP {text!r}: {_import_of(subject.target, found.ended)}")
    return found.subject


def find_judged(scenarios: Iterable[Scenario], ddp: str, backend: str) -> tuple[Subject, Backend]:
    """Return whom `scenarios` judge, and the backend: the DDP, or the backend by itself where no program wraps one.

    Raises as `find_subject` and `find_backend` do.
    """
    over = find_backend(backend)
    alone = all(get_program(one.program).without_ddp for one in scenarios)
    return by_itself(over.name) if alone else find_subject(ddp), over


@cache
def find_backend(text: str) -> Backend:
    """Return the backend called `text`, as `get_backend` does, without importing a vendor's module in this process.

    The result has its name, limits and capabilities; only ranks can call its `device` and `create`.

    Raises:
        BackendError: as `get_backend`, or the import ends the process or takes too long.

    """
    is_installed = any(plugins.named(group, text) for group in plugins.GROUPS_OF_BACKENDS)
    if text in BUILT_IN or (":" not in text and not is_installed):
        return get_backend(text)
    found = _ask(text, backend=True)
    told = found.backend
    if told is None:
        raise BackendError(found.error or f"backend {text!r}: {_import_of(text, found.ended)}")
    return Backend(
        told.name,
        told.device_type,
        told.capabilities,
        max_world_size=lambda: told.most_ranks,
        unavailable=lambda: told.unavailable,
        device=_only_in_ranks,
        create=_only_in_ranks,
        device_bytes=lambda: told.device_bytes,
        simulated=told.simulated,
        source=text,
    )


def _import_of(target: str, ended: str) -> str:
    return f"the process that imported {target.partition(':')[0]} {ended}"


def _only_in_ranks(*_: Any) -> NoReturn:
    raise BackendError("only a rank imports the backend's module and calls its functions")


# ------------------------------------------------------------------------------------------------- the asking process


class _Server:
    """The other process, started by the first question; a new one where it was lost."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None

    def ask(self, question: Question) -> Found:
        if self._process is None:
            self._process, self._channel = start_interpreter(__name__, expects=Found, environment={})
        try:
            self._channel.send(question)
            found: Found = self._channel.receive(START_TIMEOUT_S + IMPORT_TIMEOUT_S)
        except (EOFError, OSError, MessageError) as error:
            self._channel.close()
            self._process.kill()
            self._process.wait()
            self._process = None
            return Found(ended=f"was lost: {error or 'it closed its connection'}")
        return found


_server = _Server()


def _ask(text: str, *, backend: bool) -> Found:
    return _server.ask(Question(text, backend, tuple(entry or os.getcwd() for entry in sys.path)))


# ------------------------------------------------------------------------------------------------- the other process


def main(arguments: list[str]) -> None:
    """Answer the questions of the process at the other end of the file descriptor `arguments[0]`, until it is gone."""
    import torch.nn.parallel  # noqa: F401 - once, and not for every question

    channel = Channel(socket.socket(fileno=int(arguments[0])), Question)
    while True:
        try:
            question = channel.receive(None)
        except (EOFError, OSError):
            return
        channel.send(_in_a_process_of_its_own(question))


def _in_a_process_of_its_own(question: Question) -> Found:
    ours, theirs = (Channel(one, Found) for one in socket.socketpair())
    server = os.getpid()
    pid = os.fork()
    lead_own_group(pid)
    if pid == 0:
        try:
            die_with(server)
            sys.path[:] = question.path
            theirs.send(_found(question))
        finally:
            end_process(1)  # whatever threads the import has started
    theirs.close()
    found, ended = None, ""
    try:
        found = ours.receive(IMPORT_TIMEOUT_S)
    except TimeoutError:
        ended = f"did not end within {IMPORT_TIMEOUT_S:g} s"
    except (EOFError, OSError, MessageError):
        ended = ""
    ours.close()
    if found is not None or ended:
        signal_group(pid, signal.SIGKILL)
    _, status = os.waitpid(pid, 0)
    signal_group(pid, signal.SIGKILL)  # what the import has started
    return found or Found(ended=ended or str(death(os.waitstatus_to_exitcode(status))))


def _found(question: Question) -> Found:
    what: Callable[[str], Found] = _as_backend if question.backend else _as_subject
    try:
        return what(question.text)
    except ConformanceError as error:
        return Found(error=str(error))
    except BaseException as error:
        kind = "backend" if question.backend else "DDP"
        return Found(error=f"{kind} {question.text!r}: its import raised {type(error).__name__}")


def _as_subject(text: str) -> Found:
    return Found(get_subject(text))


def _as_backend(text: str) -> Found:
    one = get_backend(text)
    try:
        unavailable, most_ranks, device_bytes = one.unavailable(), one.max_world_size(), one.device_bytes()
    except Exception as error:
        unavailable, most_ranks, device_bytes = f"asking it raised {type(error).__name__}: {error}", None, None
    told = Description(
        one.name, one.device_type, one.capabilities, most_ranks, device_bytes, one.simulated, unavailable
    )
    return Found(backend=told)


if __name__ == "__main__":
    main(sys.argv[1:])
