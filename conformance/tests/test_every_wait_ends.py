"""Whoever falls silent, and wherever in its messages, the run ends in time and says who it was.

The boundaries are counted: the bytes of every message that a rank, a zygote or an agent sends are cut at its beginning,
in its header, after its header, in its middle and before its last byte.
"""

import logging
import os
import signal
import socket
import threading
from collections.abc import Callable, Mapping
from typing import Any

import msgspec
import pytest

from conformance.backends.gloo import GLOO
from conformance.errors import ConformanceError
from conformance.observation import Ending, Observation
from conformance.scenario import Scenario, Step
from conformance.subjects.subject import KNOWN
from conformance.tests.processes import all_end, processes_under
from conformance.workers import channel as channel_module
from conformance.workers.attached_controller import AttachedController
from conformance.workers.attached_messages import Beat, FromAgent, Hello, Reply, RunOrder, ToAgent
from conformance.workers.channel import Channel, MessageError, pair
from conformance.workers.controller import Controller
from conformance.workers.messages import Answer, Ended, Forked, FromRank, FromZygote, Job, Preloaded, Ready

TORCH = KNOWN["torch"]
STEP = Scenario("waits/WAIT-01/step", ("WAIT-01",), "train", schedule=(Step(),), deadline_s=2.0)

ENDED = Observation(0, Ending("returned"))
MESSAGES: list[tuple[Any, Any]] = [
    (FromRank, Ready()),
    (FromRank, Answer(1, ENDED)),
    (FromZygote, Preloaded()),
    (FromZygote, Forked(0, (1, 2))),
    (FromZygote, Ended(0, 1, -9)),
    (FromAgent, Hello(0, "host-a")),
    (FromAgent, Beat(1)),
    (FromAgent, Reply(1, ENDED, True)),
]
PLACES = ("nothing", "half a header", "the header", "half", "all but a byte")


def _cut(message: Any, place: str) -> bytes:
    data = msgspec.msgpack.encode(message)
    whole = len(data).to_bytes(4, "little") + data
    return whole[: {"nothing": 0, "half a header": 2, "the header": 4, "half": len(whole) // 2}.get(place, -1)]


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize(("expects", "message"), MESSAGES, ids=lambda value: type(value).__name__)
def test_no_message_is_waited_for_beyond_the_deadline(expects: Any, message: Any, place: str) -> None:
    ours, theirs = socket.socketpair()
    channel = Channel(ours, expects)
    theirs.sendall(_cut(message, place))
    assert channel.arrived() is None
    with pytest.raises(TimeoutError, match="no message" if place == "nothing" else "half of a message, and no more"):
        channel.receive(0.05)
    theirs.sendall(
        (len(data := msgspec.msgpack.encode(message)).to_bytes(4, "little") + data)[len(_cut(message, place)) :]
    )
    assert channel.receive(1.0) == message, "and what was late is whole"
    theirs.close()
    with pytest.raises(EOFError):
        channel.receive(1.0)


def test_who_does_not_read_is_not_waited_for_either() -> None:
    ours, theirs = pair(None, None)
    with pytest.raises(TimeoutError):
        ours.send(bytes(50_000_000), 0.1)
    theirs.close()


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"\xff\xff\xff\xff", "announced a message of 4294967295 bytes"),
        (b"\x05\x00\x00\x00xxxxx", "not a message that is expected here"),
        (b"\x00\x00\x00\x00", "not a message that is expected here"),
    ],
    ids=["too long", "rubbish", "empty"],
)
def test_what_is_no_message_is_an_error(data: bytes, says: str) -> None:
    ours, theirs = socket.socketpair()
    theirs.sendall(data)
    with pytest.raises(MessageError, match=says):
        Channel(ours, FromRank).receive(1.0)


# --------------------------------------------------------------------------------- real processes, stopped by a signal


class Boundaries:
    """Counts the messages that this process sends and receives, and does something at one of them."""

    def __init__(self, at: int, act: Callable[[], None]) -> None:
        self.seen: list[str] = []
        self._at = at
        self._act = act

    def note(self, what: str) -> None:
        self.seen.append(what)
        if len(self.seen) == self._at + 1:
            self._act()


