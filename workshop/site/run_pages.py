"""The pages that show verdicts of runs, made from the newest stored reports where these hold all that a page shows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from conformance.errors import ReportError
from conformance.report.results import Stored
from conformance.run.report import Report
from workshop.generated_pages import RUN_PAGES, generated_pages
from workshop.page import Page

_OF_A_CHECKOUT = """
!!! note
    The stored reports do not hold all the scenarios of this page. It shows the run from which the repository's copy
    was made, which may be older than what it describes.
"""


def run_pages(root: Path, stored: Sequence[Stored]) -> Mapping[str, str]:
    """Return the pages in Markdown by path below docs/; `stored` is ordered by date.

    A page whose scenarios are not all stored is the copy in the repository, and says so.
    """
    reports = newest(stored)
    pages = [page for page in generated_pages(root) if page.path in RUN_PAGES]
    return {page.path.removeprefix("docs/"): _text(page, (root / page.path), reports) for page in pages}


def newest(stored: Sequence[Stored]) -> tuple[Report, ...]:
    """Return the last report of each DDP on each backend at each profile, of those on the newest run's torch."""
    if not stored:
        return ()
    torch = stored[-1].report.package_version("torch")
    same = [one for one in stored if one.report.package_version("torch") == torch]
    return tuple({(one.name, one.report.selection.profile): one.report for one in same}.values())


def _text(page: Page, copy: Path, reports: Sequence[Report]) -> str:
    tracked = copy.read_text(encoding="utf-8")
    try:
        made = page.make(tracked, reports)
    except ReportError:  # a scenario is missing: the page would have empty cells
        return tracked + _OF_A_CHECKOUT
    return tracked + _OF_A_CHECKOUT if made.text is None or made.lacks or made.note else made.text
