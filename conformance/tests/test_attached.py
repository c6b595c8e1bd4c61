"""Ranks that a launcher has placed: agents and their controller, links that fall silent, and torchrun itself."""

import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
from torch._C._distributed_c10d import HashStore

from conformance.backends.gloo import GLOO
from conformance.checkers.registry import get_checker
from conformance.errors import ConformanceError
from conformance.recorder.flight_record import LastSeen
from conformance.report.read import read_report
from conformance.scenario import Fault, Scenario, Step
from conformance.subjects.subject import KNOWN
from conformance.tests.busy_machine import at_this_load
from conformance.tests.evidence_by_hand import collective, ended, evidence_of
from conformance.waiting.limits import LOST_S
from conformance.workers import attached_agent, attached_controller
from conformance.workers.attached_agent import Agent
from conformance.workers.attached_controller import AttachedController
from conformance.workers.attached_messages import (
    Beat,
    Challenge,
    Forget,
    FromAgent,
    Hello,
    Ping,
    Proof,
    RunOrder,
    ToAgent,
)
from conformance.workers.attached_place import Door, Place, agree_on_secret, interface_of, knock, place_of
from conformance.workers.channel import Channel, pair

TRAIN = Scenario("gradients/GRAD-01/attached", ("GRAD-01",), "train", schedule=(Step(), Step()), deadline_s=10.0)
OURS = KNOWN["ddp_impl"]
_PROOF = msgspec.msgpack.encode(Proof(bytes(32)))
#: What a controller that does not know the secret may say, as it travels.
CHALLENGE = b"".join(
    len(data).to_bytes(4, sys.byteorder) + data for data in (msgspec.msgpack.encode(Challenge(bytes(32))), _PROOF)
)


@pytest.fixture(scope="module")
def attached() -> Iterator[AttachedController]:
    """Yield the controller of two agents, which are threads of this process with zygotes of their own."""
    ours, theirs = zip(*(pair(FromAgent, ToAgent) for _ in range(2)), strict=True)
    threads = [threading.Thread(target=_serve, args=(theirs[index], index), daemon=True) for index in range(2)]
    for thread in threads:
        thread.start()
    with AttachedController(GLOO, ours, "127.0.0.1") as controller:
        yield controller
    for thread in threads:
        thread.join(at_this_load(10))
        assert not thread.is_alive()


def _serve(channel: Channel, index: int) -> None:
    place = Place(index, 2, index, f"host-{'ab'[index]}", "127.0.0.1")
    Agent(
        channel, place, ("conformance.tests.worker_programs",), {"GLOO_SOCKET_IFNAME": interface_of("127.0.0.1")}
    ).serve()


def test_ranks_train_together_and_stay_warm(attached: AttachedController) -> None:
    for _ in range(2):
        seen = attached.run(TRAIN, OURS)
        assert [(one.rank, one.fate.kind, one.host) for one in seen.values()] == [
            (0, "returned", "host-a"),
            (1, "returned", "host-b"),
        ]
        assert seen[0].facts.keys() == seen[1].facts.keys() != set()
        assert len(attached._pools) == 1


def test_a_killed_rank_is_named_and_the_next_scenario_runs(attached: AttachedController) -> None:
    killed = attached.run(TRAIN.replace(faults=(Fault(rank=1, kind="kill", at="backward"),)), OURS)
    assert (killed[1].fate.kind, killed[1].fate.code, killed[1].host) == ("killed", 9, "host-b")
    assert killed[1].phase == "backward"
    assert killed[0].fate.kind in ("raised", "abandoned")
    assert {one.fate.kind for one in attached.run(TRAIN, OURS).values()} == {"returned"}


def test_a_rank_is_not_waited_for_when_one_on_another_host_has_raised(attached: AttachedController) -> None:
    """It waits for that one in a collective, and hears nothing of it: the process of that one lives."""
    raises = TRAIN.replace(program="workers/raise", arguments={"ranks": [1], "meet": True}, deadline_s=5.0)
    assert [one.fate.kind for one in attached.run(raises, OURS).values()] == ["abandoned", "raised"]


