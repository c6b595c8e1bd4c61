"""JUnit, Markdown, HTML, badge and trace: what they show, and that nothing in a report can break out of them."""

import base64
import dataclasses
import datetime
import hashlib
import html
import json
import re
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import pytest

from conformance.bench.ratio import DEFAULT, Ratio
from conformance.checkers import checker, registry
from conformance.report import words
from conformance.report.causes import Kind, causes_of
from conformance.report.headline import badge_svg, headline
from conformance.report.html import html_page
from conformance.report.junit import junit_xml
from conformance.report.markdown import MAX_CHARACTERS, markdown
from conformance.report.ratio_chart import LEFT, WIDTH, ratio_chart
from conformance.report.results import Stored, results_pages
from conformance.report.timeline import timeline
from conformance.report.trace import trace_of
from conformance.run.known_failures import UNEXPECTED_PASS, Excuse
from conformance.run.outcome import Outcome
from conformance.run.report import Report
from conformance.spec.catalogue import Catalogue, Chapter, load_catalogue
from conformance.spec.profile import in_profile
from conformance.suite import load_scenarios
from conformance.tests.reports_by_hand import (
    CAP,
    FAIL,
    HANG,
    HOSTILE,
    MIXED,
    PASS,
    RANKS,
    RATIOS,
    UNPRINTABLE,
    UNSUPPORTED,
    collective,
    excuse,
    outcome,
    run_report,
    stored,
)
from conformance.verdict import Finding, RankFate, Verdict

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


@pytest.fixture
def mixed(tmp_path: Path) -> Report:
    return stored(tmp_path, *MIXED)


@pytest.fixture
def hostile(tmp_path: Path) -> Report:
    """Return a report in which every string that a subject or a stranger can choose is an attack."""
    text = HOSTILE + UNPRINTABLE
    ranks = [dataclasses.replace(rank, fate=text, phase=text, stack=text, stderr=text) for rank in RANKS]
    report = stored(tmp_path, outcome("gradients/GRAD-02/mlp", FAIL, PASS, summary=text, ranks=ranks))
    one = report.scenarios[0]
    expectation = Excuse(text, FAIL, text, text, text)
    one = dataclasses.replace(one, id=f"gradients/GRAD-02/{text}", expectation=expectation, replay={text: text})
    requirement = dataclasses.replace(report.requirements[0], statement=text, level=text)
    ratio = Ratio(text, text, text, 2, 1.0, 1.0, 1.0, 4)
    selection = dataclasses.replace(report.selection, order=text)
    return dataclasses.replace(
        report, scenarios=(one,), requirements=(requirement,), backend=text, environment={"python": text},
        performance=(ratio,), selection=selection,
        subject=dataclasses.replace(report.subject, name=text),
    )  # fmt: skip


class Tags(HTMLParser):
    """Collects elements, attributes and text of a page."""

    def __init__(self, page: str) -> None:
        super().__init__(convert_charrefs=True)
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.text = ""
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs

    def handle_data(self, data: str) -> None:
        self.text += data


def test_headlines(tmp_path: Path, mixed: Report) -> None:
    assert headline(mixed) == "4 of 7 failed"
    green = stored(tmp_path, outcome("gradients/GRAD-01/a", PASS))
    assert headline(green) == "keeps 1 of 1 requirement"
    asked = (outcome(f"gradients/{name}/a", verdict) for name, verdict in (("GRAD-01", PASS), ("GRAD-02", UNSUPPORTED)))
    assert (
        headline(stored(tmp_path, *asked)) == "keeps 1 of 2 requirements, 1 needs capabilities that it does not declare"
    )
    said = [Finding("runner", UNSUPPORTED, f"{who} declares no join") for who in ("acme", "ddp_impl")]
    of_both = [
        dataclasses.replace(one, subject=dataclasses.replace(one.subject, findings=(finding,)))
        for name, finding in zip("ab", said, strict=True)
        for one in [outcome(f"gradients/GRAD-02/{name}", UNSUPPORTED)]
    ]
    assert headline(run_report(of_both[0], outcome("gradients/GRAD-01/a", PASS))).endswith("acme does not declare")
    assert headline(run_report(*of_both, outcome("gradients/GRAD-01/a", PASS))).endswith("it or acme does not declare")
    certified = dataclasses.replace(
        green, certified=True, selection=dataclasses.replace(green.selection, profile="core")
    )
    assert headline(certified) == "conformant at core, 1 scenario"
    assert headline(dataclasses.replace(green, interrupted=True)) == "incomplete, 0 of 1 scenario did not run"
    assert headline(stored(tmp_path, outcome("gradients/GRAD-01/a", UNSUPPORTED))) == "nothing passed"


