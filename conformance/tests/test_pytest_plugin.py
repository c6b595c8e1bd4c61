"""The pytest front, as people call it: in a process of its own, from a folder that is not ours."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from conformance.spec.catalogue import load_catalogue
from conformance.spec.cheapest import one_per_requirement
from conformance.spec.profile import about_ddps, in_profile
from conformance.suite import load_scenarios

SUBJECTS = "conformance.tests.subjects"


def run_pytest(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--pyargs", "conformance.test_chapters"]
    return subprocess.run([*command, *arguments], cwd=folder, capture_output=True, text=True, check=False)


def test_a_session_that_does_not_use_it_never_imports_torch(tmp_path: Path) -> None:
    (tmp_path / "test_nothing.py").write_text(
        "import sys\n"
        "def test_nothing(request):\n"
        "    assert 'conformance.pytest_plugin' in sys.modules\n"
        "    assert request.config.getoption('--ddp') == 'ddp_impl'\n"
        "    strangers = {'torch', 'numpy', 'rich', 'click'} & set(sys.modules)\n"
        "    ours = {name for name in sys.modules if name.startswith('conformance')}\n"
        "    assert (strangers, ours) == (set(), {'conformance', 'conformance.pytest_plugin'})\n"
    )
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:hypothesispytest", "test_nothing.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_session_that_only_collects_never_imports_torch(tmp_path: Path) -> None:
    """Once the suite's scenarios are kept, which the first session sees to that may write bytecode."""
    (tmp_path / "imported.py").write_text(
        "import sys\ndef pytest_sessionfinish():\n    print('torch is imported:', 'torch' in sys.modules)\n"
    )
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:hypothesispytest", "-p", "imported", "--collect-only"]
    command += ["-p", "no:cacheprovider", "--pyargs", "conformance.test_chapters", "-k", "TRAIN-16"]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    for _ in range(2):
        done = subprocess.run(
            command, cwd=tmp_path, env={**environment, "PYTHONPATH": str(tmp_path)}, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stdout + done.stderr
        if "torch is imported: False" in done.stdout:
            return
    pytest.fail(done.stdout)


@pytest.mark.nightly
def test_scenarios_run_side_by_side_in_workers_with_ranks_of_their_own(tmp_path: Path) -> None:
    done = run_pytest(tmp_path, "-n", "2", "-k", "TRAIN-16 and moe", "--ddp", "torch")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 passed" in done.stdout


@pytest.mark.nightly
def test_an_installed_copy_whose_files_pytest_loads_as_a_plugins_judges_the_same(tmp_path: Path) -> None:
    """From a wheel, and from a checkout with `python -m pytest`, pytest rewrites the asserts of all our modules."""
    (tmp_path / "rewritten.py").write_text(
        "import pytest, sys\n"
        "pytest.register_assert_rewrite('conformance', 'ddp_impl')\n"
        "def pytest_sessionfinish():\n"
        "    module = sys.modules['conformance.chapters.gradients.changed_modules']\n"
        "    print('loaded by', type(module.__loader__).__name__)\n"
    )
    done = run_pytest(tmp_path, "-s", "-p", "rewritten", "-k", "GRAD-18 and replaced-world2", "--ddp-no-native")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1 passed" in done.stdout
    assert "loaded by AssertionRewritingHook" in done.stdout


@pytest.mark.nightly
def test_a_failure_is_the_explanation_and_no_traceback(tmp_path: Path) -> None:
    chosen = ["-k", "GRAD-01 and mlp-world2", "--ddp-no-native"]
    done = run_pytest(tmp_path, *chosen, "--ddp", f"{SUBJECTS}:Unsynchronised")
    assert done.returncode == pytest.ExitCode.TESTS_FAILED, done.stdout + done.stderr
    assert "\nFAIL  GRAD-01  When a synchronised backward returns" in done.stdout
    assert f"\nReplay  ddp-conformance run gradients/GRAD-01/mlp-world2 --ddp {SUBJECTS}:Unsynchronised" in done.stdout
    assert "def test_scenario" not in done.stdout


@pytest.mark.nightly
def test_a_baseline_excuses_what_torchs_ddp_breaks_and_nothing_else(tmp_path: Path) -> None:
    arguments = ["-k", "(UNUSED-04 or UNUSED-11) and world2", "--ddp", "torch", "--ddp-baseline", "-rfx"]
    good = run_pytest(tmp_path, *arguments)
    assert good.returncode == 0, good.stdout + good.stderr
    assert re.search(r"\d\d passed, (\d+ deselected, )?2 xfailed", good.stdout), good.stdout
    assert good.stdout.count("FAIL was expected (torch 2.13.0 breaks it over gloo") == 2
    bad = run_pytest(tmp_path, *arguments, "--ddp-backend", "conformance.mutants.backends:LocalSparse")
    assert bad.returncode == pytest.ExitCode.TESTS_FAILED, bad.stdout + bad.stderr
    assert re.search(r"1 failed, \d\d passed, (\d+ deselected, )?2 xfailed", bad.stdout), bad.stdout
    assert "test_scenario[unused/UNUSED-11/sparse-embedding-world2]" in bad.stdout
    assert "--backend conformance.mutants.backends:LocalSparse" in bad.stdout  # the command that shows it again


@pytest.mark.nightly
@pytest.mark.parametrize("workers", [[], ["-n", "2"]], ids=["alone", "workers"])
def test_an_unusable_subject_is_said_once_and_ends_the_session(tmp_path: Path, workers: list[str]) -> None:
    done = run_pytest(tmp_path, "-k", "TRAIN-16", "--ddp", f"{SUBJECTS}:NOT_A_CLASS", *workers)
    assert done.returncode != 0
    assert "must be a class, got int" in done.stdout
    assert "INTERNALERROR" not in done.stdout
    assert done.stdout.count("ERROR at setup") <= max(1, len(workers))


#: Collects once for every list of arguments, in one process that imports torch and the suite once.
COLLECT_EACH = """
import json, sys, pytest

for number, arguments in enumerate(json.loads(sys.argv[1])):
    print("=" * 9, number, flush=True)
    pytest.main(["-p", "no:cacheprovider", "--pyargs", "conformance.test_chapters", "--collect-only", *arguments])
"""


@pytest.fixture(scope="module")
def collected(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Return what pytest says of the collection with each of some arguments."""
    few = ["-k", "TRAIN-16 or TRAIN-15"]
    each = {
        "listed": few,
        "reversed": [*few, "--ddp-order", "reversed"],
        "shuffled": [*few, "--ddp-order", "shuffled", "--ddp-seed", "3"],
        "one": [*few, "--one-per-requirement"],
        "core": [*few, "--ddp-profile", "core"],
    }
    command = [sys.executable, "-c", COLLECT_EACH, json.dumps(list(each.values()))]
    folder = tmp_path_factory.mktemp("elsewhere")
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True)
    said = re.split(r"^=========\ \d+\n", done.stdout, flags=re.MULTILINE)[1:]
    return dict(zip(each, said, strict=True))


def ids(said: str) -> list[str]:
    return re.findall(r"test_scenario\[(.*)\]", said)


def test_scenarios_come_in_the_order_that_was_asked_for(collected: dict[str, str]) -> None:
    listed, shuffled = ids(collected["listed"]), ids(collected["shuffled"])
    assert len(listed) > 10
    assert ids(collected["reversed"]) == listed[::-1]
    assert (sorted(shuffled), shuffled != listed) == (sorted(listed), True)


def test_the_session_says_how_many_scenarios_its_options_choose(collected: dict[str, str]) -> None:
    assert sorted(one.split("/")[1] for one in ids(collected["one"])) == ["TRAIN-15", "TRAIN-16"]
    about = about_ddps(load_scenarios(), load_catalogue())
    assert f"ddp-conformance: {len(one_per_requirement(about)):,} scenarios, the cheapest of each" in collected["one"]
    core = in_profile("core", load_scenarios(), load_catalogue())
    assert f"ddp-conformance: {len(core):,} scenarios of profile core\n" in collected["core"]
    assert "ddp-conformance:" not in collected["listed"]
