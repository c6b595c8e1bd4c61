"""The onboarding page, followed word for word in an empty folder, and what `new` refuses."""

import ast
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

import conformance
from conformance.backends.backend import CAPABILITIES as OF_BACKENDS
from conformance.cli import main, starters
from conformance.cli.starters.starter import KINDS, Starter, StarterError
from conformance.errors import ConformanceError
from conformance.subjects.subject import CAPABILITIES

DEVICES = "\n## If you have a device\n"
PAGE = Path(conformance.__file__).parent.parent / "docs" / "onboarding.md"
REFERENCE = PAGE.with_name("adapter_reference.md")
#: Words with which a command begins: other indented blocks show output.
COMMANDS = ("ddp-conformance ", "cd ", "pytest", "python -m pip ")


def commands_of(page: str) -> list[str]:
    blocks = re.findall(r"(?:^\n)((?:    .*\n)+)", page, re.MULTILINE)
    return [line.strip() for block in blocks for line in block.splitlines() if line.strip().startswith(COMMANDS)]


@pytest.mark.nightly
def test_the_page_followed_word_for_word_ends_in_a_passing_run(tmp_path: Path) -> None:
    commands = commands_of(PAGE.read_text().partition(DEVICES)[0])
    assert commands[0] == "ddp-conformance new backend acme"
    assert commands[-1].startswith("ddp-conformance run ")
    assert commands[-1].endswith(" --backend acme")
    folder, ended = followed(commands, tmp_path)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "Every rung holds." in ended.stdout
    report = (folder / "acme" / "report" / "report.json").read_text()
    assert '"backend": "acme"' in report
    assert re.search(r"ddp_impl keeps [1-9]\d* of [1-9]\d* requirement", ended.stdout)


@pytest.mark.nightly
def test_the_section_about_devices_followed_word_for_word_ends_in_a_passing_run(tmp_path: Path) -> None:
    commands = commands_of(DEVICES + PAGE.read_text().partition(DEVICES)[2])
    assert commands[0] == "ddp-conformance new device volta"
    assert commands[-1].startswith("ddp-conformance run DEV-01 ")
    folder, ended = followed([*commands, "pytest -q -p no:cacheprovider"], tmp_path)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "Every rung holds." in ended.stdout
    assert '"backend": "volta.adapter:BACKEND"' in (folder / "volta" / "report" / "report.json").read_text()
    assert re.search(r"ddp_impl keeps [1-9]\d* of [1-9]\d* requirement", ended.stdout)
    assert "2 passed" in ended.stdout


def followed(commands: list[str], tmp_path: Path) -> tuple[Path, subprocess.CompletedProcess[str]]:
    """Run `commands` in an empty folder; return it, and how they ended."""
    site = tmp_path / "site"
    environment = {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": str(site),
        # The page installs into the reader's environment; here that is a folder, with nothing fetched.
        "PIP_TARGET": str(site), "PIP_NO_DEPS": "1", "PIP_NO_BUILD_ISOLATION": "0", "PIP_NO_INDEX": "1",
    }  # fmt: skip
    for leftover in ("PYTEST_ADDOPTS", "PYTEST_XDIST_WORKER", "PYTEST_CURRENT_TEST"):
        environment.pop(leftover, None)
    folder = tmp_path / "empty"
    folder.mkdir()
    script = "set -eux\n" + "\n".join(commands)
    return folder, subprocess.run(["bash", "-c", script], cwd=folder, env=environment, capture_output=True, text=True)


@pytest.mark.nightly
def test_the_test_that_comes_with_a_ddp_passes_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Starter("subject", "fleet-foot").write(tmp_path)
    root = tmp_path / "fleet-foot"
    monkeypatch.syspath_prepend(str(root))
    runpy.run_path(str(root / "tests" / "test_fleet_foot.py"))["test_every_rung_holds"]()


