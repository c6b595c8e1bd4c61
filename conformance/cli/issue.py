"""Writes an issue for torch's developers: requirement, versions, evidence, and a program that needs only torch."""

import math
import subprocess
import sys
from collections.abc import Iterator, Mapping
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory
from textwrap import indent

import torch
import torch.distributed as dist

from conformance.checkers.explanation import shorten
from conformance.programs.operation_cells import cells_of
from conformance.programs.operations.cell import Cell
from conformance.programs.operations.data import dtype_of
from conformance.programs.operations.memory import OF_LISTS, WITH_OUTPUTS, Arena
from conformance.programs.registry import get_program
from conformance.report.console import printable
from conformance.report.failure import result_text
from conformance.report.markdown import as_code, as_text, fenced
from conformance.run.report import Report
from conformance.scenario import Scenario
from conformance.spec.catalogue import Catalogue

#: A scenario of a backend has up to hundreds of cells; programs of so many are run.
_MAX_PROGRAMS = 6
#: Far longer than two ranks need on a machine with other work: a program that was only slow shows nothing.
_TIMEOUT_S = 300
#: Characters of an error's message that are the same each time, unlike the addresses and numbers further on.
_TELLING = 30

_FRAME = """\
import contextlib, tempfile, torch, torch.distributed as dist, torch.multiprocessing as mp{imports}

{definitions}

def run(rank, file, size):
    dist.init_process_group("{backend}", init_method=f"file://{{file}}", rank=rank, world_size=size)
    ranks = range(size)
{body}
    bits = lambda tensors: [t.reshape(-1).view(torch.uint8).tolist() for t in tensors]
    word = "right" if bits(got) == bits(want) else "WRONG"
    print(f"rank {{rank}}: {{word}}, {{{got}}}, expected {{{want}}}\\n", end="", flush=True)

if __name__ == "__main__":
    mp.spawn(run, (tempfile.mktemp(), {size}), {size})
"""
_DATA = """\
def data(source, target=0):  # what rank `source` passes for rank `target`
    return ({values}).to({dtype}).reshape({shape})"""
_LAID = """
def {name}(values):  # the same values in another layout
    return torch.empty({span}, dtype={dtype}).as_strided(values.shape, {strides}, {offset}).copy_(values)"""
_TRAINING = """\
def model():  # of whole numbers, whose sums are exact
    net = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.ReLU(), torch.nn.Linear(3, 2)).to({dtype})
    [p.data.copy_(torch.arange(p.numel()).reshape(p.shape) % 3 - 1) for p in net.parameters()]
    return net

def backward(model, rank, number):
    rows = (torch.arange(8).reshape(2, 4) * (number + 1) + rank) % 3
    (model(rows.to(next(model.parameters()).dtype)).sum() * {scale}).backward()  # means are whole, too"""
_STEPS = """\
net, alone = model(), model(){cast}  # with a DDP, and with all ranks' data
{before}ddp = torch.nn.parallel.DistributedDataParallel(net{options})
for number, synchronised in enumerate({schedule}):
    with contextlib.nullcontext() if synchronised else ddp.no_sync():
        backward(ddp, rank, number)
    [backward(alone, other, number) for other in ranks]
{after}"""
_GRADIENTS = """\
got = [p.grad for p in net.parameters()]
want = [(p.grad / size).to({dtype}) for p in alone.parameters()]"""
_IN_BACKWARD = """\
torch.distributed.optim._apply_optimizer_in_backward(torch.optim.SGD, net.parameters(), {"lr": 1.})
sgd = torch.optim.SGD(alone.parameters(), lr=1 / size)
"""
_OPTIM = ", torch.distributed.optim"
_STEPPED = """\
    if synchronised: sgd.step(), sgd.zero_grad()
got, want = ([p.data for p in m.parameters()] for m in (net, alone))"""