def test_junit_counts_every_kind(mixed: Report) -> None:
    root = ElementTree.fromstring(junit_xml(mixed))
    assert [root.get(name) for name in ("tests", "failures", "errors", "skipped")] == ["7", "3", "1", "2"]
    assert [suite.get("name") for suite in root] == ["gradients", "buckets"]
    case = next(case for case in root.iter("testcase") if case.get("name") == "gradients/GRAD-02/mlp")
    assert (case.get("classname"), case.get("time")) == ("gradients.GRAD-02", "0.013")
    failure = case.find("failure")
    assert failure is not None
    said = "A gradient MUST NOT depend on the bucket cap. a gradient is wrong"
    assert (failure.get("type"), failure.get("message")) == ("FAIL", said)
    assert "Then  A is not 2." in (failure.text or "")


def test_junit_is_not_green_when_the_run_was_not_completed(tmp_path: Path) -> None:
    report = stored(tmp_path, outcome("gradients/GRAD-01/a", PASS), num_selected=3)
    root = ElementTree.fromstring(junit_xml(report))
    assert root.get("errors") == "1"
    assert "2 scenario(s) did not run" in junit_xml(report)


def test_a_backend_by_itself_is_called_by_its_name_and_no_ddp() -> None:
    report = run_report(outcome("gradients/GRAD-01/a", FAIL), subject="acme", target="", backend="acme.adapter:IT")
    assert (report.tested, report.subject.typed) == ("acme", "")
    page = html_page([report])
    assert "<title>ddp-conformance: acme</title>" in page
    assert "run gradients/GRAD-01/a --backend acme.adapter:IT" in html.unescape(page)
    assert "<code>acme</code>, torch" in markdown(report)
    assert "| chapter | requirements passed | scenarios | <code>acme</code> |" in markdown(report)
    assert "torch's DDP" not in markdown(report)
    pages = results_pages([Stored(datetime.date(2026, 1, 1), one) for one in (report, run_report(*report.scenarios))])
    assert {"acme.md", "ddp_impl-gloo.md"} < set(pages)
    assert pages["acme.md"].startswith("# acme\n")
    ddps, backends = html.unescape(pages["index.md"]).split("| backend by itself |")
    assert ("[ddp_impl over gloo]" in ddps, "[acme](acme.md)" in backends) == (True, True)


def test_markdown_says_the_answer_first(mixed: Report) -> None:
    text = markdown(mixed)
    assert html.unescape(text.splitlines()[0]) == "### ❌ ddp-conformance: 4 of 7 failed"
    assert "| gradients | 0 of 2 | 4 | HANG 1, FAIL 1 of 4 | HANG 1, FAIL 1 of 4 |" in text
    assert text.count("<details>") == text.count("</details>") == 4  # chapters, and a cause each
    assert html.unescape(text).index("**3 causes of 4 failures**") < text.index("<details>")
    assert text[: text.index("<details>")].count("\n") <= 12


def test_a_comment_stays_within_what_may_be_posted(tmp_path: Path) -> None:
    catalogue = load_catalogue()
    of_each = {one.requirements[0]: one for one in load_scenarios() if one.chapter == "gradients"}
    names = ("".join(chr(97 + int(digit)) for digit in f"{number:03}") for number in range(len(of_each)))
    outcomes = [
        outcome(one, FAIL, summary=name + " x" * 2500) for name, one in zip(names, of_each.values(), strict=True)
    ]
    text = markdown(run_report(*outcomes, catalogue=catalogue))
    assert len(text) < MAX_CHARACTERS + 100
    shown = text.count("<details>") - 1  # the chapters are folded too
    assert 0 < shown < len(outcomes)
    assert f"and {len(outcomes) - shown} more causes of failures" in text


