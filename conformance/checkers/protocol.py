"""Checks invariants of the collective history.

Programs name the invariants that apply to them. For an unrecorded run these checkers return no finding.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence

from conformance.checkers.checker import DEAD, Evidence, checker, failed, passed, unknown
from conformance.checkers.explanation import let_then
from conformance.errors import present
from conformance.observation import Collective, Observation, Raised, by_member
from conformance.verdict import Finding

#: The checker of every recorded scenario whose program names none of `ASKED_FOR_ORDER`.
ONE_ORDER = "one_order"
ASKED_FOR_ORDER = frozenset({"same_collectives", "same_until_refused"})

#: A rank and what it issued, None for nothing.
_Issued = tuple[int, Collective | None]

_FLOATING = ("float", "bfloat", "complex", "double", "half")


def _recorded(name: str) -> Callable[[Callable[[Evidence], Finding]], Callable[[Evidence], Finding | None]]:
    """Register an invariant that returns no finding for unrecorded runs."""

    def register(check: Callable[[Evidence], Finding]) -> Callable[[Evidence], Finding | None]:
        def applies(evidence: Evidence) -> Finding | None:
            return check(evidence) if evidence.scenario.recorded else None

        applies.__doc__ = check.__doc__
        return checker(name)(applies)

    return register


def is_gradient(collective: Collective) -> bool:
    """Whether a collective moves gradients: floating or complex numbers in backward, by any operation.

    Not for programs whose module communicates in backward.
    """
    return collective.phase == "backward" and holds_floats(collective)


def holds_floats(collective: Collective) -> bool:
    """Whether a collective moves floating or complex numbers."""
    return any(dtype.startswith(_FLOATING) for dtype in collective.dtypes)


@_recorded("same_collectives")
def same_collectives(evidence: Evidence) -> Finding:
    """Every rank of a group issues matching collectives in the same order.

    They match in operation, number of elements (except for all_to_all), dtypes, reduction and root. Point-to-point
    operations are no collectives. If a rank did not finish, the checker compares only what all ranks issued: the hang
    checker explains a missing rank.
    """
    return _same_collectives("same_collectives", evidence, whole=evidence.all_returned)


@_recorded("same_until_refused")
def same_until_refused(evidence: Evidence) -> Finding:
    """As `same_collectives`; where every rank refused, it compares only what all ranks issued.

    A rank whose backward raised later may have launched more buckets, for which no rank waits.
    """
    refused = all(any(isinstance(value, Raised) for value in one.facts.values()) for one in evidence.by_rank)
    return _same_collectives("same_until_refused", evidence, whole=evidence.all_returned and not refused)


@checker(ONE_ORDER)
def one_order(evidence: Evidence) -> Finding | None:
    """As `same_collectives`, for programs that do not name it: collectives of the DDP, the user and others.

    Does not apply to unrecorded runs, nor where a rank has not run to its end or has observed an exception.
    """
    if not evidence.scenario.recorded or not evidence.all_returned:
        return None
    if any(_has_exception(one.facts) for one in evidence.by_rank):
        return None
    return _same_collectives(ONE_ORDER, evidence, whole=True)


def _same_collectives(name: str, evidence: Evidence, *, whole: bool) -> Finding:
    for group in dict.fromkeys(collective.group for one in evidence.by_rank for collective in one.history):
        histories = by_member({one.rank: one.history for one in evidence.by_rank}, group)
        if found := _first_mismatch(histories, whole):
            (one, mine), (other, theirs) = found
            pair = (evidence.observations[one], evidence.observations[other])
            return failed(name, *_describe_mismatch(pair, mine, theirs))
    if evidence.ended(*DEAD, "hung") and not any(one.history for one in evidence.by_rank):
        return unknown(name, "ranks died or hung before any collective was recorded")
    return passed(name)


@_recorded("silent_no_sync")
def silent_no_sync(evidence: Evidence) -> Finding:
    """Inside `no_sync` no backward communicates gradients, by any operation."""
    return _none_issued(
        "silent_no_sync", evidence, lambda one: is_gradient(one) and not one.sync, "in backward inside no_sync",
        "A moves gradients inside no_sync.",
    )  # fmt: skip


def _none_issued(
    name: str, evidence: Evidence, is_wrong: Callable[[Collective], bool], where: str, then: str
) -> Finding:
    """Return a failure that names the first wrong collective, if there is one."""
    for one in evidence.by_rank:
        for collective in filter(is_wrong, one.history):
            summary = f"rank {one.rank} issued {collective.describe()} {where}, step {collective.step}"
            return failed(name, summary, let_then([f"A = rank {one.rank}, {_place(collective)}"], [then]))
    return passed(name)


@_recorded("nothing_in_flight")
def nothing_in_flight(evidence: Evidence) -> Finding:
    """At the end, the subject or the program has waited for every collective, and every collective is complete.

    Precondition: every rank ran the program to its end.
    """
    name = "nothing_in_flight"
    if not evidence.all_returned:
        return unknown(name, "not every rank ran to its end, so collectives may rightly be unfinished")
    return _in_flight(name, evidence, lambda _: True) or passed(name)


@checker("no_gradients_in_flight")
def no_gradients_in_flight(evidence: Evidence) -> Finding | None:
    """At the end, somebody has waited for every collective that moves gradients; does not apply otherwise.

    Values need not show this: a collective without a wait is often complete in time. Nobody need wait for buckets of a
    backward that raised on some rank, nor for a message that nobody reads, such as torch's in a join context. Where all
    that nobody waited for was issued inside `no_sync`, it was issued in error. Precondition: as for
    `nothing_in_flight`.
    """
    if not evidence.all_returned or any(_has_exception(one.facts) for one in evidence.by_rank):
        return None
    flying = [one for each in evidence.by_rank for one in each.history if is_gradient(one) and not one.finished]
    name = "no_gradients_in_flight" if any(one.sync for one in flying) else "silent_no_sync"
    return _in_flight(name, evidence, is_gradient)


def _has_exception(value: object) -> bool:
    if isinstance(value, Mapping):
        return any(map(_has_exception, value.values()))
    return any(map(_has_exception, value)) if isinstance(value, (list, tuple)) else isinstance(value, Raised)


def _in_flight(name: str, evidence: Evidence, matters: Callable[[Collective], bool]) -> Finding | None:
    """Return a failure that names the first collective that matters and for which nobody waited, if there is one."""
    for one in evidence.by_rank:
        flying = [collective for collective in one.history if matters(collective) and not collective.finished]
        if flying:
            summary = f"nobody waited for {len(flying)} collective(s) of rank {one.rank}, first {flying[0].describe()}"
            lets = [f"A = rank {one.rank}, {_place(flying[0])}"]
            thens = ["A was issued, and the program ended with nobody having waited for it."]
            return failed(name, summary, let_then(lets, thens))
    return None


@_recorded("same_number_each_step")
def same_number_each_step(evidence: Evidence) -> Finding:
    """Every synchronised backward after the first step reduces the gradients with the same number of collectives.

    The first step may differ: the order of its gradients is unknown before it (pytorch/pytorch#72843). Precondition: at
    least two synchronised steps after the first.
    """
    return _each_step_alike(evidence, "same_number_each_step", len, "number of gradient collectives")


@_recorded("bucket_order")
def bucket_order(evidence: Evidence) -> Finding:
    """Every synchronised backward after the first step reduces the same buckets in the same order.

    The checker identifies a bucket by its size and dtype. Precondition: as for `same_number_each_step`.
    """

    def sizes(collectives: Sequence[Collective]) -> tuple[object, ...]:
        return tuple(f"{one.numel} x {'/'.join(dict.fromkeys(one.dtypes))}" for one in collectives)

    return _each_step_alike(evidence, "bucket_order", sizes, "order of gradient collectives")


@_recorded("broadcast_before_forward")
def broadcast_before_forward(evidence: Evidence) -> Finding:
    """In every step that reduces gradients a forward broadcasts (buffers, from one root) before anything else.

    Precondition: at least one step reduced gradients.
    """
    name = "broadcast_before_forward"
    num_steps = 0
    for one in evidence.by_rank:
        for step, collectives in _by_step(one.history).items():
            if not any(map(is_gradient, collectives)):
                continue
            num_steps += 1
            forward = [collective for collective in collectives if collective.phase == "forward"]
            if not forward or forward[0].op != "broadcast":
                first = f"{forward[0].describe()} came first" if forward else "no collective was issued in forward"
                summary = f"rank {one.rank} did not broadcast before its forward in step {step}"
                lets, thens = [f"A = rank {one.rank}, step {step}"], [f"A broadcast no buffer before forward: {first}."]
                return failed(name, summary, let_then(lets, thens))
    return passed(name) if num_steps else unknown(name, "no step reduced gradients")


@_recorded("no_broadcast_in_forward")
def no_broadcast_in_forward(evidence: Evidence) -> Finding:
    """No forward broadcasts anything: for models without buffers, or with `broadcast_buffers=False`."""
    return _none_issued(
        "no_broadcast_in_forward", evidence, lambda one: one.phase == "forward" and one.op == "broadcast", "in forward",
        "A is a broadcast where none must be.",
    )  # fmt: skip


def _matching(collective: Collective) -> tuple[object, ...]:
    numel = -1 if collective.op.startswith("all_to_all") else collective.numel
    return (collective.op, numel, collective.dtypes, collective.reduce_op, collective.root)


def _first_mismatch(histories: Mapping[int, Mapping[int, Collective]], whole: bool) -> tuple[_Issued, _Issued] | None:
    """Return two ranks that differ in the earliest such collective, and what each issued; None if no ranks differ.

    A rank that issued nothing differs if histories are `whole`; otherwise it may not have reached the collective.
    """
    for index in sorted(set[int]().union(*histories.values())):
        issued = {rank: history.get(index) for rank, history in histories.items()}
        reference = next(one for one in issued.values() if one is not None)
        same = [rank for rank, one in issued.items() if one is not None and _matching(one) == _matching(reference)]
        for rank, one in issued.items():
            if rank not in same and (whole or one is not None):
                first, second = sorted((rank, same[0]))
                return (first, issued[first]), (second, issued[second])
    return None


def _describe_mismatch(
    pair: tuple[Observation, Observation], mine: Collective | None, theirs: Collective | None
) -> tuple[str, str]:
    """Return summary and explanation: two collectives meet and do not match, or one has no counterpart."""
    lets = [f"A = {_side(pair[0], mine)}", f"B = {_side(pair[1], theirs)}"]
    either = present(mine or theirs)
    group = "one group" if either.group in ("", "default") else either.group
    if mine is None or theirs is None:
        lone, absent = (pair[0], pair[1]) if theirs is None else (pair[1], pair[0])
        label = "A" if theirs is None else "B"
        summary = f"rank {lone.rank} issued {either.describe()}, and rank {absent.rank} issued nothing to match it"
        return summary, let_then(lets, [f"{label} meets nothing: rank {absent.rank} issued fewer collectives."])
    aspects = [
        f"{aspect} ({own} and {their})"
        for aspect, own, their in (
            ("operation", mine.op, theirs.op),
            ("number of elements", mine.numel, theirs.numel),
            ("dtype", "/".join(mine.dtypes), "/".join(theirs.dtypes)),
            ("reduction", mine.reduce_op or "none", theirs.reduce_op or "none"),
            ("root", mine.root, theirs.root),
        )
        if own != their
    ]
    summary = f"ranks {pair[0].rank} and {pair[1].rank} differ: {mine.describe()} meets {theirs.describe()}"
    notes = [
        f"Rank {observation.rank} was in {one.phase or 'an unknown phase'}{_step(one)}."
        for observation, one in zip(pair, (mine, theirs), strict=True)
    ]
    return summary, let_then(lets, [f"A and B meet in {group}, but differ in {', '.join(aspects)}."], notes)


def _side(observation: Observation, collective: Collective | None) -> str:
    if collective is None:
        return f"rank {observation.rank}, which issued nothing more"
    dtypes = "/".join(dict.fromkeys(collective.dtypes)) or "no tensor"
    details = [f"{collective.numel} x {dtypes}", collective.reduce_op, f"root {collective.root}"]
    shown = [detail for detail in details if detail and detail != "root -1"]
    return f"rank {observation.rank}, collective #{collective.index}: {collective.op}({', '.join(shown)})"


def _place(collective: Collective) -> str:
    phase = f"phase {collective.phase or 'unknown'}"
    return f"{collective.describe()} in {phase}{_step(collective)}"


def _step(collective: Collective) -> str:
    return f", step {collective.step}" if collective.step >= 0 else ""


def _by_step(history: Iterable[Collective]) -> dict[int, list[Collective]]:
    steps: dict[int, list[Collective]] = {}
    for collective in history:
        if collective.step >= 0:
            steps.setdefault(collective.step, []).append(collective)
    return steps


def _each_step_alike(
    evidence: Evidence, name: str, measure: Callable[[Sequence[Collective]], object], what: str
) -> Finding:
    fewest = None
    for one in evidence.by_rank:
        reduced = {step: list(filter(is_gradient, found)) for step, found in _by_step(one.history).items()}
        later = {step: found for step, found in reduced.items() if step > 0 and found}
        fewest = len(later) if fewest is None else min(fewest, len(later))
        first = min(later, default=0)
        for step, found in later.items():
            if measure(found) != measure(later[first]):
                summary = f"rank {one.rank}: the {what} changed between step {first} and step {step}"
                buckets = {number: ", ".join(each.describe() for each in later[number]) for number in (first, step)}
                lets = [f"{label} = rank {one.rank}, step {number}: {buckets[number]}"
                        for label, number in (("A", first), ("B", step))]  # fmt: skip
                return failed(name, summary, let_then(lets, [f"A and B differ in the {what}."]))
    if not fewest or fewest < 2:
        return unknown(name, "fewer than two steps after the first reduced gradients")
    return passed(name)