#: By operation what a rank does and must get. `sent` and `room` lay tensors out; words in capitals are replaced.
CALLS: Mapping[str, str] = {
    "all_reduce": """\
got = [sent(data(rank))]
dist.all_reduce(got[0], OP)WAIT
want = [reduced([data(source) for source in ranks])]""",
    "broadcast": """\
got = [sent(data(rank))]
dist.broadcast(got[0], ROOT)WAIT
want = [data(ROOT)]""",
    "reduce": """\
got = [sent(data(rank))]
dist.reduce(got[0], ROOT, OP)WAIT
want = [reduced([data(source) for source in ranks])] if rank == ROOT else got""",
    "all_gather": """\
got = [room(data(0) * 0) for _ in ranks]
dist.all_gather(got, sent(data(rank)))WAIT
want = [data(source) for source in ranks]""",
    "all_gather_single": """\
got = [room(torch.cat([data(0) * 0] * size))]
dist.all_gather_single(got[0], sent(data(rank)))WAIT
want = [torch.cat([data(source) for source in ranks])]""",
    "reduce_scatter": """\
got = [room(data(0) * 0)]
dist.reduce_scatter(got[0], [sent(data(rank, target)) for target in ranks], OP)WAIT
want = [reduced([data(source, rank) for source in ranks])]""",
    "reduce_scatter_single": """\
got = [room(data(0) * 0)]
dist.reduce_scatter_single(got[0], sent(torch.cat([data(rank, target) for target in ranks])), OP)WAIT
want = [reduced([data(source, rank) for source in ranks])]""",
    "gather": """\
got = [room(data(0) * 0) for _ in ranks] if rank == ROOT else []
dist.gather(sent(data(rank)), got or None, ROOT)WAIT
want = [data(source) for source in ranks if rank == ROOT]""",
    "scatter": """\
got = [room(data(0) * 0)]
dist.scatter(got[0], [sent(data(rank, target)) for target in ranks] if rank == ROOT else None, ROOT)WAIT
want = [data(ROOT, rank)]""",
    "all_to_all": """\
got = [room(data(0) * 0) for _ in ranks]
dist.all_to_all(got, [sent(data(rank, target)) for target in ranks])WAIT
want = [data(source, rank) for source in ranks]""",
    "all_to_all_single": """\
got = [room(torch.cat([data(0) * 0] * size))]
dist.all_to_all_single(got[0], sent(torch.cat([data(rank, target) for target in ranks])))WAIT
want = [torch.cat([data(source, rank) for source in ranks])]""",
}
_REDUCED = {
    "SUM": "sum(parts)",
    "AVG": "sum(parts) / size",
    "PRODUCT": "torch.stack(parts).prod(0)",
    "MAX": "torch.stack(parts).amax(0)",
    "MIN": "torch.stack(parts).amin(0)",
}
_OLDER_NAMES = {"all_gather_single": "all_gather_into_tensor", "reduce_scatter_single": "reduce_scatter_tensor"}
#: How the Work is waited for, by the cell's lifetime.
_WAITS = {
    "sync": ")",
    "wait": ", async_op=True).wait()",
    "future": ", async_op=True).get_future().wait()",
    "value": ", async_op=True).get_future().wait()",
    "then": ", async_op=True).get_future().then(lambda future: future.value()).wait()",
}


def issue_text(report: Report, scenario: Scenario, catalogue: Catalogue) -> str:
    """Return an issue as Markdown for the last outcome of `report`, which is a replay of `scenario`.

    Runs programs that may show the failure with nothing but torch, over the report's backend, until one shows it, and
    says so where none does.
    """
    outcome = report.scenarios[-1]
    result = next((one for one in reversed(outcome.results) if one.verdict.is_failure), outcome.results[-1])
    requirement = catalogue.requirement(scenario.requirements[0])
    evidence = result_text(outcome, result, report.backend, catalogue)
    tried = ((program, _output(program, evidence)) for program in programs_of(scenario, report.backend, evidence))
    program, printed = next((one for one in tried if one[1]), ("", ""))
    if program:
        shown = f"This needs nothing but torch:\n{fenced(program)}\nIt prints:\n{fenced(printed)}"
    else:
        replay = as_code("ddp-conformance replay scenario.json")
        shown = f"No program with nothing but torch was found that shows it. As {replay}:\n{fenced(scenario.dumps())}"
    versions = f"torch {torch.__version__}, Python {sys.version.split()[0]}, {sys.platform}, backend {report.backend}"
    sources = "".join(f"- {as_text(source)}\n" for source in requirement.source)
    return (
        f"Title: {printable(shorten(f'{report.backend}: {result.summary}'))}\n\n{as_text(versions)}\n\n"
        f"**Expected** ({requirement.id}): {as_text(requirement.statement)}\n\n{sources}\n{shown}\n"
        f"What ddp-conformance observed:\n{fenced(evidence)}"
    )


def programs_of(scenario: Scenario, backend: str, evidence: str) -> Iterator[str]:
    """Yield programs that may show the failure; of cells those first that the evidence names."""
    if scenario.program == "operation_cells":
        cells = sorted(cells_of(scenario), key=lambda cell: cell.describe() not in evidence)
        yield from islice(filter(None, (_of_cell(cell, scenario, backend) for cell in cells)), _MAX_PROGRAMS)
    elif not get_program(scenario.program).without_ddp:
        yield _training(scenario, backend)