def test_a_comment_shows_a_requirement_once_and_names_some_of_its_scenarios(tmp_path: Path) -> None:
    outcomes = [outcome(f"gradients/GRAD-02/{number}", FAIL) for number in range(50)]
    text = markdown(stored(tmp_path, *outcomes))
    assert text.count("<details>") == 2  # chapters, and the cause
    assert " and 39 more." in text
    again = markdown(stored(tmp_path, *outcomes), run_report(*outcomes))
    assert "Since the last report no verdict changed in the 50 scenarios of both." in again


def test_badges_are_drawn_and_escaped(mixed: Report, hostile: Report) -> None:
    for report in (mixed, hostile):
        assert ElementTree.fromstring(badge_svg(report)).get("aria-label") == f"DDP conformance: {headline(report)}"
    alone = run_report(outcome("values/VAL-01/add", PASS), subject="acme.adapter:acme", target="")
    assert ">backend conformance of acme</text>" in badge_svg(alone)


def test_a_trace_has_every_rank_and_what_never_finished(mixed: Report) -> None:
    trace = json.loads(json.dumps(trace_of(mixed)))
    slices = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    assert [(event["tid"], event["ts"], event["dur"]) for event in slices[:1]] == [(0, 0, 4000)]
    assert [event["name"] for event in slices if "not seen to finish" in event["name"]] == [
        "all_reduce #1 (32 x float32, sum), not seen to finish"
    ]
    names = {event["args"]["name"] for event in trace["traceEvents"] if event["name"] == "thread_name"}
    assert names == {"rank 0: hung in backward", "rank 1: killed by SIGKILL"}


def test_a_timeline_keeps_collectives_in_flight_together_apart() -> None:
    drawn = timeline([RankFate(0, "raised", collectives=tuple(collective(n, "all_reduce", n, 5) for n in range(3)))])
    assert drawn is not None
    assert len({bar.y for bar in drawn.lanes[0].bars}) == 3
    assert timeline([RankFate(0, "raised"), RankFate(1, "returned")]) is None
    waiting = timeline(RANKS)
    assert waiting is not None
    assert waiting.description == (
        "rank 0: last all_reduce #1 (32 x float32, sum), not seen to finish; "
        "rank 1: last all_reduce #0 (32 x float32, sum)"
    )
    edge = max(bar.x + bar.width for lane in waiting.lanes for bar in lane.bars)
    assert edge == pytest.approx(992, abs=0.1)
    assert [bar.pending for bar in waiting.lanes[0].bars] == [False, True]


def test_the_page_has_a_row_per_requirement_and_an_entry_per_result(mixed: Report) -> None:
    page = html_page([mixed])
    ids = re.findall(r'<th scope="row">([A-Z]+-\d+)</th>', page)
    assert ids == ["GRAD-01", "GRAD-02", "BUCKET-01"]
    assert page.count('<details class="item entry"') == 6 + 3  # ours, and torch's FAIL, HANG, UNSUPPORTED
    assert page.count("<svg ") == 1
    for anchor in re.findall(r'href="#(entry-\d+)"', page):
        assert f'id="{anchor}"' in page
    assert "ddp-conformance run gradients/GRAD-02/cnn --ddp torch" in page


