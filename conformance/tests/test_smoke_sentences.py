"""`smoke` notices each method of the generated process group that is left out or wrong, and says what to do."""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Iterator
from pathlib import Path

import pytest

from conformance.cli.starters.starter import Starter
from conformance.smoke.ladder import Status, climb
from conformance.workers.zygote_process import ZygoteProcess

WORK, GROUP = "AcmeWork", "AcmeGroup"
DEADLINE_S = 10.0
#: What torch answers as well where nothing fails, what only a DDP that has failed asks for, and an older name.
NOT_MISSED = ("is_success", "exception", "get_group_store", "abort", "allgather_into_tensor_coalesced")

#: Method -> what is wrong with it, the text that is replaced, and by what.
BROKEN: dict[str, tuple[str, str, str]] = {
    "broadcast": ("sends rank 0's tensor, whatever the root", "every[root]", "every[0]"),
    "allreduce": ("sums, whatever the operation", "= REDUCTIONS[op]", "= REDUCTIONS[dist.ReduceOp.SUM]"),
    "allreduce_coalesced": (
        "reduces the first tensor only",
        "allreduce_coalesced = allreduce\n",
        "def allreduce_coalesced(self, tensors, opts=None):\n        return self.allreduce(tensors[:1], opts)\n",
    ),
    "allgather": ("lists the ranks in reverse order", "for (sent,) in every]", "for (sent,) in every[::-1]]"),
    "all_gather_single": ("joins the parts in reverse order", "torch.cat(parts)", "torch.cat(parts[::-1])"),
    "barrier": (
        "waits for nobody",
        'self._issue("barrier", opts, [], lambda every: [])',
        "AcmeWork(self._thread.submit(list))",
    ),
    "getBackendName": ("returns an empty text", 'return "acme"', 'return ""'),
    "shutdown": (
        "leaves the threads running",
        "        self._thread.shutdown()\n        self._transport.close()\n",
        "        pass\n",
    ),
    "wait": (
        "returns before the collective is done",
        "        self._done.result(timeout.total_seconds() or None)",
        "        pass",
    ),
    "is_completed": (
        "is never True",
        '"""Whether the collective is done, well or not."""\n        return self._done.done()',
        '"""Whether the collective is done, well or not."""\n        return False',
    ),
    "get_future": (
        "returns a future that nobody completes", "            return self._future\n",
        "            return torch.futures.Future()\n",
    ),
    "_issue": (
        "stops on rank 1 after ten collectives",
        "        def carry_out() -> list[Tensor]:\n",
        "        self.number = getattr(self, 'number', 0) + 1\n"
        "        def carry_out() -> list[Tensor]:\n"
        "            if self.rank() == 1 and self.number > 10:\n                time.sleep(1000)\n",
    ),
    "_put": ("forgets the end of large tensors", "tensor.copy_(value.reshape(tensor.shape))", "_most(tensor, value)"),
    "__init__": (
        "does not tell the base class who it is",
        "super().__init__(rank, world_size)",
        "super().__init__(0, world_size)",
    ),
}  # fmt: skip

#: What replacements need, and the adapter. They follow the module, which begins with its imports from __future__.
EPILOGUE = """

import time
from dataclasses import replace
from acme.adapter import BACKEND as WORKING

def _most(tensor, value):
    end = value.numel() - (value.numel() > 100_000)
    tensor.view(-1)[:end] = value.reshape(-1)[:end]

BACKEND = replace(WORKING, create=AcmeGroup)
"""


def without(source: str, class_name: str, method: str) -> str:
    """Return the module without one method of one class, its aliases included."""
    tree = ast.parse(source)
    found = next(node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == class_name)
    found.body = [node for node in found.body if method not in names_of(node)]
    return ast.unparse(tree)


def names_of(node: ast.stmt) -> set[str]:
    """Return the names that a statement of a class defines or copies."""
    if isinstance(node, ast.FunctionDef):
        return {node.name}
    return {part.id for part in ast.walk(node) if isinstance(part, ast.Name)} if isinstance(node, ast.Assign) else set()


def variants(source: str) -> Iterator[tuple[str, str, str]]:
    """Yield every method, what was done to it, and the module's source with that."""
    classes = [node for node in ast.parse(source).body if isinstance(node, ast.ClassDef)]
    for one in classes:
        for method in (name for node in one.body for name in sorted(targets_of(node))):
            if not method.startswith("_") and method not in NOT_MISSED:
                yield f"{one.name.removeprefix('Acme')}.{method}", "left out", without(source, one.name, method)
    for method, (wrong, text, instead) in BROKEN.items():
        assert source.count(text) == 1, (method, source.count(text))
        broken = source.replace(text, instead)
        if method == "wait":  # shows only where the transport takes its time
            broken = broken.replace(
                "                every = []\n", "                every = []\n                time.sleep(0.1)\n"
            )
        owner = "Work." if method in ("wait", "is_completed", "get_future") else "" if method == "_put" else "Group."
        yield f"{owner}{method}", wrong, broken


def targets_of(node: ast.stmt) -> set[str]:
    """Return the names that a statement of a class defines."""
    if isinstance(node, ast.FunctionDef):
        return {node.name}
    return {part.id for part in node.targets if isinstance(part, ast.Name)} if isinstance(node, ast.Assign) else set()


@pytest.mark.nightly
def test_smoke_notices_every_method_that_is_left_out_or_broken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Starter("backend", "acme").write(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path / "acme"))
    assert importlib.util.find_spec("acme.group") is not None
    source = (tmp_path / "acme" / "acme" / "group.py").read_text()
    changed = list(variants(source))
    for number, (_, _, text) in enumerate(changed):
        (tmp_path / "acme" / f"acme_variant_{number}.py").write_text(text + EPILOGUE)
    zygote = ZygoteProcess(None, ())
    rows = []
    try:
        for number, (method, done, _) in enumerate(changed):
            *_, last = climb(f"acme_variant_{number}:BACKEND", "torch", deadline_s=DEADLINE_S, zygote=zygote)
            rows.append((method, done, last))
    finally:
        zygote.close()
    unnoticed = [(method, done) for method, done, last in rows if last.status is not Status.BROKEN]
    assert unnoticed == []
    assert [(method, done) for method, done, last in rows if last.breakage is None or not last.breakage.advice] == []