def test_a_stopped_rank_hangs_both_and_both_have_a_stack(attached: AttachedController) -> None:
    stop = Fault(rank=0, kind="stop", at="collective", occurrence=3)
    seen = attached.run(TRAIN.replace(faults=(stop,), deadline_s=2.0), OURS)
    assert [one.fate.kind for one in seen.values()] == ["hung", "hung"]
    assert "stopped by a signal" in seen[0].fate.detail
    assert all(one.stack and one.history for one in seen.values())


@pytest.mark.nightly
def test_a_rank_that_waits_for_a_slow_one_on_another_host_has_as_long_as_that(attached: AttachedController) -> None:
    """Its own agent sees no progress, and is told of the other's."""
    deadline_s = at_this_load(1.0)
    arguments = {"times": 20, "seconds": deadline_s / 8}
    waits = TRAIN.replace(program="workers/wait_for_the_last", arguments=arguments, deadline_s=deadline_s)
    attached.run(TRAIN, OURS)
    assert {rank: str(one.fate) for rank, one in attached.run(waits, OURS).items()} == {0: "returned", 1: "returned"}


def test_ranks_in_doubt_are_replaced(attached: AttachedController) -> None:
    idle = TRAIN.replace(program="workers/idle")
    before = {one.facts["pid"] for one in attached.run(idle, OURS).values()}
    attached.run(TRAIN.replace(program="workers/forget", arguments={"ranks": [0]}), OURS)
    assert before.isdisjoint(one.facts["pid"] for one in attached.run(idle, OURS).values())


def test_a_smaller_world_is_spread_and_a_larger_one_is_refused(attached: AttachedController) -> None:
    assert attached.num_ranks == 2
    assert [one.host for one in attached.run(TRAIN.replace(world_size=1), OURS).values()] == ["host-a"]
    with pytest.raises(ConformanceError, match="3 ranks are needed, and 2 of 2 are left"):
        attached.run(TRAIN.replace(world_size=3), OURS)


SECRET = b"0123456789abcdef"
ALONE = Place(0, 1, 0, "host-a", "127.0.0.1")


def test_strangers_at_the_door_hold_nobody_up() -> None:
    """Not those who say nothing, nor those who say too much, nor those with another secret."""
    store = HashStore()
    door = Door(ALONE, store, SECRET)
    address, port = json.loads(store.get("ddp_conformance/controller"))
    silent, rude, greedy = (socket.create_connection((address, port)) for _ in range(3))
    rude.sendall(b"GET / HTTP/1.1\r\n\r\n")
    greedy.sendall(b"\xff\xff\xff\x00" + bytes(5000))
    refused: list[str] = []

    def forge() -> None:
        try:
            knock(store, b"another secret that is long enough")
        except ConformanceError as error:
            refused.append(str(error))

    forger = threading.Thread(target=forge)
    forger.start()
    agent = threading.Thread(target=lambda: knock(store, SECRET)[0].send(Hello(0, "host-a")))
    agent.start()
    (channel,) = door.admit(1)  # before any of them has been given up
    assert channel.receive(5.0) == Hello(0, "host-a")
    agent.join()
    for one in (silent, rude, greedy, door):
        one.close()
    forger.join()
    assert len(refused) == 1
    assert "has every process the same DDP_CONFORMANCE_SECRET?" in refused[0]


def test_an_agent_takes_no_orders_from_who_does_not_know_the_secret() -> None:
    """Whoever writes the controller's address into the store is none yet."""
    store = HashStore()
    stranger = Door(ALONE, store, b"what a stranger made up")
    admitting = threading.Thread(target=lambda: stranger._socket.accept()[0].sendall(CHALLENGE), daemon=True)
    admitting.start()
    with pytest.raises(ConformanceError, match="cannot join the controller at "):
        knock(store, SECRET)
    stranger.close()


