"""The bench compares the right pairs, and compiled modules are compiled as their configuration says."""

import json
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from conformance.backends.backend import get_backend
from conformance.bench import measure as bench
from conformance.bench import operations
from conformance.bench.curve import Curve, Plot, Point, steeper_than_linear
from conformance.bench.growth import ALONE, BY_SIMULATED, BY_TENSORS, TORCH, Sizes, measure_growth
from conformance.bench.ratio import DEFAULT, FLOOR, Ratio, overheads, slower_than_reference
from conformance.cli import main
from conformance.errors import ConformanceError
from conformance.report.console import make_console
from conformance.report.plots import draw_growth, draw_ratios
from conformance.report.ratio_chart import ratio_chart
from conformance.report.terminal import operations_table
from conformance.subjects.subject import get_subject

OURS = get_subject("ddp_impl")
GLOO = get_backend("gloo")


def facts_with(step_s: Mapping[str, float], graphs: int = 3) -> dict[int, dict[str, Any]]:
    """Return what two ranks observed, of which rank 1 is always the slower one."""
    facts: dict[int, dict[str, Any]] = {}
    for rank in (0, 1):
        facts[rank] = {label: [seconds * (1 + rank)] * 10 for label, seconds in step_s.items()}
        facts[rank] |= {f"graphs/{label}": graphs for label in step_s}
    return facts


def test_every_reduction_is_compared_with_both_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    step_s = {
        "ddp_optimizer": 2.0,
        "python_reducer": 3.0,
        "torch ddp_optimizer": 4.0,
        "torch python_reducer": 8.0,
        "torch again": 4.0,
    }
    monkeypatch.setattr(bench, "run_program", lambda *_: facts_with(step_s))
    ratios = bench.measure_compiled(OURS, GLOO, "GPT", rounds=5, compiler="aot_eager")
    assert all((one.world_size, one.rounds, one.is_sound) == (2, 5, True) for one in ratios)
    assert [(one.variant, one.reference, one.median) for one in ratios] == [
        ("ddp_optimizer", "torch's ddp_optimizer", 0.5),
        ("ddp_optimizer", "torch's python_reducer", 0.25),
        ("python_reducer", "torch's ddp_optimizer", 0.75),
        ("python_reducer", "torch's python_reducer", 0.375),
        ("torch itself", "torch's ddp_optimizer", 1.0),
    ]


def test_a_reference_that_was_not_split_is_no_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    labels = ["ddp_optimizer", "python_reducer", "torch ddp_optimizer", "torch python_reducer", "torch again"]
    monkeypatch.setattr(bench, "run_program", lambda *_: facts_with(dict.fromkeys(labels, 1.0), graphs=1))
    with pytest.raises(ConformanceError, match=r"torch's optimiser must split .*, but on rank 0 it compiled 1"):
        bench.measure_compiled(OURS, GLOO, "GPT", rounds=5, compiler="aot_eager")


@pytest.mark.nightly
def test_contestants_are_compiled_as_configured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "WARM_UP_ROUNDS", 0)
    contestants = [
        ["torch whole", "torch", "python_reducer"],  # this one first: it makes Dynamo inline torch's class for good
        ["torch split", "torch", "ddp_optimizer"],
        ["split", OURS.target, "ddp_optimizer"],
        ["in graph", OURS.target, "python_reducer"],
    ]
    arguments = {"contestants": contestants, "compiler": "aot_eager"}
    facts = bench.run_program("compiled_step_time", OURS, GLOO, "24 layers", 1, 1, arguments)
    assert {label: facts[0][f"graphs/{label}"] for label, *_ in contestants} == {
        "torch whole": 2,  # compiled autograd captures the backward as another one
        "torch split": 6,
        "split": 6,
        "in graph": 1,
    }
    assert all(len(facts[0][label]) == 1 for label, *_ in contestants)


