"""Every command of README and docs runs: the cheap ones on every push, the others at night, long ones narrowed down.

A command that cannot run here has its reason in `NOT_HERE`; one that takes long has in `NARROWED` what is added to it,
so that it ends soon. Both are patterns, and each must match a command: what is no longer documented goes.
"""

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import click
import pytest
from click.testing import CliRunner
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

from conformance.cli import main
from conformance.cli.starters.starter import Starter
from conformance.spec.catalogue import load_catalogue
from conformance.suite import load_scenarios
from conformance.tests.reports_by_hand import FAIL, PASS, outcome, stored

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]

_PROGRAMS = r"(?:ddp-conformance|bash|pytest|torchrun|python -m|srun|mpirun|sudo|pip)"
_VARIABLES = r"(?:[A-Z_]+=\S+ )*"
#: A line of its own, with the lines that continue it, or in backticks; up to a comment or a pipe.
COMMAND = re.compile(
    rf"^(?:    |\$ )({_VARIABLES}{_PROGRAMS} (?:[^#|\n\\]|\\\n)+)|`({_VARIABLES}{_PROGRAMS} [^`\n]+)`", re.MULTILINE
)

#: Pattern -> why a command that matches it does not run here.
NOT_HERE = {
    r"\.\.\.(\s|$)|NAME|<\w+>|FOLDER|\bREPORT\b|key FILE": "it has a blank to fill in",
    r"^bash ci/test\.sh": "it runs these tests",
    r"^bash ci/conformance\.sh": "it takes a quarter of an hour; every push runs it, in .github/workflows/gloo.yml",
    r"^bash ci/clients\.sh": "it fetches libraries; .github/workflows/clients.yml runs it every night",
    r"^bash ci/scoreboard\.sh": "it needs other projects' DDPs",
    r"^bash ci/gpu\.sh": "it needs a GPU",
    r"ci/torch_versions\.sh": "it fetches versions of torch, gigabytes each",
    r"^sudo ": "it needs root, to make network namespaces; .github/workflows/gloo.yml runs it",
    r"--nnodes|^MASTER_ADDR=|^mpirun ": "it needs several hosts; ci/two_hosts.sh runs the like in two namespaces",
    r"ci/nightly\.sh": "it is the nightly job, which runs these tests",
    r"ci/store\.sh": "it runs every scenario; workshop/tests/test_storing.py stores the report of a small run",
    r"--certified": "it cannot be narrowed; `sign`, which needs it, runs it",
    r"bench --growth": "it takes minutes; BENCH=1 bash ci/nightly.sh measures",
    r"bench --workload": "it takes a quarter of an hour and more; BENCH=1 bash ci/nightly.sh measures",
    r"^python -m workshop": "it changes this checkout; workshop/tests run it",
    r"^EXPECTTEST_ACCEPT": "it rewrites a page",
    r"pip install": "it fetches packages; test_onboarding.py installs the generated one",
    r"^python -m ddp_impl$": "it is a command's name",
    r"volta": "test_onboarding.py follows that section of docs/onboarding.md",
    r"others:REPLICATE": "torch's replicate breaks requirements: the command ends with 1, as docs/scoreboard.md says",
}

#: Pattern -> what is added to a command that takes long, the first that matches; empty for those that do not.
NARROWED = {
    r"^ddp-conformance run GRAD-01 ": "",
    r"--last-failed": "",
    r"--profile gpu": "DEV-01 --world-size 2",
    r"--bench": "GRAD-01 -k mlp-world2",
    r"^ddp-conformance run|^torchrun .*--attach": "GRAD-01 --world-size 2",
    r"^ddp-conformance explore": "--examples 5",
    r"^ddp-conformance mutants$": "NoDivision",
    r"^ddp-conformance bench": "--rounds 4",
    r"^ddp-conformance upstream --list": "",
    r"^ddp-conformance upstream .*-k ": "",
    r"^ddp-conformance upstream": "-k test_ddp_zero_output_features",
    r"action\.sh": "",
    r"^pytest .*one-per-requirement": "-k GRAD-01",
    r"^pytest .*gradients": "--one-per-requirement --ddp-profile core",
    r"^pytest": "-k GRAD-01/mlp-world2",
}

