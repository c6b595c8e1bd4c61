"""`parity` finds mistakes of trainings, accepts their correct twins, and refuses what it cannot compare."""

import importlib
import itertools
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from click.testing import CliRunner
from mistakes import models
from mistakes.table import PRECISIONS, in_precision, load
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

from conformance import parity as door
from conformance.cli import main
from conformance.errors import ConformanceError, present
from conformance.parity import DifferenceError, VacuityError, examine, launch, parity
from conformance.parity.comparison import Comparison
from conformance.parity.explanation import explain
from conformance.parity.launch import RankError, on_ranks
from conformance.parity.record import Run
from conformance.parity.tensors import Key, Part, assemble
from conformance.parity.wrappers import Wrap

MISTAKES = load()
#: A class of mistakes each, and each way in which one is found; all of them run at night.
SAMPLE = (
    "mean of means, unequal token counts", "clipped by rank before the average", "head outside of the wrapper",
    "first micro-batch synchronises", "gradients never cleared", "barrier on rank 0 only", "gather without gradient",
    "optimizer older than the parameters", "nothing trains",
)  # fmt: skip
#: Too coarse in bfloat16: refused instead of accepted.
COARSE = re.compile("^Vacuous: too coarse")


@pytest.mark.parametrize("name", SAMPLE)
def test_a_mistake_is_named_and_its_twin_passes(name: str) -> None:
    one = MISTAKES[name]
    assert re.search(one.expected, str(examine(**one.of(True))), re.DOTALL)
    assert examine(**one.of(False)).findings == ()


@pytest.mark.nightly
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("name", MISTAKES)
def test_every_mistake_is_found_in_every_precision(name: str, precision: str) -> None:
    one = MISTAKES[name]
    found = str(examine(**one.arguments(True, precision)))
    assert re.search(one.expected, found, re.DOTALL) if precision == "float64" else found
    said = examine(**one.arguments(False, precision)).findings
    assert not [text for text in said if precision != "bfloat16" or not COARSE.match(text)]


def next_token(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())


def alike(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    left, right = model(*batch)
    return (1 - (left * right).sum(-1)).mean()


def last_state() -> nn.Module:
    class Last(nn.GRU):
        def forward(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            return super().forward(x)[0][:, -1]

    return nn.Sequential(Last(6, 12, num_layers=2, batch_first=True), nn.Linear(12, 4))


#: Correct trainings: a model, its batch and its loss.
CORRECT: dict[str, tuple[Any, Any, Any]] = {
    "MLP": (models.plain, models.rows, models.loss_of),
    "CNN": (models.cnn, models.images, models.loss_of),
    "GPT": (models.GPT, lambda _: torch.randint(0, 30, (8, 13)), next_token),
    "GRU": (last_state, lambda _: (torch.randn(8, 5, 6), torch.randint(0, 4, (8,))), models.loss_of),
    "towers": (models.Towers, models.pairs, alike),
}


@pytest.mark.nightly
@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("optimizer", ["SGD", "AdamW"])
@pytest.mark.parametrize("wrapper", ["torch", "ddp_impl", "replicate", "fully_shard", "hsdp"])
@pytest.mark.parametrize("name", CORRECT)
def test_no_correct_training_is_accused(name: str, wrapper: str, optimizer: str, precision: str, seed: int) -> None:
    model_of, batch_of, loss = CORRECT[name]

    def make(wrap: Wrap) -> tuple[Any, Any]:
        torch.manual_seed(seed)
        model = wrap(model_of())
        return model, getattr(torch.optim, optimizer)(model.parameters(), lr=0.01)

    def batch(step: int) -> Any:
        torch.manual_seed(100 * seed + step)
        return batch_of(step)

    given = models.training(
        models.step_of(loss), make=make, batch=batch, wrap=wrapper, ranks=4 if wrapper == "hsdp" else 2
    )
    found = examine(**in_precision(given, precision)).findings
    assert not [text for text in found if precision != "bfloat16" or not COARSE.match(text)]


def make_model() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))


def make_batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(8, 8), torch.randint(0, 4, (8,))


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Any) -> torch.Tensor:
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(batch[0]), batch[1])
    loss.backward()
    optimizer.step()
    return loss


def tensor_parallel(module: nn.Module) -> nn.Module:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return parallelize_module(module, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})


def adamw(wrap: Wrap) -> tuple[Any, Any]:
    model = wrap(make_model())
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)


def zero(wrap: Wrap) -> tuple[Any, Any]:
    model = wrap(make_model())
    return model, ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=0.01)