def test_overhead_is_relative_to_the_floor_of_the_same_workload_and_world_size() -> None:
    def ratio(workload: str, variant: str, reference: str, median: float, noise: float = 0.0) -> Ratio:
        return Ratio(workload, variant, reference, 2, median, median - noise, median + noise, 100)

    ratios = [
        ratio("a", "default", DEFAULT, 0.9),
        ratio("a", "bucket view", "torch, same options", 0.9),
        ratio("a", FLOOR, DEFAULT, 0.8),
        ratio("b", "default", DEFAULT, 0.9),
        ratio("b", FLOOR, DEFAULT, 1.02),
        ratio("c", "default", DEFAULT, 0.9),
        ratio("d", "default", DEFAULT, 0.9, 0.1),
        ratio("d", FLOOR, DEFAULT, 0.8, 0.1),
        ratio("e", "default", DEFAULT, 0.9, 0.1),
        ratio("e", FLOOR, DEFAULT, 0.99, 0.1),
    ]
    shares = overheads(ratios)
    told = {key[:2]: str(share) for key, share in shares.items()}
    assert told == {
        ("a", "default"): "0.50 ± 0.00", ("a", FLOOR): "0.00 ± 0.00",
        ("d", "default"): "0.50 ± 0.21", ("d", FLOOR): "0.00 ± 0.00",
    }  # fmt: skip


def test_only_what_is_slower_beyond_noise_does_not_pass_the_gate() -> None:
    def ratio(variant: str, lower: float, median: float, upper: float) -> Ratio:
        return Ratio("a", variant, DEFAULT, 2, median, lower, upper, 10)

    noise = ratio("torch itself", 0.97, 1.0, 1.04)
    assert slower_than_reference([ratio("default", 1.01, 1.05, 1.09), noise]) == ()
    assert slower_than_reference([ratio(FLOOR, 1.05, 1.06, 1.09), noise]) == ()
    (told,) = slower_than_reference([ratio("bucket view", 1.05, 1.06, 1.09), noise])
    assert told.startswith("a, bucket view, 2 ranks: 1.060 (1.050 - 1.090) of torch's default")


@pytest.mark.nightly
def test_memory_of_gradients_that_live_in_buckets_is_less() -> None:
    peaks = bench.measure_memory(OURS, GLOO, "100 tensors", world_size=1)
    assert set(peaks) == {FLOOR, "torch default", "default", "torch bucket view", "bucket view"}
    assert 0 < peaks["torch bucket view"] < peaks["torch default"]


def curve(*points: tuple[int, float, float, float]) -> Curve:
    return Curve(Plot("a step", "number of tensors", "one"), "some", tuple(Point(*point) for point in points))


def test_a_curve_knows_how_it_grows() -> None:
    assert curve((10, 1, 1, 1), (100, 20, 19, 21), (1000, 200, 190, 210)).exponent == 1.0
    assert curve((10, 1, 1, 1), (100, 4, 4, 4)).exponent == pytest.approx(0.602, abs=0.001)


def test_only_what_grows_faster_than_linearly_beyond_noise_is_told() -> None:
    assert steeper_than_linear([curve((10, 1.0, 0.9, 1.1), (100, 10.5, 9.9, 12.0))]) == ()
    (told,) = steeper_than_linear([curve((10, 1.0, 0.9, 1.1), (100, 12.0, 11.1, 13.0))])
    assert told == ("a step: some grows faster than the number of tensors (10: 1 (0.9 - 1.1), 100: 12 (11.1 - 13))")


def test_what_grows_as_without_a_ddp_is_not_told() -> None:
    some = curve((10, 1.0, 0.9, 1.1), (100, 12.0, 11.1, 13.0))
    floor = curve((10, 1.0, 1.0, 1.0), (100, 10.5, 10.2, 11.0))
    assert steeper_than_linear([some], {some.plot: floor}) == ()
    floor = curve((10, 1.0, 1.0, 1.0), (100, 8.0, 7.0, 9.0))
    assert len(steeper_than_linear([some], {some.plot: floor})) == 1


