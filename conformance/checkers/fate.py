"""Checks how ranks ended: finds deaths, hangs and exceptions, and the rank that caused them."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import dropwhile

from conformance.checkers.checker import DEAD, Evidence, checker, failed, harness_error, passed, unknown
from conformance.checkers.explanation import block, let_then, ranks, shorten
from conformance.checkers.unconnected import unconnected
from conformance.observation import PROCESSES, Collective, Observation, Raised, by_member
from conformance.truth.expected import Raises
from conformance.verdict import Finding, Verdict

_TAIL_LINES = 8
_MOST_REPORTS = 4  # of one rank: the others follow from the first
_STACK_LINES = 16  # stacks are printed with the most recent call first
#: The innermost frame of an idle thread of a pool.
_IDLE = re.compile(r"\A[^\n]*\n[^\n]*concurrent/futures/thread\.py[^\n]* in _worker")
#: A frame of torch.distributed, with its function; `wrapper` calls every public one.
_OF_DISTRIBUTED = re.compile(r"/torch/distributed/.* in (?!wrapper\b)(\w+)")
#: A frame of a traceback: file, line, function. Neither the standard library, torch, nor the suite is the subject.
_FRAME = re.compile(
    r'File "(?![^"]*/(?:torch/|conformance/|lib(?:64)?/(?:python|pypy)[\d.]+t?/(?!site-|dist-)))([^"<]+)"'
    r", line (\d+), in (\S+)"
)
#: Frames of the harness, which are on every stack.
OUR_FRAMES = ("conformance/workers/", "conformance/recorder/", "conformance/programs/rank_context.py")


@checker("no_crash")
def no_crash(evidence: Evidence) -> Finding:
    """No rank died."""
    dead = evidence.ended(*DEAD)
    if not dead:
        return passed("no_crash")
    sentences = [f"rank {one.rank} {_death(one)} {_where(one)}" for one in dead]
    lets = [f"{label} = rank {one.rank}{_last_collective(one, evidence)}" for label, one in _labelled(dead)]
    thens = [f"{label} {_death(one)} {_where(one)}." for label, one in _labelled(dead)]
    notes = [*_never_issued(evidence), *(_stop_of(other, evidence) for other in evidence.by_rank if other not in dead)]
    for one in dead:
        notes += _attachments(one)
    found = Finding("no_crash", Verdict.CRASH, "; ".join(sentences), let_then(lets, thens, notes), evidence.about(dead))
    return _lacking_a_check(found, evidence, dead)


@checker("no_hang")
def no_hang(evidence: Evidence) -> Finding:
    """Every rank finished within the deadline; if not, the finding names the ranks that a collective is missing."""
    found = _no_hang(evidence)
    return found if found.verdict is not Verdict.HANG else _lacking_a_check(found, evidence, evidence.ended("hung"))


def _lacking_a_check(found: Finding, evidence: Evidence, lost: list[Observation]) -> Finding:
    """Return the finding; if all `lost` ranks had to raise, with the missing check as its mistake."""
    expected = evidence.expected or {}
    demands = [list(dropwhile(lambda demand: demand is None, expected.get(one.rank, {}).values())) for one in lost]
    if all(one.phase == "construct" for one in lost):
        demands = [one[:1] for one in demands]
    lacks = all(one and all(isinstance(demand, Raises) for demand in one) for one in demands)
    return replace(found, mistake="lacks-check") if lacks else found


def _no_hang(evidence: Evidence) -> Finding:
    hung = evidence.ended("hung")
    if not hung:
        if evidence.ended("abandoned") and not evidence.ended(*DEAD, "raised"):
            lost = evidence.ended("abandoned")
            abandoned = ranks(_ranks(lost))
            if (why := lost[0].fate.detail.partition(": ")[2]) and all(one.fate == lost[0].fate for one in lost):
                return harness_error("no_hang", f"{abandoned} ended, because {why}")
            return harness_error("no_hang", f"the harness ended {abandoned}, although no rank died or raised")
        return passed("no_hang")
    missing = missing_from(evidence.observations)
    if missing is None:
        where = "; ".join(map(_whereabouts, hung))
        known = "no rank is missing from a collective, but " if evidence.scenario.recorded else ""
        summary = f"{known}{ranks(_ranks(hung))} did not end: {where}"
        if mute := [one.rank for one in hung if not one.stack]:
            summary += f"; {ranks(mute)} did not write a stack when signalled"
        if (odd := _odd_one_out(hung)) is not None:
            summary += f"; rank {odd} is not where the others are (see its stack)"
        lets = [f"{label} = rank {one.rank}{_last_collective(one, evidence)}" for label, one in _labelled(hung)]
        deadline = f"did not end within {evidence.scenario.deadline_s:g} s"
        thens = [f"{label} {deadline}; it {_predicate(one)}." for label, one in _labelled(hung)]
        explanation = let_then(lets, thens, _all_attachments(hung))
        return Finding("no_hang", Verdict.HANG, summary, explanation, evidence.about(hung))
    collective, waiting, absent = missing
    of_group = "" if collective.group in ("", "default") else f" of {collective.group}"
    # The controller cannot see whether a rank behind a cut link has issued it.
    unheard = all("unheard" in evidence.observations[rank].fate.detail for rank in absent)
    missing_from_it = "not known to have joined" if unheard else "missing from"
    others = [evidence.observations[rank] for rank in absent]
    verb = "is" if len(absent) == 1 else "are"
    summary = f"{ranks(absent)} {verb} {missing_from_it} {collective.describe()}{of_group}; "
    summary += "; ".join(map(_whereabouts, others))
    issuers = _by_host([evidence.observations[rank] for rank in waiting])
    lets = [f"A = {collective.describe()}{of_group}, issued by {issuers}"]
    lets += [f"{label} = rank {one.rank}{_last_collective(one, evidence)}" for label, one in _labelled(others, "B")]
    thens = [f"A waits for {label}, which {_predicate(one)}." for label, one in _labelled(others, "B")]
    involved = [*others, *(one for one in hung if one.rank not in absent)]
    return Finding("no_hang", Verdict.HANG, summary, let_then(lets, thens, _all_attachments(involved)))


def _odd_one_out(hung: list[Observation]) -> int | None:
    """Return the one rank whose threads are elsewhere than those of all others, which are in one place; else None."""
    places = [
        tuple(line for line in one.stack.splitlines() if line.strip() and not line.startswith(("Thread", "Current")))
        for one in hung
    ]
    odd = [one.rank for one, place in zip(hung, places, strict=True) if place and places.count(place) == 1]
    return odd[0] if len(hung) > 2 and len(odd) == 1 and len(set(places)) == 2 else None


@checker("no_exception")
def no_exception(evidence: Evidence) -> Finding:
    """No exception left the program on any rank.

    Precondition: no rank died, because the errors of the others may then only report that their peer is gone.
    """
    raised = evidence.ended("raised")
    if not raised:
        return passed("no_exception")
    if dead := evidence.ended(*DEAD):
        names = ", ".join(f"rank {one.rank}: {_error(one)}" for one in raised)
        return unknown(
            "no_exception", f"{ranks(_ranks(dead))} died, which the others' errors may follow from ({names})"
        )
    # If a scenario is not recorded, only the phase shows what was called.
    in_words = _error if evidence.scenario.recorded else _error_in_phase
    errors = {one.rank: f"{in_words(one)}{_place(one)}" for one in raised}
    everybody = len(raised) == len(evidence.observations)
    if len(set(errors.values())) == 1:
        who = "every rank" if everybody and len(raised) > 1 else ranks(errors)
        summary = f"{who} raised {errors[raised[0].rank]}"
    else:
        summary = "; ".join(f"rank {rank} raised {error}" for rank, error in errors.items())
    lets = [f"{label} = rank {one.rank}{_last_collective(one, evidence)}" for label, one in _labelled(raised)]
    thens = [f"{label} raised {_error(one)} {_where(one)}." for label, one in _labelled(raised)]
    notes = [_stop_of(other, evidence) for other in evidence.by_rank if other not in raised]
    notes += _tracebacks(raised)
    explanation = let_then(lets, thens, notes)
    if any(_is_ours(one.raised) for one in raised):
        return harness_error("no_exception", summary, explanation)
    found = failed("no_exception", summary, explanation, evidence.about(raised))
    return replace(found, mistake="not-connected") if unconnected(evidence.observations) else found


@checker("leaves_no_trace")
def leaves_no_trace(evidence: Evidence) -> Finding:
    """Every rank's process has the same state at the end of the run as at its beginning."""
    return _traces(evidence, "leaves_no_trace") or passed("leaves_no_trace")