def copies(wrap: Wrap) -> tuple[Any, Any]:
    """Make an optimizer that holds copies of the parameters, as those with master weights do."""
    model = wrap(make_model())
    optimizer = torch.optim.SGD([parameter.detach().clone() for parameter in model.parameters()], lr=0.1)
    pairs = [*zip(optimizer.param_groups[0]["params"], model.parameters(), strict=True)]

    def take_gradients(*_: object) -> None:
        for copied, parameter in pairs:
            copied.grad, parameter.grad = parameter.grad, None

    def give_values(*_: object) -> None:
        for copied, parameter in pairs:
            parameter.data.copy_(copied)

    optimizer.register_step_pre_hook(take_gradients)
    optimizer.register_step_post_hook(give_values)
    return model, optimizer


def by_night(*parameters: tuple[Any, ...]) -> list[Any]:
    return [pytest.param(*one, marks=pytest.mark.nightly) for one in parameters]


@pytest.mark.parametrize(
    ("make", "options"),
    [
        (adamw, {"wrap": "ddp_impl", "ranks": 4}), (adamw, {"wrap": "fully_shard"}), (zero, {"wrap": "torch"}),
        (adamw, {"wrap": tensor_parallel, "shares": 1}),
        *by_night(
            (adamw, {"wrap": "torch"}), (adamw, {"wrap": "replicate"}), (adamw, {"wrap": "hsdp", "ranks": 4}),
            (copies, {"wrap": "torch"}), (adamw, {"wrap": DistributedDataParallel, "dtype": None}),
        ),
    ],
)  # fmt: skip
def test_correct_trainings_pass(make: Callable[..., Any], options: dict[str, Any]) -> None:
    report = parity(make, make_batch, train_step, **options)
    assert any("quantities compared" in note for note in report.notes)


