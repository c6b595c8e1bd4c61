"""The page about devices: how often ranks wait for theirs in a step, for each feature, ddp_impl beside torch's DDP."""

from __future__ import annotations

from collections.abc import Sequence

from conformance.report.markdown import as_code
from conformance.run.report import Report

CHAPTER = "devices"

#: What a row is called -> the scenario, without its chapter, that counts.
ROWS = {
    "default": "DEV-03/plain-world2",
    "`gradient_as_bucket_view`": "DEV-03/view-world2",
    "`no_sync` before it": "DEV-03/no-sync-plain-world2",
    "`find_unused_parameters`": "DEV-04/default-world2",
    "`find_unused_parameters`, a layer unused": "DEV-04/default-spare-world2",
    "`static_graph`": "DEV-03/static-world2",
    "`static_graph`, a layer unused": "DEV-29/plain-world2",
    "join": "DEV-24/plain-world2",
    "mixed precision": "DEV-25/plain-world2",
    "a comm hook": "DEV-26/plain-world2",
    "optimizers in backward": "DEV-27/plain-world2",
    "buffers": "DEV-28/plain-world2",
    "SyncBatchNorm, its own": "DEV-50/plain-world2",
}
_HEAD = """# Devices

The profile `gpu` is about accelerators: what a DDP does with streams, events and memory of a device. It runs on the
simulated device of this package (`--backend sim`) wherever a C++ compiler is, and on `nccl` and vendors' devices alike;
what only a device can tell that counts and lists is UNSUPPORTED on the others.
[decisions/devices.md](decisions/devices.md) says how the simulated one works.

How often the host waits for the device in a step, from forward to the end of backward, once the DDP has agreed on its
buckets; at world size 2. Each wait empties the queue of the device. Made from reports of chapter devices, of both DDPs:

    ddp-conformance run --backend sim devices --report ours
    ddp-conformance run --backend sim devices --ddp torch --report torch
    python -m workshop renew --report ours --report torch
"""

_FOOT = """Waits are counted wherever they are asked for, in the C++ of torch's reducer too: copies that block,
`synchronize`, operations whose result the host needs.

With `find_unused_parameters`, ranks exchange in each step which parameters they used, and whether one refuses to go on
because its gradients are impossible. A rank that left a parameter out must read the answer, as with torch's DDP. One
that used all of them does not: its device copies the answer to the host, and a forward that finds it there raises if
another rank refused. Where the host need not wait, on a CPU, every rank reads it, and all raise in the same backward.
"""


def devices_page(reports: Sequence[Report]) -> str:
    """Return the page in Markdown; `reports` hold chapter devices, each of one DDP."""
    first = reports[0]
    counts = [_counts(report) for report in reports]
    lines = [
        _HEAD,
        f"On {as_code(first.backend)} with torch {as_code(first.package_version('torch'))}.",
        "",
        f"| in each step | {' | '.join(report.subject.name for report in reports)} |",
        "|---|" + "--:|" * len(reports),
        *(f"| {row} | {' | '.join(count.get(scenario, '-') for count in counts)} |" for row, scenario in ROWS.items()),
    ]
    return "\n".join([*lines, "", _FOOT])


def _counts(report: Report) -> dict[str, str]:
    return {
        outcome.id.removeprefix(f"{CHAPTER}/"): f"{note.value:g}"
        for outcome in report.scenarios
        if outcome.chapter == CHAPTER
        for note in outcome.notes
        if note.name == "waits"
    }
