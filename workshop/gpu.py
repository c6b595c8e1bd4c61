"""The page that `ci/gpu.sh` writes: what ran on a machine's accelerator, and what came of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from conformance.report.markdown import as_code
from conformance.run.outcome import Outcome
from conformance.run.report import Report
from conformance.verdict import ScenarioResult

_SIMULATED = "sim"
_HEAD = "# On an accelerator\n\nMade by `bash ci/gpu.sh`; each run has torch's own DDP beside `ddp_impl`.\n"
_NO_DEVICE = """
This machine has no accelerator: what ran is the simulated device, which shows that the script works, and nothing about
NCCL.
"""


def gpu_page(reports: Sequence[Report], bench: str, date: str) -> str:
    """Return the page in Markdown; `bench` is what `ddp-conformance bench` printed."""
    environment = reports[0].environment
    devices = ", ".join(dict.fromkeys(environment.get("accelerators", ()))) or "none"
    facts = {
        "date": date,
        "backend": reports[0].backend,
        "accelerator": devices,
        "torch": reports[0].package_version("torch"),
        "Python": str(environment.get("python", "")),
        "platform": str(environment.get("platform", "")),
    }
    lines = [
        _HEAD + (_NO_DEVICE if reports[0].backend.startswith(_SIMULATED) else ""),
        "| | |",
        "|---|---|",
        *(f"| {name} | {as_code(value)} |" for name, value in facts.items()),
        "",
        "| profile | ranks | scenarios | ddp_impl, or the backend | torch's DDP | seconds |",
        "|---|---|--:|---|---|--:|",
        *(row for report in reports for row in _rows(report)),
        "",
        "Step times with one rank, as ratios to torch's DDP:",
        "",
        *(f"    {line}".rstrip() for line in bench.splitlines()),
    ]
    return "\n".join(lines) + "\n"


def _rows(report: Report) -> list[str]:
    sizes = sorted({outcome.world_size for outcome in report.scenarios})
    rows = []
    for size in sizes:
        chosen = [outcome for outcome in report.scenarios if outcome.world_size == size]
        own = _counts([outcome.subject for outcome in chosen])
        native = _counts([outcome.native for outcome in chosen if outcome.native is not None])
        seconds = sum(map(_milliseconds, chosen)) / 1000
        profile = report.selection.profile
        rows.append(f"| {profile} | {size} | {len(chosen):,} | {own} | {native} | {seconds:.0f} |")
    return rows


def _counts(results: Sequence[ScenarioResult]) -> str:
    counts = Counter(result.verdict.value for result in results)
    return ", ".join(f"{count:,} {verdict}" for verdict, count in counts.most_common()) or "-"


def _milliseconds(outcome: Outcome) -> float:
    return outcome.subject.duration_ms + (outcome.native.duration_ms if outcome.native is not None else 0.0)
