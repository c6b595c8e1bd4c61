"""Injects a fault at every collective of a training and at every message, and counts what the harness makes of it.

    python ci/trust/fault_sweep.py [--only collectives|messages] [--kinds kill,stop,...]

At every collective of three steps, on every rank: kill, stop, loop (it is there and says nothing) and slow. At every
message between the controller and its processes: kill, stop and slow the zygote or a rank, or lose all that it sends.
Exits with 1 if fewer than 99 % are right, or if anything leaks. Takes 20 minutes; run nothing beside it: what a rank
waits for a processor is no part of its deadline, so on a busy machine a right verdict may come later than asked here.
"""

import argparse
import contextlib
import logging
import os
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from conformance.backends.gloo import GLOO
from conformance.observation import Collective
from conformance.run.scenario_runner import ScenarioRunner
from conformance.scenario import Fault, Scenario, Step
from conformance.subjects.subject import KNOWN, Subject
from conformance.tests.processes import all_end, processes_under
from conformance.workers.channel import Channel
from conformance.workers.controller import Controller
from conformance.workers.faults import SLOW_S

TRAIN = Scenario("gradients/GRAD-01/sweep", ("GRAD-01",), "train", schedule=(Step(),) * 3, deadline_s=2.0)
#: How much later than its deadline a run may end; a zygote that is replaced takes as long as the first one did.
MARGIN_S = 5.0
START_TIMEOUT_S = 4.0
#: What ranks are told to have ended of whose zygote was killed.
LOST = "the process that forks ranks was killed by SIGKILL"
VERDICTS = {"kill": "CRASH", "stop": "HANG", "loop": "HANG", "slow": "PASS"}


class Score:
    """Counts, and prints whatever is not right."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()

    def add(self, what: str, **right: bool) -> None:
        """Count one trial; each of `right` names something that must hold."""
        self.counts["trials"] += 1
        self.counts["all right"] += all(right.values())
        self.counts.update({name.replace("_", " "): holds for name, holds in right.items()})
        if not all(right.values()):
            print(f"NOT {', '.join(name for name, holds in right.items() if not holds)}: {what}", flush=True)

    def share(self) -> float:
        """Return the share of trials in which everything was right."""
        return self.counts["all right"] / max(1, self.counts["trials"])


def at_collectives(score: Score, kinds: list[str], work_dir: Path) -> None:
    """Inject every kind of fault into every rank at every collective, under torch's DDP and ours."""
    with Controller(GLOO, work_dir=work_dir) as controller:
        for subject in (KNOWN["ddp_impl"], KNOWN["torch"]):
            runner = ScenarioRunner(subject, GLOO, controller, native=False)
            histories = {rank: seen.history for rank, seen in controller.run(TRAIN, subject).items()}
            for rank, history in histories.items():
                for position, collective in enumerate(history):
                    for kind in kinds:
                        _at_collective(score, runner, Fault(kind, rank, "collective", position), collective)
        _count_leaks(score, controller, work_dir)
    score.counts["left at the end"] = len(processes_under(work_dir))


def _at_collective(score: Score, runner: ScenarioRunner, fault: Fault, collective: Collective) -> None:
    started = time.monotonic()
    result = runner.run(TRAIN.replace(faults=(fault,))).subject
    took_s = time.monotonic() - started
    after = runner.run(TRAIN).subject
    told = " ".join(finding.summary + finding.explanation for finding in result.findings)
    names = (f"rank {fault.rank}", f"phase {collective.phase}", collective.describe())
    score.add(
        f"{fault} under {runner.subject.name}, in {took_s:.1f} s: {result.verdict.value}, {told[:300]}",
        verdict_right=result.verdict.value == VERDICTS[fault.kind] and after.verdict.value == "PASS",
        explanation_right=fault.kind == "slow" or all(name in told for name in names),
        ended_in_time=took_s < 2 * TRAIN.deadline_s + MARGIN_S,
    )


def _count_leaks(score: Score, controller: Controller, work_dir: Path) -> None:
    controller.run(TRAIN, KNOWN["torch"])
    time.sleep(0.5)  # the zygote reaps what was killed
    score.counts["leaked"] += max(0, len(processes_under(work_dir)) - 1 - controller.num_ranks)


class Boundary:
    """Acts at the n-th message that this process sends (before and after) or receives."""

    def __init__(self, act: Callable[[Channel], None], at: int) -> None:
        self.seen = 0
        self._at, self._act = at, act

    def reached(self, channel: Channel) -> None:
        """Count a boundary, and act if it is the one."""
        self.seen += 1
        if self.seen == self._at + 1:
            self._act(channel)