@pytest.mark.nightly
def test_growth_is_measured_and_drawn(tmp_path: Path) -> None:
    sizes = Sizes(tensors=(20, 200), ranks=(2,), simulated=(2, 4096), tensors_simulated=(20, 40))
    curves = measure_growth(OURS, GLOO, sizes=sizes, rounds=2)
    assert [(one.plot, one.contestant) for one in curves if one.plot in (BY_TENSORS, BY_SIMULATED)] == [
        (BY_TENSORS, "ddp_impl"),
        (BY_TENSORS, TORCH),
        (BY_TENSORS, ALONE),
        (BY_SIMULATED, "ddp_impl"),
        (BY_SIMULATED, TORCH),
        (BY_SIMULATED, ALONE),
    ]
    assert {tuple(point.size for point in one.points) for one in curves} == {(20, 200), (2,), (2, 4096), (20, 40)}
    drawn = draw_growth([one for one in curves if len(one.points) > 1], tmp_path)
    assert len(drawn) == 3
    assert all("number of" in path.read_text() for path in drawn)


def test_ratios_are_drawn(tmp_path: Path) -> None:
    ratios = [Ratio("small", variant, DEFAULT, 2, 0.9, 0.8, 1.0, 10) for variant in ("default", FLOOR, "torch itself")]
    assert "small, 2 ranks" in draw_ratios(ratios, tmp_path).read_text()


def timed_by_hand(monkeypatch: pytest.MonkeyPatch, backend: str = "acme") -> operations.Timed:
    """Return what is measured of a backend that takes 2 + bytes / 1024 milliseconds, and gloo half of that."""

    def facts(_: object, subject: Any, *__: object) -> dict[int, dict[str, Any]]:
        of_rank: dict[str, list[float]] = {}
        labels = [label for label, _ in __[4]["contestants"]]  # type: ignore[index]
        for label, factor in zip(labels, (2.0, 1.0, 1.0), strict=True):
            for size in (1024, 4096, 16384):
                of_rank[f"{label}/{size}"] = [factor * (1 + size / 2048)] * 10
            of_rank |= {f"{label}/cpu": [factor] * 10, f"{label}/computation": [18.0] * 10}
            of_rank[f"{label}/beside"] = [18.0 * (factor / 2 + 0.5)] * 10
        return {
            rank: {label: [one / (2 - rank) for one in times] for label, times in of_rank.items()} for rank in (0, 1)
        }

    monkeypatch.setattr("conformance.bench.measure.run_program", facts)
    tested = replace(GLOO, name=backend)
    return operations.measure(tested, GLOO, "all_reduce", rounds=5, sizes=(1024, 4096, 16384))


def test_operations_of_two_backends_are_shown_as_ratios(monkeypatch: pytest.MonkeyPatch) -> None:
    timed = timed_by_hand(monkeypatch)
    told = [(one.workload, one.variant, one.reference, one.median, one.rounds) for one in timed.ratios()]
    assert told == [
        ("all_reduce, 1 KiB", "acme", "gloo", 2.0, 5), ("all_reduce, 1 KiB", "gloo itself", "gloo", 1.0, 5),
        ("all_reduce, 4 KiB", "acme", "gloo", 2.0, 5), ("all_reduce, 4 KiB", "gloo itself", "gloo", 1.0, 5),
        ("all_reduce, 16 KiB", "acme", "gloo", 2.0, 5), ("all_reduce, 16 KiB", "gloo itself", "gloo", 1.0, 5),
        ("all_reduce, 16 KiB, CPU time", "acme", "gloo", 2.0, 5),
        ("all_reduce, 16 KiB, beside a computation", "acme", "one after the other", 0.75, 5),
        ("all_reduce, 16 KiB, beside a computation", "gloo", "one after the other", 18 / 27, 5),
    ]  # fmt: skip
    # Two ranks, of which rank 0 computes half as long as rank 1.
    assert timed.cpu_seconds_per_gib() == {"acme": 3.0 * 2**16, "gloo": 1.5 * 2**16, "gloo itself": 1.5 * 2**16}