@checker("leaves_no_process")
def leaves_no_process(evidence: Evidence) -> Finding | None:
    """No rank has more child processes at the end than at the beginning; does not apply where none has.

    Such a process may hold the rank's connections and its device.
    """
    return _traces(evidence, "leaves_no_process", PROCESSES)


def _traces(evidence: Evidence, checker_name: str, of: str = "") -> Finding | None:
    """Return a failure that names what ranks left, of one kind or of all; None where they left nothing."""
    traces = {one.rank: [each for each in one.hygiene if each.startswith(of)] for one in evidence.by_rank}
    traces = {rank: found for rank, found in traces.items() if found}
    if not traces:
        return None
    lines = [f"Rank {rank}: {trace}" for rank, found in traces.items() for trace in found]
    summary = f"{ranks(traces)} left traces: {next(iter(traces.values()))[0]}"
    return failed(checker_name, summary, "\n".join(lines), requirements=("COMPAT-12",))


@checker("does_not_interfere")
def does_not_interfere(evidence: Evidence) -> Finding | None:
    """Demand that no construction, forward, backward or step changes modes, random states or the wrapped module.

    Does not apply where nothing changed. It speaks for requirements of its own, not for those of the scenario.
    """
    changes = {one.rank: one.interference for one in evidence.by_rank if one.interference}
    if not changes:
        return None
    lines = [f"Rank {rank}: {change}" for rank, found in changes.items() for change in found]
    first = next(iter(changes.values()))[0]
    of_device = [" changed current " in change for found in changes.values() for change in found]
    broken = (*(("DEV-13",) if any(of_device) else ()), *(() if all(of_device) else ("COMPOSED-02",)))
    return failed("does_not_interfere", f"on {ranks(changes)} {first}", "\n".join(lines), requirements=broken)


