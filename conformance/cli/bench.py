"""`ddp-conformance bench`: compares a DDP's step times with those of torch's DDP."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import click

from conformance.bench.ratio import slower_than_torch
from conformance.cli.console import make_console
from conformance.errors import ReportError

_MAX_FUNCTIONS = 10


@click.command("bench", short_help="Compare step times with torch's DDP.")
@click.option("--ddp", default="ddp_impl", show_default=True, help="DDP under test: ddp_impl, torch, or module:Class.")
@click.option("--backend", default="gloo", show_default=True, help="gloo, nccl, an installed name, or module:attr.")
@click.option("--world-size", type=click.IntRange(min=1), default=2, show_default=True, help="Number of ranks.")
@click.option("--rounds", type=click.IntRange(min=4), default=60, show_default=True, help="Measured steps per DDP.")
@click.option("--out", type=click.Path(path_type=Path, dir_okay=False), help="Also write the ratios to this JSON file.")
@click.option("--compiled", is_flag=True, help="Compile both DDPs with torch.compile.")
@click.option("--compiler", default="inductor", show_default=True, help="Backend of torch.compile, with --compiled.")
@click.option("--workload", "workloads", multiple=True, help="Measure this one; may be repeated. `all` for all.")
@click.option("--clock", type=click.Choice(["wall", "cpu"]), default="wall", show_default=True, help="What is timed.")
@click.option("--memory", is_flag=True, help="Also measure the most memory that tensors take in a step.")
@click.option("--profile", is_flag=True, help="Only show in which of the DDP's functions a step's time goes.")
@click.option("--gate", is_flag=True, help="Exit with 1 where a variant is slower than torch's default, beyond noise.")
def command(
    ddp: str,
    backend: str,
    world_size: int,
    rounds: int,
    out: Path | None,
    compiled: bool,
    compiler: str,
    workloads: tuple[str, ...],
    clock: str,
    memory: bool,
    profile: bool,
    gate: bool,
) -> None:
    """Compare the DDP's step time with that of torch's own DDP, on the same ranks in one run.

    The DDPs take turns. Each round gives one ratio of step times; the command prints the median ratio and its
    quartiles. Below 1, the DDP under test is faster than torch's. The line `torch itself` compares torch's DDP with a
    second copy of itself: it shows how far noise alone moves a ratio from 1.

    The column `overhead` says what share of the overhead of torch's default a variant has: 0 is a step without a DDP
    and with one all-reduce of the same bytes (the line `no DDP, one all-reduce`), 1 is torch's default.

    `--workload` names rows: 400 small layers, small GPT, 24 layers of 512, GPT of width 256, 4 layers of 2048,
    CNN with buffers, experts, 5,000 tensors (or any other number), accumulation, fp16 hook, bf16 hook, join. On a
    busy machine `--clock cpu` shows more than the clock on the wall: the time that the processes computed.

    `--profile` measures no ratio. It runs the DDP alone under Python's profiler, which makes calls of Python dearer
    than they are, and prints CPU time per step of its functions, with what they call in torch.

    With `--compiled`, the columns `options` and `compared with` show values of `torch._dynamo.config.optimize_ddp`:
    `ddp_optimizer` splits graphs at bucket boundaries, `python_reducer` averages gradients in the compiled backward
    (torch's DDP needs compiled autograd for that).

    \b
    ddp-conformance bench
    ddp-conformance bench --compiled
    ddp-conformance bench --workload all --memory --out ratios.json
    ddp-conformance bench --ddp my_pkg:MyDDP --world-size 4 --rounds 200

    `ddp-conformance run --bench` writes these ratios into the run's report.
    """
    from conformance.bench import measure as bench
    from conformance.bench.programs.compiled_step_time import COMPILED_WORKLOADS
    from conformance.bench.programs.workloads import QUICK, WORKLOADS, is_workload
    from conformance.report.terminal import ratios_table
    from conformance.workers.finder import find_backend, find_subject

    console = make_console()
    names = tuple(WORKLOADS) if "all" in workloads else workloads
    for name in names:
        if compiled and name not in COMPILED_WORKLOADS:
            raise click.UsageError(f"unknown compiled workload {name!r}; known: {', '.join(COMPILED_WORKLOADS)}")
        if not compiled and not is_workload(name):
            raise click.UsageError(f"unknown workload {name!r}; known: {', '.join(WORKLOADS)}")
    how = f", both compiled with {compiler}" if compiled else ""
    if not profile:
        console.print(
            f"{ddp} beside torch's DDP{how}, {world_size} ranks on {backend}, {rounds} rounds, ratios of step time"
        )
    if profile:
        for name in names or QUICK:
            step_ms, functions = bench.measure_profile(
                find_subject(ddp), find_backend(backend), name, world_size=world_size, rounds=rounds
            )
            own_ms = sum(num_ms for _, _, num_ms in functions)
            console.print(f"{name}: of {step_ms:.1f} ms per step, {own_ms:.1f} in {ddp} and what it calls in torch")
            for function, calls, num_ms in functions[:_MAX_FUNCTIONS]:
                console.print(f"  {num_ms:7.2f} ms {calls:8.1f} calls  {function}", highlight=False)
        return
    ratios = bench.run(
        find_subject(ddp),
        find_backend(backend),
        world_size=world_size,
        rounds=rounds,
        compiler=compiler if compiled else None,
        workloads=names,
        clock=clock,
        progress=lambda workload: console.print(f"measuring {workload} ..."),
    )
    console.print(ratios_table(ratios))
    for name in (names or QUICK) if memory and not compiled else ():
        peaks = bench.measure_memory(find_subject(ddp), find_backend(backend), name, world_size=world_size)
        told = ", ".join(f"{label} {num_bytes / 1e6:.2f}" for label, num_bytes in peaks.items())
        console.print(f"peak memory of {name} on rank 0, in MB: {told}")
    if out is not None:
        try:
            out.write_text(json.dumps([asdict(ratio) for ratio in ratios], indent=2) + "\n")
        except OSError as error:
            raise ReportError(f"cannot write {out}: {error.strerror}") from error
    if gate and (slower := slower_than_torch(ratios)):
        click.echo("\n".join(["Slower than torch's DDP:", *slower]), err=True)
        click.get_current_context().exit(1)
