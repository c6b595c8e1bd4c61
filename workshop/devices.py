"""The page about devices: how often ranks wait for theirs in a step, for each feature, ddp_impl beside torch's DDP."""

from __future__ import annotations

from collections.abc import Sequence

from conformance.run.outcome import Note
from conformance.run.report import Report
from workshop.run_text import run_text

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
buckets; at world size 2. Each wait empties the queue of the device. This counts them again:

    ddp-conformance run --backend sim devices
"""

_FOOT = """Waits are counted wherever they are asked for, in the C++ of torch's reducer too: copies that block,
`synchronize`, operations whose result the host needs.

With `find_unused_parameters`, ranks exchange in each step which parameters they used, and whether one refuses to go on
because its gradients are impossible. A rank that left a parameter out must read the answer, as with torch's DDP. One
that used all of them does not: its device copies the answer to the host, and a forward that finds it there raises if
another rank refused. Where the host need not wait, on a CPU, every rank reads it, and all raise in the same backward.
"""


def devices_page(report: Report | None) -> str:
    """Return the page in Markdown, of a report that holds chapter devices; without one, it says that none is stored."""
    return "\n".join([_HEAD, f"No stored run holds chapter {CHAPTER}.\n" if report is None else _table(report), _FOOT])


def _table(report: Report) -> str:
    scenarios = {one.id.removeprefix(f"{CHAPTER}/"): one for one in report.scenarios if one.chapter == CHAPTER}
    own = {name: _waits(one.notes) for name, one in scenarios.items()}
    of_torch = {name: _waits(one.native_notes) for name, one in scenarios.items()}
    lines = [
        f"{run_text(report)}.",
        "",
        f"| in each step | {report.subject.name} | torch's DDP |",
        "|---|--:|--:|",
        *(f"| {row} | {own.get(name, '-')} | {of_torch.get(name, '-')} |" for row, name in ROWS.items()),
    ]
    return "\n".join(lines) + "\n"


def _waits(notes: Sequence[Note]) -> str:
    return next((f"{note.value:g}" for note in notes if note.name == "waits"), "-")
