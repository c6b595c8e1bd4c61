"""The collectives of every rank as a trace file, which Perfetto (ui.perfetto.dev) and chrome://tracing open."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from conformance.observation import Collective
from conformance.run.outcome import Outcome
from conformance.run.report import Report
from conformance.verdict import RankFate


def trace_of(report: Report) -> dict[str, Any]:
    """Return the trace of all scenarios that did not pass: a process per scenario and column, a thread per rank.

    Times are microseconds since the first collective of their scenario. A collective whose end nobody saw lasts until
    its rank issued the next one, or to the end of the scenario, and says so. Ranks on one machine share a clock;
    elsewhere they are shifted.
    """
    events: list[dict[str, Any]] = []
    for scenario in report.scenarios:
        for result in scenario.results:
            if any(rank.collectives for rank in result.ranks):
                name = f"{result.verdict.value} {scenario.id} ({result.subject})"
                events += _events(len(events), name, scenario, result.ranks)
    return {"displayTimeUnit": "ms", "traceEvents": events}


@dataclass(frozen=True, slots=True)
class Span:
    """One collective on the time axis of its scenario, which starts with the first collective of any rank.

    `pending` is a collective that the rank still waited for when everything was over.
    """

    collective: Collective
    start_ns: int
    end_ns: int
    pending: bool


def spans(ranks: Iterable[RankFate]) -> dict[int, tuple[Span, ...]]:
    """Return every rank's collectives as spans on one time axis."""
    by_rank = {rank.rank: rank.collectives for rank in ranks}
    everything = [collective for collectives in by_rank.values() for collective in collectives]
    first = min((one.started_ns for one in everything), default=0)
    last = max((one.started_ns + one.duration_ns for one in everything), default=0)
    last += max((last - first) // 10, 1000)  # so that what was issued last and never finished can be seen
    return {rank: tuple(_spans_of_rank(collectives, first, last)) for rank, collectives in by_rank.items()}


def _spans_of_rank(collectives: tuple[Collective, ...], first: int, last: int) -> Iterator[Span]:
    following = [*(one.started_ns for one in collectives[1:]), None]
    for collective, next_start in zip(collectives, following, strict=False):
        start = collective.started_ns - first
        if collective.finished:
            yield Span(collective, start, start + max(collective.duration_ns, 1), pending=False)
        elif next_start is not None:
            yield Span(collective, start, max(next_start - first, start + 1), pending=False)
        else:
            yield Span(collective, start, last - first, pending=True)


def _events(process: int, name: str, scenario: Outcome, ranks: tuple[RankFate, ...]) -> list[dict[str, Any]]:
    events: list[dict[str, Any]] = [
        {"ph": "M", "name": "process_name", "pid": process, "tid": 0, "args": {"name": name}},
    ]
    of_rank = spans(ranks)
    for rank in ranks:
        thread = {"pid": process, "tid": rank.rank}
        label = f"rank {rank.rank}: {rank.fate}"
        events.append({"ph": "M", "name": "thread_name", **thread, "args": {"name": label}})
        events.append({"ph": "M", "name": "thread_sort_index", **thread, "args": {"sort_index": rank.rank}})
        events += [{**_slice(span), **thread, "cat": scenario.chapter} for span in of_rank[rank.rank]]
    return events


def _slice(span: Span) -> dict[str, Any]:
    collective = span.collective
    return {
        "ph": "X",
        "name": collective.describe() + (", not seen to finish" if span.pending else ""),
        "ts": span.start_ns / 1000,
        "dur": (span.end_ns - span.start_ns) / 1000,
        "args": {
            "group": collective.group,
            "shapes": [list(shape) for shape in collective.shapes],
            "dtypes": list(collective.dtypes),
            "phase": collective.phase,
            "step": collective.step,
            "root": collective.root,
            "synchronised": collective.sync,
            "end seen": collective.finished,
        },
    }