#: Pattern -> the command whose file a command that matches it needs.
AFTER = {
    r"^ddp-conformance sign": "ddp-conformance run --certified --profile core",
    r"--expectations mine\.toml": "ddp-conformance report baseline torch --out mine.toml",
}

#: What ends with 1, as its page says: torch's own DDP breaks something.
FAILS = re.compile(r"explore --ddp torch")

#: Commands that need no rank and little time run on every push.
CHEAP = re.compile(r"^ddp-conformance (list|new|doctor|report)")

TRAINING = """\
import argparse
import os
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=1)
epochs = parser.parse_args().epochs
dist.init_process_group("gloo")
model = DDP(torch.nn.Linear(2, 1))
assert "ddp_impl" in type(model).__module__
for _ in range(epochs):
    model(torch.ones(4, 2)).sum().backward()
dist.destroy_process_group()
os._exit(0)  # torch may abort a process that ends right behind its last collective, with any DDP
"""
KNOWN = """\
[[expectation]]
scenarios = "unused/UNUSED-04/two-heads-world2"
verdict = "FAIL"
reason = "not yet"
issue = "https://example.org/issues/12"
expires = 2099-01-01
subject = "somebody-else"
"""


def commands() -> list[tuple[str, str]]:
    """Return every command, with the page it is on, once a page; a name in backticks alone is no command."""
    found = [
        (page.name, " ".join((line or quoted).replace("\\\n", " ").split()))
        for page in PAGES
        for line, quoted in COMMAND.findall(page.read_text())
        if line or quoted.count(" ") > 1 or quoted.startswith("bash ")
    ]
    return list(dict.fromkeys(found))


def why_not(command: str) -> str:
    """Return why a command does not run here; empty if it does."""
    return next((reason for pattern, reason in NOT_HERE.items() if re.search(pattern, command)), "")


def narrowed(command: str) -> str:
    """Return the command with what makes it short."""
    return next((f"{command} {more}" for pattern, more in NARROWED.items() if re.search(pattern, command)), command)


def parse(command: str) -> None:
    """Have click take the command apart, as it does before it runs it; raises `click.ClickException`."""
    _, *words = shlex.split(command.partition("&&")[0])
    context = click.Context(main)
    group: click.Group = main
    while True:
        name, *words = words
        found = group.get_command(context, name)
        if found is None:
            raise click.UsageError(f"no command {name}")
        if not isinstance(found, click.Group):
            break
        group = found
    found.make_context(name, words)


def prepare(folder: Path) -> Path:
    """Write what the pages talk about into `folder`: packages, reports, a training. Returns where to run commands."""
    site, here = folder / "site", folder / "here"
    Starter("backend", "acme").write(folder)
    shutil.copytree(folder / "acme" / "acme", site / "acme")
    installed = site / "acme_conformance-0.1.0.dist-info"
    installed.mkdir()
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: acme-conformance\nVersion: 0.1.0\n")
    (installed / "entry_points.txt").write_text("[ddp_conformance.backends]\nacme = acme.adapter:BACKEND\n")
    Starter("subject", "swift").write(folder)
    shutil.copytree(folder / "swift" / "swift", here / "swift")
    (here / "my_pkg.py").write_text("import ddp_impl\n\nclass MyDDP(ddp_impl.DistributedDataParallel):\n    pass\n")
    (here / "train.py").write_text(TRAINING)
    page = (ROOT / "docs" / "howto" / "parity.md").read_text()
    (here / "my_training.py").write_text(page.partition("```python\n")[2].partition("```")[0])
    shutil.copy(ROOT / "README.md", here)
    (here / "package").mkdir()
    (here / "package" / "training.py").write_text(TRAINING)
    (here / "known.toml").write_text(KNOWN)
    key = Ed25519PrivateKey.generate().private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    (here / "key.pem").write_bytes(key)
    scenarios = {one.id: one for one in load_scenarios()}
    failed = scenarios["gradients/GRAD-01/mlp-world2"]
    others = [one for one in scenarios.values() if one.id.startswith("gradients/GRAD-02/")][:4]
    whole = [outcome(failed, FAIL, PASS), *(outcome(one, PASS, PASS) for one in others)]
    ids = [one.id for one in whole]
    for name in ("report", "last", "reports/mine"):
        stored(here / name, *whole, catalogue=load_catalogue())
    for name in ("torch", "reports/torch"):
        stored(here / name, *whole, catalogue=load_catalogue(), subject="torch")
    for number in range(4):
        part = whole[number::4]
        stored(here / f"shard{number + 1}", *part, selected=ids, num_selected=len(part), catalogue=load_catalogue())
    return here


