"""What the documentation shows of the code is generated from it."""

from __future__ import annotations

import re
from pathlib import Path

import ddp_impl
from conformance.subjects.reducer_diagram import reducer_diagram

DOCS = Path(ddp_impl.__file__).parent.parent / "docs"


def test_the_diagram_is_that_of_the_rules() -> None:
    shown = re.search(r"```mermaid\n(.*?)```", (DOCS / "reducer.md").read_text(), re.DOTALL)
    assert shown is not None
    assert shown.group(1) == reducer_diagram(), "docs/reducer.md is stale: run `python -m workshop renew`"
