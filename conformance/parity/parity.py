"""`parity`: the same training step once in one process and once on N ranks, compared by name."""

import tempfile
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch._dynamo  # torch's DDP imports it: once here, not in every forked rank
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_leaves

from conformance.backends.backend import Backend, get_backend
from conformance.parity.comparison import Comparison, Reference, compare, spread, wrong_data
from conformance.parity.explanation import explain, first_difference
from conformance.parity.guards import by_chance, listed, mistakes_in_one_process, vacuous
from conformance.parity.launch import RankError, on_ranks
from conformance.parity.record import Run, record
from conformance.parity.reproduction import write_program
from conformance.parity.tolerance import NUDGES, Nudge
from conformance.parity.training import ParityError, Training
from conformance.parity.wrappers import Wrap, wrapper

#: Ranks hang when none has been runnable for so many times the reference's time, and for this long at least.
_PATIENCE, _LEAST_PATIENCE_S = 4.0, 1.0
#: One process has no reference: it hangs after so many seconds. Ranks that compute for ever end after `_TOTAL` times.
_REFERENCE_IDLE_S, _REFERENCE_TOTAL_S, _TOTAL = 30.0, 600.0, 100.0
#: Of torch's assertion about a device that its engine does not know.
_TOO_LATE = (
    "\nThis process ran a backward before the device was loaded, and torch's engine keeps to the devices of that time:"
    " import the backend before the first backward, or run `ddp-conformance parity`, a process of its own."
)
T = TypeVar("T")


class DifferenceError(AssertionError):
    """The ranks do not do what one process does."""


class VacuityError(DifferenceError):
    """The comparison would pass whatever the ranks do, so that it shows nothing."""


@dataclass(frozen=True)
class Report:
    """What `examine` found: `findings` fail the test, `notes` say what was compared, left out and declared."""

    findings: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    declared: tuple[str, ...] = ()  # those of `notes` that excuse a difference

    def __str__(self) -> str:
        return "\n".join([*self.findings, *(f"  note: {note}" for note in (*self.notes, *self.declared))])

    def check(self) -> "Report":
        """Return this report; raises `DifferenceError`, or `VacuityError` if it shows nothing else."""
        __tracebackhide__ = True  # from pytest
        if self.findings:
            shows_nothing = all(text.startswith("Vacuous") for text in self.findings)
            raise (VacuityError if shows_nothing else DifferenceError)(str(self))
        return self


def parity(
    make: Callable[..., Any], make_batch: Callable[..., Any], train_step: Callable[..., Any], **options: Any
) -> Report:
    """Take the same steps in one process and on N ranks, and raise `DifferenceError` where they differ.

    `make()` returns a module, or `make(wrap)` all that the step needs, such as `(model, optimizer, ema)`: it calls
    `wrap` on what is to be wrapped, which is the identity in one process. `make_batch(step)` returns the whole batch,
    any pytree whose tensors are split along dimension 0, or `make_batch(step, rank, ranks)` a rank's share; one process
    calls it with `(step, 0, 1)`. `train_step(model, optimizer, ..., batch)` returns the loss, or
    `{"loss": ..., "grad_norm": ...}`, or None. The options are those of `examine`, which returns findings instead of
    raising them. Raises `VacuityError` where equality would show nothing, and `ParityError` for what cannot be run.
    """
    return examine(make, make_batch, train_step, **options).check()


