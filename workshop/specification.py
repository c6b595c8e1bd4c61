"""The specification as pages: one per chapter, and one that leads to them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from conformance.scenario import Scenario
from conformance.spec.catalogue import Catalogue, Chapter, Requirement
from conformance.spec.version import Version, since_text

_HEAD = """# The specification

What a DistributedDataParallel must do, chapter by chapter. Every requirement has an id that is never used again for
another one, a level, and the source that it comes from. A subject is conformant at a level when it keeps every
requirement of that level. The requirements stand in `conformance/chapters/`.

| chapter | ids | requirements | scenarios | levels |
|---|---|--:|--:|---|
"""


def specification_pages(
    catalogue: Catalogue, scenarios: Sequence[Scenario], versions: Sequence[Version]
) -> Mapping[str, str]:
    """Return the pages in Markdown by file name: `README.md` and `<chapter>.md`; `versions`, the oldest first."""
    index, pages = _HEAD, {}
    for chapter in catalogue.chapters:
        own = [scenario for scenario in scenarios if scenario.id.partition("/")[0] == chapter.name]
        levels = ", ".join(dict.fromkeys(requirement.level for requirement in chapter.requirements))
        index += (
            f"| [{chapter.title}]({chapter.name}.md) | {chapter.prefix} | {len(chapter.requirements)} | {len(own)} "
            f"| {levels} |\n"
        )
        pages[f"{chapter.name}.md"] = _chapter_page(chapter, scenarios, versions)
    return {"README.md": index, **pages}


def _chapter_page(chapter: Chapter, scenarios: Sequence[Scenario], versions: Sequence[Version]) -> str:
    entries = []
    for requirement in chapter.requirements:
        mine = [one for one in scenarios if requirement.id in one.requirements]
        sizes = sorted({scenario.world_size for scenario in mine})
        entries.append(_entry(requirement, len(mine), sizes, since_text(requirement.id, versions)))
    return f"# {chapter.title}\n\n" + "\n".join(entries)


def _entry(requirement: Requirement, num_scenarios: int, world_sizes: Sequence[int], since: str) -> str:
    shown = "no scenario"
    if num_scenarios:
        sizes = ", ".join(map(str, world_sizes))
        shown = f"{num_scenarios} scenario{'s' * (num_scenarios > 1)} at world size {sizes}"
    facts = [f"level {requirement.level}", since, shown, *map(source_link, requirement.source)]
    note = f"\n{requirement.note}\n" if requirement.note else ""
    return f"## {requirement.id}\n\n{requirement.statement}\n{note}\n{'; '.join(facts)}\n"


def source_link(source: str) -> str:
    """Return the source of a requirement in Markdown, an issue as a link to it."""
    repository, _, number = source.partition("#")
    return f"[{source}](https://github.com/{repository}/issues/{number})" if number.isdigit() else source
