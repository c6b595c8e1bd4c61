"""What ranks issued, said and printed, kept in one run and compared with another one's."""

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from conformance.cli import main
from conformance.errors import ReportError
from conformance.observation import Observation, Raised
from conformance.report.folder import HISTORIES
from conformance.report.histories import Histories, history_lines, issued, printed, read_histories, said
from conformance.tests.evidence_by_hand import SCENARIO, collective, gradients, returned
from conformance.tests.reports_by_hand import PASS, outcome, stored


def kept(folder: Path, *runs: tuple[Observation, ...]) -> Path:
    """Store what ranks observed in scenarios 0, 1, ... beside a report that all of them passed."""
    stored(folder, *(outcome(f"gradients/GRAD-01/{number}", PASS) for number in range(len(runs))))
    histories = Histories(kept=True)
    for number, ranks in reversed(list(enumerate(runs))):  # lanes end in any order
        histories.keep(SCENARIO.replace(id=f"gradients/GRAD-01/{number}"), {one.rank: one for one in ranks})
    histories.write(folder)
    return folder


def diff(*arguments: object) -> str:
    return CliRunner().invoke(main, ["report", "diff", *map(str, arguments)], catch_exceptions=False).output


def test_a_collective_is_a_line_without_times_and_names_of_groups() -> None:
    member = {"group": "group 17", "members": (0, 2)}
    history = (
        collective(started_ns=7, duration_ns=9), collective(0, 8, "broadcast", root=2, **member),
        collective(1, shapes=((2, 3), (4,)), dtypes=("float32", "int8"), sync=False, finished=False, step=1),
    )  # fmt: skip
    assert issued(returned(0, history)) == [
        "0 backward: all_reduce 4 float32 sum",
        "0 backward: broadcast 8 float32 root 2 in group 0 of [0, 2]",
        "1 backward: all_reduce 6+4 float32/int8 sum in no_sync, unfinished or not awaited",
    ]


@pytest.mark.parametrize(
    ("text", "steady"),
    [
        ("fc1.weight of rank 1: 3 of 16 (step0/grad)", "fc1.weight of rank 1: 3 of 16 (step0/grad)"),
        ("<M at 0x7f12ab>, pid 312 in /tmp/a/b.py:17", "<M at ADDRESS>, pid N in PATH:LINE"),
        ('File "/a/b.py", line 17; hooks.py:3', 'File "PATH", line N; hooks.py:LINE'),
        ("[::1]:3141, 10.0.0.1:80, 12.5 ms or 1e-05s", "[::1]:PORT, 10.0.0.1:PORT, TIME ms or TIME s"),
    ],
)  # fmt: skip
def test_what_no_two_runs_share_is_left_out_of_texts(text: str, steady: str) -> None:
    facts: dict[str, Any] = {"a": 1, "b": [text], "c": {"d": Raised.of(ValueError(text))}}
    assert said(returned(0, facts=facts)) == ["ended: returned", f"b: {steady}", f"c/d: ValueError: {steady}"]
    seen = returned(0, stderr=f"/a/b.py:3: UserWarning: {text}\n  warnings.warn(text)\n")
    assert printed(seen) == [f"UserWarning: {steady}"]


def test_a_change_is_said_once_with_an_example(tmp_path: Path) -> None:
    def run(*bases: int, extra: int = 0, answer: str = "as ever", **rest: Any) -> list[tuple[Observation, ...]]:
        barrier = (collective(0, 1, "barrier"),) * extra
        facts = {"answer": answer}
        return [tuple(returned(r, barrier + gradients(b, 5), facts, **rest) for r in (0, 1)) for b in bases]

    before = kept(tmp_path / "a", *run(10, 20, 30))
    same = kept(tmp_path / "b", *run(10, 20, 30))
    assert (before / HISTORIES).read_bytes() == (same / HISTORIES).read_bytes()
    both = "in the 3 scenarios of both reports.\n"
    none = "\ncollectives differ in 0 of 3\n\ntexts differ in 0 of 3\n\nprinted warnings and errors differ in 0 of 1\n"
    assert diff(before, same) == f"No verdict changed {both}{none}"
    after = kept(tmp_path / "c", *run(11, 22), *run(30, extra=1, answer="no", stderr="FutureWarning: old\n"))
    assert (
        diff(before, after)
        == f"No verdict changed {both}"
        + """
collectives differ in 3 of 3
  2 scenarios, such as gradients/GRAD-01/0, rank 0:
    - 0 backward: all_reduce 10 float32 sum
    + 0 backward: all_reduce 11 float32 sum
  1 scenario, such as gradients/GRAD-01/2, rank 0:
    + 0 backward: barrier 1 float32

texts differ in 1 of 3
  1 scenario, such as gradients/GRAD-01/2, rank 0:
    - answer: as ever
    + answer: no

printed warnings and errors differ in 1 of 1
  1 scenario, such as the whole run, rank any:
    + FutureWarning: old
"""
    )
    again = kept(tmp_path / "d", *run(10, 21, 30))
    assert "collectives differ in 2 of 3, 1 more in any two runs" in diff(before, after, "--again", again)


def test_a_missing_or_broken_file_is_said(tmp_path: Path) -> None:
    report = kept(tmp_path, (returned(0, gradients(4)),))
    assert history_lines(*[read_histories(report) or {}] * 2)
    (report / HISTORIES).write_bytes(b"no gzip")
    with pytest.raises(ReportError, match=r"histories\.json\.gz(: gzip cannot decompress it| holds no histories)"):
        read_histories(report)
    (report / HISTORIES).unlink()
    assert "collectives" not in diff(report, report)
    assert "run with --keep-histories" in diff(report, report, "--again", report)


@pytest.mark.usefixtures("lent_zygote")
def test_a_run_keeps_what_all_lanes_observed(tmp_path: Path) -> None:
    names = ["gradients/GRAD-01/mlp-world2", "gradients/GRAD-01/frozen-world2"]
    arguments = ["run", *names, "--no-native", "--jobs", "2", "--keep-histories", "-q", "--report", str(tmp_path)]
    assert CliRunner().invoke(main, arguments).exit_code == 0
    histories = read_histories(tmp_path)
    assert histories is not None
    assert list(histories["issued"]) == sorted(names)
    assert all("0 backward: all_reduce" in json.dumps(ranks["1"]) for ranks in histories["issued"].values())