@pytest.fixture
def boundaries(monkeypatch: pytest.MonkeyPatch) -> Callable[[int, Callable[[], None]], Boundaries]:
    def install(at: int, act: Callable[[], None]) -> Boundaries:
        counted = Boundaries(at, act)
        send, arrived = Channel.send, Channel.arrived

        def noted_send(self: Channel, message: object, *arguments: Any, **options: Any) -> None:
            counted.note(f"before sending {type(message).__name__}")
            send(self, message, *arguments, **options)
            counted.note(f"after sending {type(message).__name__}")

        def noted_arrived(self: Channel) -> Any:
            if (message := arrived(self)) is not None:
                counted.note(f"after receiving {type(message).__name__}")
            return message

        monkeypatch.setattr(channel_module.Channel, "send", noted_send)
        monkeypatch.setattr(channel_module.Channel, "arrived", noted_arrived)
        return counted

    return install


def _two_scenarios(controller: Controller) -> list[Mapping[int, Observation]]:
    """Run a scenario on new ranks, and one on ranks of another world size, which must be forked."""
    return [controller.run(STEP, TORCH), controller.run(STEP.replace(world_size=1), TORCH)]


#: Messages of `_two_scenarios` by this process's count: sending counts twice, before and after.
NUM_BOUNDARIES = 18


#: Every one of them; one is enough for every push.
STOPPED = tuple(
    pytest.param(at, who, marks=() if (at, who) == (8, "rank") else pytest.mark.nightly)
    for at in range(NUM_BOUNDARIES)
    for who in ("zygote", "rank")
)


@pytest.mark.parametrize(("at", "who"), STOPPED)
def test_a_process_that_is_stopped_at_any_message_holds_up_nothing(
    boundaries: Any, tmp_path: Any, caplog: pytest.LogCaptureFixture, who: str, at: int
) -> None:
    """The run ends within its deadlines and says so, and the next scenario runs."""
    caplog.set_level(logging.WARNING)
    stopped: list[int] = []

    def stop() -> None:
        processes = processes_under(tmp_path)
        chosen = processes[:1] if who == "zygote" else processes[-1:]
        stopped.extend(chosen)
        for pid in chosen:
            os.kill(pid, signal.SIGSTOP)

    with Controller(GLOO, work_dir=tmp_path, start_timeout_s=3.0) as controller:
        controller._zygote.await_ready()
        boundaries(at, stop)
        seen = _two_scenarios(controller)
        fates = [str(one.fate) for observations in seen for one in observations.values()]
        told = caplog.text + " ".join(fates)
        assert "stopped" in told or set(fates) == {"returned"}, told
        assert {str(one.fate) for one in controller.run(STEP, TORCH).values()} == {"returned"}
    # Ranks of a zygote that was killed die with it by the kernel's signal, which nobody here can wait for.
    assert all_end(processes_under(tmp_path), within_s=5)
    assert len(stopped) <= 1


@pytest.mark.nightly
def test_the_boundaries_are_counted(boundaries: Any) -> None:
    with Controller(GLOO) as controller:
        controller._zygote.await_ready()
        counted = boundaries(-1, lambda: None)
        seen = _two_scenarios(controller)
        assert {one.fate.kind for observations in seen for one in observations.values()} == {"returned"}
        assert len(counted.seen) == NUM_BOUNDARIES, counted.seen


# ---------------------------------------------------------------------------------------------------------- agents


@pytest.mark.parametrize("place", PLACES)
def test_an_agent_that_falls_silent_in_its_reply_is_given_up(place: str) -> None:
    ours, theirs = pair(FromAgent, ToAgent)

    def agent() -> None:
        theirs.send(Hello(0, "host-a"))
        while True:
            try:
                message = theirs.receive(None)
            except (EOFError, OSError):
                return
            if isinstance(message, RunOrder):
                theirs._socket.send(_cut(Reply(message.number, ENDED, True), place))

    thread = threading.Thread(target=agent, daemon=True)
    thread.start()
    with AttachedController(GLOO, [ours], "127.0.0.1") as controller:
        seen = controller.run(STEP.replace(world_size=1, deadline_s=0.5), TORCH)
        assert seen[0].fate.kind == "hung"
        assert "unheard of" in seen[0].fate.detail
        with pytest.raises(ConformanceError, match="0 of 1 are left"):
            controller.run(STEP.replace(world_size=1), TORCH)
    thread.join(5)


def test_a_rank_s_silence_is_of_its_own_job(tmp_path: Any) -> None:
    """An answer to another job is an error of that rank; the answers after it count for the right jobs."""
    ours, theirs = pair(FromRank, Job)
    theirs.send(Answer(1, ENDED))
    from conformance.workers.answers import answer

    with pytest.raises(MessageError, match="an answer of rank 0 to job 1"):
        answer(ours, 0, 2)
    theirs.send(Answer(2, ENDED))
    assert isinstance(answer(ours, 0, 2), Answer)