@checker("device_is_content")
def device_is_content(evidence: Evidence) -> Finding | None:
    """No rank's device reported a mistake, such as accesses that no event orders.

    Does not apply where the device found nothing or can find nothing, nor where every rank refused: a late gradient is
    added to a bucket in flight before a DDP can refuse to average it.
    """
    if all(any(isinstance(value, Raised) for value in one.facts.values()) for one in evidence.by_rank):
        return None
    reports = {one.rank: one.device_reports for one in evidence.by_rank if one.device_reports}
    if not reports:
        return None
    lines = [
        f"Rank {rank}: {_placed(report, evidence.observations[rank].history)}"
        for rank, found in reports.items()
        for report in found[:_MOST_REPORTS]
    ]
    rank, found = next(iter(reports.items()))
    first = _placed(found[0], evidence.observations[rank].history)
    return failed("device_is_content", f"on {ranks(reports)} {first}", "\n".join(lines))


def _placed(report: str, history: Sequence[Collective]) -> str:
    """Return `report` with the phase, the step and the bucket of the collective that it names by its number."""

    def place(match: re.Match[str]) -> str:
        index, numel, dtype = int(match[1]), int(match[2]), match[3]
        if index >= len(history) or (history[index].numel, history[index].dtypes[:1]) != (numel, (dtype,)):
            return match[0]
        one = history[index]
        where = f"{one.phase} of step {one.step}"
        if one.op == "all_reduce" and one.phase == "backward" and not dtype.startswith("int"):
            alike = (
                each for each in history[:index] if (each.op, each.phase, each.step) == (one.op, one.phase, one.step)
            )
            where += f", bucket {len(list(alike))}"
        return f"{match[0][:-1]}, {where})"

    return re.sub(r"#(\d+) \((\d+) x (\w+)\)", place, report)


