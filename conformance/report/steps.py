"""A run step by step: every rank's collectives side by side, and the wrong facts."""

import re
from collections.abc import Iterable, Mapping, Sequence

from conformance.checkers.explanation import ranks as names_of
from conformance.checkers.facts import WrongFact, wrong_facts
from conformance.observation import Carried, Collective, Facts, Observation

_INDENT = "  "
#: Facts of one backward of a step that has several: `local` are those that ran under `no_sync`.
_MICRO = re.compile(r"step\d+/(?P<kind>local|micro)(?P<number>\d+)/")
_LABEL_WIDTH = 10
#: Of more rows in which all ranks agree than this, only the first and the last are shown.
_MOST_ALIKE = 5
_MOST_WRONG = 4

#: The collectives of one index in one group, by rank; None where a rank issued none.
Row = Mapping[int, Collective | None]

#: The values of a rank's collective, if the run recorded them.
Looks = Mapping[tuple[int, Collective], Carried]


def step_listing(
    observations: Mapping[int, Observation], expected: Mapping[int, Facts] | None, only: int | None = None
) -> list[str]:
    """Return the lines: per step the collectives by phase, then how many of its facts are right and which are wrong.

    A step of several backwards has a line of facts for each. With `only` there is that step and no other; there all
    collectives are shown, and what each of them carried on each rank, and all wrong facts. So are those of no step.
    """
    rows = _rows(observations)
    looks = {
        (rank, collective): carried
        for rank, one in observations.items()
        for collective, carried in zip(one.history, one.carried, strict=bool(one.carried))
    }
    expected = _observed_part(expected or {}, observations)
    wrong = _by_step(wrong_facts(expected, {rank: one.facts for rank, one in observations.items()}))
    names = dict.fromkeys(name for facts in expected.values() for name in facts)
    steps = sorted({_step_of_row(row) for row in rows} | {_step_of(name) for name in names})
    lines: list[str] = []
    if only is not None and only not in steps:
        known = ", ".join(str(step) for step in steps if 0 <= step < _AT_THE_END) or "none"
        lines.append(f"no step {only} was observed; there are {known}")
    for step in steps if only is None else {only}.intersection(steps):
        lines.append("before the first step" if step < 0 else f"step {step}" if step < _AT_THE_END else "at the end")
        lines += _collectives([row for row in rows if _step_of_row(row) == step], looks, in_full=only is not None)
        for part, of_part in _parts([name for name in names if _step_of(name) == step]).items():
            wrong_here = [one for one in wrong.get(step, []) if one.name in of_part]
            lines += _facts(part, of_part, wrong_here, in_full=step in (only, _AT_THE_END))
    return [*lines, *(_ending(one) for _, one in sorted(observations.items()) if one.fate.kind != "returned")]


_AT_THE_END = 1_000_000


def _observed_part(expected: Mapping[int, Facts], observations: Mapping[int, Observation]) -> Mapping[int, Facts]:
    """Return the expected facts; of ranks that did not return only the ones that they observed."""
    return {
        rank: {name: value for name, value in facts.items() if one.fate.kind == "returned" or name in one.facts}
        for rank, facts in expected.items()
        if (one := observations.get(rank)) is not None
    }


def _step_of(name: str) -> int:
    first = name.split("/")[0]
    return int(first[4:]) if first.startswith("step") and first[4:].isdigit() else _AT_THE_END


def _step_of_row(row: Row) -> int:
    return next(one.step for one in row.values() if one is not None)


def _rows(observations: Mapping[int, Observation]) -> list[Row]:
    """Return the rows in the order in which the first rank that took part issued them."""
    found: dict[tuple[str, int], dict[int, Collective]] = {}
    for rank, one in sorted(observations.items()):
        for collective in one.history:
            found.setdefault((collective.group, collective.index), {})[rank] = collective
    rows: list[Row] = []
    for issued in found.values():
        members = next(iter(issued.values())).members or tuple(observations)
        rows.append({rank: issued.get(rank) for rank in sorted({*members, *issued}) if rank in observations})
    return sorted(rows, key=_step_of_row)  # stable: within a step they stay in the order in which they were issued


