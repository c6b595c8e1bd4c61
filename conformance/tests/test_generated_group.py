"""The generated process group in processes of its own: no harness between torch and it.

`test_onboarding` judges it by profile backend.
"""

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

TRAINING = """
torch.manual_seed(rank)
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 1))
model(torch.full((1, 2), float(rank))).sum().backward()
assert model.module.weight.grad.tolist() == [[1.0, 1.0]], model.module.weight.grad
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


BODIES = {"training": TRAINING, "death": DEATH}
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


def test_the_generated_group_trains_without_the_harness(ended: Ended) -> None:
    assert [code for code, _ in ended["training"]] == [0] * WORLD_SIZE, ended["training"]


def test_a_dead_peer_is_noticed_at_once(ended: Ended) -> None:
    assert [code for code, _ in ended["death"]] == [0, 0, 7], ended["death"]
    assert "the connection to rank 2 is lost" in ended["death"][0][1] + ended["death"][1][1]
