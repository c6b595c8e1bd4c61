"""The scenarios that are kept beside the bytecode are those that the suite's files make, and no others."""

import os
import sys
from pathlib import Path

import pytest

from conformance.scenario import Fault, Scenario, Step
from conformance.spec.kept_scenarios import kept_scenarios
from conformance.suite import _made, load_scenarios

ONE = Scenario(
    "a/A-01/one", ("A-01",), "train", options={"static_graph": True}, schedule=(Step(local_backwards=1),),
    faults=(Fault("kill", 1),), arguments={"deep": [{"x": 1.5}, None]}, apart=True,
)  # fmt: skip


class Making:
    """Makes scenarios and counts how often it was asked."""

    def __init__(self) -> None:
        self.times = 0

    def __call__(self) -> tuple[Scenario, ...]:
        self.times += 1
        return (ONE.replace(seed=self.times),)


@pytest.fixture
def suite(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder with two files, from which Python may keep bytecode."""
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    (tmp_path / "chapter").mkdir()
    (tmp_path / "chapter" / "scenarios.py").write_text("a = 1\n")
    (tmp_path / "chapter" / "requirements.toml").write_text("a = 1\n")
    return tmp_path


def test_they_are_made_once_and_the_same_again(suite: Path) -> None:
    making = Making()
    first, second = kept_scenarios(making, suite), kept_scenarios(making, suite)
    assert first == second == (ONE.replace(seed=1),)
    assert making.times == 1


@pytest.mark.parametrize("name", ["scenarios.py", "requirements.toml"])
@pytest.mark.parametrize("change", ["written", "touched", "another", "gone"])
def test_a_file_that_has_changed_makes_them_anew(suite: Path, name: str, change: str) -> None:
    making, file = Making(), suite / "chapter" / name
    kept_scenarios(making, suite)
    match change:
        case "written":
            file.write_text("a = 22\n")
        case "touched":
            os.utime(file, ns=(1, 1))
        case "another":
            (suite / f"another_{name}").touch()
        case "gone":
            file.unlink()
    assert kept_scenarios(making, suite) == (ONE.replace(seed=2),)
    assert kept_scenarios(making, suite) == (ONE.replace(seed=2),)


@pytest.mark.parametrize("torn", [b"", b"x", None])
def test_a_torn_file_makes_them_anew(suite: Path, torn: bytes | None) -> None:
    making = Making()
    kept_scenarios(making, suite)
    (file,) = suite.glob("__pycache__/*.kept")
    file.write_bytes(file.read_bytes()[:-5] if torn is None else torn)
    assert kept_scenarios(making, suite) == (ONE.replace(seed=2),)


def test_nothing_is_kept_where_python_keeps_no_bytecode(suite: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    kept_scenarios(Making(), suite)
    assert not list(suite.glob("**/*.kept"))


@pytest.mark.nightly
def test_the_suites_own_are_those_that_its_chapters_make() -> None:
    assert load_scenarios() == _made()