def test_the_secret_comes_from_the_environment_a_file_or_the_host(tmp_path: Path) -> None:
    store, first, second = HashStore(), ALONE, Place(1, 2, 1, "host-a", "127.0.0.1")
    text = "a secret of this cluster"
    assert agree_on_secret(first, store, {"DDP_CONFORMANCE_SECRET": text}).text == text.encode()
    file = tmp_path / "secret"
    file.write_text(text + "\n")
    file.chmod(0o600)
    assert agree_on_secret(second, store, {"DDP_CONFORMANCE_SECRET_FILE": str(file)}).text == text.encode()
    file.chmod(0o644)
    with pytest.raises(ConformanceError, match="only you can read"):
        agree_on_secret(first, store, {"DDP_CONFORMANCE_SECRET_FILE": str(file)})
    with pytest.raises(ConformanceError, match="at least 16 characters, got 3"):
        agree_on_secret(first, store, {"DDP_CONFORMANCE_SECRET": "abc"})
    near = [replace(place, one_host=True) for place in (first, second)]
    drawn = [agree_on_secret(place, store, {}) for place in near]
    assert drawn[0].text == drawn[1].text
    assert drawn[0].text not in store.get("ddp_conformance/secret")  # the store knows only where it is
    drawn[0].forget()
    with pytest.raises(ConformanceError, match="cannot read the secret"):
        agree_on_secret(near[1], store, {})


def test_without_a_secret_from_outside_several_hosts_are_warned(caplog: pytest.LogCaptureFixture) -> None:
    store = HashStore()
    far = [Place(index, 2, 0, f"host-{index}", "node0") for index in range(2)]
    assert agree_on_secret(far[0], store, {}).text == agree_on_secret(far[1], store, {}).text
    assert "Whoever reaches node0 can take part in this run: set DDP_CONFORMANCE_SECRET" in caplog.text


class SilentAgent:
    """An agent that says hello and what it last saw of its rank, and then no more."""

    def __init__(self, channel: Channel, index: int, host: str) -> None:
        self.received: list[Any] = []
        self._channel = channel
        channel.send(Hello(index, host))
        self._thread = threading.Thread(target=self._listen, daemon=True)
        self._thread.start()

    def all_received(self) -> list[Any]:
        """Return the messages of the controller until it hung up."""
        self._thread.join(timeout=60)
        return self.received

    def _listen(self) -> None:
        while True:
            try:
                message = self._channel.receive(None)
            except (EOFError, OSError):
                return
            self.received.append(message)
            if isinstance(message, RunOrder):
                seen = LastSeen("backward", 0, 1, 0, (collective(0),))
                self._channel.send(Beat(message.number, seen))


@contextmanager
def silent_hosts() -> Iterator[tuple[AttachedController, list[SilentAgent]]]:
    ours, theirs = zip(*(pair(FromAgent, ToAgent) for _ in range(2)), strict=True)
    agents = [SilentAgent(end, index, f"host-{'ab'[index]}") for index, end in enumerate(theirs)]
    with AttachedController(GLOO, ours, "127.0.0.1") as controller:
        yield controller, agents


def test_hosts_that_fall_silent_are_given_up_after_the_deadline_with_what_was_last_heard() -> None:
    with silent_hosts() as (controller, agents):
        seen = controller.run(TRAIN.replace(deadline_s=0.5), OURS)
        for rank, host in enumerate(("host-a", "host-b")):
            assert (seen[rank].fate.kind, seen[rank].phase, seen[rank].host) == ("hung", "backward", host)
            assert seen[rank].history == (collective(0),)
        finding = get_checker("no_hang")(evidence_of(*seen.values()))
        assert finding is not None
        assert "because host-a is down or the link to it is cut" in finding.summary
        assert "because host-b is down or the link to it is cut" in finding.summary
        with pytest.raises(ConformanceError, match="0 of 2 are left: host-a has not been heard of for"):
            controller.run(TRAIN, OURS)
    assert all(any(isinstance(message, Forget) for message in agent.all_received()) for agent in agents)


def test_a_hang_over_a_cut_link_names_both_sides() -> None:
    history = (collective(0), collective(1))
    near = [ended(rank, "hung", history, host="host-a") for rank in (0, 1)]
    far = [ended(rank, "hung", history[:1], host="host-b") for rank in (2, 3)]
    far = [_unheard(one) for one in far]
    finding = get_checker("no_hang")(evidence_of(*near, *far))
    assert finding is not None
    assert "A = all_reduce #1 (4 x float32, sum), issued by ranks 0 and 1 on host-a" in finding.explanation
    assert finding.summary.startswith("ranks 2 and 3 are not known to have joined all_reduce #1")
    assert "when last heard of, because host-b is down or the link to it is cut" in finding.summary


def _unheard(observation: Any) -> Any:
    return replace(observation, fate=replace(observation.fate, detail="unheard of for 3 s, last seen in backward"))