def test_the_page_shows_whole_a_few_of_those_that_broke_a_requirement_alike(tmp_path: Path) -> None:
    def page_of(verdict: Verdict, native: Verdict | None) -> str:
        outcomes = []
        for name in ("GRAD-01/a", "GRAD-01/b", "GRAD-01/c", "GRAD-02/a"):
            one = outcome(f"gradients/{name}", verdict, native, ranks=RANKS)
            beside = one.native and dataclasses.replace(one.native, ranks=RANKS)
            outcomes.append(dataclasses.replace(one, native=beside))
        return html_page([stored(tmp_path, *outcomes)])

    page = page_of(PASS, FAIL)
    assert "gradients/GRAD-02/a" in page
    first, *others = re.findall(r'<details class="item entry".*?(?=<details class="item entry"|</section>)', page, re.S)
    assert ("<svg " in first, "<pre" in first) == (True, True)
    assert "2 more scenarios of this requirement" in first
    assert "gradients/GRAD-01/b: it was FAIL\ngradients/GRAD-01/c: it was FAIL" in first
    assert [("<svg " in other, "<pre" in other) for other in others] == [(True, True)]
    assert all("it was FAIL" in other for other in others)
    assert page_of(PASS, HANG).count("<svg ") == 2
    assert page_of(FAIL, None).count("<svg ") == 4  # three of a requirement, of what the subject under test breaks


def test_failures_come_first_the_one_to_look_at_open_and_the_matrix_after_them(mixed: Report) -> None:
    page = html_page([mixed])
    places = [page.index(f'<h2 id="{name}"') for name in ("failures", "matrix", "evidence")]
    assert places == sorted(places)
    opened = re.findall(r'<details class="item entry" open .*?<code>(.*?)</code>', page, re.S)
    assert opened == ["buckets/BUCKET-01/rnn"]  # the gravest


def test_a_failure_on_the_page_says_what_the_terminal_says(tmp_path: Path) -> None:
    raised = "every rank raised AttributeError: 'NaiveDDP' object has no attribute 'no_sync'"
    report = stored(tmp_path, outcome("gradients/GRAD-02/mlp", FAIL, FAIL, summary=raised), backend="acme")
    page = Tags(html_page([report], [tmp_path])).text
    assert "ddp_impl over acme: 1 of 1 failed" in page
    assert "GRAD-02 A gradient MUST NOT depend on the bucket cap." in page
    assert "leave it out of its capabilities" in page
    replay = f"ddp-conformance replay {tmp_path}/failures/gradients.GRAD-02.mlp.json --backend acme"
    assert replay in (tmp_path / "failures" / "gradients.GRAD-02.mlp.txt").read_text()
    replay = replay.replace(str(tmp_path), tmp_path.name)  # a page names no place of the machine that made it
    assert [text.partition("\n")[0] for text in page.split("Run it again: ")[1:]] == [
        replay, "ddp-conformance run gradients/GRAD-02/mlp --ddp torch --backend acme",
    ]  # fmt: skip
    assert "Run it again: ddp-conformance run gradients/GRAD-02/mlp --backend acme" in Tags(html_page([report])).text


def test_the_page_counts_over_what_was_judged_and_explains_its_words(mixed: Report) -> None:
    page = html_page([mixed])
    counts = re.findall(r'<td class="cell">.*?>([A-Z_]+)</.*?<small>(.*?)</small></td>', page, re.S)
    assert counts[-2:] == [("HARNESS_ERROR", "1 of 3, 1 unsupported"), ("PASS", "2 of 3, 1 unsupported")]
    legend = page.partition('<details class="legend">')[2].partition("</details>")[0]
    assert "<code>facts</code>" in legend
    assert "no_hang" not in legend  # no finding here is of that checker
    assert f'<small title="{html.escape(words.CHECKERS["facts"])}">facts</small>' in page


def test_every_checker_is_explained_and_a_page_needs_no_torch() -> None:
    assert {name: registry.get_checker(name) for name in words.CHECKERS} == checker.CHECKERS
    code = "import sys, conformance.report.html; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_an_unexpected_pass_says_what_it_is_everywhere(tmp_path: Path) -> None:
    mended = outcome("gradients/GRAD-02/mlp", PASS, excuse=excuse(UNEXPECTED_PASS))
    report = stored(tmp_path, mended, outcome("gradients/GRAD-02/cnn", FAIL))
    says = (
        "it passed, but FAIL was expected (a known defect; https://example.org/1): remove its entry from the known"
        " failures, or narrow it down"
    )
    assert headline(report) == "1 of 2 failed, 1 unexpected pass"
    assert [(one.verdict, one.kind) for one in causes_of(report)] == [(FAIL, Kind.BUG), (PASS, Kind.UNEXPECTED_PASS)]
    failure = ElementTree.fromstring(junit_xml(report)).find(".//failure")
    assert failure is not None
    assert failure.get("message") == f"unexpected pass: {says}."
    assert says in html.unescape(markdown(report))
    assert Tags(html_page([report])).text.count(says) == 2


