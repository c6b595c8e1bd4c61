"""`ddp-conformance parity`: takes the same training steps in one process and on N ranks, and compares them by name."""

from __future__ import annotations

import importlib
import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from conformance.cli import EXIT_FAILED
from conformance.cli.options import NamedPath
from conformance.errors import ConformanceError
from conformance.report.console import make_console, say
from conformance.report.lines import print_evidence

if TYPE_CHECKING:
    from conformance.parity import Report


@click.command("parity")
@click.argument("training")
@click.option("--ranks", type=click.IntRange(2, 64), default=2, show_default=True, metavar="N", help="Number of ranks.")
@click.option(
    "--wrap", default="torch", show_default=True, metavar="NAME",
    help="What wraps the model: torch, ddp_impl, replicate, fully_shard, hsdp, or module:Class.",
)  # fmt: skip
@click.option("--backend", default="gloo", show_default=True, help="Backend, on whose device the step runs.")
@click.option("--steps", type=click.IntRange(min=1), default=3, show_default=True, help="Steps to take and compare.")
@click.option(
    "--shares", type=click.IntRange(min=1), metavar="N", help="How many ranks get different batches.  [default: all]"
)
@click.option("--own-precision", is_flag=True, help="Do not cast to float64, in which a factor is seen best.")
@click.option("--local-batchnorm", is_flag=True, help="BatchNorm normalises by each rank's share on purpose.")
@click.option(
    "--exempt", multiple=True, metavar="PATTERN=REASON", help="Names that may differ, and why; may be repeated."
)
@click.option("--output", type=NamedPath(file_okay=False), help="Folder for the program that shows a difference.")
def command(
    training: str,
    ranks: int,
    wrap: str,
    backend: str,
    steps: int,
    shares: int | None,
    own_precision: bool,
    local_batchnorm: bool,
    exempt: tuple[str, ...],
    output: Path | None,
) -> None:
    """Compare a training step on N ranks with the same step in one process.

    TRAINING is a module, or an object in one (module:object), with three functions:

    \b
    def make_model():                           # or make(wrap), which returns all that the step needs:
        return nn.Linear(8, 4)                  #   model = wrap(net); return model, optimizer, scheduler
    def make_batch(step):                       # the whole batch, which is split along dimension 0;
        return torch.randn(8, 8)                #   or make_batch(step, rank, ranks): a rank's share
    def train_step(model, optimizer, batch):    # what make returned, and a batch
        optimizer.zero_grad()
        loss = model(batch).square().mean()
        loss.backward()
        optimizer.step()
        return loss                             # or {"loss": loss, "grad_norm": norm}, or nothing

    \b
    ddp-conformance parity my_training
    ddp-conformance parity my_pkg:training --ranks 4 --wrap fully_shard

    Is my training right on N GPUs? Gradients as the optimizer sees them, parameters, buffers, optimizer state, learning
    rate, loss and the rows of data are compared after each step. The tolerance is how far one process moves when its
    inputs move by one unit in the last place. The command says what the first difference looks like (a factor, a
    missing share, a part of the model), and writes a short program that shows it. It refuses a comparison that could
    not fail. Exits with 1 where the two differ.
    """
    say(f"Comparing {training} on {ranks} ranks with one process ...", err=True)  # at once: torch is imported next
    found = _resolve(training)

    from conformance.parity import examine

    options: dict[str, Any] = {} if not own_precision else {"dtype": None}
    report = examine(
        *_functions(training, found), ranks=ranks, wrap=wrap, backend=backend, steps=steps, shares=shares,
        local_batchnorm=local_batchnorm, exempt=dict(_reason(text) for text in exempt), folder=output, **options,
    )  # fmt: skip
    _print(report, ranks)
    if report.findings:
        click.get_current_context().exit(EXIT_FAILED)


def _print(report: Report, ranks: int) -> None:
    console = make_console()
    for text in (*report.findings, *(f"note: {note}" for note in (*report.notes, *report.declared))):
        print_evidence(console, text)
    if not report.findings:
        print_evidence(console, f"{ranks} ranks do what one process does.")


def _resolve(name: str) -> object:
    module, _, attribute = name.partition(":")
    module = module.removesuffix(".py").removeprefix("./").replace("/", ".")  # as a shell completes it
    try:
        if module.startswith("."):
            raise ValueError("call it from the folder in which the module lies")
        found = importlib.import_module(module)
        if attribute and not hasattr(found, attribute) and importlib.util.find_spec(f"{module}.{attribute}"):
            return importlib.import_module(f"{module}.{attribute}")
        return getattr(found, attribute) if attribute else found
    except (ImportError, AttributeError, ValueError) as error:
        raise ConformanceError(f"{name}: expected a module, or module:object; {error}") from error


def _functions(name: str, found: object) -> tuple[Any, Any, Any]:
    make = getattr(found, "make", None) or getattr(found, "make_model", None)
    functions = {
        "make or make_model": make,
        **{each: getattr(found, each, None) for each in ("make_batch", "train_step")},
    }
    if missing := [each for each, function in functions.items() if function is None]:
        raise ConformanceError(
            f"{name} has no {', no '.join(missing)}. `ddp-conformance parity --help` shows the three functions."
        )
    first, second, third = functions.values()
    return first, second, third


def _reason(text: str) -> tuple[str, str]:
    pattern, _, reason = text.partition("=")
    if not reason:
        raise ConformanceError(f"--exempt {text}: expected PATTERN=REASON, such as 'ema:*=each rank keeps its own'.")
    return pattern, reason