def missing_from(observations: Mapping[int, Observation]) -> tuple[Collective, list[int], list[int]] | None:
    """Return the first collective that some rank of its group never issued, the ranks that issued it, and the others.

    Of several groups, a group whose missing ranks wait in no other group comes first, since a rank that waits is not
    the cause; then the group whose collective was issued first. None if no rank is missing.
    """
    found: list[tuple[Collective, list[int], list[int]]] = []
    histories = {rank: seen.history for rank, seen in observations.items()}
    for group in sorted({one.group for history in histories.values() for one in history}):
        issued = by_member(histories, group)
        reached = {rank: max(collectives, default=-1) for rank, collectives in issued.items()}
        first_missing = min(reached.values()) + 1
        waiting = sorted(rank for rank in issued if first_missing in issued[rank])
        absent = sorted(rank for rank in issued if reached[rank] < first_missing)
        if waiting and absent:
            found.append((issued[waiting[0]][first_missing], waiting, absent))
    held_up = {rank for _, waiting, _ in found for rank in waiting}
    return min(found, key=lambda case: (not held_up.isdisjoint(case[2]), case[0].started_ns), default=None)


def _never_issued(evidence: Evidence) -> list[str]:
    """Return a sentence about the first collective that only the dead ranks never issued, if there is one."""
    missing = missing_from(evidence.observations)
    if missing is None or any(evidence.observations[rank].fate.kind not in DEAD for rank in missing[2]):
        return []
    collective, waiting, absent = missing
    return [f"{ranks(waiting).capitalize()} had issued {collective.describe()}, which {ranks(absent)} never did."]


def _is_ours(raised: Raised | None) -> bool:
    """Whether the harness raised the error, except for an unusable subject."""
    return raised is not None and "ConformanceError" in raised.bases and "SubjectError" not in raised.bases


def _labelled(observations: list[Observation], first: str = "A") -> list[tuple[str, Observation]]:
    return [(chr(ord(first) + number), one) for number, one in enumerate(observations)]


def _ranks(observations: list[Observation]) -> list[int]:
    return [one.rank for one in observations]


def _by_host(observations: list[Observation]) -> str:
    """Return e.g. `ranks 0 and 1 on host-a, rank 2 on host-b`; without the hosts where there is only one."""
    hosts: dict[str, list[int]] = {}
    for one in observations:
        hosts.setdefault(one.host, []).append(one.rank)
    return ", ".join(ranks(numbers) + (f" on {host}" if host else "") for host, numbers in hosts.items())


def _death(observation: Observation) -> str:
    if observation.fate.kind == "exited":
        return f"exited with code {observation.fate.code}"
    return f"was {observation.fate}"


def _where(observation: Observation) -> str:
    """Return e.g. `in phase backward, step 1`, or `in new_group` before the program's first phase."""
    phase = observation.phase or "an unknown phase"
    if phase == "start":
        return f"in {called}" if (called := _called(observation)) else "before its first phase"
    last = observation.history[-1] if observation.history else None
    step = f", step {last.step}" if last is not None and last.phase == phase and last.step >= 0 else ""
    step += f", on {observation.host}" if observation.host else ""
    return f"in {phase if phase.startswith('an ') else f'phase {phase}'}{step}"