def test_seven_causes_are_listed_and_the_others_are_one_click_away() -> None:
    def failed(number: int) -> Outcome:
        found = Finding("no_exception", FAIL, f"rank 0 raised Error{chr(65 + number)}: no")
        one = outcome(f"gradients/GRAD-02/{number}", FAIL)
        return dataclasses.replace(one, subject=dataclasses.replace(one.subject, findings=(found,)))

    page = html_page([run_report(*map(failed, range(9)))])
    listed, rest = page.split('<details class="more-causes"><summary>2 more</summary>')
    assert listed.count("<li>") == 7
    assert rest.split("</details>")[0].count("<li>") == 2
    assert '<ol start="8">' in rest
    assert 'class="more-causes"' not in html_page([run_report(*map(failed, range(7)))])


def test_ids_of_requirements_lead_to_their_rows_which_name_their_sources() -> None:
    real = load_catalogue()
    known = real.requirement("GRAD-01")
    catalogue = Catalogue((Chapter("gradients", "Gradients", "GRAD", (known, CAP)),))
    page = html_page([run_report(outcome("gradients/GRAD-01/a", FAIL), outcome("gradients/GRAD-02/a", FAIL),
                                 catalogue=catalogue)])  # fmt: skip
    for name in ("GRAD-01", "GRAD-02"):
        assert page.count(f'id="requirement-{name}"') == 1
        assert page.count(f'<a href="#requirement-{name}">{name}</a>') >= 3  # its cause, and twice in its evidence
    assert re.findall('<small class="source">(.*?)</small>', page) == [html.escape("; ".join(known.source))]
    assert real.requirement("GRAD-02").statement != CAP.statement  # so that its sources are not this sentence's


def test_the_page_of_a_full_run_stays_small() -> None:
    outcomes = [
        outcome(f"gradients/{name}/{number}", verdict, FAIL, ranks=RANKS)
        for name in ("GRAD-01", "GRAD-02")
        for number, verdict in enumerate([PASS, HANG] * 700)
    ]
    assert len(html_page([run_report(*outcomes)])) < 400_000  # 2,800 scenarios, all of which torch's DDP breaks


def test_last_collectives_have_a_column_where_they_were_recorded(tmp_path: Path) -> None:
    unrecorded = [dataclasses.replace(rank, last_collective="", collectives=()) for rank in RANKS]
    for ranks, number in ((RANKS, 1), (unrecorded, 0)):
        page = html_page([stored(tmp_path, outcome("gradients/GRAD-01/mlp", FAIL, ranks=ranks))])
        assert page.count(">last collective</th>") == number


def test_ranks_that_left_the_same_stack_share_it(tmp_path: Path) -> None:
    ranks = [RankFate(rank, "raised", stack="a stack" if rank != 1 else "another") for rank in range(3)]
    page = html_page([stored(tmp_path, outcome("gradients/GRAD-01/mlp", FAIL, ranks=ranks))])
    assert re.findall("<summary>(Stack of .*?)</summary>", page) == ["Stack of ranks 0 and 2", "Stack of rank 1"]


def test_step_times_are_shown_where_they_were_compared(tmp_path: Path, mixed: Report) -> None:
    measured = stored(tmp_path, *MIXED, performance=RATIOS)
    page, text = Tags(html_page([measured])).text, html.unescape(markdown(measured))
    assert "a modeldefaulttorch's default21.5001.375 \u2013 1.62560" in page
    assert "| a model | torch itself | torch's default | 2 | 1.000 (0.900 - 1.500) | 60 |" in text
    assert "below 1 the first is faster" in page
    for nothing in (html_page([mixed]), markdown(mixed)):
        assert "Step time" not in nothing
    assert html_page([measured, mixed, measured]).count('<details class="speed">') == 2


