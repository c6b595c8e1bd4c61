"""Private names of torch: all are listed, and one that is missing takes one feature away."""

from __future__ import annotations

import ast
import importlib
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from ddp_impl.torch_internals import __main__ as command
from ddp_impl.torch_internals import names

FOLDER = Path(names.__file__).parent
LISTED = {name for listed in names.needed().values() for name in listed}


def imported(tree: ast.AST) -> set[str]:
    """Return the names that are imported from private modules of torch, and private ones from public modules."""
    nodes = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    paths = {f"{node.module}.{alias.name}" for node in nodes for alias in node.names if f"{node.module}"[:5] == "torch"}
    return {path for path in paths if any(part.startswith("_") for part in path.split("."))}


def test_every_private_name_that_is_imported_is_listed() -> None:
    for path in FOLDER.glob("*.py"):
        assert imported(ast.parse(path.read_text())) <= LISTED, f"{path.name} imports names that names.py does not list"


def test_all_are_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert command._check() == 0
    assert "MISSING" not in capsys.readouterr().out


def test_a_missing_name_takes_its_feature_and_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.warns(RuntimeWarning, match=r"has no torch\._dynamo\.no_such, which ddp_impl needs for torch\.compile"):
        absent = names.needed_for(names.COMPILE, "torch._dynamo.no_such")
    assert not isinstance(5, absent)
    for use in (absent, lambda: absent.attribute):
        with pytest.raises(NotImplementedError, match="All else works as ever"):
            use()
    monkeypatch.setattr(command, "needed", lambda: {names.COMPILE: ("torch._dynamo.no_such",)})
    assert command._check() == 1
    assert "MISSING" in (said := capsys.readouterr().out)
    assert "without torch.compile, all else works" in said


def test_a_module_that_raises_while_it_is_imported_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(path: str) -> None:
        raise NameError(f"of another name, in {path}")

    monkeypatch.setattr(importlib, "import_module", broken)
    assert not names.is_there("torch._no_such_module.name")


def test_without_any_name_that_averaging_needs_the_import_says_which(monkeypatch: pytest.MonkeyPatch) -> None:
    names.explain_missing(None)
    for missing in names.needed()["averaging"]:
        monkeypatch.setattr(names, "is_there", lambda name, missing=missing: name != missing)
        with pytest.raises(ImportError, match=f"has no {re.escape(missing)}: install another version of torch"):
            names.explain_missing(None)


#: Without these torch trains nothing, so that what we do without them cannot be seen.
OF_TORCH = {"torch._C._set_grad_enabled", "torch._C._are_functorch_transforms_active"}
#: Takes each group of names away in a fork, trains there in several ways, and prints what came of it.
WITHOUT = """
import os, pkgutil, sys, traceback, warnings
import torch, torch.distributed as dist
from torch import nn
import ddp_impl  # and all of torch that it imports: once

for loaded in [name for name in sys.modules if name.partition(".")[0] == "ddp_impl"]:
    del sys.modules[loaded]


class Viewing(nn.Module):
    def __init__(self):
        super().__init__()
        self.used, self.unused = nn.Linear(2, 2), nn.Linear(2, 2)

    def forward(self, inputs):
        return self.used(inputs).view(4)[1:], self.used(inputs).unbind()


def train():
    import ddp_impl

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    for options in ({"static_graph": True}, {"find_unused_parameters": True, "lazy_bucket_allocation": True}):
        ddp = ddp_impl.DistributedDataParallel(Viewing(), **options)
        for _ in range(3):
            view, parts = ddp(torch.ones(2, 2))
            (view.sum() + parts[0].sum()).backward()
    assert ddp.module.used.weight.grad is not None


def outcome(names):
    warnings.simplefilter("ignore", FutureWarning)
    paths = [name.rpartition(".") for name in names]
    for holder, last in [(pkgutil.resolve_name(path), last) for path, _, last in paths]:
        delattr(holder, last)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        try:
            train()
        except ImportError as error:
            return f"refused: {error}"
        except BaseException as error:
            *_, (frame, _) = traceback.walk_tb(error.__traceback__)
            if f"{os.sep}torch{os.sep}" in frame.f_code.co_filename:
                return f"torch itself needs it: {error}"
            return f"{type(error).__name__}: {error}"
    return "trains; " + "; ".join(str(one.message) for one in warned if "ddp_impl needs" in str(one.message))


for group in sys.argv[1:]:
    sys.stdout.flush()
    if not (child := os.fork()):
        print(group, outcome(group.split("+")).splitlines()[0], flush=True)
        os._exit(0)
    os.waitpid(child, 0)
"""


@pytest.mark.nightly
@pytest.mark.parametrize("alone", [False, True])
def test_a_name_taken_away_takes_its_feature_or_refuses_the_import(alone: bool) -> None:
    needed = names.needed()
    features = {name: feature for feature, listed in needed.items() for name in listed if feature != "averaging"}
    missed = [name for name in features if name not in OF_TORCH]
    apart = [name for name in missed if "_dynamo.eval_frame" in name]  # torch needs them where other names are missing
    refused = needed["averaging"][0]  # of those that all needs, whose check is the same, the first
    together = ["+".join(name for name in missed if name not in apart), "+".join(apart)]
    taken = [*(missed if alone else together), *OF_TORCH, refused]
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT, *taken], capture_output=True, text=True, check=False, timeout=600
    )
    outcomes = dict(line.split(" ", 1) for line in done.stdout.splitlines())
    assert list(outcomes) == taken, done.stderr
    for group, outcome in outcomes.items():
        word = "torch itself needs it: " if group in OF_TORCH else "refused: " if group == refused else "trains; "
        assert outcome.startswith(word), (group, outcome)
    said = [
        each
        for one in outcomes.values()
        for each in re.findall(r"has no (\S+), which ddp_impl needs for (.*?)\. ", one)
    ]
    assert set(said) <= set(features.items())
    assert {feature for _, feature in said} == {names.COMPILE, names.TRANSFORMS, names.PROFILER}
    assert f"ddp_impl does not work with torch {torch.__version__}, which has no {refused}" in outcomes[refused]
