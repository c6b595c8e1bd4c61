"""The command line: what it answers to mistakes, how it ends, and what it leaves behind."""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from conformance.bench import measure as bench
from conformance.bench.ratio import Ratio
from conformance.cli import main
from conformance.cli.replay import read_scenario
from conformance.errors import ConformanceError
from conformance.report.folder import report_text
from conformance.report.read import read_report
from conformance.report.terminal import STYLES
from conformance.run import doctor
from conformance.run.report import Report
from conformance.scenario import Scenario
from conformance.subjects.subject import Subject
from conformance.suite import load_scenarios
from conformance.tests.processes import processes_under
from conformance.tests.reports_by_hand import RATIOS, run_report
from conformance.verdict import Verdict

pytestmark = pytest.mark.usefixtures("lent_zygote")

SUBJECTS = "conformance.tests.subjects"
PLAIN = Scenario("gradients/GRAD-01/plain", ("GRAD-01",), "train", world_size=2)
SOME = "training/TRAIN-16/*-world2"


def call(*arguments: str | Path) -> Result:
    return CliRunner().invoke(main, [str(argument) for argument in arguments])


def refused(*arguments: str | Path) -> str:
    """Call with a mistake: one paragraph on stderr, exit code 2, no traceback. Returns the paragraph."""
    result = call(*arguments)
    assert result.exit_code == 2, result.output
    stderr = re.sub(r"\A(Testing|Running) .* \.\.\.\n", "", result.stderr)  # what `run` and `replay` say at once
    assert stderr.removeprefix("Starting ranks ...\n").startswith("Error: ")
    assert "\n\n" not in result.stderr.strip()
    assert "Traceback" not in result.output
    assert isinstance(result.exception, SystemExit)
    return result.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["GRAD-1"], "'GRAD-1' is no chapter, requirement, scenario or glob of scenarios; did you mean GRAD-01"),
        (["GRAD-0x"], "'GRAD-0x' is no chapter, requirement, scenario or glob of scenarios; did you mean GRAD-"),
        (["--requirement", "GRAD-999"], "unknown requirement 'GRAD-999'; did you mean GRAD-"),
        (["--chapter", "gradient"], "unknown chapter 'gradient'; did you mean gradients?"),
        (["GRAD-01", "--profile", "backend"], "GRAD-01 is not in profile backend"),
        (["--requirement", "GRAD-01", "--profile", "backend"], "of profile backend matches --requirement GRAD-01"),
        (["--world-size", "77"], "no scenario matches --world-size 77"),
        (["--spec", "3.9"], "unknown version '3.9' of the specification; known: 1.0"),
        (["-k", "zeppelin"], "no scenario matches -k zeppelin"),
        (["--ddp", "ddp_imp"], "unknown DDP 'ddp_imp'; did you mean ddp_impl?"),
        (["--ddp", "nowhere_to_be_found:DDP"], "cannot import nowhere_to_be_found: ModuleNotFoundError"),
        (["--ddp", "torch.nn.parallel:DistributedDataParalel"], "did you mean DistributedDataParallel?"),
        (["--ddp", f"{SUBJECTS}:NOT_A_CLASS"], "must be a class, got int"),
        (
            ["--backend", "glue"],
            "unknown backend 'glue'; expected gloo, nccl, sim, sim-alone, sim-late, or module:attr",
        ),
        (["--backend", f"{SUBJECTS}:NO_DRIVER"], "backend 'driverless' cannot be used here: its driver is not loaded"),
        (
            ["--backend", f"{SUBJECTS}:TWO_RANKS", "--world-size", "3"],
            "serves at most 2 rank(s) here, got world size 3",
        ),
    ],
)
def test_a_mistake_is_answered_before_anything_runs(tmp_path: Path, arguments: list[str], message: str) -> None:
    assert message in refused("run", "--report", tmp_path, *arguments)