def test_step_times_are_drawn_on_one_axis() -> None:
    def ratio(variant: str, lower: float, median: float, upper: float, reference: str = DEFAULT) -> Ratio:
        return Ratio("a model", variant, reference, 2, median, lower, upper, 60)

    drawn = ratio_chart(
        [
            ratio("default", 0.5, 0.75, 1.0),
            ratio("view", 0.9, 1.0, 1.25, "torch, same options"),
            ratio("static graph", 1.0, 2.0, 9.0),
            ratio("torch itself", 0.99, 1.0, 1.01),
        ]
    )
    assert drawn is not None
    default, static, noise = drawn.rows
    assert [row.label for row in drawn.rows] == ["a model, default", "a model, static graph", "a model, torch itself"]
    assert default.lower == LEFT  # what is fastest begins the axis
    assert default.upper == static.lower == noise.median == drawn.one
    assert static.upper == WIDTH - 12  # and nothing is drawn beyond it
    assert default.median - default.lower == pytest.approx(default.upper - default.median, abs=0.1)
    assert (default.kind, noise.kind) == ("measured", "noise")
    assert ratio_chart([ratio("view", 0.9, 1.0, 1.1, "torch, same options")]) is None


def test_the_page_needs_no_network(mixed: Report) -> None:
    attributes = Tags(html_page([mixed])).attributes
    assert not [value for name, value in attributes if name in ("src", "srcset", "action", "data") and value]
    assert all(str(value).startswith("#") for name, value in attributes if name == "href")
    assert "url(" not in html_page([mixed])
    assert "@import" not in html_page([mixed])


def chromium(page: str, folder: Path, *, complains: bool = False) -> str:
    """Return the page as headless Chromium has it, after its script ran; fail unless the console is as it must be."""
    assert CHROMIUM is not None
    file = folder / "page.html"
    file.write_text(page, encoding="utf-8", errors="replace")
    command = [
        CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
        "--disable-background-networking", "--disable-component-update", "--disable-sync",
        f"--user-data-dir={folder / 'profile'}", "--enable-logging=stderr", "--dump-dom", file.as_uri(),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=90)
    said = [line for line in done.stderr.splitlines() if ":CONSOLE:" in line]
    assert bool(said) == complains, "\n".join(said)
    return done.stdout


def title_of(page: str) -> str:
    match = re.search("<title>(.*?)</title>", page, re.DOTALL)
    assert match is not None
    return match[1]


#: Put before the end of a page: does what a person would, and leaves what it saw in the title.
DRIVER = """{
const seen = [];
const shown = (what) => [...document.querySelectorAll(what)].filter((one) => !one.hidden).length;
const note = (name) => seen.push(`${name}=${shown(".requirement")}/${shown(".entry")}`);
const press = (key) => document.activeElement.dispatchEvent(new KeyboardEvent("keydown", {key, bubbles: true}));
note("all");
press("/");
seen.push(`focus=${document.activeElement.id}`);
document.activeElement.value = "missing";
document.activeElement.dispatchEvent(new Event("input", {bubbles: true}));
note("search");
press("Escape");
note("escape");
document.querySelector("[data-verdict=HANG]").click();
note("hang");
document.querySelector("[data-verdict=CRASH]").click();
note("hang+crash");
document.querySelector("[type=reset]").click();
note("reset");
const chapter = document.getElementById("chapter");
chapter.value = "buckets";
chapter.dispatchEvent(new Event("input", {bubbles: true}));
note("buckets");
document.getElementById("filters").reset();
press("j"); press("j");
const entries = [...document.querySelectorAll(".entry:not([hidden])")];
seen.push(`j=${entries.indexOf(document.activeElement.parentElement) + 1}`);
document.querySelector(".matrix a.HANG").click();
addEventListener("hashchange", () => {
  seen.push(`open=${document.querySelectorAll(".entry[open]").length}`);
  const bar = document.querySelector(".entry[open] .bar rect").getBoundingClientRect();
  seen.push(`drawn=${bar.width > 10}`);
  document.title = seen.join(" ");
});
}"""


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed, so the page's script cannot be run")
def test_the_page_in_chromium(mixed: Report, tmp_path: Path) -> None:
    page = html_page([mixed])
    allowed = base64.b64encode(hashlib.sha256(DRIVER.encode()).digest()).decode()
    page = page.replace("script-src '", f"script-src 'sha256-{allowed}' '")
    page = page.replace("</body>", f"<script>{DRIVER}</script></body>")
    title = title_of(chromium(page, tmp_path))
    assert title == (
        "all=3/9 focus=search search=0/1 escape=3/9 hang=1/2 hang+crash=1/3 reset=3/9 buckets=1/4 j=2"
        " open=2 drawn=true"  # the first failure is open from the start
    )


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed, so a page cannot be laid out")
@pytest.mark.parametrize("width", [390, 1400])
def test_a_page_is_no_wider_than_its_window(mixed: Report, tmp_path: Path, width: int) -> None:
    api = pytest.importorskip("playwright.sync_api")
    name = "a_package.of_somebody.with_long_names:DistributedDataParallelOfSomebody"
    page = html_page([dataclasses.replace(mixed, subject=dataclasses.replace(mixed.subject, name=name))])
    file = tmp_path / "page.html"
    file.write_text(page, encoding="utf-8")
    with api.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        window = browser.new_page(viewport={"width": width, "height": 800})
        window.goto(file.as_uri())
        assert window.evaluate("document.documentElement.scrollWidth") <= width
        browser.close()


