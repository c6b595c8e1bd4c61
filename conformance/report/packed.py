"""The packed form of a report's JSON data: findings, stacks and collectives repeat a lot, and are written once each.

A packed report has one more field, `shared`, a list. A finding and what a rank said (its stack, say) are numbers of
entries of that list, and a collective is such a number with its `started_ns` and `duration_ns` behind it, such as
`[12, 28917866248038, 220451]`.
Entries refer to nothing themselves. `ddp-conformance report plain` unpacks a report, and `report.schema.json` is about
what it writes.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from conformance.codec import MismatchError

#: What a rank says in texts, which ranks with the same fate say alike.
_TEXTS = ("fate", "last_collective", "stack", "stderr")
#: What differs between collectives that are alike otherwise.
_TIMES = ("started_ns", "duration_ns")
#: How long a report may become, in characters, 30 times a full run's: a small file must not fill a reader's memory.
_MOST_CHARACTERS = 1_000_000_000


def packed(data: dict[str, Any]) -> dict[str, Any]:
    """Return the data of a report in packed form; `unpacked` gives it back."""
    entries: dict[str, int] = {}
    shared: list[Any] = []

    def number_of(value: Any) -> int:
        text = json.dumps(value)
        if text not in entries:
            entries[text] = len(shared)
            shared.append(value)
        return entries[text]

    def collective(value: dict[str, Any]) -> list[int]:
        kind = {name: field for name, field in value.items() if name not in _TIMES}
        return [number_of(kind), *(value[time] for time in _TIMES)]

    scenarios = [_with_evidence(each, number_of, collective) for each in data["scenarios"]]
    return {**data, "shared": shared, "scenarios": scenarios}


def unpacked(data: dict[str, Any]) -> dict[str, Any]:
    """Return the data of a report as the values that it is read into have it; data that is not packed, unchanged.

    Raises:
        MismatchError: a number in it is that of no entry, or entries are used so often that memory would not hold them.

    """
    if "shared" not in data:
        return data
    shared = data["shared"]
    if type(shared) is not list:
        raise MismatchError("must be a list", ".shared")

    lengths, length = [len(json.dumps(value)) for value in shared], 0

    def entry(number: Any) -> Any:
        nonlocal length
        if type(number) is not int:
            return number
        if not 0 <= number < len(shared):
            raise MismatchError(f"refers to entry {number} of {len(shared)}", ".shared")
        length += lengths[number]
        if length > _MOST_CHARACTERS:
            raise MismatchError(f"the report would have more than {_MOST_CHARACTERS:,} characters unpacked", ".shared")
        return shared[number]

    def collective(row: Any) -> Any:
        if type(row) is not list or len(row) != 1 + len(_TIMES):
            return row
        kind = entry(row[0])
        return {**kind, **dict(zip(_TIMES, row[1:], strict=True))} if type(kind) is dict else kind

    scenarios = data.get("scenarios")
    rest = {name: value for name, value in data.items() if name != "shared"}
    if type(scenarios) is not list:
        return rest
    return {**rest, "scenarios": [_with_evidence(each, entry, collective) for each in scenarios]}


def _with_evidence(scenario: Any, whole: Callable[[Any], Any], collective: Callable[[Any], Any]) -> Any:
    """Return a scenario's data with `whole` applied to findings and texts of both columns, `collective` to collectives.

    Data of another shape passes through: whoever decodes it says what is wrong.
    """

    def of_rank(rank: Any) -> Any:
        for name in _TEXTS:
            rank = _with(rank, name, whole)
        return _each(rank, "collectives", collective)

    def of_result(result: Any) -> Any:
        return _each(_each(result, "findings", whole), "ranks", of_rank)

    return _with(_with(scenario, "subject", of_result), "native", of_result)


def _with(data: Any, name: str, change: Callable[[Any], Any]) -> Any:
    return {**data, name: change(data[name])} if type(data) is dict and name in data else data


def _each(data: Any, name: str, change: Callable[[Any], Any]) -> Any:
    return _with(data, name, lambda items: [change(item) for item in items] if type(items) is list else items)
