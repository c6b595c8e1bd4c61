"""`ddp-conformance bench`: compares a DDP's step times with those of torch's DDP, and operations of two backends."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from conformance.bench.ratio import Ratio, changes, slower_than_reference
from conformance.cli.options import NamedPath
from conformance.errors import ReportError
from conformance.report.console import make_console, say

if TYPE_CHECKING:
    from conformance.backends.backend import Backend
    from conformance.subjects.subject import Subject

_ROUNDS = 60
_MAX_FUNCTIONS = 10
_GROWTH_ROUNDS = 6


@click.command("bench")
@click.option("--ddp", help="DDP under test: ddp_impl, torch, or module:Class.  [default: ddp_impl]")
@click.option(
    "--backend",
    help="gloo, nccl, an installed name, or module:attr; without --ddp its operations are timed.  [default: gloo]",
)
@click.option("--against", metavar="BACKEND", help="With --backend, the one beside which it is timed.  [default: gloo]")
@click.option(
    "--world-size", "world_sizes", type=click.IntRange(min=1), multiple=True,
    help="Number of ranks; for a backend it may be repeated.  [default: 2; 2 and 4]",
)  # fmt: skip
@click.option("--rounds", type=click.IntRange(min=4), help="Measured rounds: 60, 30 for a backend, 6 with --growth.")
@click.option("--since", type=NamedPath(exists=True, dir_okay=False), help="Also say what changed since that --out.")
@click.option("--out", type=NamedPath(dir_okay=False), help="Also write the ratios to this JSON file.")
@click.option("--plots", type=NamedPath(file_okay=False), help="Also draw SVG figures into this folder.")
@click.option("--compiled", is_flag=True, help="Compile both DDPs with torch.compile.")
@click.option("--compiler", default="inductor", show_default=True, help="Backend of torch.compile, with --compiled.")
@click.option("--workload", "workloads", multiple=True, help="Measure this one, or this operation; may be repeated.")
@click.option("--clock", type=click.Choice(["wall", "cpu"]), default="wall", show_default=True, help="What is timed.")
@click.option(
    "--steps-before", type=click.IntRange(min=0), default=1, show_default=True,
    help="Steps in each turn of a DDP before the one that is measured.",
)  # fmt: skip
@click.option("--memory", is_flag=True, help="Also measure the most memory that tensors take in a step.")
@click.option("--profile", is_flag=True, help="Only show in which of the DDP's functions a step's time goes.")
@click.option("--growth", is_flag=True, help="Only show how costs grow with tensors and with ranks.")
@click.option("--gate", is_flag=True, help="Exit with 1 where the DDP, or the backend, is slower, beyond noise.")
def command(
    ddp: str | None,
    backend: str | None,
    against: str | None,
    world_sizes: tuple[int, ...],
    rounds: int | None,
    since: Path | None,
    out: Path | None,
    plots: Path | None,
    compiled: bool,
    compiler: str,
    workloads: tuple[str, ...],
    clock: str,
    steps_before: int,
    memory: bool,
    profile: bool,
    growth: bool,
    gate: bool,
) -> None:
    """Compare the DDP's step time with that of torch's own DDP, on the same ranks in one run.

    The DDPs take turns. In each, a DDP takes one step to bring its data and code back into the caches, where a
    training has them, and one that is measured (`--steps-before 0`: none, as behind much other work). Each round gives
    one ratio of step times; the command prints the median ratio and its quartiles. Below 1, the DDP under test is
    faster than torch's. The line `torch itself` compares torch's DDP with a second copy of itself: it shows how far
    noise alone moves a ratio from 1.

    The column `overhead` says what share of the overhead of torch's default a variant has: 0 is a step without a DDP
    and with one all-reduce of the same bytes (the line `no DDP, one all-reduce`), 1 is torch's default. Behind it stand
    two standard errors: more `--rounds` make them smaller. There is none where that floor is as slow, within noise.

    `--workload` names rows: 400 small layers, small GPT, 24 layers of 512, GPT of width 256, 4 layers of 2048,
    CNN with buffers, experts, 5,000 tensors (or any other number), accumulation, fp16 hook, bf16 hook, join. On a
    busy machine `--clock cpu` shows more than the clock on the wall: the time that the processes computed.

    `--growth` compares costs at growing sizes: a step of 100 to 100,000 tensors, a step on 2 to 32 ranks, and wrapping
    and the first two steps of one rank that 4,096 simulated ones answer. With `--gate` it exits with 1 where the DDP's
    cost grows faster than linearly, beyond noise.

    `--backend` without `--ddp` compares a backend with the one of `--against`, by operation, bytes and ranks: the ratio
    of the time of a call of the fewest bytes (latency) and that of bytes per second of the most (bandwidth); at how
    many bytes a call takes twice as long as of the fewest (knee); with which power of the bytes the time grows at the
    end; the time of a call and a computation that begin together, over one after the other (1: nothing overlaps, 0.5:
    all); and the CPU seconds of all ranks per GiB. A second group of the other backend shows the noise. `--workload`
    then names operations. `--plots` draws all sizes, `--out` writes them, and `--since` names such a file of an
    earlier run. Bytes are those of the largest tensor, or list of tensors, of a rank.

    `--profile` measures no ratio. It runs the DDP alone under Python's profiler, which makes calls of Python dearer
    than they are, and prints CPU time per step of its functions, with what they call in torch.

    With `--compiled`, the columns `options` and `compared with` show values of `torch._dynamo.config.optimize_ddp`:
    `ddp_optimizer` splits graphs at bucket boundaries, `python_reducer` averages gradients in the compiled backward
    (torch's DDP needs compiled autograd for that).

    \b
    ddp-conformance bench
    ddp-conformance bench --compiled
    ddp-conformance bench --workload all --memory --out ratios.json
    ddp-conformance bench --growth --plots figures
    ddp-conformance bench --ddp my_pkg:MyDDP --world-size 4 --rounds 200

    ddp-conformance bench --backend acme --against gloo --plots figures --out today.json --since monday.json

    `ddp-conformance run --bench` writes these ratios into the run's report, with `--profile backend` the backend's.
    """
    of_operations = backend is not None and ddp is None and not (compiled or profile or growth or memory)
    beside = f"beside {against or 'gloo'}" if of_operations else "alone" if profile else "beside torch's DDP"
    timed = (
        f"operations of {backend} {beside}"
        if of_operations
        else f"{ddp or 'ddp_impl'} {beside} over {backend or 'gloo'}"
    )
    say(f"Timing {timed} ...", err=True)  # at once: torch is imported next

    from conformance.bench.programs.compiled_step_time import COMPILED_WORKLOADS
    from conformance.bench.programs.workloads import WORKLOADS, is_workload
    from conformance.workers.finder import find_backend, find_subject

    earlier = None if since is None else _read(since)
    if backend is not None and of_operations:
        _Operations(backend, against or "gloo", world_sizes, rounds, workloads).compare(out, plots, earlier, gate=gate)
        return
    if against is not None:
        raise click.UsageError("--against goes with --backend, and without --ddp: it compares two backends")
    if len(world_sizes) > 1:
        raise click.UsageError("only operations of a backend are timed at several --world-size: leave --ddp out")
    ddp, backend, world_size = ddp or "ddp_impl", backend or "gloo", next(iter(world_sizes), 2)
    names = tuple(WORKLOADS) if "all" in workloads else workloads
    for name in names:
        if compiled and name not in COMPILED_WORKLOADS:
            raise click.UsageError(f"unknown compiled workload {name!r}; known: {', '.join(COMPILED_WORKLOADS)}")
        if not compiled and not is_workload(name):
            raise click.UsageError(f"unknown workload {name!r}; known: {', '.join(WORKLOADS)}")
    chosen = [flag for flag, given in (("--compiled", compiled), ("--profile", profile), ("--growth", growth)) if given]
    if len(chosen) > 1:
        raise click.UsageError(f"choose one of {' and '.join(chosen)}")
    if plots is not None and (compiled or profile):
        raise click.UsageError(
            "--plots draws ratios to torch's default, and growth; leave out --compiled and --profile"
        )
    if growth and (names or memory):
        raise click.UsageError("--growth has sizes of its own: leave --workload and --memory out")
    subject, of_ranks = find_subject(ddp), find_backend(backend)
    if growth:
        _grow(subject, of_ranks, rounds or _GROWTH_ROUNDS, out, plots, gate=gate)
    elif profile:
        _profile(subject, of_ranks, names, world_size, rounds or _ROUNDS)
    else:
        measured = _Measurement(subject, of_ranks, names, world_size, rounds or _ROUNDS, clock, steps_before)
        measured.compare(compiler if compiled else None, out, plots, earlier, memory=memory, gate=gate)


def _profile(subject: Subject, backend: Backend, names: Sequence[str], world_size: int, rounds: int) -> None:
    from conformance.bench.measure import measure_profile
    from conformance.bench.programs.workloads import QUICK

    console = make_console()
    for name in names or QUICK:
        step_ms, functions = measure_profile(subject, backend, name, world_size=world_size, rounds=rounds)
        own_ms = sum(num_ms for _, _, num_ms in functions)
        console.print(
            f"{name}: of {step_ms:.1f} ms per step, {own_ms:.1f} in {subject.name} and what it calls in torch"
        )
        for function, calls, num_ms in functions[:_MAX_FUNCTIONS]:
            console.print(f"  {num_ms:7.2f} ms {calls:8.1f} calls  {function}")


def _grow(subject: Subject, backend: Backend, rounds: int, out: Path | None, plots: Path | None, *, gate: bool) -> None:
    from conformance.bench.curve import steeper_than_linear
    from conformance.bench.growth import ALONE, measure_growth
    from conformance.report.terminal import growth_table

    console = make_console()
    console.print(f"{subject.name} beside torch's DDP on {backend.name}, {rounds} rounds, costs as ratios")
    curves = measure_growth(
        subject, backend, rounds=rounds, progress=lambda text: console.print(f"measuring {text} ...")
    )
    console.print(growth_table(curves))
    _write(out, [asdict(curve) for curve in curves])
    if plots is not None:
        from conformance.report.plots import draw_growth

        for path in draw_growth(curves, plots):
            console.print(f"drawn: {path}")
    floors = {curve.plot: curve for curve in curves if curve.contestant == ALONE}
    steeper = steeper_than_linear((curve for curve in curves if curve.contestant == subject.name), floors)
    for sentence in steeper or ("Nothing grows faster than linearly, beyond noise.",):
        console.print(sentence)
    if gate and steeper:
        click.get_current_context().exit(1)


@dataclass(frozen=True, slots=True)
class _Measurement:
    """What is compared with torch's DDP, and where."""

    subject: Subject
    backend: Backend
    names: Sequence[str]
    world_size: int
    rounds: int
    clock: str
    steps_before: int

    def compare(
        self, compiler: str | None, out: Path | None, plots: Path | None, earlier: Sequence[Ratio] | None,
        *, memory: bool, gate: bool,
    ) -> None:  # fmt: skip
        """Print the ratios of step times; with `gate`, exit with 1 where the DDP is slower."""
        from conformance.bench.measure import measure_memory, run
        from conformance.bench.programs.compiled_step_time import COMPILED_WORKLOADS
        from conformance.bench.programs.workloads import QUICK
        from conformance.report.terminal import ratios_table

        console = make_console()
        how = "" if compiler is None else f", both compiled with {compiler}"
        console.print(
            f"{self.subject.name} beside torch's DDP{how}, {self.world_size} ranks on {self.backend.name}, "
            f"{self.rounds} rounds, ratios of step time"
        )
        ratios: list[Ratio] = []
        try:
            for name in self.names or (QUICK if compiler is None else tuple(COMPILED_WORKLOADS)):
                console.print(f"measuring {name} ...")
                ratios += run(
                    self.subject,
                    self.backend,
                    world_size=self.world_size,
                    rounds=self.rounds,
                    compiler=compiler,
                    workloads=[name],
                    clock=self.clock,
                    steps_before=self.steps_before,
                )
        finally:  # also when a rank does not finish in one of the workloads
            if ratios:
                console.print(ratios_table(ratios))
        for name in (self.names or QUICK) if memory and compiler is None else ():
            peaks = measure_memory(self.subject, self.backend, name, world_size=self.world_size)
            told = ", ".join(f"{label} {num_bytes / 1e6:.2f}" for label, num_bytes in peaks.items())
            console.print(f"peak memory of {name} on rank 0, in MB: {told}")
        if plots is not None:
            from conformance.report.plots import draw_ratios

            console.print(f"drawn: {draw_ratios(ratios, plots)}")
        _conclude(ratios, out, earlier, gate=gate)


@dataclass(frozen=True, slots=True)
class _Operations:
    """Two backends whose operations are compared, and where."""

    backend: str
    against: str
    world_sizes: tuple[int, ...]
    rounds: int | None
    names: tuple[str, ...]

    def compare(
        self, out: Path | None, plots: Path | None, earlier: Sequence[Ratio] | None, *, gate: bool
    ) -> None:  # fmt: skip
        """Print the table of operations; with `gate`, exit with 1 where the backend is slower."""
        from conformance.bench.operations import ROUNDS, Timed, operations_of, run
        from conformance.report.terminal import operations_table
        from conformance.workers.finder import find_backend

        console = make_console()
        backend, against = find_backend(self.backend), find_backend(self.against)
        for side in (backend, against):
            side.require()
        known = operations_of(backend, against)
        if unknown := set(self.names) - {"all", *known}:
            told = f"both backends must have {', '.join(sorted(unknown))}"
            raise click.UsageError(f"{told}; both have {', '.join(known)}")
        most = min(side.max_world_size() or 4 for side in (backend, against))
        sizes = self.world_sizes or tuple(size for size in (2, 4) if size <= max(2, most))
        rounds = self.rounds or ROUNDS
        console.print(f"{backend.name} beside {against.name}, {rounds} rounds, as ratios of time")
        timed: list[Timed] = []
        try:
            for one in run(
                backend, against, world_sizes=sizes, rounds=rounds,
                operations=() if "all" in self.names else self.names,
                progress=lambda text: console.print(f"measuring {text} ..."),
            ):  # fmt: skip
                timed.append(one)
        finally:  # also when a rank does not finish in one of the operations
            if timed:
                console.print(operations_table(timed))
        if plots is not None:
            from conformance.report.plots import draw_growth

            for path in draw_growth([curve for one in timed for curve in one.curves() if len(one.sizes) > 1], plots):
                console.print(f"drawn: {path}")
        _conclude([ratio for one in timed for ratio in one.ratios()], out, earlier, gate=gate)


def _conclude(ratios: Sequence[Ratio], out: Path | None, earlier: Sequence[Ratio] | None, *, gate: bool) -> None:
    _write(out, [asdict(ratio) for ratio in ratios])
    if earlier is not None:
        for line in changes(earlier, ratios) or ("Beyond noise nothing has changed.",):
            say(line)
    if gate and (slower := slower_than_reference(ratios)):
        for line in ["Slower, beyond noise:", *slower]:
            say(line, err=True)
        click.get_current_context().exit(1)


def _read(path: Path) -> list[Ratio]:
    try:
        return [Ratio(**one) for one in json.loads(path.read_text())]
    except (OSError, ValueError, TypeError) as error:
        raise ReportError(f"{path} must be what `bench --out` writes, ratios as JSON: {error}") from error


def _write(out: Path | None, data: list[dict[str, Any]]) -> None:
    if out is not None:
        try:
            out.write_text(json.dumps(data, indent=2) + "\n")
        except OSError as error:
            raise ReportError(f"cannot write {out}: {error.strerror}") from error
