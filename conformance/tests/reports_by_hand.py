"""Reports made without running anything, for the tests of what is made of reports."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from conformance.bench.ratio import Ratio
from conformance.observation import Collective
from conformance.report.folder import write_report
from conformance.run.known_failures import EXPIRED, MET, UNEXPECTED_PASS, Excuse
from conformance.run.outcome import Note, Outcome
from conformance.run.report import Assignment, JudgedSubject, Report
from conformance.scenario import Fault, Scenario, Step
from conformance.spec.catalogue import Catalogue, Chapter, Requirement
from conformance.verdict import Finding, RankFate, ScenarioResult, Verdict

PASS, FAIL, HANG, CRASH = Verdict.PASS, Verdict.FAIL, Verdict.HANG, Verdict.CRASH
UNSUPPORTED, UNKNOWN, HARNESS_ERROR = Verdict.UNSUPPORTED, Verdict.UNKNOWN, Verdict.HARNESS_ERROR

#: What a page, a comment or an XML file must show and never obey.
HOSTILE = "<script>document.title='owned'</script>\"'><img src=x onerror=\"document.title='owned'\">]]>{{7*7}}"
#: What XML cannot hold, and what a terminal would obey.
UNPRINTABLE = "\x00\x08\x1b[31mred\x1b[0m\ufffe"

MEAN = Requirement("GRAD-01", "gradients", "Every rank MUST hold the mean of the gradients.", "core", ("docs",))
CAP = Requirement("GRAD-02", "gradients", "A gradient MUST NOT depend on the bucket cap.", "full", ("docs",))
ORDER = Requirement("BUCKET-01", "buckets", "Ranks MUST reduce the same buckets.", "core", ("docs",))
CATALOGUE = Catalogue(
    (Chapter("gradients", "Gradients", "GRAD", (MEAN, CAP)), Chapter("buckets", "Buckets", "BUCKET", (ORDER,)))
)
ENVIRONMENT = {
    "python": "3.11.7", "platform": "Linux", "machine": "x86_64", "cores": 2, "accelerators": [], "variables": {},
    "packages": {"ddp-conformance": "0.1.0", "torch": "2.13.0+cpu"}, "device_type": "cpu",
    "sources": {"suite": "a", "subject": "b"},
}  # fmt: skip


def scenario(scenario_id: str, **changes: Any) -> Scenario:
    return Scenario(scenario_id, (scenario_id.split("/")[1],), "train", world_size=2, seed=7).replace(**changes)


def result(
    verdict: Verdict, subject: str = "ddp_impl", summary: str = "", ranks: Sequence[RankFate] = (), ms: float = 12.5
) -> ScenarioResult:
    summary = summary or f"it was {verdict.value}"
    finding = Finding(
        "facts", verdict, summary, f"Let   A = {summary}\nThen  A is not 2." if verdict.is_failure else ""
    )
    return ScenarioResult(subject, verdict, ms, 3, (finding,), tuple(ranks))


def outcome(
    of: str | Scenario,
    verdict: Verdict,
    native: Verdict | None = None,
    summary: str = "",
    ranks: Sequence[RankFate] = (),
    *,
    ms: float = 12.5,
    notes: tuple[Note, ...] = (),
    warm: bool = True,
    excuse: Excuse | None = None,
) -> Outcome:
    """Return what a scenario, given by its id or as it is, came to for ddp_impl and for torch's DDP."""
    beside = result(native, "torch") if native is not None else None
    mine = result(verdict, summary=summary, ranks=ranks, ms=ms)
    of = scenario(of) if isinstance(of, str) else of
    return Outcome.of(of, mine, beside, notes=notes, warm=warm, excuse=excuse)


def run_report(
    *outcomes: Outcome,
    selected: Sequence[str] = (),
    subject: str = "ddp_impl",
    target: str = "ddp_impl:DistributedDataParallel",
    catalogue: Catalogue = CATALOGUE,
    **changes: Any,
) -> Report:
    """Return the report of a run of `outcomes`; `selected` are the ids of all shards, the outcomes' by default.

    Without a `target` a backend was judged by itself, whose name is `subject`.
    """
    given = {
        "backend": "gloo", "num_selected": len(outcomes), "environment": ENVIRONMENT, "duration_s": 3.25,
        "selection": Assignment("", "", tuple(selected) or tuple(one.id for one in outcomes)), **changes,
    }  # fmt: skip
    return Report.of(outcomes, catalogue, subject=JudgedSubject(subject, target), **given)


def stored(folder: Path, *outcomes: Outcome, **changes: Any) -> Report:
    folder.mkdir(parents=True, exist_ok=True)
    report = run_report(*outcomes, **changes)
    write_report(report, CATALOGUE, folder)
    return report


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
    outcome("gradients/GRAD-01/mlp", PASS, FAIL, notes=(Note("accuracy", 0.97, "at least 0.95"),)),
    outcome("gradients/GRAD-01/cnn", UNKNOWN, PASS),
    outcome("gradients/GRAD-02/mlp", FAIL, PASS, summary="a gradient is wrong"),
    outcome("gradients/GRAD-02/cnn", HANG, HANG, summary="rank 1 is missing", ranks=RANKS),
    outcome("buckets/BUCKET-01/mlp", CRASH, PASS),
    outcome("buckets/BUCKET-01/cnn", UNSUPPORTED, UNSUPPORTED),
    outcome("buckets/BUCKET-01/rnn", HARNESS_ERROR, PASS),
)


def excuse(status: str) -> Excuse:
    return Excuse(status, FAIL, "a known defect", "https://example.org/1", "2030-01-31")


#: A run with everything that a report can hold; `fixtures/reports/interrupted.json` is its file.
EVERYTHING = (
    *MIXED,
    outcome("gradients/GRAD-01/known", FAIL, PASS, excuse=excuse(MET)),
    outcome("gradients/GRAD-01/mended", PASS, PASS, excuse=excuse(UNEXPECTED_PASS)),
    outcome("gradients/GRAD-01/late", FAIL, excuse=excuse(EXPIRED)),
    outcome("gradients/GRAD-02/native-broken", PASS, HARNESS_ERROR, ms=12.346),
    outcome(
        "gradients/GRAD-02/cold", PASS, PASS, warm=False,
        notes=(
            Note("loss", float("nan"), "at most 1"), Note("bound", float("-inf"), "above 0"),
            Note("steps", 3, "at least 2"),
        ),
    ),
    outcome(
        scenario(
            "buckets/BUCKET-01/odd", requirements=("BUCKET-01", "GRAD-01"), world_size=3, needs=("join",),
            options={"bucket_cap_mb": 0.5, "nested": [1, [2, {"a": None}]]}, arguments={"dtypes": ["float32"]},
            schedule=(Step(2, False, True, "zeros"),), faults=(Fault("kill", 1),),
        ),
        FAIL,
    ),
)  # fmt: skip
INTERRUPTED = run_report(
    *EVERYTHING, num_selected=15, interrupted=True, duration_s=3.14159265, performance=RATIOS,
    selection=Assignment(
        "core", "1/2", (*(one.id for one in EVERYTHING), "gradients/GRAD-01/left", "gradients/GRAD-01/out"),
        "shuffled", 7,
    ),
)  # fmt: skip