def examine(
    make: Callable[..., Any],
    make_batch: Callable[..., Any],
    train_step: Callable[..., Any],
    *,
    ranks: int = 2,
    wrap: Wrap | str = DistributedDataParallel,
    steps: int = 3,
    dtype: torch.dtype | None = torch.float64,
    shares: int | None = None,
    local_batchnorm: bool = False,
    exempt: Mapping[str, str] | None = None,
    folder: Path | str | None = None,
    backend: str = "gloo",
) -> Report:
    """Compare as `parity` does, and return what differs.

    `wrap` is a callable or a name (`wrappers.wrapper`). `dtype` None keeps the training's own precision. `shares`: how
    many different shares the ranks get, fewer than ranks under tensor parallelism. `local_batchnorm`: each rank's
    BatchNorm normalises by its own share on purpose, so one process does the same. `exempt` maps patterns of names to
    reasons. `backend` is one that the suite knows, such as `nccl` or `sim`: modules and batches move to its device. The
    program that shows a difference is written to `folder`, by default one for temporary files.
    """
    exempt, shares = exempt or {}, ranks if shares is None else shares
    _check_options(ranks, steps, shares)
    wrap = wrapper(wrap)
    under = get_backend(backend)
    under.require()
    training = Training(make, make_batch, train_step, steps, shares, dtype)
    training.check()
    notes: list[str] = []
    training, reference = _reference(training, local_batchnorm, notes, under)
    if not reference.base.trained:
        return Report(("Vacuous: no optimizer stepped in train_step, so that nothing was trained.",), tuple(notes))
    idle_s = max(_LEAST_PATIENCE_S, _PATIENCE * reference.base.seconds)
    total_s = _LEAST_PATIENCE_S + _TOTAL * max(reference.base.seconds, _LEAST_PATIENCE_S)

    def one_rank(rank: int) -> tuple[Run, list[Counter[int]]]:
        own = replace(training, device=under.device(rank))
        batches = own.batches(rank * shares // ranks, shares)
        return record(own, batches, wrap), [_rows(batch) for batch in batches]

    try:
        runs, rows = zip(*on_ranks(one_rank, ranks, idle_s=idle_s, total_s=total_s, backend=under), strict=True)
    except RankError as error:
        return Report((f"The ranks do not finish, one process does:\n{error}",), tuple(notes))
    found = compare(reference, runs, exempt, local_statistics=local_batchnorm)
    findings, sentence = mistakes_in_one_process(reference.base, exempt), wrong_data(reference.rows, rows, shares)
    if found.wrong and not sentence:  # of other data, all else follows
        step, _ = first_difference(found)
        alone = [] if step else reference.alone
        if step:
            with suppress(RankError):  # a share alone may not survive that step: the explanation does without
                alone = _on_one(partial(_alone, training, step, reference.base), under)
        sentence = by_chance(reference.drawn_in) or explain(found, reference.base, runs, alone)
    if sentence:
        where = Path(folder or tempfile.mkdtemp(prefix="parity-"))
        findings += [sentence, write_program(training, wrap, ranks, sentence, reference.base, where)]
    findings += vacuous(found, reference)
    declared = _declared(found, reference, local_batchnorm)
    return Report(tuple(findings), (*notes, *_notes(found, reference.base)), declared)


def _check_options(ranks: int, steps: int, shares: int) -> None:
    for name, value, least, most in (("ranks", ranks, 2, 64), ("steps", steps, 1, 10**6), ("shares", shares, 1, ranks)):
        if not isinstance(value, int) or not least <= value <= most:
            raise ParityError(f"{name}: expected a whole number from {least} to {most:,}, got {value!r}.")
    if ranks % shares:
        raise ParityError(f"shares: expected a divisor of the {ranks} ranks, got {shares}.")
    if torch.cuda.is_initialized():
        raise ParityError(
            "UNSUPPORTED: this process has initialised CUDA, which fails in the ranks that parity forks. Call it"
            " before anything uses the GPU, or run `ddp-conformance parity`."
        )


def _reference(
    training: Training, local_batchnorm: bool, notes: list[str], under: Backend
) -> tuple[Training, Reference]:
    """Return one process's runs, and the training in its own precision where it cannot run in another."""
    training = replace(training, device=under.device(0))
    own, why_not = replace(training, dtype=None), ""
    for each in (training, own) if training.dtype else (own,):
        try:
            found = _on_one(partial(_one_process, each, local_batchnorm), under)
        except RankError as error:
            why_not = str(error).strip()
            continue
        if each is own and training.dtype:
            notes.append(f"runs in its own precision, since not in {training.dtype}: {why_not.splitlines()[-1]}")
        return each, found
    hint = _TOO_LATE if "device_ready_queues_" in why_not else ""
    raise ParityError(f"The training does not run in one process either:\n{why_not}{hint}")


def _on_one(function: Callable[[], T], under: Backend) -> T:
    return on_ranks(lambda _: function(), 1, idle_s=_REFERENCE_IDLE_S, total_s=_REFERENCE_TOTAL_S, backend=under)[0]


def _one_process(training: Training, local_batchnorm: bool) -> Reference:
    """Return the reference; runs in a forked process."""
    statistics_of = training.shares if local_batchnorm else 0
    whole = training.batches(0, 1)
    base = record(training, whole, None, statistics_of=statistics_of)
    if not base.trained:
        return Reference(base, {}, [], [], 0.0)
    ulp = max(torch.finfo(dtype).eps for dtype in base.dtypes or {torch.float32})
    again = partial(record, training, whole, None, statistics_of=statistics_of)
    moved = spread(base, (again(nudge=Nudge(ulp, seed)) for seed in range(NUDGES)))
    reference = Reference(base, moved, _alone(training, 0, base), [_rows(batch) for batch in whole], ulp)
    if not base.draws:
        return reference
    other = again(seed=1)
    differ = compare(reference, [other], {}, local_statistics=False).wrong
    return replace(reference, drawn_in=tuple(other.drawn_in or ["random, numpy.random"])) if differ else reference


def _alone(training: Training, step: int, base: Run) -> list[Run]:
    """Return one process's runs that take step `step` with each share alone, and earlier ones with the whole batch."""
    if training.shares == 1:
        return []
    before = training.batches(0, 1)[:step]
    own = [training.batches(share, training.shares)[step] for share in range(training.shares)]
    return [record(training, [*before, batch], None, follow=base) for batch in own]


def _rows(batch: Any) -> Counter[int]:
    """Return how often each row of a batch's tensors occurs, by its hash."""
    leaves = [leaf for leaf in tree_leaves(batch) if isinstance(leaf, Tensor) and leaf.dim() and leaf.numel()]
    wide = [leaf.detach().cpu().double() for leaf in leaves if leaf[0].numel() > 1]
    return Counter(hash(row.contiguous().numpy().tobytes()) for leaf in wide for row in leaf)


def _notes(found: Comparison, base: Run) -> list[str]:
    seen = f"smallest factor of all gradients that would be seen: 1 ± {found.smallest_factor - 1:.1e}"
    if base.strangers:
        copies = f"the optimizer holds copies ({listed(base.strangers)}), whose gradients are not compared"
        seen = f"{copies}. Return the gradient norm from train_step: an optimizer such as Adam hides a factor"
    said = [f"{len(found.limits)} quantities compared; {seen}"]
    if found.rounding:
        said.append(f"{found.rounding} elements of parameters not compared: their gradient is rounding")
    return said


def _declared(found: Comparison, reference: Reference, local_batchnorm: bool) -> tuple[str, ...]:
    base = reference.base
    said = [f"declared: {count} quantities differ: {reason}" for reason, count in found.excused.items()]
    if reference.drawn_in:
        said.append(f"declared: all ranks draw the same random numbers here ({listed(reference.drawn_in)})")
    if base.dropouts:
        said.append(f"declared: {base.dropouts} calls of dropout do nothing, on the ranks as in one process")
    if base.batch_norms and local_batchnorm:
        said.append(f"declared: {listed(base.batch_norms)} takes each share's own statistics, in one process, too")
    return tuple(said)
