"""The site's own checks: a link that leads nowhere is found, and stored reports become pages with their dates."""

from __future__ import annotations

from pathlib import Path

import pytest

from conformance.errors import ReportError
from conformance.report.results import stored_reports
from workshop.site.links import dead_links, main


def test_links_that_lead_nowhere_are_found(tmp_path: Path) -> None:
    (tmp_path / "a.html").write_text('<a href="b.html#there">b</a><a href="b.html#no">b</a><a href="c.html">c</a>')
    (tmp_path / "b.html").write_text('<h1 id="there">b</h1><a href="https://example.org">out</a>')
    checked, dead = dead_links(tmp_path)
    assert checked == 3
    assert dead == (
        "a.html links to b.html#no, whose page has no such anchor",
        "a.html links to c.html, which is not there",
    )


def test_a_site_without_pages_is_an_error(tmp_path: Path) -> None:
    assert main(tmp_path) == 1


def test_no_stored_report_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ReportError, match=r"no report\.json"):
        stored_reports([tmp_path])
