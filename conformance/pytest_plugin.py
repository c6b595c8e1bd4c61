"""The pytest front: `pytest --pyargs conformance -n 2 -k buckets --ddp my_pkg:MyDDP`.

pytest imports this module in every session of every project on the machine, so it imports nothing but pytest at the
top; the harness and torch are imported by the first scenario that runs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from conformance.parity import Report

#: The name of a test's property with the comparisons of `parity`, which pytest passes on from xdist workers.
_PARITY = "parity"


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options of `pytest --pyargs conformance.test_chapters`."""
    group = parser.getgroup("ddp-conformance", "conformance of a DistributedDataParallel")
    group.addoption("--ddp", default="ddp_impl", metavar="NAME", help="DDP under test: ddp_impl, torch or module:Class")
    group.addoption("--ddp-backend", default="gloo", metavar="NAME", help="c10d backend: gloo, nccl or module:attr")
    group.addoption("--ddp-no-native", action="store_true", help="leave out torch's own DDP, which runs beside it")
    group.addoption("--ddp-profile", default="", metavar="LEVEL", help="only scenarios of this level; full has core")
    group.addoption("--ddp-expectations", default="", metavar="FILE", help="known failures, or a baseline, as TOML")
    group.addoption(
        "--ddp-baseline", action="store_true", help="with --ddp torch: excuse what torch's own DDP breaks over gloo too"
    )
    group.addoption(
        "--ddp-order", default="listed", choices=("listed", "reversed", "shuffled"), help="order of the scenarios"
    )
    group.addoption("--ddp-seed", default=0, type=int, metavar="N", help="how they are shuffled; default 0")
    group.addoption(
        "--one-per-requirement", action="store_true", help="only the cheapest scenario of each requirement; minutes"
    )


def pytest_report_header(config: pytest.Config) -> list[str]:
    """Report the number of scenarios, if options select some."""
    profile, cheapest = config.getoption("--ddp-profile"), config.getoption("--one-per-requirement")
    if not (profile or cheapest):
        return []
    from conformance.test_chapters import selected_scenarios

    asked = f" of profile {profile}" if profile else ""
    each = ", the cheapest of each requirement; all of them without --one-per-requirement" if cheapest else ""
    return [f"ddp-conformance: {len(selected_scenarios(config)):,} scenarios{asked}{each}"]


@pytest.fixture
def parity(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Report]:
    """Return `conformance.parity.parity`, which writes its program to pytest's temporary folder."""

    def check(*functions: Callable[..., Any], **options: Any) -> Report:
        from conformance.parity import examine

        __tracebackhide__ = True
        report = examine(*functions, **{"folder": tmp_path_factory.mktemp("parity"), **options})
        for about, texts in (("note", report.notes), ("declared", report.declared)):
            request.node.user_properties += [(_PARITY, (about, text)) for text in texts]
        return report.check()

    return check


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print declared differences of `parity`, and with `-v` its comparisons."""
    tests = [test for outcome in ("passed", "failed") for test in terminalreporter.getreports(outcome)]
    verbose = terminalreporter.verbosity > 0
    lines = [
        f"{test.nodeid}: {text}"
        for test in tests
        for name, value in test.user_properties
        if name == _PARITY
        for about, text in [value]
        if verbose or about == "declared"
    ]
    if lines:
        terminalreporter.section("parity")
        terminalreporter.write("\n".join([*lines, ""]))