def test_sharded_tensors_are_put_together_as_they_were_cut() -> None:
    whole, mesh = torch.arange(16.0).reshape(8, 2), torch.arange(4).reshape(2, 2)
    twice = [Part(whole.chunk(2)[rank // 2].chunk(2)[rank % 2], mesh, ((0, 0), (1, 0))) for rank in range(4)]
    strided = [Part(whole.chunk(2)[rank % 2].chunk(2)[rank // 2], mesh, ((1, 0), (0, 0))) for rank in range(4)]
    summed = [Part(whole.chunk(2, 1)[rank % 2] / 2, mesh, ((0, None), (1, 1))) for rank in range(4)]
    for parts in (twice, strided, summed):
        assert all(torch.equal(value, whole) for value in assemble(parts) if value is not None)


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"ranks": 0}, "ranks: expected a whole number from 2 to 64, got 0"),
    ({"steps": 0}, "steps: expected a whole number from 1 to 1,000,000, got 0"),
    ({"shares": 3, "ranks": 4}, "shares: expected a divisor of the 4 ranks, got 3"),
    ({"wrap": "no_such"}, "unknown DDP 'no_such'"),
    ({"make": None}, "make: expected make.wrap. or make_model.., got NoneType"),
    ({"make": lambda width: None}, "missing a required argument: 'width'. Name its parameters so, and bind others"),
    ({"make": lambda: None}, "make returned None: expected a module, or a tuple"),
    ({"make": lambda: (1, 2)}, "make returned no torch.nn.Module, but int, int"),
    ({"make_batch": lambda: None}, "make_batch: expected make_batch.step. or .*too many positional arguments"),
    ({"make_batch": lambda step: None}, "The batch, a NoneType, holds no tensor to split among 2 ranks"),
    ({"make_batch": lambda step: torch.ones(1, 8)}, "1 rows, too few for 2 ranks. Write make_batch"),
    ({"make_batch": lambda step, rank, ranks: None}, "make_batch returned None for step 0"),
    ({"train_step": 3}, "train_step: expected a function .model, optimizer, ..., batch., got int"),
    (
        {"train_step": lambda model: None},
        r"expected a function of Sequential, SGD \(added, .*\) and a batch, got <lambda>\(model\): too many",
    ),
    ({"train_step": lambda *all: "x"}, "train_step returned 'loss': expected a number, got str"),
    ({"train_step": lambda *all: 1 / 0}, "does not run in one process either:\n.*ZeroDivisionError"),
]


@pytest.mark.parametrize(("change", "said"), WRONG, ids=[said[:40] for _, said in WRONG])
def test_what_cannot_be_run_is_a_sentence(change: dict[str, Any], said: str) -> None:
    given: dict[str, Any] = {"make": make_model, "make_batch": make_batch, "train_step": train_step}
    with pytest.raises(ConformanceError, match=f"(?s){said}"):
        parity(**{**given, **change})


def test_ranks_that_wait_hang_and_ranks_that_compute_do_not() -> None:
    def compute(rank: int) -> float:
        began = time.process_time()
        while time.process_time() < began + 1:  # twice as long as ranks may wait
            pass
        return time.process_time() - began

    assert min(on_ranks(compute, 2, idle_s=0.5, total_s=100)) >= 1
    with pytest.raises(RankError, match=r"rank 1 waits in barrier, called from test_parity.py, line"):
        on_ranks(lambda rank: dist.barrier() if rank else None, 2, idle_s=0.5, total_s=100)


def test_ranks_are_not_accused_where_the_process_that_watches_them_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = itertools.count(step=1000.0)
    monkeypatch.setattr(launch, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    monkeypatch.setattr(launch, "_processor_time", lambda sessions: (False, 0))
    assert on_ranks(lambda rank: rank, 2, idle_s=100, total_s=1e7) == [0, 1]


#: Weights of the gradients of two shares: on each rank, and in one process; what is said of them.
WEIGHTS: list[tuple[list[tuple[float, float]], tuple[float, float], str]] = [
    ([(0.5, 0.5)] * 2, (0.57, 0.43), "mean of the ranks' means.*0.5 : 0.5 of the shares' gradients, one process 0.57"),
    ([(0.024, 0.017)] * 2, (0.026, 0.026), "Each share is scaled by itself before the average"),
    ([(1e-8, 2e-8)] * 2, (2e-8, 2e-8), "Each share is scaled by itself before the average"),
    ([(1.0, 0.0)] * 2, (0.5, 0.5), "The share of rank 1 is missing"),
    ([(2**-1.5, 2**-1.5)] * 2, (0.5, 0.5), "0.707. times one process: one over the root of the world size .*counts"),
    ([(0.5, 0.25), (1.0, 0.5)], (0.5, 0.5), "Replicas disagree. By rank 1, 2 times rank 0: each scales the average"),
    ([(1.0, 0.0)] * 2 + [(0.0, 1.0)] * 2, (0.5, 0.5), "disagree .alike are 0, 1; 2, 3., but their mean is right"),
]


@pytest.mark.parametrize("noise", [0.0, 0.002], ids=["exact", "coarse"])
@pytest.mark.parametrize(("ours", "theirs", "said"), WEIGHTS, ids=[said[:40] for _, _, said in WEIGHTS])
def test_weights_of_shares_are_named_however_coarse_the_tolerance(
    ours: list[tuple[float, float]], theirs: tuple[float, float], said: str, noise: float
) -> None:
    key, random = Key(0, "gradient", "weight"), torch.Generator().manual_seed(0)
    one, other, rounding = torch.randn(3, 400, dtype=torch.float64, generator=random)
    want, *got = (left * one + right * other for left, right in [theirs, *ours])
    want += noise * want.norm() / rounding.norm() * rounding
    limits = {key: torch.full_like(want, 100 * noise * float(want.abs().max()))}
    shares = [Run(seen={key: share}) for share in (one, other)]
    found = Comparison({key: want}, {key: [*got]}, limits, {key: (want, got)})
    assert re.search(said, explain(found, Run(), [Run() for _ in got], shares))


def test_what_differs_besides_gradients_is_named() -> None:
    one, other = torch.ones(4, dtype=torch.float64), torch.arange(4.0, dtype=torch.float64)

    def said(kind: str, want: torch.Tensor, *got: torch.Tensor) -> str:
        key, mean = Key(0, kind, "it"), torch.stack(got).mean(0)
        wrong = want, [mean] if kind == "number" else [*got]
        found = Comparison({key: want}, {key: [*got]}, {key: 0 * want}, {key: wrong})
        alone = [Run(seen={key: value}) for value in (one, other)]
        return explain(found, Run(trained={"it": None}), [Run() for _ in got], alone)

    own = "it differs from one process. Not averaged: every rank has the buffer of its own share."
    assert said("buffer", one + other, one, other) == f"Step 1, buffer: {own}"
    turned, half = one * torch.tensor([1, -1, 1, -1]), one[0] / 2
    optimizer = "norm is 2, one process's 2, the difference's 2.8. Their gradients agree: the optimizer's step differs"
    assert optimizer in said("parameter", one, turned, turned)
    assert "one process 1. The mean is 0.5 times that: one over the world size" in said("number", one[0], half, half)


def test_a_difference_that_is_declared_is_counted() -> None:
    one = MISTAKES["moving average begins by rank"].of(True)
    report = parity(**one, exempt={"average:*": "each rank keeps its own"})
    assert [text for text in report.declared if re.search("declared: 12 quantities differ: each rank", text)]


def test_what_float64_cannot_do_runs_in_its_own_precision() -> None:
    class Picky(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return nn.functional.linear(x, self.weight.float(), self.bias.float())

    report = parity(lambda: Picky(8, 4), make_batch, train_step)
    assert any("runs in its own precision, since not in torch.float64" in note for note in report.notes)


def test_autocast_is_as_coarse_where_a_module_returns_float32() -> None:
    class Widening(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x).float()

    def step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Any) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return train_step(model, optimizer, batch)

    assert not [
        text
        for text in examine(lambda: Widening(8, 4), make_batch, step, dtype=None).findings
        if not COARSE.match(text)
    ]


def documented_training() -> str:
    page = (Path(__file__).parents[2] / "docs" / "howto" / "parity.md").read_text(encoding="utf-8")
    return page.partition("```python\n")[2].partition("```")[0]


@pytest.mark.nightly
def test_the_documented_training_is_right_on_a_device(tmp_path: Path) -> None:
    """In a process of its own: torch's engine knows no device that is loaded after a process's first backward."""
    (tmp_path / "my_training.py").write_text(documented_training())
    on_sim = [sys.executable, "-m", "conformance", "parity", "./my_training.py", "--backend", "sim"]
    assert subprocess.run(on_sim, cwd=tmp_path, check=False).returncode == 0


#: Of the documented training, with a loss that is summed.
SAID = "0.5 times one process: one over the world size"


@pytest.fixture
def trainings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Go to a folder with the documented training and one that is wrong."""
    source = documented_training()
    (tmp_path / "my_training.py").write_text(source)
    (tmp_path / "summed.py").write_text(source.replace("batch[1])\n", 'batch[1], reduction="sum")\n'))
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


def test_the_command_says_what_differs(trainings: Path) -> None:
    done = CliRunner().invoke(main, ["parity", "./summed.py", "--output", str(trainings)])
    assert (done.exit_code, SAID in " ".join(done.output.split())) == (1, True), done.output


@pytest.mark.nightly
def test_the_fixture_and_the_notebook_and_the_program_say_the_same(trainings: Path) -> None:
    command = [sys.executable, "-m", "pytest", "-v", "-p", "no:cacheprovider", "--basetemp", str(trainings / "pytest")]
    tested = subprocess.run([*command, "my_training.py", "summed.py"], capture_output=True, text=True, check=False)
    assert "1 failed, 1 passed" in tested.stdout, tested.stdout
    assert SAID in tested.stdout
    assert "my_training.py::test_my_step: 48 quantities compared" in tested.stdout
    notebook: Any = door  # a module that can be called
    summed = importlib.import_module("summed")
    program = trainings / "parity_difference.py"
    with pytest.raises(DifferenceError, match=f"{SAID}.*\\n.*python {program}"):
        notebook(summed.make_model, summed.make_batch, summed.train_step, folder=trainings)

    assert len(program.read_text().splitlines()) <= 30
    shown = subprocess.run([sys.executable, str(program)], capture_output=True, text=True, check=False)
    rows = re.findall(r"rank \d of (\d): lr 0.1, gradients ([\d.]+)", shown.stdout)
    one, several = ([float(norm) for ranks, norm in rows if ranks == of] for of in ("1", "2"))
    assert (len(one), len(several)) == (3, 6), shown.stderr
    assert several[0] == pytest.approx(one[0] / 2)


def test_gradients_that_a_closure_makes_are_compared() -> None:
    def step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Any) -> None:
        def closure() -> float:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(batch[0]), batch[1]) * dist.get_world_size()
            loss.backward()
            return loss.item()

        optimizer.step(closure)

    assert "On all ranks 2 times one process" in str(examine(adamw, make_batch, step))


def test_a_difference_in_the_last_digits_is_called_so() -> None:
    def nearly(model: nn.Module) -> None:
        for parameter in model.parameters():
            present(parameter.grad).mul_(1 + 1e-9 * (dist.get_world_size() - 1))

    half = models.hooked(lambda total: (total / models.size()).bfloat16().double())
    assert "but for 1e-09 of its norm" in str(examine(make_model, make_batch, models.step_of(between=nearly)))
    assert re.search("but for 0.00. of its norm", str(examine(make_model, make_batch, train_step, wrap=half)))


def test_an_average_in_a_dict_is_compared() -> None:
    def make(wrap: Wrap) -> tuple[Any, ...]:
        model = wrap(make_model())
        return model, {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}, models.sgd(model)

    def step(model: nn.Module, average: dict[str, torch.Tensor], optimizer: torch.optim.Optimizer, batch: Any) -> None:
        train_step(model, optimizer, batch)
        for old, new in zip(average.values(), model.state_dict().values(), strict=True):
            old.lerp_(new, 0.1 * (dist.get_rank() == 0))

    assert "buffer: all 4 differ from one process. Replicas disagree. Rank 0" in str(examine(make, make_batch, step))


def test_a_parameter_outside_of_modules_is_compared() -> None:
    def make(wrap: Wrap) -> tuple[Any, ...]:
        model, scale = wrap(make_model()), nn.Parameter(torch.zeros(()))
        return model, scale, torch.optim.SGD([*model.parameters(), scale], lr=0.1)

    def step(model: nn.Module, scale: nn.Parameter, optimizer: torch.optim.Optimizer, batch: Any) -> None:
        train_step(lambda x: model(x) * scale.exp(), optimizer, batch)  # type: ignore[arg-type]

    assert "1 of 5 (scale) differ from one process. Not averaged" in str(examine(make, make_batch, step))


def test_imaginary_parts_are_compared() -> None:
    class Spectrum(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(8, 4).to(torch.get_default_dtype().to_complex()))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (torch.fft.fft(x) @ self.weight).abs()

    def average(model: nn.Module) -> None:
        gradient = present(next(model.parameters()).grad)
        dist.all_reduce(real := gradient.real.contiguous())
        gradient.real = real / dist.get_world_size()

    said = str(examine(Spectrum, make_batch, models.step_of(between=average), wrap=models.by_hand))
    assert "Step 1, gradient: weight differs from one process. Replicas disagree, but their mean is right" in said


def test_factors_by_rank_are_named_though_their_mean_is_right() -> None:
    def limited(model: nn.Module) -> None:
        for parameter in model.parameters():
            present(parameter.grad).mul_(1 + (dist.get_rank() - 0.5) / 5 if dist.get_world_size() > 1 else 1)

    assert "By rank 0.9, 1.1 times one process" in str(examine(make_model, make_batch, models.step_of(between=limited)))


def test_vacuity_is_an_error_of_its_own() -> None:
    for name in ("nothing trains", "no optimizer steps", "all samples alike"):
        with pytest.raises(VacuityError, match=r"^Vacuous"):
            parity(**MISTAKES[name].of(True))


#: What is wrong in a training of two models, and what is said of it.
GANS = {
    "nothing": "",
    "first": "gradient used by first: all 2 .*On all ranks 2 times one process.*used later differ, too: by second",
    "second": "gradient used by second: 1 of 2 .two:weight. differ from one process. Not averaged",
}


@pytest.mark.parametrize("wrong", GANS)
def test_a_difference_is_that_of_one_optimizer(wrong: str) -> None:
    def make(wrap: Wrap) -> tuple[Any, ...]:
        one, two = wrap(nn.Linear(8, 8)), (nn.Module.double if wrong == "second" else wrap)(nn.Linear(8, 1))
        return one, two, models.sgd(one), models.sgd(two)

    def step(one: Any, two: Any, first: Any, second: Any, batch: Any) -> dict[str, torch.Tensor]:
        first.zero_grad()
        made = two(one(batch[0])).tanh().mean()
        (made * (models.size() if wrong == "first" else 1)).backward()  # adds to used ones, which are cleared below
        first.step()
        second.zero_grad()
        told = (two(batch[0]) - two(one(batch[0]).detach())).sigmoid().mean()
        told.backward()
        second.step()
        return {"loss": told, "made": made}  # each rank's own

    said = examine(make, make_batch, step)
    assert re.search(GANS[wrong], str(said)), said
    assert bool(said.findings) is bool(GANS[wrong])


def test_help_shows_the_functions_that_are_asked_for() -> None:
    output = CliRunner().invoke(main, ["parity", "--help"]).output
    assert "def make_batch(step):" in output
    above = CliRunner().invoke(main, ["parity", "../my_training.py"])
    assert "call it from the folder in which the module lies" in above.output
    missing = CliRunner().invoke(main, ["parity", "os.path"])
    assert "os.path has no make or make_model, no make_batch, no train_step." in missing.output