#: What a small DDP does, too, that neither counts on options nor agrees with the other ranks on anything.
KEPT_BY_A_STARTER = (
    "gradients/GRAD-01/mlp-world2", "accumulation/ACCUM-01/*-world2", "compatibility/COMPAT-12/freed-world2",
    "construction/CONS-08/*", "construction/CONS-09/*", "construction/CONS-17/*", "construction/CONS-18/*",
)  # fmt: skip


@pytest.mark.nightly
def test_the_ddp_that_is_written_keeps_what_a_small_one_can(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Starter("subject", "fleet-hand").write(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path / "fleet-hand"))
    chosen = ["run", *KEPT_BY_A_STARTER, "--no-native", "--ddp", "fleet_hand.ddp:SUBJECT"]
    done = CliRunner().invoke(main, [*chosen, "--report", str(tmp_path / "report")])
    assert done.exit_code == 0, done.output
    passed = re.search(r"fleet-hand: (\d+) PASS", done.output)
    assert passed is not None, done.output
    assert int(passed[1]) >= len(KEPT_BY_A_STARTER), done.output


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_written_has_no_blanks_left_and_keeps_the_name(tmp_path: Path, kind: str) -> None:
    files = Starter(kind, "my-own").write(tmp_path)
    assert {path.relative_to(tmp_path).parts[0] for path in files} == {"my-own"}
    assert tmp_path / "my-own" / "tests" / "test_my_own.py" in files
    assert len(files) == len(list((Path(starters.__file__).parent / kind).rglob("*.jinja")))
    for path in files:
        text = path.read_text()
        assert "{{" not in text
        if path.suffix == ".py":
            compile(text, path, "exec")
    assert 'my-own = "my_own.' in (tmp_path / "my-own" / "pyproject.toml").read_text()


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("9lives", "cannot be the name of a package"),
        ("../up", "cannot be the name of a package"),
        ("lambda", "cannot be the name of a package"),
        ("torch", "a module torch exists already and would be hidden"),
        ("taken", "exists already; nothing is overwritten"),
    ],
)
def test_what_cannot_be_written(tmp_path: Path, name: str, says: str) -> None:
    (tmp_path / "taken").mkdir()
    with pytest.raises(StarterError, match=re.escape(says)):
        Starter("backend", name).write(tmp_path)
    assert issubclass(StarterError, ConformanceError)
    assert [path.name for path in tmp_path.iterdir()] == ["taken"]


def test_only_commands_of_the_page_are_run() -> None:
    page = (
        "Text `ddp-conformance doctor`.\n\n    ddp-conformance new backend x\n    cd x\n\n    BROKEN      something\n\n"
    )
    assert commands_of(page) == ["ddp-conformance new backend x", "cd x"]


def listed(header: str) -> list[str]:
    """Return the names in the first column of the reference's table with this header."""
    table = REFERENCE.read_text().partition(f"\n{header}\n")[2].partition("\n\n")[0]
    return [name for row in table.splitlines()[1:] for name in re.findall(r"`(\w+)[`(]", row.split("|")[1])]


def test_the_reference_lists_every_capability() -> None:
    assert sorted(listed("| capability | what the DDP can do |")) == sorted(CAPABILITIES)
    assert sorted(listed("| capability | what the backend can do |")) == sorted(OF_BACKENDS)


def test_the_reference_lists_every_method_that_the_generated_group_has(tmp_path: Path) -> None:
    Starter("backend", "acme").write(tmp_path)
    source = (tmp_path / "acme" / "acme" / "group.py").read_text()
    group = next(one for one in ast.parse(source).body if isinstance(one, ast.ClassDef) and one.name == "AcmeGroup")
    names = {one.name for one in group.body if isinstance(one, ast.FunctionDef) and not one.name.startswith("_")}
    refused = set(re.findall(r'"(\w+)"', source.partition("for _method in (")[2].partition("):")[0]))
    assert names | refused <= set(listed("| method | what torch calls it for | capability |"))
