"""A stranger's text in every field of a report, and everything that is made of a report: nothing obeys it."""

import contextlib
import copy
import json
import re
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from click.testing import CliRunner
from markdown_it import MarkdownIt

from conformance.cli import main
from conformance.codec import encode
from conformance.errors import ReportError
from conformance.report.folder import report_text
from conformance.report.read import parse_report
from conformance.run.report import Report
from conformance.tests.reports_by_hand import EVERYTHING, INTERRUPTED, run_report

#: Read by a terminal, by rich, as Markdown, as HTML and as XML; `[x]` and `](` would break out of a link.
HOSTILE = (
    "a\x1b]0;owned\x07\x9b2J\u202e\nChecked: owned [bold]x[/none] [owned](http://owned.example) <img src=owned.png>"
    " ![i](http://owned.example/i.png) `x` __init__ @owned #1 www.owned.example http://owned.example | &#60; ]]>"
    " <script>owned()</script>\n\n# owned\n"
)
#: These are Markdown in a line, which no name is long enough for: a reader takes it for a name.
NAME = "a[owned](http://o.example)![i](o.png)<img src=owned.png>`x`__init__@owned #1 www.owned.example|&#60;/../x"
OUTPUTS = ("summary", "summary -v", "diff", "verify", "markdown", "html", "junit", "badge", "site", "merge")


def fields(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the path of every text in the data of a report, once for each of its fields."""
    if isinstance(value, dict):
        for name, item in value.items():
            yield from fields(item, (*path, name))
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from fields(item, (*path, index))
    elif isinstance(value, str):
        yield path


def hostile_report(report: Report, text: str) -> tuple[str, int]:
    """Return the report with `text` in every field that may hold it, at each of its places, and how many fields."""
    data = encode(report)
    by_name: dict[str, list[tuple[Any, ...]]] = {}
    for path in fields(data):
        by_name.setdefault(".".join(one for one in path if type(one) is str), []).append(path)
    taken = 0
    for number, (name, paths) in enumerate(by_name.items()):
        said = text.replace("\n", " ") if name.endswith("explanation") else text  # of it every line is printed
        changed = copy.deepcopy(data)
        for place, path in enumerate(paths):
            where = changed
            for step in path[:-1]:
                where = where[step]
            where[path[-1]] = f"{said}{number}" if len(paths) == 1 else f"{said}{number}.{place}"
        with contextlib.suppress(ReportError):  # no report: a verdict that there is not, a name of two lines
            parse_report(json.dumps(changed))
            data, taken = changed, taken + 1
    return json.dumps(data), taken


def made(output: str, folder: Path) -> Iterator[tuple[str, str]]:
    """Yield what is made of the report in `folder`, with the kind of reader that it is for."""
    name, *options = output.split()
    others: dict[str, list[Any]] = {
        "diff": [folder / "other"],
        "site": ["--out", folder / "pages"],
        "merge": [folder / "other"],
    }
    arguments = [*options, folder, *others.get(name, [])]
    result = CliRunner().invoke(main, ["report", name, *map(str, arguments)])
    assert isinstance(result.exception, (SystemExit, type(None))), (output, result.exception)
    if name in ("markdown", "html", "junit", "badge") and not result.stderr:
        yield {"junit": "xml", "badge": "xml"}.get(name, name), result.stdout
    else:
        yield "terminal", result.output
    for page in (folder / "pages").glob("*"):
        yield "xml" if page.suffix == ".svg" else "markdown", page.read_text()


def obeyed(reader: str, text: str) -> str:
    """Return what a reader of that kind obeys of a stranger's text, empty if nothing."""
    return {"terminal": _terminal, "markdown": _markdown, "html": _html, "xml": _xml}[reader](text)


def _terminal(text: str) -> str:
    lines = [line for line in text.splitlines() if line.startswith("Checked: owned")]
    return "".join(re.findall(r"[^\n\t -\ud7ff\ue000-\uffff]|[\x7f-\x9f\u202e]", text)) + "".join(lines)


def _markdown(text: str) -> str:
    tokens = MarkdownIt("commonmark").enable(["table"]).parse(text)
    live = [one for token in tokens for one in (token, *(token.children or ()))]
    found = [one.tag for one in live if "owned" in f"{one.attrs}" or "o.png" in f"{one.attrs}"]
    found += [one.content for one in live if one.type.startswith("html_") and re.search("<(img|script)", one.content)]
    found += [one.content for one in live if one.type == "text" and re.search(r"@owned|#1\b", one.content)]
    found += [one.content for one in live if one.type == "heading_open" and "owned" in one.content]
    in_code = [one.children or () for one in tokens if "<code>" in one.content]
    found += ["emphasis" for one in in_code for each in one if each.type in ("strong_open", "code_inline")]
    return "; ".join(found) + "; ".join(re.findall(r"(?<![`\w])(?:www\.owned|http://owned)", _unfenced(text)))


def _unfenced(text: str) -> str:
    return re.sub(r"(?ms)^(`{3,})text$.*?^\1$", "", text)


def _html(text: str) -> str:
    found: list[str] = []

    class Reader(HTMLParser):
        def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
            for name, value in attrs:
                if "owned" in name or (name in ("src", "href", "onerror") and not (value or "").startswith("#")):
                    found.append(f"<{tag} {name}={value}>")

    Reader(convert_charrefs=True).feed(text)
    return "; ".join(found) + "owned()" * (text.count("<script>") - 1)


def _xml(text: str) -> str:
    try:
        ElementTree.fromstring(text)
    except ElementTree.ParseError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(("report", "least"), [(INTERRUPTED, 30), (run_report(EVERYTHING[0]), 15)])
@pytest.mark.parametrize("text", [HOSTILE, NAME], ids=["text", "name"])
def test_nothing_that_is_made_of_a_report_obeys_what_stands_in_it(
    report: Report, least: int, text: str, tmp_path: Path
) -> None:
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "report.json").write_text(report_text(report))
    hostile, taken = hostile_report(report, text)
    assert taken >= least
    (tmp_path / "report.json").write_text(hostile)
    pages = [(output, *page) for output in OUTPUTS for page in made(output, tmp_path)]
    assert {(output, what) for output, reader, page in pages if (what := obeyed(reader, page))} == set()