def _collectives(rows: Sequence[Row], looks: Looks, *, in_full: bool) -> list[str]:
    def shortened(alike: list[str]) -> list[str]:
        return alike if in_full else _shortened(alike)

    lines: list[str] = []
    alike: list[str] = []
    phase = ""
    for row in rows:
        first = next(one for one in row.values() if one is not None)
        entered = first.phase if first.sync else f"{first.phase}, under no_sync"
        label = entered if entered != phase else ""
        phase = entered
        if label:
            lines += shortened(alike)
            alike = []
        seen = {rank: looks.get((rank, one)) for rank, one in row.items() if one is not None}
        places = {_at(look) for look in seen.values()}
        carried = _carried(seen) if in_full else []
        agrees = _agree(row.values())
        if agrees and len(places) == 1:
            alike += [_line(label, f"{names_of(row)}: {first.describe()}{places.pop()}"), *carried]
            continue
        lines += shortened(alike)
        alike = []
        for number, (rank, one) in enumerate(row.items()):
            what = f"nothing in place of #{first.index}" if one is None else one.describe() + _at(seen[rank])
            lines.append(_line("" if number else label, f"rank {rank}: {what}{'' if agrees else '   <- differs'}"))
        lines += carried
    return lines + shortened(alike)


def _line(label: str, text: str) -> str:
    """Return a line of a step; however long a label is, it stands apart from the text."""
    return f"{_INDENT}{label:<{_LABEL_WIDTH}}  {text}"


def _at(look: Carried | None) -> str:
    return f", at {look.issued_at}" if look is not None and look.issued_at else ""


def _carried(seen: Mapping[int, Carried | None]) -> list[str]:
    """Return a line for each rank whose collective carried something."""
    return [
        _line(
            "", f"  rank {rank} gave {look.given}, {f'got {look.left}' if look.left else 'and has not got its result'}"
        )
        for rank, look in seen.items()
        if look is not None and look.given != "[]"
    ]


def _agree(row: Iterable[Collective | None]) -> bool:
    return len({one.signature if one is not None else None for one in row}) == 1


def _shortened(lines: list[str]) -> list[str]:
    if len(lines) <= _MOST_ALIKE:
        return lines
    return [lines[0], _line("", f"... {len(lines) - 2} more, alike on all ranks"), lines[-1]]


def _by_step(wrong: Iterable[WrongFact]) -> dict[int, list[WrongFact]]:
    found: dict[int, list[WrongFact]] = {}
    for fact in wrong:
        found.setdefault(_step_of(fact.name), []).append(fact)
    return found


def _parts(names: Iterable[str]) -> dict[str, list[str]]:
    """Return the names by the backward of the step that they are of; an empty text stands for the step itself."""
    found: dict[str, list[str]] = {}
    for name in names:
        match = _MICRO.match(name)
        part = ""
        if match:
            part = f"micro-step {match['number']}{', under no_sync' if match['kind'] == 'local' else ''}: "
        found.setdefault(part, []).append(name)
    return found


def _facts(part: str, names: Sequence[str], wrong: Sequence[WrongFact], *, in_full: bool) -> list[str]:
    by_name: dict[str, list[WrongFact]] = {}
    for fact in wrong:
        by_name.setdefault(fact.name, []).append(fact)
    lines = [_line("facts", f"{part}{len(names) - len(by_name)} of {len(names)} right")]
    most = len(by_name) if in_full else _MOST_WRONG
    for name, facts in list(by_name.items())[:most]:
        why = facts[0].diagnosis or str(facts[0].difference)
        lines.append(_line("", f"wrong: {name} on {names_of(one.rank for one in facts)}: {why}"))
    if len(by_name) > most:
        lines.append(_line("", f"and {len(by_name) - most} more; --step shows all"))
    return lines


def _ending(one: Observation) -> str:
    what = str(one.raised) if one.raised is not None else str(one.fate)
    return f"rank {one.rank} ended in {one.phase or 'an unknown phase'}: {what.splitlines()[0] if what else ''}"