def _training(scenario: Scenario, backend: str) -> str:
    """Return a training of the scenario's dtype, options and schedule, whatever else its program does."""
    dtype, options, cast = f"torch.{scenario.dtype}", dict(scenario.options), ""
    steps = scenario.schedule
    schedule = [last for step in steps for last in [False] * step.local_backwards + [True] * step.synchronised]
    written = {name: repr(value) for name, value in options.items()}
    if precision := options.get("mixed_precision"):
        dtypes = ", ".join(f"{name}=torch.{text}" for name, text in precision.items())
        written["mixed_precision"] = f"torch.nn.parallel.distributed._MixedPrecision({dtypes})"
        cast = f".to(torch.{precision.get('param_dtype', scenario.dtype)})"
    in_backward = "optimizer_in_backward" in scenario.needs
    body = _STEPS.format(
        cast=cast, before=_IN_BACKWARD if in_backward else "", schedule=schedule,
        options="".join(f", {name}={text}" for name, text in written.items()),
        after=_STEPPED if in_backward else _GRADIENTS.format(dtype=dtype),
    )  # fmt: skip
    definitions = _TRAINING.format(dtype=dtype, scale=scenario.world_size ** sum(schedule))
    return _framed(definitions, body, scenario, backend, dtype, _OPTIM * in_backward)


def _of_cell(cell: Cell, scenario: Scenario, backend: str) -> str:
    """Return a program with the cell's operation, dtype, layouts, root and way to wait; empty if there can be none.

    The group, what else goes on and the path are the usual ones: whether the failure needs them shows in a run.
    """
    unusual = {cell.reads, cell.writes} & {*OF_LISTS, WITH_OUTPUTS}
    if unusual or cell.operation not in CALLS or cell.reduction not in ("", *_REDUCED) or cell.lifetime not in _WAITS:
        return ""
    size, shape, dtype = scenario.world_size, cell.block_shape, dtype_of(cell.dtype)
    values = f"torch.arange({math.prod(shape)}) % 5 + 1 + source + 2 * target"
    if dtype is torch.bool:
        values = f"({values}) % 3 > 0"
    elif cell.reduction == "AVG":
        values = f"({values}) * {size}"
    definitions = _DATA.format(values=values, dtype=dtype, shape=tuple(shape))
    body = CALLS[cell.operation].replace(")WAIT", _WAITS[cell.lifetime]).replace("ROOT", str(cell.root))
    for new, old in _OLDER_NAMES.items():
        body = body.replace(f"{new}(", f"{new if hasattr(dist, new) else old}(")
    if cell.form in ("scalar", "stacked"):
        body = body.replace("torch.cat", "torch.stack")
    if cell.reduction:
        body = f"reduced = lambda parts: ({_REDUCED[cell.reduction]}).to({dtype})\n{body}"
        body = body.replace("OP", f"dist.ReduceOp.{cell.reduction}")
    for name, layout in (("sent", cell.reads), ("room", cell.writes)):
        whole = (size * shape[0], *shape[1:]) if f"{name}(torch.cat" in body else shape
        tensor = Arena.of(whole, dtype, layout, torch.device("cpu")).tensor
        if layout == "contiguous" or tensor.dim() == 0:
            body = body.replace(f"{name}(", "(")
        elif f"{name}(" in body:
            span = tensor.untyped_storage().nbytes() // dtype.itemsize
            strides, offset = tensor.stride(), tensor.storage_offset()
            definitions += "\n" + _LAID.format(name=name, span=span, dtype=dtype, strides=strides, offset=offset)
    return _framed(definitions, body, scenario, backend, str(dtype))


def _framed(definitions: str, body: str, scenario: Scenario, backend: str, dtype: str, imports: str = "") -> str:
    shown = "bits({0})" if dtype == "torch.bool" else "[t.tolist() for t in {0}]"
    filled = {name: shown.format(name) for name in ("got", "want")}
    filled |= {"definitions": definitions, "body": indent(body, " " * 4), "imports": imports}
    return _FRAME.format(backend=backend, size=scenario.world_size, **filled)


def _output(program: str, evidence: str) -> str:
    """Return what a program prints that shows a failure: wrong values, or the error in `evidence`. Else nothing."""
    with TemporaryDirectory() as folder:
        file = Path(folder) / "shows.py"
        file.write_text(program, encoding="utf-8")
        try:
            done = subprocess.run(
                [sys.executable, str(file)], capture_output=True, text=True, timeout=_TIMEOUT_S, check=False
            )
        except subprocess.TimeoutExpired:
            return ""
    if "WRONG" in done.stdout:
        return done.stdout
    said = next((line for line in reversed(done.stderr.splitlines()) if line.strip()), "")
    error = said.partition(": ")[2][:_TELLING]
    return done.stdout + said if done.returncode and error and error in evidence else ""