def environment(here: Path, command: str) -> dict[str, str]:
    """Return the variables with which a command runs: our programs, and an installed package acme."""
    variables = {key: value for key, value in os.environ.items() if not key.startswith("PYTEST_")}
    variables["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{variables['PATH']}"
    if " new " not in command:  # `new backend acme` refuses the name of a module that exists
        ours = (str(here.parent / "site"), str(here), *filter(None, [variables.get("PYTHONPATH")]))
        variables["PYTHONPATH"] = os.pathsep.join(ours)
    return variables


def run(command: str, here: Path) -> str:
    """Run a command as a person would, in a shell; return what is wrong, empty if it ended with 0."""
    place = here
    if " new " in command:
        place = here.parent / "empty"
        shutil.rmtree(place, ignore_errors=True)
        place.mkdir()
    if "ci/action.sh" in command:
        shutil.copytree(ROOT / "ci", here / "ci", dirs_exist_ok=True)
    before = [f"{first} && " for pattern, first in AFTER.items() if re.search(pattern, command)]
    done = subprocess.run(
        ["bash", "-c", "".join([*before, narrowed(command)])], cwd=place, env=environment(here, command),
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    ended = f"{narrowed(command)} ended with {done.returncode}:\n{done.stdout}{done.stderr}"
    return "" if done.returncode == (1 if FAILS.search(command) else 0) else ended


def test_there_are_commands_and_a_wrong_one_is_noticed() -> None:
    assert len(commands()) > 80
    for wrong in ("ddp-conformance run --no-such", "ddp-conformance rum", "ddp-conformance report diff one"):
        with pytest.raises(click.ClickException):
            parse(wrong)


def test_every_exception_is_of_a_command_that_is_documented() -> None:
    documented = [command for _, command in commands()]
    for pattern in (*NOT_HERE, *NARROWED):
        assert any(re.search(pattern, command) for command in documented), f"no command matches {pattern}"


def ours() -> list[tuple[str, str]]:
    """Return the commands that click can take apart."""
    return [one for one in commands() if one[1].startswith("ddp-conformance ") and "..." not in one[1].split()]


@pytest.mark.parametrize(("page", "command"), ours())
def test_a_documented_command_is_one(page: str, command: str) -> None:
    parse(command)


def test_cheap_commands_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In this process, which has imported everything; a command that starts a shell or a rank is not cheap."""
    here = prepare(tmp_path)
    cheap = dict.fromkeys(command for _, command in commands() if CHEAP.search(command) and not why_not(command))
    assert len(cheap) > 8
    wrong = []
    for number, command in enumerate(cheap):
        empty = tmp_path / f"empty{number}"
        empty.mkdir()
        monkeypatch.chdir(empty if " new " in command else here)
        result = CliRunner().invoke(main, shlex.split(command.partition("&&")[0])[1:])
        if result.exit_code != 0:
            wrong.append(f"{command} ended with {result.exit_code}: {result.output}{result.exception or ''}")
    assert wrong == []


@pytest.mark.nightly
@pytest.mark.timeout(900)
@pytest.mark.parametrize("command", dict.fromkeys(command for _, command in commands() if not why_not(command)))
def test_a_documented_command_runs(tmp_path: Path, command: str) -> None:
    wrong = run(command, prepare(tmp_path))
    assert not wrong, wrong