def _called(observation: Observation) -> str:
    """Return the function of torch.distributed that the program had called; empty if there is none in a stack."""
    traceback = observation.raised.traceback.splitlines() if observation.raised is not None else []
    inside = filter(None, map(_OF_DISTRIBUTED.search, [*traceback, *reversed(observation.frames)]))
    return next((found[1] for found in inside), "")


def _last_collective(observation: Observation, evidence: Evidence) -> str:
    """Return the last collective after a comma; nothing where none is recorded, as in a backend by itself."""
    if not evidence.scenario.recorded:
        return ""
    return f", last collective {observation.history[-1].describe()}" if observation.history else ", no collective yet"


def _whereabouts(observation: Observation) -> str:
    return f"rank {observation.rank} {_predicate(observation)}"


def _predicate(observation: Observation) -> str:
    kind = observation.fate.kind
    if kind == "raised":
        return f"raised {_error(observation)} {_where(observation)}"
    if kind == "returned":
        return "has run the program to its end"
    if kind in DEAD:
        return f"{_death(observation)} {_where(observation)}"
    stopped = ", stopped by a signal" if "stopped" in observation.fate.detail else ""
    if "unheard" in observation.fate.detail:
        last = f"was {_where(observation)} when last heard of" if observation.phase else "has not been heard of"
        return f"{last}, because {observation.host} is down or the link to it is cut"
    return f"is {_where(observation)}{stopped}"


def _error(observation: Observation) -> str:
    return shorten(str(observation.raised)) if observation.raised is not None else "an unknown exception"


def _place(observation: Observation) -> str:
    """Return e.g. ` (acme/ddp.py:12, in forward)`: where the subject raised; empty if no frame is its own."""
    frames = _FRAME.findall(observation.raised.traceback) if observation.raised is not None else []
    if not frames:
        return ""
    file, line, name = frames[-1]
    return f" ({'/'.join(file.split('/')[-2:])}:{line}, in {name})"


def _error_in_phase(observation: Observation) -> str:
    """Return e.g. `RuntimeError in phase new_group: no route`."""
    kind, colon, message = _error(observation).partition(": ")
    return f"{kind} {_where(observation)}{colon}{message}"


def _stop_of(observation: Observation, evidence: Evidence) -> str:
    ended = "was then ended by the harness" if observation.fate.kind == "abandoned" else _predicate(observation)
    return f"Rank {observation.rank} {ended}{_last_collective(observation, evidence)}."


def _tracebacks(raised: list[Observation]) -> list[str]:
    tails: dict[str, list[int]] = {}
    for one in raised:
        if one.raised is not None and one.raised.traceback:
            lines = [line for line in one.raised.traceback.strip().splitlines() if line.strip(" ~^")]
            tail = lines[-_TAIL_LINES:]
            tails.setdefault(block(tail), []).append(one.rank)
    return [f"End of the traceback of {ranks(numbers)}:\n{tail}" for tail, numbers in tails.items()]


def _attachments(observation: Observation) -> list[str]:
    texts = []
    if observation.stack:
        frames = [line for line in _busy_first(observation.stack) if not any(part in line for part in OUR_FRAMES)]
        texts.append(f"Rank {observation.rank}'s stack:\n{block(frames[:_STACK_LINES])}")
    if observation.stderr.strip():
        tail = observation.stderr.strip().splitlines()[-_TAIL_LINES:]
        texts.append(f"End of rank {observation.rank}'s stderr:\n{block(tail)}")
    return texts


def _busy_first(stack: str) -> list[str]:
    """Return the lines of the stacks, the main thread's (the last) first, without idle threads of pools."""
    threads = re.split(r"\n\s*\n", stack.strip("\n"))
    busy = [thread for thread in reversed(threads) if not _IDLE.search(thread)]
    return "\n\n".join(busy or threads).splitlines()


def _all_attachments(observations: list[Observation]) -> list[str]:
    return [text for one in observations for text in _attachments(one)]
