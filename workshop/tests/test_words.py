"""Pages are read: links lead somewhere, requirements have one MUST a sentence, the README is one screen."""

import re
import subprocess
import tomllib
from pathlib import Path

import pytest

from conformance.spec.catalogue import Chapter, load_catalogue
from workshop import ROOT

PAGES = [
    *(ROOT / name for name in ("README.md", "CHANGELOG.md", "CODE_OF_CONDUCT.md", "CONTRIBUTING.md", "SECURITY.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
    ROOT / "results" / "README.md",
]
#: Leads to pages that the site's build makes, which checks its links.
START = ROOT / "docs" / "index.md"


@pytest.mark.parametrize("chapter", load_catalogue().chapters, ids=lambda chapter: str(chapter.name))
def test_each_sentence_of_a_requirement_has_at_most_one_must(chapter: Chapter) -> None:
    parts = [(one.id, part) for one in chapter.requirements for part in re.split(r"(?<=[.!?])\s+", one.statement)]
    second = [f"{name}: {part}" for name, part in parts if len(re.findall(r"\bMUST\b", part)) > 1]
    assert not second, "\n".join(["a second MUST, make it a sentence of its own:", *second])


def anchors(page: Path) -> set[str]:
    headings = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize(
    "page", [page for page in PAGES if page != START], ids=lambda page: str(page.relative_to(ROOT))
)
def test_links_lead_somewhere(page: Path) -> None:
    dead = []
    for target in re.findall(r"\]\((?!https?:|mailto:)([^)\s]+)\)", page.read_text(encoding="utf-8")):
        path, _, anchor = target.partition("#")
        there = (page.parent / path).resolve() if path else page
        if there.suffix == ".svg" and there.with_suffix(".txt").exists():  # the site draws it
            continue
        if not there.exists() or (anchor and anchor not in anchors(there)):
            dead.append(target)
    assert dead == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_pages_that_are_named_exist(page: Path) -> None:
    named = re.findall(r"`((?:docs|ci|workshop)/[\w/.-]+\.(?:md|sh|py|toml))`", page.read_text(encoding="utf-8"))
    assert [one for one in named if not (ROOT / one).exists()] == []


def test_contributing_fits_an_afternoon() -> None:
    assert len((ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8").splitlines()) <= 120
    assert len((ROOT / "docs" / "onboarding.md").read_text(encoding="utf-8").split()) <= 900


def test_the_readme_is_short() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert len(readme.splitlines()) <= 80
    for command in ("bash ci/conformance.sh", "bash ci/test.sh"):
        assert f"    {command} " in readme


def test_one_version_is_released() -> None:
    version = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"]
    assert f"\nversion: {version}\n" in (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    release = ["bash", str(ROOT / "ci" / "release.sh")]
    done = subprocess.run([*release, f"v{version}"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert re.findall(r"^### (.+)$", done.stdout, re.MULTILINE) == ["Added", "Changed", "Fixed", "Verdicts that change"]
    wrong = subprocess.run([*release, "v99.0"], capture_output=True, text=True, check=False)
    assert (wrong.returncode, f"tag v{version}, or change the version" in wrong.stderr) == (1, True)
