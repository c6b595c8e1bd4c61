"""Reports made without running anything, for the tests of what is made of reports."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from conformance.bench.ratio import Ratio
from conformance.history import Collective
from conformance.report.json_report import write_report
from conformance.report.read import read_report
from conformance.report.stored_report import StoredReport
from conformance.run.outcome import Assignment, Note, Outcome, RunReport
from conformance.scenario import Scenario
from conformance.spec.catalogue import Catalogue, Chapter, Requirement
from conformance.verdict import Finding, RankFate, ScenarioResult, Verdict

PASS, FAIL, HANG, CRASH = Verdict.PASS, Verdict.FAIL, Verdict.HANG, Verdict.CRASH
UNSUPPORTED, UNKNOWN, HARNESS_ERROR = Verdict.UNSUPPORTED, Verdict.UNKNOWN, Verdict.HARNESS_ERROR

#: What a page, a comment or an XML file must show and never obey.
HOSTILE = "<script>document.title='owned'</script>\"'><img src=x onerror=\"document.title='owned'\">]]>{{7*7}}"
#: What XML cannot hold, and what a terminal would obey.
UNPRINTABLE = "\x00\x08\x1b[31mred\x1b[0m\ufffe"

MEAN = Requirement("GRAD-01", "gradients", "Every rank MUST hold the mean of the gradients.", "core", ("docs",), "0.1")
CAP = Requirement("GRAD-02", "gradients", "A gradient MUST NOT depend on the bucket cap.", "full", ("docs",), "0.1")
ORDER = Requirement("BUCKET-01", "buckets", "Ranks MUST reduce the same buckets.", "core", ("docs",), "0.1")
CATALOGUE = Catalogue(
    (Chapter("gradients", "Gradients", "GRAD", (MEAN, CAP)), Chapter("buckets", "Buckets", "BUCKET", (ORDER,)))
)
ENVIRONMENT = {
    "python": "3.11.7", "platform": "Linux", "machine": "x86_64", "cores": 2, "accelerators": [], "variables": {},
    "packages": {"ddp-conformance": "0.1.0", "torch": "2.13.0+cpu"}, "device_type": "cpu",
}  # fmt: skip


def scenario(scenario_id: str, **changes: Any) -> Scenario:
    return Scenario(scenario_id, (scenario_id.split("/")[1],), "train", world_size=2, seed=7).replace(**changes)


def result(
    of: Scenario, verdict: Verdict, subject: str = "ddp_impl", summary: str = "", ranks: Sequence[RankFate] = ()
) -> ScenarioResult:
    summary = summary or f"it was {verdict.value}"
    finding = Finding(
        "facts", verdict, summary, f"Let   A = {summary}\nThen  A is not 2." if verdict.is_failure else ""
    )
    return ScenarioResult(of.id, of.requirements, subject, verdict, (finding,), tuple(ranks), 12.5, 3)


def outcome(
    scenario_id: str, verdict: Verdict, native: Verdict | None = None, summary: str = "", ranks: Sequence[RankFate] = ()
) -> Outcome:
    of = scenario(scenario_id)
    beside = result(of, native, "torch") if native is not None else None
    return Outcome(of, result(of, verdict, summary=summary, ranks=ranks), beside, warm=True)


def run_report(*outcomes: Outcome, selected: Sequence[str] = (), **changes: Any) -> RunReport:
    """Return the report of a run of `outcomes`; `selected` are the ids of all shards, the outcomes' by default."""
    ids = tuple(selected) or tuple(one.scenario.id for one in outcomes)
    report = RunReport(
        "ddp_impl", "ddp_impl:DistributedDataParallel", "gloo", outcomes, len(outcomes), duration_s=3.25,
        environment=ENVIRONMENT, assignment=Assignment(ids),
    )  # fmt: skip
    return dataclasses.replace(report, **changes)


def stored(folder: Path, *outcomes: Outcome, **changes: Any) -> StoredReport:
    """Write a report of `outcomes` into `folder` and read it back."""
    folder.mkdir(parents=True, exist_ok=True)
    return read_report(write_report(run_report(*outcomes, **changes), CATALOGUE, folder))


def collective(index: int, op: str, start_ms: float, duration_ms: float | None) -> Collective:
    finished = duration_ms is not None
    return Collective(
        index, op, "default", ((8, 4),), ("float32",), "sum", phase="backward", step=1, finished=finished,
        started_ns=int(start_ms * 1e6) + 10**15, duration_ns=int((duration_ms or 0) * 1e6),
    )  # fmt: skip


#: Rank 1 died after one collective, and rank 0 waits for it in the second.
RANKS = (
    RankFate(
        0, "hung in backward", "backward", "all_reduce #1", "a stack", "",
        (collective(0, "all_reduce", 1, 4), collective(1, "all_reduce", 7, None)),
    ),
    RankFate(1, "killed by SIGKILL", "backward", "all_reduce #0", "", "its end", (collective(0, "all_reduce", 2, 3),)),
)  # fmt: skip

#: Half again as slow as torch's DDP, and how far noise alone gets.
RATIOS = (
    Ratio("a model", "default", "torch's default", 2, 1.5, 1.375, 1.625, 60),
    Ratio("a model", "torch itself", "torch's default", 2, 1.0, 0.9, 1.5, 60),
)

MIXED = (
    dataclasses.replace(outcome("gradients/GRAD-01/mlp", PASS, FAIL), notes=(Note("accuracy", 0.97, "at least 0.95"),)),
    outcome("gradients/GRAD-01/cnn", UNKNOWN, PASS),
    outcome("gradients/GRAD-02/mlp", FAIL, PASS, summary="a gradient is wrong"),
    outcome("gradients/GRAD-02/cnn", HANG, HANG, summary="rank 1 is missing", ranks=RANKS),
    outcome("buckets/BUCKET-01/mlp", CRASH, PASS),
    outcome("buckets/BUCKET-01/cnn", UNSUPPORTED, UNSUPPORTED),
    outcome("buckets/BUCKET-01/rnn", HARNESS_ERROR, PASS),
)