def test_what_stands_in_backticks_is_code(mixed: Report) -> None:
    one = dataclasses.replace(mixed.requirements[0], statement="`no_sync` MUST be <left> alone")
    page = html_page([dataclasses.replace(mixed, requirements=(one, *mixed.requirements[1:]))])
    assert "<code>no_sync</code> MUST be &lt;left&gt; alone" in page


#: Leaves in the title after how many milliseconds the page could be used.
CLOCK = """addEventListener("load", () => setTimeout(() => {
  document.title = Math.round(performance.getEntriesByType("navigation")[0].loadEventEnd);
}));"""


@pytest.mark.nightly
@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed, so a page cannot be opened")
def test_the_page_of_profile_full_opens_within_a_second_in_chromium(tmp_path: Path) -> None:
    catalogue = load_catalogue()
    outcomes = []
    for number, one in enumerate(in_profile("full", load_scenarios(), catalogue)):
        both = outcome(one, PASS, FAIL if number % 3 == 0 else HANG if number % 40 == 0 else PASS)
        outcomes.append(dataclasses.replace(both, native=both.native and dataclasses.replace(both.native, ranks=RANKS)))
    page = html_page([run_report(*outcomes, catalogue=catalogue)])
    assert 500_000 < len(page) < 2_000_000
    allowed = base64.b64encode(hashlib.sha256(CLOCK.encode()).digest()).decode()
    page = page.replace("script-src '", f"script-src 'sha256-{allowed}' '")
    opened_ms = int(title_of(chromium(page.replace("</body>", f"<script>{CLOCK}</script></body>"), tmp_path)))
    assert 0 < opened_ms < 1000


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed, so an attack on the page cannot be run")
def test_an_attack_does_nothing_in_chromium(hostile: Report, tmp_path: Path) -> None:
    page = html_page([hostile])
    shown = chromium(page, tmp_path)
    assert title_of(shown).startswith("ddp-conformance: ")
    assert "1 requirement, 1 result" in shown  # our own script did run
    attack = "<script>document.title = 'owned'</script><img src=x onerror=\"document.title = 'owned'\">"
    unescaped = page.replace("</main>", f"{attack}</main>")  # had escaping failed
    assert title_of(chromium(unescaped, tmp_path, complains=True)) != "owned"
    unguarded = re.sub('<meta http-equiv="Content-Security-Policy"[^>]*>', "", page)
    assert title_of(chromium(unguarded.replace("</main>", f"{attack}</main>"), tmp_path)) == "owned"  # a real attack