@pytest.mark.parametrize(
    "arguments", [["run", "--report", ""], ["report", "summary", ""], ["explore", "--report", ""], ["replay", ""]]
)
def test_an_empty_path_is_not_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    result = call(*arguments)
    assert result.exit_code == 2
    assert "an empty path; write . for the working directory" in result.stderr
    assert not list(tmp_path.iterdir())


def test_a_mistyped_option_gets_near_misses() -> None:
    result = call("run", "--wrold-size", "3")
    assert result.exit_code == 2
    assert "No such option '--wrold-size'. Did you mean '--world-size'?" in result.stderr


def test_a_world_size_that_is_none_is_refused_before_the_suite_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr("conformance.cli.run.load_scenarios")
    assert "world size must be >= 1, got 0" in refused("run", "--world-size", "0")


def test_an_unwritable_report_folder_is_said_before_the_run(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert "cannot write reports to" in refused("run", "--report", tmp_path / "file" / "report")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (PLAIN.dumps()[:100], "not valid JSON (line "),
        ("[]", "a scenario must be a JSON object, got list"),
        (PLAIN.dumps().replace('"schema_version": 1', '"schema_version": 99'), "schema_version 99 is not supported"),
        (PLAIN.dumps().replace('"train"', '"trian"'), "unknown program 'trian'; did you mean train"),
        (PLAIN.dumps().replace('"mlp"', '"mpl"'), "unknown model 'mpl'; did you mean mlp"),
        (PLAIN.dumps().replace('"GRAD-01"', '"GRAD-0!"'), "unknown requirement 'GRAD-0!'; did you mean GRAD-"),
        (PLAIN.dumps().replace('"dtype"', '"dtyp"'), "dtyp: this field is not known"),
        (
            PLAIN.dumps().replace('"world_size": 2', '"world_size": 0'),
            "world_size must be an integer from 1 to 1024, got 0",
        ),
        (report_text(run_report()), "it is a whole report; "),
        ("\udce9", "it is not UTF-8 text"),
    ],
)
def test_a_broken_scenario_file_is_refused(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "scenario.json"
    file.write_text(text, encoding="utf-8", errors="surrogateescape")
    assert message in refused("replay", file)


def test_a_scenario_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    assert "cannot read" in refused("replay", tmp_path / "nowhere.json")
    assert "Is a directory" in refused("replay", tmp_path)


def test_a_scenario_beyond_the_backend_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "scenario.json"
    file.write_text(PLAIN.replace(world_size=3).dumps())
    message = refused("replay", file, "--backend", f"{SUBJECTS}:TWO_RANKS")
    assert "backend 'small' serves at most 2 rank(s) here, got world size 3" in message


@pytest.mark.parametrize(
    ("subject", "message"),
    [
        (
            "Dying",
            "cannot be constructed around a small MLP at world size 2; rank 0: ValueError: this needs a l",
        ),
        ("not_a_module", "must give a torch.nn.Module, conformance.tests.subjects:not_a_module(module, ...) gave str"),
    ],
)
def test_a_subject_that_cannot_be_constructed_is_refused(tmp_path: Path, subject: str, message: str) -> None:
    file = tmp_path / "scenario.json"
    file.write_text(PLAIN.dumps())
    assert message in refused("replay", file, "--ddp", f"{SUBJECTS}:{subject}")


@pytest.mark.parametrize("mistake", [["--ddp", f"{SUBJECTS}:Missing"], ["--backend", "gluo"], ["--ddp", "Dying"]])
def test_a_mistake_leaves_the_last_report_as_it_was(tmp_path: Path, mistake: list[str]) -> None:
    """What failed in it can still be run again, once the mistake is mended; also where the DDP is tried in vain."""
    assert call("run", SOME, "--ddp", "torch", "--report", tmp_path, "-k", "moe").exit_code == 0
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    refused("run", SOME, *[word.replace("Dying", f"{SUBJECTS}:Dying") for word in mistake], "--report", tmp_path)
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


@pytest.mark.parametrize("kind", ["html", "junit", "markdown", "trace", "badge"])
def test_a_page_does_not_replace_a_report(tmp_path: Path, kind: str) -> None:
    file = tmp_path / "report.json"
    file.write_text(report_text(run_report()))
    assert "is a report, whose data would be lost" in refused("report", kind, file, "-o", file)
    assert read_report(file) == run_report()


@pytest.mark.parametrize(
    ("arguments", "into", "code", "complaint"),
    [
        (["list"], "/dev/full", 2, "cannot write to standard output: No space left on device"),
        (["list"], "a reader that leaves", 0, ""),
        *(
            pytest.param(["run", SOME, "-k", "moe", "--no-native"], into, 0, complaint, marks=pytest.mark.nightly)
            for into, complaint in (
                ("/dev/full", "cannot write to standard output: No space left"),
                ("a reader that leaves", ""),
            )
        ),
    ],
)
def test_output_that_cannot_be_written_costs_no_file_and_no_verdict(
    tmp_path: Path, arguments: list[str], into: str, code: int, complaint: str
) -> None:
    where = ["--report", str(tmp_path)] if arguments[0] == "run" else []
    command = [sys.executable, "-m", "conformance", *arguments, *where]
    reads, writes = os.pipe()
    os.close(reads)  # it has left
    with open(into if into.startswith("/") else writes, "w") as stdout:
        done = subprocess.run(command, stdout=stdout, stderr=subprocess.PIPE, text=True, timeout=200)
    assert done.returncode == code, done.stderr
    assert complaint in done.stderr
    assert "Traceback" not in done.stderr
    if where:
        assert read_report(tmp_path).is_green
        assert "</html>" in (tmp_path / "report.html").read_text()


def test_a_conformant_run_ends_with_0_and_a_report(tmp_path: Path) -> None:
    result = call("run", SOME, "--ddp", "torch", "--report", tmp_path, "-k", "moe")
    assert result.exit_code == 0, result.output
    assert re.search(r"torch keeps [1-9]\d* of [1-9]\d* requirement", result.stdout)
    assert json.loads((tmp_path / "report.json").read_text())["green"]
    report = read_report(tmp_path)
    assert report.totals.selected == len(report.scenarios) >= 1
    assert all(outcome.native is None for outcome in report.scenarios)


@pytest.mark.nightly
def test_a_shuffled_run_says_its_seed_and_can_be_had_again(tmp_path: Path) -> None:
    def verdicts(folder: str, *arguments: str) -> tuple[list[tuple[str, str]], Report]:
        result = call("run", SOME, "--no-native", "--report", tmp_path / folder, *arguments)
        assert result.exit_code == 0, result.output
        report = read_report(tmp_path / folder)
        assert ("Scenarios are shuffled with seed" in result.stdout) == (report.selection.order == "shuffled")
        return [(one.id, one.subject.verdict.value) for one in report.scenarios], report

    listed, _ = verdicts("listed")
    shuffled, report = verdicts("shuffled", "--order", "shuffled")
    again, _ = verdicts("again", "--order", "shuffled", "--seed", str(report.selection.seed))
    assert (sorted(shuffled), shuffled) == (sorted(listed), again)
    assert verdicts("reversed", "--order", "reversed")[0] == listed[::-1]
    assert refused("run", SOME, "--report", tmp_path, "--seed", "1").startswith("Error: --seed says how")
    assert "leave out --order" in refused("run", "--certified", "--profile", "core", "--order", "reversed")


def test_step_times_lie_in_the_report_of_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def measure(subject: Subject, *arguments: Any, **named: Any) -> tuple[Ratio, ...]:
        assert (subject.name, named["world_size"]) == ("ddp_impl", 2)
        return RATIOS

    def lose_a_rank(*arguments: Any, **named: Any) -> tuple[Ratio, ...]:
        raise ConformanceError("bench: rank 1 was killed")

    command = ("run", "GRAD-01", "-k", "mlp-world2", "--no-native", "--report", tmp_path, "--bench")
    monkeypatch.setattr(bench, "run", measure)
    measured = call(*command)
    assert measured.exit_code == 0, measured.output
    assert read_report(tmp_path).performance == RATIOS
    assert "torch itself" in measured.stdout
    monkeypatch.setattr(bench, "run", lose_a_rank)
    lost = call(*command)
    report = read_report(tmp_path)
    assert (lost.exit_code, report.performance, report.green) == (1, (), True)
    assert "Step times could not be compared: bench: rank 1 was killed" in lost.stderr
    assert "cannot go with --attach" in refused(*command, "--attach")


@pytest.mark.parametrize(
    ("arguments", "timed"),
    [
        ([], "ddp_impl beside torch's DDP over gloo"),
        (["--ddp", "torch", "--backend", "sim"], "torch beside torch's DDP over sim"),
        (["--profile"], "ddp_impl alone over gloo"),
        (["--backend", "acme"], "operations of acme beside gloo"),
        (["--backend", "acme", "--against", "sim"], "operations of acme beside sim"),
        (["--backend", "acme", "--memory"], "ddp_impl beside torch's DDP over acme"),
    ],
)
def test_bench_says_first_what_it_times(arguments: list[str], timed: str) -> None:
    assert call("bench", *arguments, "--workload", "nothing").stderr.startswith(f"Timing {timed} ...\n")


def test_a_failing_run_ends_with_1_and_says_how_to_replay_it(tmp_path: Path) -> None:
    ddp = f"{SUBJECTS}:Unsynchronised"
    result = call("run", SOME, "--ddp", ddp, "--report", tmp_path, "-k", "moe", "--no-native")
    assert result.exit_code == 1, result.output
    assert "FAIL  TRAIN-16" in result.stdout
    report = read_report(tmp_path)
    assert report.totals.subject["FAIL"] == report.totals.selected
    file = next((tmp_path / "failures").glob("*.json"))
    assert f"Replay  ddp-conformance replay {file} --ddp {ddp}" in result.stdout
    assert read_scenario(file).id == report.scenarios[0].id


@pytest.mark.parametrize(
    ("ddp", "exit_code", "shown"), [(f"{SUBJECTS}:Unsynchronised", 1, "FAIL  GRAD-01"), ("torch", 0, "PASS")]
)
def test_a_replay_shows_one_scenario_again(tmp_path: Path, ddp: str, exit_code: int, shown: str) -> None:
    file = tmp_path / "scenario.json"
    file.write_text(PLAIN.dumps())
    result = call("replay", file, "--ddp", ddp, "--no-native")
    assert result.exit_code == exit_code, result.output
    assert shown in result.stdout


@pytest.mark.nightly
@pytest.mark.parametrize(
    "signum",
    [signal.SIGINT, signal.SIGTERM, signal.SIGHUP],
    ids=lambda signum: signum.name,
)
def test_a_signal_leaves_a_partial_report_and_no_process(tmp_path: Path, signum: signal.Signals) -> None:
    """As in a terminal, every process of the command gets the signal; the ranks are in the middle of a scenario."""
    announcements = tmp_path / "announcements"
    os.mkfifo(announcements)
    report = tmp_path / "report"
    arguments = ["run", "GRAD-01", "--no-native", "--jobs", "1"]
    command = [sys.executable, "-c", "from conformance.cli import main; main()", *arguments]
    run = subprocess.Popen(
        [*command, "--ddp", f"{SUBJECTS}:Announcing", "--report", str(report)],
        env={**os.environ, "ANNOUNCE": str(announcements), "TMPDIR": str(tmp_path)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    with os.fdopen(os.open(announcements, os.O_RDWR)) as pipe, run:
        # One is for the probe. Of 12 that have begun at most 10 are not judged, and whoever fails begins once more: so
        # three are judged, or are about to be, when 16 more have come.
        for _ in range(17):
            assert pipe.readline() == "constructed\n"
        assert processes_under(tmp_path)
        os.killpg(run.pid, signum)
        stdout, stderr = run.communicate()
    assert run.returncode == 130, stderr
    assert "Traceback" not in stderr
    assert "Incomplete: " in stdout
    data = json.loads((report / "report.json").read_text())
    assert (data["interrupted"], data["complete"], data["green"]) == (True, False, False)
    assert 3 <= len(data["scenarios"]) < data["totals"]["selected"]
    assert processes_under(tmp_path) == []


@pytest.mark.parametrize("arguments", [["--help"], ["run", "--help"], ["list"], ["list", "training", "GRAD-01"]])
def test_help_and_list_do_not_wait_for_torch(arguments: list[str]) -> None:
    code = (
        "import sys; from conformance.cli import main\n"
        f"try: main({arguments!r})\n"
        "except SystemExit as end: assert end.code == 0, end.code\n"
        "assert 'torch' not in sys.modules and 'numpy' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL)


def test_the_zygote_is_begun_before_the_command_imports_torch() -> None:
    code = "import sys; from conformance.workers.zygote_process import ZygoteProcess; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_list_shows_requirements_and_scenarios() -> None:
    assert "GRAD-01" in call("list", "gradients").stdout
    assert "TRAIN-01" not in call("list", "gradients").stdout
    of_backends = call("list", "--profile", "backend").stdout
    assert "VAL-01" in of_backends
    assert "GRAD-01" not in of_backends
    ids = call("list", "--scenarios", "gradients", "--world-size", "2").stdout.split()
    assert ids == [one.id for one in load_scenarios() if one.chapter == "gradients" and one.world_size == 2]


@pytest.mark.nightly
def test_doctor_finds_what_a_run_needs() -> None:
    result = call("doctor")
    assert result.exit_code == 0, result.output
    assert "MISSING" not in result.stdout
    assert "two steps of torch's DDP" in result.stdout


@pytest.mark.nightly
def test_doctor_says_what_to_do_about_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "MIN_TORCH", (99, 0))
    monkeypatch.setattr(doctor, "judged_with", lambda _: "")
    monkeypatch.setattr(doctor, "CHECKS", doctor.CHECKS[:-1])  # without the ranks
    result = call("doctor")
    assert result.exit_code == 1
    assert "MISSING torch" in result.stdout
    assert "install torch 99.0 or newer" in result.stdout


def test_doctor_knows_which_profiles_were_judged_with_which_torch_and_when(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "JUDGED", tmp_path / "judged.toml")
    doctor.JUDGED.write_text('"9.1.0" = "smoke on 2030-01-01"\n"9.1.0@3.14" = "core on 2030-01-02"\n"9.2.0" = "x"\n')
    assert doctor.judged_with("9.1.0+cpu") == "this suite ran smoke on 2030-01-01, core on 2030-01-02 (Python 3.14)"
    assert doctor.judged_with("9.1.1") == "this suite was not run with it, but with 9.1.0, 9.2.0"


def test_every_verdict_has_a_style() -> None:
    assert set(STYLES) == set(Verdict)


def test_a_malformed_ddp_name_is_reported_before_torch_is_imported(tmp_path: Path) -> None:
    code = (
        "import sys\nfrom conformance.cli import main\n"
        "try:\n    main(sys.argv[1:])\nfinally:\n    print('torch' in sys.modules)"
    )
    (tmp_path / "x.json").write_text(PLAIN.dumps())
    for arguments in (["run", "--ddp", "subj:"], ["replay", "x.json", "--ddp", "subj:"]):
        done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, cwd=tmp_path)
        assert (done.returncode, done.stdout.strip()) == (2, "False"), done.stderr
        assert done.stderr.startswith("Error: unknown DDP 'subj:'")