def test_the_knee_is_where_a_call_takes_twice_as_long_as_the_smallest(monkeypatch: pytest.MonkeyPatch) -> None:
    acme, gloo, again = timed_by_hand(monkeypatch).curves()
    assert [point.median for point in acme.points] == [2.0, 4.0, 12.0]
    assert (acme.knee, gloo.knee) == (4096.0, 4096.0)
    assert again.contestant == "gloo itself"
    assert curve((1, 1, 1, 1), (100, 1.9, 1.9, 1.9)).knee is None
    assert curve((1, 1, 1, 1), (100, 1, 1, 1), (10_000, 4, 4, 4)).knee == pytest.approx(1000.0)


def test_a_backend_beside_itself_has_another_name(monkeypatch: pytest.MonkeyPatch) -> None:
    timed = timed_by_hand(monkeypatch, "gloo")
    assert timed.contestants == ("gloo", "the other gloo", "gloo itself")
    assert [str(one) for one, _ in timed.by_size] == ["2.000 (2.000 - 2.000)"] * 3


def test_operations_are_laid_out_and_drawn(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    timed = timed_by_hand(monkeypatch)
    console = make_console()
    with console.capture() as shown:
        console.print(operations_table([timed]))
    (row,) = (line for line in shown.get().splitlines() if "all_reduce" in line)
    for cell in (
        "all_reduce, 2",
        "2.00 (2.00-2.00)",
        "0.50 (0.50-0.50)",
        "4 KiB / 4 KiB",
        "0.79 / 0.79",
        "0.75 / 0.67",
    ):
        assert cell in row
    chart = ratio_chart(timed.ratios())
    assert chart is not None
    assert [row.kind for row in chart.rows] == ["measured", "noise"] * 3 + ["measured"]
    (drawn,) = draw_growth(timed.curves(), tmp_path)
    assert "All_reduce of 2 ranks" in drawn.read_text()
    assert slower_than_reference(timed.ratios())[0].endswith("2.000 (2.000 - 2.000) of gloo, and noise ends at 1.000")


def test_what_changed_since_an_earlier_run_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    timed = timed_by_hand(monkeypatch)
    monkeypatch.setattr(operations, "run", lambda *_, **__: iter([timed]))
    before, after = tmp_path / "before.json", tmp_path / "after.json"
    ratios = [asdict(one) for one in timed.ratios()]
    before.write_text(json.dumps([{**one, "median": 1.0, "lower": 0.9, "upper": 1.1} for one in ratios[:2]]))
    asked = ["bench", "--backend", "gloo", "--since", str(before), "--out", str(after)]
    done = CliRunner().invoke(main, asked)
    assert done.exit_code == 0, done.output
    assert "time of all_reduce, 1 KiB, acme over gloo, 2 ranks: 1.000 (0.900 - 1.100) -> 2.000" in done.output
    assert json.loads(after.read_text()) == ratios
    again = CliRunner().invoke(main, ["bench", "--backend", "gloo", "--since", str(after), "--gate"])
    assert "Beyond noise nothing has changed." in again.output
    assert again.exit_code == 1
    before.write_text("[1]")
    assert "must be what `bench --out` writes" in CliRunner().invoke(main, asked).output


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        (["--against", "gloo"], "--against goes with --backend"),
        (["--world-size", "2", "--world-size", "4"], "at several --world-size"),
        (["--backend", "gloo", "--workload", "small GPT"], "both backends must have small GPT; both have all_reduce"),
    ],
)
def test_what_cannot_be_compared_is_refused(asked: list[str], said: str) -> None:
    done = CliRunner().invoke(main, ["bench", *asked])
    assert (done.exit_code, said in done.output) == (2, True), done.output
