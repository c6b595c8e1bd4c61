"""The pytest front: `pytest --pyargs conformance -n 2 -k buckets --ddp my_package:MyDDP`.

pytest imports this module in every session of every project on the machine, so it imports nothing but pytest at the
top; the harness and torch are imported by the first scenario that runs.
"""

from __future__ import annotations

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add `--ddp`, `--ddp-backend`, `--ddp-no-native`, `--ddp-order` and `--ddp-seed`."""
    group = parser.getgroup("ddp-conformance", "conformance of a DistributedDataParallel")
    group.addoption("--ddp", default="ddp_impl", metavar="NAME", help="DDP under test: ddp_impl, torch or module:Class")
    group.addoption("--ddp-backend", default="gloo", metavar="NAME", help="c10d backend: gloo, nccl or module:attr")
    group.addoption("--ddp-no-native", action="store_true", help="leave out torch's own DDP, which runs beside it")
    group.addoption(
        "--ddp-order", default="listed", choices=("listed", "reversed", "shuffled"), help="order of the scenarios"
    )
    group.addoption("--ddp-seed", default=0, type=int, metavar="N", help="how they are shuffled; default 0")
