"""The generated process group in processes of its own, as torchrun starts them: no harness between torch and it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from conformance.starters.starter import Starter

WORLD_SIZE = 3
DEADLINE_S = 120

#: What every rank runs; `{body}` follows, in which `group` is the default group.
SCRIPT = """
import os, sys
from datetime import timedelta
import torch, torch.distributed as dist
from torch.distributed import _functional_collectives as functional
from acme.adapter import create

assert not any(name.startswith(("conformance.recorder", "conformance.workers")) for name in sys.modules)
dist.Backend.register_backend("acme", create, devices="cpu")
rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
dist.init_process_group(
    "acme", init_method="file://" + os.environ["MEETING"], rank=rank, world_size=size, timeout=timedelta(seconds=60)
)
group = dist.group.WORLD
{body}
"""

FUNCTIONAL = """
total = functional.wait_tensor(functional.all_reduce(torch.full((3,), float(rank + 1)), "sum", group))
assert total.tolist() == [6.0] * 3, total
part = dist.new_group([1, 2])
if rank:
    total = functional.wait_tensor(functional.all_reduce(torch.full((3,), float(rank)), "max", part))
    assert total.tolist() == [2.0] * 3, total
    dist.destroy_process_group(part)
dist.barrier()
dist.destroy_process_group()
"""

CALLBACK = """
def then(done):
    second = torch.full((2,), 2.0)
    dist.all_reduce(second)  # waits for a collective where the first one's future is completed
    third = dist.all_reduce(torch.ones(2), async_op=True)
    third.get_future().wait()
    return done.value()[0] + second

work = dist.all_reduce(torch.ones(2), async_op=True)
assert work.get_future().then(then).wait().tolist() == [9.0, 9.0]
dist.destroy_process_group()
"""

TRAINING = """
torch.manual_seed(rank)
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 1))
model(torch.full((1, 2), float(rank))).sum().backward()
assert model.module.weight.grad.tolist() == [[1.0, 1.0]], model.module.weight.grad
dist.destroy_process_group()
"""

REFUSED = """
for call in (
    lambda: dist.reduce(torch.ones(1), 0),
    lambda: dist.all_to_all_single(torch.ones(3), torch.ones(3)),
    lambda: dist.reduce_scatter_tensor(torch.ones(1), torch.ones(3)),
    lambda: functional.reduce_scatter_tensor(torch.ones(3), "sum", 0, group),
    lambda: dist.gather(torch.ones(1), [torch.ones(1)] * size if rank == 0 else None),
    lambda: dist.send(torch.ones(1), (rank + 1) % size),
):
    try:
        call()
    except NotImplementedError as error:
        assert "acme has no" in str(error), error
    else:
        raise AssertionError("nothing was refused")
dist.destroy_process_group()
"""

DEATH = """
dist.barrier()
if rank == 2:
    os._exit(7)
try:
    dist.all_reduce(torch.ones(3))
except ConnectionError as error:
    print(error)
    os._exit(0)
os._exit(1)
"""

TIMEOUT = """
late = dist.new_group(timeout=timedelta(seconds=0.5))
if rank != 2:
    try:
        dist.all_reduce(torch.ones(3), group=late)
    except (TimeoutError, ConnectionError) as error:
        print(error)
    else:
        raise AssertionError("came back as if rank 2 had come")
dist.barrier()
dist.destroy_process_group()
"""


@pytest.fixture
def package(tmp_path: Path) -> Path:
    Starter("backend", "acme").write(tmp_path)
    return tmp_path / "acme"


def ended(package: Path, body: str) -> list[tuple[int, str]]:
    """Run every rank in a process; return their codes and what they printed."""
    script = package / "script.py"
    script.write_text(SCRIPT.replace("{body}", body))
    environment = {
        **os.environ, "PYTHONPATH": str(package), "WORLD_SIZE": str(WORLD_SIZE), "MEETING": str(package / "meeting"),
        "OMP_NUM_THREADS": "1",
    }  # fmt: skip
    running = [
        subprocess.Popen(
            [sys.executable, str(script)], env={**environment, "RANK": str(rank)}, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )
        for rank in range(WORLD_SIZE)
    ]  # fmt: skip
    try:
        printed = [process.communicate(timeout=DEADLINE_S)[0] for process in running]
    finally:
        for process in running:
            process.kill()
    return [(process.returncode, text) for process, text in zip(running, printed, strict=True)]


@pytest.mark.parametrize(
    "body",
    [FUNCTIONAL, CALLBACK, TRAINING, REFUSED],
    ids=["functional", "callback", "training", "refused"],
)
def test_the_generated_group_works_without_the_harness(package: Path, body: str) -> None:
    results = ended(package, body)
    assert [code for code, _ in results] == [0] * WORLD_SIZE, results


def test_a_dead_peer_is_noticed_at_once(package: Path) -> None:
    results = ended(package, DEATH)
    assert [code for code, _ in results] == [0, 0, 7], results
    assert "the connection to rank 2 is lost" in results[0][1] + results[1][1]


def test_the_timeout_that_create_gets_counts(package: Path) -> None:
    results = ended(package, TIMEOUT)
    assert [code for code, _ in results] == [0] * WORLD_SIZE, results
    assert "rank 2 sent nothing for 0.5 s" in results[0][1] + results[1][1]
