"""`ddp_impl` needs torch and Python's own library: it trains where nothing else can be imported."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

PROJECT = Path(__file__).parents[2] / "pyproject.toml"

#: Trains a step in an interpreter that finds none of the modules it is given.
STEP = """
import sys
from importlib.machinery import PathFinder

REFUSED = set(sys.argv[1].split(","))


class Lacking(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name.partition(".")[0] in REFUSED else super().find_spec(name, path, target)


# The checkout is on the path already; the finder of its editable install would find it, whatever is refused.
sys.meta_path[:] = [one for one in sys.meta_path if one is not PathFinder and "__editable__" not in repr(one)]
sys.meta_path.append(Lacking)
sys.path.insert(0, sys.argv[2])
import tempfile
import torch
import torch.distributed as dist
import ddp_impl

with tempfile.TemporaryDirectory() as folder:
    dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store", 1), rank=0, world_size=1)
    model = ddp_impl.DistributedDataParallel(torch.nn.Linear(2, 1), find_unused_parameters=True)
    before = model.module.weight.detach().clone()
    model(torch.ones(3, 2)).sum().backward()
    torch.optim.SGD(model.parameters(), lr=1.0).step()
    assert torch.equal(before - model.module.weight, torch.full((1, 2), 3.0))
    dist.destroy_process_group()
print("trained")
"""


def suite() -> set[str]:
    extra = tomllib.loads(PROJECT.read_text())["project"]["optional-dependencies"]["suite"]
    names = {name.partition(">=")[0].replace("-", "_") for name in extra}
    return (names - {"pytest_xdist"}) | {"xdist", "_pytest", "conformance"}


def trained(*refused: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", STEP, ",".join(refused), str(PROJECT.parent)],
        capture_output=True, text=True, check=False, timeout=300,
    )  # fmt: skip


@pytest.mark.skipif(not PROJECT.is_file(), reason="installed without its repository")
def test_a_step_needs_nothing_of_the_suite() -> None:
    assert {"click", "rich", "numpy", "hypothesis", "msgspec", "pytest"} <= suite()
    done = trained(*suite())
    assert (done.returncode, done.stdout) == (0, "trained\n"), done.stderr


def test_a_module_that_is_hidden_is_not_found() -> None:
    done = trained("ddp_impl")
    assert done.returncode == 1
    assert "No module named 'ddp_impl'" in done.stderr


@pytest.mark.skipif(not PROJECT.is_file(), reason="installed without its repository")
def test_the_distribution_depends_on_torch_alone() -> None:
    dependencies = tomllib.loads(PROJECT.read_text())["project"]["dependencies"]
    assert [name.partition(">=")[0] for name in dependencies] == ["torch"]
