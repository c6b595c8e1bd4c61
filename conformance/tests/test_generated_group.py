"""The generated process group in processes of its own, as a user starts them: no harness between torch and it."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from conformance.cli.starters.starter import Starter

WORLD_SIZE = 3

#: Forks ranks for every body, once torch is imported, and prints what became of them. `group` is the default group.
SCRIPT = """
import json, os, sys, traceback
from datetime import timedelta
from pathlib import Path
import torch, torch._dynamo, torch.distributed as dist  # a DDP's construction imports torch._dynamo; once is enough
from torch.distributed import _functional_collectives as functional
from acme.adapter import create

assert not any(name.startswith(("conformance.recorder", "conformance.workers")) for name in sys.modules)
dist.Backend.register_backend("acme", create, devices="cpu")
torch.set_num_threads(1)
size, folder = int(sys.argv[1]), Path(sys.argv[2])


def run(name, body, rank):
    sys.stdout = sys.stderr = open(folder / f"{name}-{rank}", "w", buffering=1)
    try:
        dist.init_process_group(
            "acme", init_method=f"file://{folder / name}", rank=rank, world_size=size, timeout=timedelta(seconds=60)
        )
        exec(body, {**globals(), "rank": rank, "group": dist.group.WORLD})
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


ended = {}
for name, body in json.loads(sys.stdin.read()).items():
    pids = []
    for rank in range(size):
        pids.append(os.fork())
        if not pids[-1]:
            run(name, body, rank)
    codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
    ended[name] = [(code, (folder / f"{name}-{rank}").read_text()) for rank, code in enumerate(codes)]
print(json.dumps(ended))
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


BODIES = {
    "functional": FUNCTIONAL, "callback": CALLBACK, "training": TRAINING, "refused": REFUSED, "death": DEATH,
    "timeout": TIMEOUT,
}  # fmt: skip
Ended = dict[str, list[tuple[int, str]]]


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> Ended:
    """Return by body the code of every rank and what it printed."""
    folder = tmp_path_factory.mktemp("ranks")
    Starter("backend", "acme").write(folder)
    script = folder / "script.py"
    script.write_text(SCRIPT)
    done = subprocess.run(
        [sys.executable, str(script), str(WORLD_SIZE), str(folder)], input=json.dumps(BODIES), text=True,
        env={**os.environ, "PYTHONPATH": str(folder / "acme")}, stdout=subprocess.PIPE, check=True,
    )  # fmt: skip
    return {name: [(code, text) for code, text in ranks] for name, ranks in json.loads(done.stdout).items()}


@pytest.mark.parametrize("body", ["functional", "callback", "training", "refused"])
def test_the_generated_group_works_without_the_harness(ended: Ended, body: str) -> None:
    assert [code for code, _ in ended[body]] == [0] * WORLD_SIZE, ended[body]


def test_a_dead_peer_is_noticed_at_once(ended: Ended) -> None:
    assert [code for code, _ in ended["death"]] == [0, 0, 7], ended["death"]
    assert "the connection to rank 2 is lost" in ended["death"][0][1] + ended["death"][1][1]


def test_the_timeout_that_create_gets_counts(ended: Ended) -> None:
    assert [code for code, _ in ended["timeout"]] == [0] * WORLD_SIZE, ended["timeout"]
    assert "rank 2 sent nothing for 0.5 s" in ended["timeout"][0][1] + ended["timeout"][1][1]
