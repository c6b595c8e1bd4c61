"""`ddp-conformance bench`: compares a DDP's step times with those of torch's DDP."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import click

from conformance.cli.console import make_console
from conformance.errors import ReportError


@click.command("bench", short_help="Compare step times with torch's DDP.")
@click.option("--ddp", default="ddp_impl", show_default=True, help="DDP under test: ddp_impl, torch, or module:Class.")
@click.option("--backend", default="gloo", show_default=True, help="gloo, nccl, an installed name, or module:attr.")
@click.option("--world-size", type=click.IntRange(min=1), default=2, show_default=True, help="Number of ranks.")
@click.option("--rounds", type=click.IntRange(min=4), default=60, show_default=True, help="Measured steps per DDP.")
@click.option("--out", type=click.Path(path_type=Path, dir_okay=False), help="Also write the ratios to this JSON file.")
@click.option("--compiled", is_flag=True, help="Compile both DDPs with torch.compile.")
@click.option("--compiler", default="inductor", show_default=True, help="Backend of torch.compile, with --compiled.")
def command(
    ddp: str, backend: str, world_size: int, rounds: int, out: Path | None, compiled: bool, compiler: str
) -> None:
    """Compare the DDP's step time with that of torch's own DDP, on the same ranks in one run.

    The DDPs take turns. Each round gives one ratio of step times; the command prints the median ratio and its
    quartiles. Below 1, the DDP under test is faster than torch's. The line `torch itself` compares torch's DDP with a
    second copy of itself: it shows how far noise alone moves a ratio from 1.

    With `--compiled`, the columns `options` and `compared with` show values of `torch._dynamo.config.optimize_ddp`:
    `ddp_optimizer` splits graphs at bucket boundaries, `python_reducer` averages gradients in the compiled backward
    (torch's DDP needs compiled autograd for that).

    \b
    ddp-conformance bench
    ddp-conformance bench --compiled
    ddp-conformance bench --ddp my_pkg:MyDDP --world-size 4 --rounds 200

    `ddp-conformance run --bench` writes these ratios into the run's report.
    """
    from conformance.bench import measure as bench
    from conformance.report.terminal import ratios_table
    from conformance.workers.finder import find_backend, find_subject

    console = make_console()
    how = f", both compiled with {compiler}" if compiled else ""
    console.print(
        f"{ddp} beside torch's DDP{how}, {world_size} ranks on {backend}, {rounds} rounds, ratios of step time"
    )
    ratios = bench.run(
        find_subject(ddp),
        find_backend(backend),
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