class NoZygote:
    """Stands for a zygote that is never asked for a rank."""

    def __init__(self, *arguments: Any) -> None:
        self.closed = False

    def await_ready(self) -> None:
        """Be ready."""

    def close(self) -> None:
        self.closed = True


@pytest.mark.parametrize(
    ("speaks", "words"),
    [
        (True, r"host-b: no message from the controller .* or the link to it is cut"),
        (False, r"host-b: the controller has not begun after 0\.3 s"),
    ],
    ids=["falls silent", "never begins"],
)
def test_an_agent_whose_controller_says_nothing_says_so_and_ends(
    monkeypatch: pytest.MonkeyPatch, speaks: bool, words: str
) -> None:
    monkeypatch.setattr(attached_agent, "ZygoteProcess", NoZygote)
    monkeypatch.setattr(attached_agent, "LOST_S", 1.0)
    monkeypatch.setattr(attached_agent, "JOIN_TIMEOUT_S", 0.3)
    ours, theirs = pair(FromAgent, ToAgent)
    agent = Agent(theirs, Place(1, 2, 0, "host-b", ""), (), {})
    if speaks:
        ours.send(Ping())
    with pytest.raises(ConformanceError, match=words):
        agent.serve()
    assert isinstance(ours.receive(5.0), Hello)
    assert agent._zygote.closed  # type: ignore[attr-defined]


@pytest.mark.nightly
def test_a_process_may_start_long_after_the_others(tmp_path: Path) -> None:
    script = tmp_path / "late.py"
    script.write_text(
        f"import os, time\ntime.sleep({LOST_S + 15.0} * int(os.environ['RANK']))\n"
        "from conformance.__main__ import start\nstart()\n"
    )
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    question = ["gradients/GRAD-01/mlp-world2", "--no-native", "--report", str(tmp_path / "report"), "-q"]
    done = subprocess.run(
        [*launcher, str(script), "run", "--attach", *question],
        capture_output=True, text=True, timeout=at_this_load(120), check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert [one.subject.verdict.value for one in read_report(tmp_path / "report").scenarios] == ["PASS"]


def test_who_has_not_joined_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attached_controller, "JOIN_TIMEOUT_S", 0.3)
    ours, theirs = zip(*(pair(FromAgent, ToAgent) for _ in range(3)), strict=True)
    theirs[1].send(Hello(2, "host-c"))
    with pytest.raises(ConformanceError, match=r"of 3 processes number 0, 1 said nothing for 0\.3 s after"):
        AttachedController(GLOO, ours, "127.0.0.1")
    with pytest.raises(EOFError):  # the others need not wait
        theirs[1].receive(5.0)
    one, its_agent = pair(FromAgent, ToAgent)
    its_agent.close()
    with pytest.raises(ConformanceError, match=r"ended before it was ready .*, of number 0; its own output says why"):
        AttachedController(GLOO, [one], "127.0.0.1")


@pytest.mark.parametrize(
    "names",
    [
        ("RANK", "WORLD_SIZE", "LOCAL_RANK"),
        ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID"),
        ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"),
    ],
    ids=["torchrun", "srun", "mpirun"],
)
def test_every_launcher_gives_a_process_its_place(names: tuple[str, str, str]) -> None:
    variables = dict(zip(names, ("3", "4", "1"), strict=True))
    place = place_of({**variables, "MASTER_ADDR": "node0", "MASTER_PORT": "29500"})
    assert (place.index, place.num_processes, place.local_index, place.master) == (3, 4, 1, "node0")
    with pytest.raises(ConformanceError, match="set MASTER_PORT, so that the 4 processes can meet"):
        place_of({**variables, "MASTER_ADDR": "node0"})


def test_without_a_launcher_there_is_nothing_to_attach_to() -> None:
    with pytest.raises(ConformanceError, match="none of them has set RANK, SLURM_PROCID, OMPI_COMM_WORLD_RANK here"):
        place_of({"MASTER_ADDR": "node0", "MASTER_PORT": "29500"})
    with pytest.raises(ConformanceError, match=r"srun sets SLURM_PROCID, .*, and here is no SLURM_LOCALID$"):
        place_of({"SLURM_PROCID": "0", "SLURM_NTASKS": "2", "RANK": "0"})