@contextlib.contextmanager
def counted(boundary: Boundary, lost: list[Channel]) -> Iterator[None]:
    """Have every channel of this process count; whatever arrives at those in `lost` is dropped."""
    send, arrived = Channel.send, Channel.arrived

    def counted_send(self: Channel, message: object, *arguments: Any, **options: Any) -> None:
        boundary.reached(self)
        send(self, message, *arguments, **options)
        boundary.reached(self)

    def counted_arrived(self: Channel) -> Any:
        message = arrived(self)
        if any(self is one for one in lost):
            return None
        if message is not None:
            boundary.reached(self)
        return message

    Channel.send, Channel.arrived = counted_send, counted_arrived  # type: ignore[method-assign]
    try:
        yield
    finally:
        Channel.send, Channel.arrived = send, arrived  # type: ignore[method-assign]


def at_messages(score: Score, kinds: list[str], work_dir: Path) -> None:
    """Inject every kind of fault into the zygote and into a rank, at every message of two scenarios on new ranks."""
    subject = KNOWN["torch"]
    for who in ("zygote", "rank"):
        for kind in kinds:
            with Controller(GLOO, work_dir=work_dir, start_timeout_s=START_TIMEOUT_S) as controller:
                began = time.monotonic()
                controller.run(TRAIN, subject)
                start_s = time.monotonic() - began
                boundary = Boundary(lambda _: None, -1)
                with counted(boundary, []):
                    _two_scenarios(controller, subject)
                for at in range(boundary.seen):
                    _at_message(score, controller, subject, who, kind, at, start_s, work_dir)
                _count_leaks(score, controller, work_dir)
            score.counts["left at the end"] += not all_end(processes_under(work_dir), 5.0)


def _two_scenarios(controller: Controller, subject: Subject) -> list[str]:
    seen = [controller.run(one, subject, fresh=True) for one in (TRAIN, TRAIN.replace(world_size=1))]
    return [str(observation.fate) for observations in seen for observation in observations.values()]


def _fates(controller: Controller, subject: Subject) -> set[str]:
    return {str(one.fate) for one in controller.run(TRAIN, subject).values()}


def _at_message(
    score: Score, controller: Controller, subject: Subject, who: str, kind: str, at: int, start_s: float, work_dir: Path
) -> None:
    lost: list[Channel] = []
    hit: list[int] = []

    def act(channel: Channel) -> None:
        if kind == "silence":
            lost.append(channel)
            return
        pids = processes_under(work_dir)
        chosen = pids[:1] if who == "zygote" else pids[1:][-1:]
        hit.extend(chosen)
        for pid in chosen:
            os.kill(pid, signal.SIGKILL if kind == "kill" else signal.SIGSTOP)
            if kind == "slow":
                threading.Timer(SLOW_S, _go_on, (pid,)).start()

    records: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("conformance").addHandler(handler)
    started = time.monotonic()
    with counted(Boundary(act, at), lost):
        fates = _two_scenarios(controller, subject)
    took_s = time.monotonic() - started
    logging.getLogger("conformance").removeHandler(handler)
    unharmed = set(fates) == {"returned"}  # it fell after its last message, or its ranks were being replaced anyway
    after = _fates(controller, subject)
    if kind == "kill" and unharmed and all(LOST in fate for fate in after):  # the next run met it, and said so
        after = _fates(controller, subject)
    told = " ".join([*records, *fates])
    replaced = who == "zygote" and kind != "slow"  # it takes as long as the first one
    words = {"kill": ("SIGKILL", "is replaced", "ended first"), "stop": ("stopped",), "silence": ("hung", "replaced")}
    score.add(
        f"{kind} {who} at message {at}, in {took_s:.1f} s: {fates} {records}, then {after}",
        verdict_right=after == {"returned"} and (unharmed or kind != "slow"),
        explanation_right=unharmed or any(word in told for word in words.get(kind, ())),
        ended_in_time=took_s < 2 * (START_TIMEOUT_S + TRAIN.deadline_s) + MARGIN_S + (3 * start_s if replaced else 0),
    )


def _go_on(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGCONT)


def main() -> None:
    """Run what the arguments ask for and print the counts."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", choices=("collectives", "messages"))
    parser.add_argument("--kinds", default="")
    arguments = parser.parse_args()
    logging.getLogger("conformance").propagate = False
    asked = [kind for kind in arguments.kinds.split(",") if kind]
    scores = {"collectives": Score(), "messages": Score()}
    with contextlib.suppress(KeyboardInterrupt), tempfile.TemporaryDirectory() as folder:
        if arguments.only != "messages":
            at_collectives(scores["collectives"], asked or list(VERDICTS), Path(folder))
        if arguments.only != "collectives":
            at_messages(scores["messages"], asked or ["kill", "stop", "silence", "slow"], Path(folder))
    for name, score in scores.items():
        print(f"{name}: {dict(score.counts)}, {score.share():.1%} right")
    leaks = sum(score.counts["leaked"] + score.counts["left at the end"] for score in scores.values())
    sys.exit(leaks > 0 or any(score.share() < 0.99 for score in scores.values() if score.counts["trials"]))


if __name__ == "__main__":
    main()
