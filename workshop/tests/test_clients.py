"""The runner of clients tells a DDP that trains otherwise from one that does not; its page is about all clients."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

import conformance
from conformance.errors import ClientError
from workshop.__main__ import main
from workshop.clients.client import Client, load_clients
from workshop.clients.comparison import Judgement, Result, differences_of, judged
from workshop.clients.page import renewed, row_text, rows_on
from workshop.clients.row import Row
from workshop.clients.torch_fault import TorchFault, load_torch_faults
from workshop.clients.trial import Trial, tried
from workshop.clients.way import BY_IMPORT, TORCH, Way

ROOT = Path(conformance.__file__).parent.parent
FOLDER = ROOT / "fixtures" / "scripts" / "clients"
BROKEN = Way("broken", "broken_ddp.DistributedDataParallel", module="broken_ddp")
pytestmark = pytest.mark.skipif(not FOLDER.is_dir(), reason="installed without its repository, so there are no clients")

FACTS = {"losses": [0.5, 0.25], "model": {"class": "the DDP", "gradients": {"weight": "float32[2] aa"}}}
WRONG = {"losses": [0.5, 0.125], "model": {"class": "the DDP", "gradients": {"weight": "float32[2] bb"}}}
FAULT = TorchFault("It forgets.", ("losses", "gradients"), "https://example.org/1")


def trial(*facts: dict[str, Any], error: str = "") -> Trial:
    return Trial(facts, error, 1.0)


# ------------------------------------------------------------------------------------------------------ on two ranks


@pytest.mark.nightly
def test_a_ddp_that_skips_one_average_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The whole way, with torchrun and a script of the folder; only the DDP is made for it."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "fixtures"))
    (sam,) = load_clients(FOLDER, ["sam"])
    torch, broken = tried(sam, TORCH, FOLDER), tried(sam, BROKEN, FOLDER)
    assert not torch.error
    found = judged(torch, None, broken, None)
    assert found.result is Result.DIFFERS
    assert found.evidence.startswith("rank 0: losses[3][0] is ")  # the step after the one that was not averaged
    assert judged(torch, None, dataclasses.replace(torch), None).result is Result.SAME


@pytest.mark.nightly
def test_a_script_that_never_has_the_ddp_shows_nothing() -> None:
    """Otherwise a library that stopped using the DDP would be equal forever."""
    (sam,) = load_clients(FOLDER, ["sam"])
    unchanged = tried(sam, dataclasses.replace(BY_IMPORT, module=""), FOLDER)
    assert unchanged.error == "rank 0 recorded no model of class ddp_impl.api.distributed.DistributedDataParallel"


@pytest.mark.parametrize(("result", "status"), [(Result.SAME, 0), (Result.TORCH_FAULT, 0), (Result.DIFFERS, 1)])
def test_the_command_fails_when_a_client_differs(
    result: Result, status: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(client: Client, *_: object) -> Row:
        return Row(client, ("losses",), {"import": Judgement(result, "losses is 1")}, 1.0, 1.0)

    monkeypatch.setattr("workshop.clients.row.run", run)
    page = tmp_path / "page.md"
    done = CliRunner().invoke(main, ["clients", "sam", "gan", "--into", str(page)])
    assert done.exit_code == status, done.output
    assert f"sam, import: {result.value} losses is 1" in done.output
    assert [name for name, row in rows_on(page.read_text()).items() if result.value in row] == ["gan", "sam"]


# ----------------------------------------------------------------------------------------------------------- judgement


def test_the_first_difference_is_named() -> None:
    assert differences_of(FACTS, FACTS) == []
    assert differences_of(FACTS, WRONG) == [
        "losses[1] is 0.125, with torch 0.25",
        "model/gradients/weight is float32[2] bb, with torch float32[2] aa",
    ]
    assert differences_of({"a": 1, "b": 2}, {"b": 2, "c": 3}) == [
        "a is recorded with torch alone",
        "c is recorded without torch alone",
    ]
    assert differences_of([1], [1, 2], "losses") == ["losses is [1, 2], with torch [1]"]


@pytest.mark.parametrize(
    ("torch", "again", "ours", "fault", "expected"),
    [
        (trial(FACTS, FACTS), None, trial(FACTS, FACTS), None, Result.SAME),
        (trial(FACTS, FACTS), trial(FACTS, FACTS), trial(FACTS, WRONG), None, Result.DIFFERS),
        (trial(FACTS, FACTS), trial(FACTS, WRONG), trial(FACTS, WRONG), None, Result.BROKEN),
        (trial({}, {}), None, trial({}, {}), None, Result.BROKEN),
        (trial(FACTS), trial(FACTS), trial(error="ValueError: no"), None, Result.OURS_RAISES),
        (trial(error="ValueError: no"), trial(error="ValueError: no"), trial(FACTS), None, Result.TORCH_RAISES),
        (trial(error="ValueError: no"), trial(FACTS), trial(FACTS), None, Result.BROKEN),
        (trial(error="ValueError: no"), None, trial(error="ValueError: no"), None, Result.BROKEN),
        (trial(FACTS), trial(FACTS), trial(WRONG), FAULT, Result.TORCH_FAULT),
        (trial(error="losses: no"), trial(error="losses: no"), trial(FACTS), FAULT, Result.TORCH_FAULT),
        (trial(FACTS), trial(FACTS), trial(FACTS), FAULT, Result.BROKEN),
        (trial(FACTS), trial(FACTS), trial(WRONG | {"buffers": 1}), FAULT, Result.DIFFERS),
        (trial(FACTS), trial(FACTS), trial(error="losses: no"), FAULT, Result.OURS_RAISES),
    ],
)
def test_trials_come_to_a_result(
    torch: Trial, again: Trial | None, ours: Trial, fault: TorchFault | None, expected: Result
) -> None:
    found = judged(torch, again, ours, fault)
    assert found.result is expected, found
    assert found.is_good == (expected in (Result.SAME, Result.TORCH_FAULT))


# ------------------------------------------------------------------------------------------------------ scripts, page


def test_the_scripts_know_nothing_of_this_project() -> None:
    for client in load_clients(FOLDER):
        assert "ddp_impl" not in client.source, client.name
        assert "conformance" not in client.source.replace("ddp-conformance", ""), client.name


def test_a_script_that_names_the_ddp_gets_another_by_its_import() -> None:
    sam, trainer = load_clients(FOLDER, ["sam", "transformers_trainer"])
    assert sam.names_ddp
    assert "from broken_ddp import DistributedDataParallel as DDP\n" in sam.importing("broken_ddp")
    assert not trainer.names_ddp
    assert trainer.packages == ("safetensors", "transformers")


def test_what_is_wrong_with_a_folder_is_said(tmp_path: Path) -> None:
    with pytest.raises(ClientError, match="there are no clients in"):
        load_clients(tmp_path)
    (tmp_path / "one.py").write_text("import torch\n")
    with pytest.raises(ClientError, match="has no docstring"):
        load_clients(tmp_path)
    (tmp_path / "one.py").write_text('"""A training."""\nfrom absent_library.models import Net\n')
    with pytest.raises(ClientError, match="no client two; there are one"):
        load_clients(tmp_path, ["two"])
    (client,) = load_clients(tmp_path)
    with pytest.raises(ClientError, match="imports absent_library, which is not installed here"):
        _ = client.versions
    (tmp_path / "torch_faults.toml").write_text('[two]\nsentence = ""\nevidence = []\nlink = ""\n')
    with pytest.raises(ClientError, match=r"no client two\.py beside it"):
        load_torch_faults(tmp_path)
    (tmp_path / "torch_faults.toml").write_text('[one]\nsentence = ""\n')
    with pytest.raises(ClientError, match="expected evidence, link, sentence; found sentence"):
        load_torch_faults(tmp_path)


def test_rows_are_renewed_one_by_one() -> None:
    one, two = (Client(name, "", "A training", ()) for name in ("one", "two"))
    good = Row(one, ("losses",), {"import": Judgement(Result.SAME), "launcher": Judgement(Result.SAME)}, 5.6, 6.0)
    bad = dataclasses.replace(
        good, judgements={"import": Judgement(Result.SAME), "launcher": Judgement(Result.OURS_RAISES, "E: a|b")}
    )
    assert row_text(good) == "| <code>one</code> A training |  | losses | same | 6, 6 |"
    assert "| import: same<br>launcher: ours raises: <code>E&#58; a&#124;b</code> |" in row_text(bad)
    assert good.is_good
    assert not bad.is_good
    page = renewed("", [good, dataclasses.replace(good, client=two)], [one, two], "Last run on Monday.")
    again = renewed(page, [bad], [one, two], "Last run on Tuesday.")
    assert rows_on(again) == {"one": row_text(bad), "two": rows_on(page)["two"]}
    assert list(rows_on(renewed(page, [], [two], ""))) == ["two"]
