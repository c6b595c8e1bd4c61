"""Subjects by name, and what is said of one that cannot be used."""

import inspect
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from conformance.errors import SubjectError
from conformance.programs.rank_context import Unsupported
from conformance.subjects import others
from conformance.subjects.adapters.adapter import only
from conformance.subjects.others import OTHERS
from conformance.subjects.subject import (
    CAPABILITIES,
    DEFAULTS,
    KNOWN,
    Subject,
    capabilities_of,
    get_subject,
    given_options,
    load,
    refused_options,
)  # fmt: skip
from conformance.suite import load_scenarios
from conformance.workers.finder import find_subject


@pytest.mark.parametrize("name", sorted(KNOWN))
def test_a_known_subject_can_be_loaded(name: str) -> None:
    subject = get_subject(name)
    assert subject.name == name
    assert load(subject).__name__ == "DistributedDataParallel"


def test_the_long_way_to_write_a_known_subject_is_the_same_subject() -> None:
    assert get_subject("torch.nn.parallel:DistributedDataParallel") is get_subject("torch")


def test_any_other_class() -> None:
    subject = get_subject("torch.nn:Sequential")
    assert subject.name == "torch.nn:Sequential"
    assert load(subject) is nn.Sequential


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("tortch", "unknown DDP 'tortch'; did you mean torch?"),
        ("mine:", "unknown DDP 'mine:'; write mine:Class, the module"),
        ("./mine.py", "write mine:Class, the module"),
        ("pkg/mine.py:Mine", "write pkg.mine:Mine, the module"),
        ("something", "expected ddp_impl, torch, "),
        ("no_such_module:Class", "cannot import no_such_module: ModuleNotFoundError"),
        ("torch.nn:Sequentiall", "has no attribute Sequentiall; did you mean Sequential?"),
        ("torch:__version__", "must be a class, got TorchVersion"),
        ("dies_at_import:Class", "cannot import dies_at_import: ZeroDivisionError: division by zero"),
        ("exits_at_import:Class", "cannot import exits_at_import: SystemExit: 4"),
    ],
)
def test_what_is_no_subject(text: str, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "dies_at_import.py").write_text("1 / 0\n")
    (tmp_path / "exits_at_import.py").write_text("raise SystemExit(4)\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(SubjectError) as caught:
        get_subject(text)
    assert says in str(caught.value)


@pytest.mark.parametrize(("name", "hint"), [("nosync", "did you mean no_sync"), ("x" * 30, "known: auto_buckets, ")])
def test_a_capability_that_there_is_not_is_named(name: str, hint: str) -> None:
    with pytest.raises(SubjectError) as caught:
        Subject("mine", "my_pkg:MyDDP", frozenset({"join", name}))
    assert f"DDP 'mine': unknown capability {name!r}; {hint}" in str(caught.value)


@pytest.mark.parametrize("subject", OTHERS, ids=lambda subject: subject.name)
def test_a_subject_of_another_project_is_described_by_a_value(subject: Subject) -> None:
    (name,) = [name for name, value in vars(others).items() if value is subject]
    text = f"conformance.subjects.others:{name}"
    assert get_subject(text) == replace(subject, source=text)
    assert subject.capabilities < CAPABILITIES


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("import os; os._exit(0)", "the process that imported bad_import exited 0"),
        ("import os; os.kill(os.getpid(), 9)", "the process that imported bad_import killed by SIGKILL"),
        ("raise KeyboardInterrupt", "its import raised KeyboardInterrupt"),
        ("import os; os.closerange(3, 4096)", "the process that imported bad_import"),
    ],
    ids=["exits", "dies", "interrupts", "closes"],
)
def test_an_import_harms_only_the_process_that_does_it(
    source: str, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "bad_import.py").write_text(source + "\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    find_subject.cache_clear()
    with pytest.raises(SubjectError) as caught:
        find_subject("bad_import:DDP")
    assert says in str(caught.value)
    assert "bad_import" not in sys.modules


def test_a_subject_is_found_without_its_import_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "threaded_import.py").write_text(
        "import threading\nthreading.Thread(target=threading.Event().wait).start()\n"
        "from conformance.subjects.subject import Subject\n"
        "MINE = Subject('mine', 'torch.nn:Sequential', frozenset({'join'}))\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    text = "threaded_import:MINE"
    assert find_subject(text) == Subject("mine", "torch.nn:Sequential", frozenset({"join"}), text)
    assert "threaded_import" not in sys.modules


def test_what_another_ddp_lacks_is_refused_and_what_it_does_anyway_is_not() -> None:
    assert only({"broadcast_buffers": True, "find_unused_parameters": False, "bucket_cap_mb": 1}, "bucket_cap_mb") == {
        "bucket_cap_mb": 1
    }
    for asked in ({"broadcast_buffers": False}, {"static_graph": True}, {"bucket_cap_mb": 1}):
        with pytest.raises(Unsupported, match=next(iter(asked))):
            only(asked, "find_unused_parameters")


@pytest.mark.parametrize("subject", KNOWN.values(), ids=lambda subject: subject.name)
def test_defaults_of_options_are_those_of_the_signature(subject: Subject) -> None:
    taken = inspect.signature(load(subject)).parameters
    assert {name: taken[name].default for name in DEFAULTS if name in taken} == {
        name: default for name, default in DEFAULTS.items() if name in taken
    }


def bare(module: nn.Module, process_group: Any = None) -> nn.Module:
    """Stand for a DDP that has none of the options."""
    return module


def strict(module: nn.Module, **options: Any) -> nn.Module:
    """Stand for a DDP that refuses options itself."""
    return bare(module, **options)


@pytest.mark.parametrize("ddp", [bare, strict])
def test_no_scenario_gives_a_ddp_an_option_at_its_default_that_its_signature_does_not_name(
    ddp: Callable[..., nn.Module],
) -> None:
    spared = 0
    for scenario in load_scenarios():
        given = given_options(ddp, scenario.options)
        changed = [name for name, value in scenario.options.items() if value != DEFAULTS[name]]
        assert list(given) == changed, scenario.id
        assert capabilities_of(given) == capabilities_of(scenario.options), scenario.id
        assert set(refused_options(bare, given)) == set(changed), scenario.id
        spared += len(scenario.options) - len(given)
        # One that has the option is told its default, which another default of its own must not win over.
        assert given_options(load(KNOWN["torch"]), scenario.options) == scenario.options
    assert spared > 50
