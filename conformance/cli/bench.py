"""`ddp-conformance bench`: how fast a DDP is beside torch's own."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import click

from conformance.cli.console import make_console
from conformance.errors import ReportError


@click.command("bench", short_help="Compare step times with torch's DDP.")
@click.option("--ddp", default="ddp_impl", show_default=True, help="DDP under test: ddp_impl, torch, or module:Class.")
@click.option("--backend", default="gloo", show_default=True, help="gloo, nccl, or module:attr of a Backend.")
@click.option("--world-size", type=click.IntRange(min=1), default=2, show_default=True, help="Number of ranks.")
@click.option("--rounds", type=click.IntRange(min=4), default=60, show_default=True, help="Steps per contestant.")
@click.option("--out", type=click.Path(path_type=Path, dir_okay=False), help="Write the ratios to this JSON file too.")
@click.option("--compiled", is_flag=True, help="Compare both under torch.compile.")
@click.option("--compiler", default="inductor", show_default=True, help="Backend of torch.compile, with --compiled.")
def command(
    ddp: str, backend: str, world_size: int, rounds: int, out: Path | None, compiled: bool, compiler: str
) -> None:
    """Compare the DDP's step time with that of torch's own DDP, on the same ranks in one run.

    Contestants take turns; each round gives a ratio, and the median ratio is printed with its quartiles. Below 1 the
    DDP is faster than torch's. The line `torch itself` (torch's DDP against a second copy of itself) tells how far from
    1 noise alone gets.

    With `--compiled`, `options` and `compared with` name values of `torch._dynamo.config.optimize_ddp`: graphs split at
    bucket boundaries, or gradients averaged in the compiled backward (for which torch's DDP needs compiled autograd).

    \b
    ddp-conformance bench
    ddp-conformance bench --compiled
    ddp-conformance bench --ddp my_pkg:MyDDP --world-size 4 --rounds 200

    `ddp-conformance run --bench` puts these ratios into a run's report.
    """
    from conformance.backends.backend import get_backend
    from conformance.bench import measure as bench
    from conformance.report.terminal import ratios_table
    from conformance.subjects.subject import get_subject

    console = make_console()
    how = f", both compiled with {compiler}" if compiled else ""
    console.print(
        f"{ddp} beside torch's DDP{how}, {world_size} ranks on {backend}, {rounds} rounds, ratios of step time"
    )
    ratios = bench.run(
        get_subject(ddp),
        get_backend(backend),
        world_size=world_size,
        rounds=rounds,
        compiler=compiler if compiled else None,
        progress=lambda workload: console.print(f"measuring {workload} ..."),
    )
    console.print(ratios_table(ratios))
    if out is not None:
        try:
            out.write_text(json.dumps([asdict(ratio) for ratio in ratios], indent=2) + "\n")
        except OSError as error:
            raise ReportError(f"cannot write {out}: {error.strerror}") from error
