"""The packed form of a report's JSON data: what repeats a lot is written once.

A packed report has three more fields:

`usual`    by kind (`scenario`, `subject`, `native`, `rank`, `collective`), the most frequent value of each field. An
           object of that kind leaves out the fields that have it.
`shared`   a list of findings, of texts that a rank said (its stack, say), and of what collectives are but for their
           times. Where they belong stand their numbers in this list, and a collective is such a number with two more
           behind it: by how many ns later it started than the one before it in the list, and how many ns it took.
`lines`    a list of lines. A text of several lines in `shared` is a list of their numbers.

`ddp-conformance report plain` unpacks a report, and `report.schema.json` is about what it writes.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from typing import Any

from conformance.codec import MismatchError

#: What a rank says in texts, which ranks with the same fate say alike.
_TEXTS = ("fate", "last_collective", "stack", "stderr")
_COLUMNS = ("subject", "native")
_FIELDS = {"usual", "lines", "shared"}
#: How long a report may become, in characters, 30 times a full run's: a small file must not fill a reader's memory.
_MOST_CHARACTERS = 1_000_000_000
#: As how many characters an object counts beside its fields: it takes memory, however short it is.
_OBJECT_CHARACTERS = 300

_Object = dict[str, Any]


def packed(data: _Object) -> _Object:
    """Return the data of a report in packed form; `unpacked` gives it back."""
    lines, shared = _Numbers(), _Numbers()
    results = [one[column] for one in data["scenarios"] for column in _COLUMNS if one[column]]
    collectives = [one for result in results for rank in result["ranks"] for one in rank["collectives"]]
    usual = {"collective": _most_frequent(map(_kind, collectives))}

    def text(value: str) -> Any:
        return [lines.of(line) for line in value.split("\n")] if "\n" in value else value

    def of_collectives(collectives: list[_Object]) -> Iterable[list[int]]:
        before_ns = 0
        for one in collectives:
            kind = shared.of(_without(_kind(one), usual["collective"]))
            yield [kind, one["started_ns"] - before_ns, one["duration_ns"]]
            before_ns = one["started_ns"]

    def of_rank(rank: _Object) -> _Object:
        texts = {name: shared.of(text(rank[name])) for name in _TEXTS if rank[name] is not None}
        return {**rank, **texts, "collectives": list(of_collectives(rank["collectives"]))}

    def of_result(result: _Object | None) -> _Object | None:
        if result is None:
            return None
        findings = [shared.of({**one, "explanation": text(one["explanation"])}) for one in result["findings"]]
        return {**result, "findings": findings, "ranks": list(map(of_rank, result["ranks"]))}

    scenarios = [{**one, **{column: of_result(one[column]) for column in _COLUMNS}} for one in data["scenarios"]]
    for column in _COLUMNS:
        usual |= _leave_out(column, [one[column] for one in scenarios if one[column]])
    usual |= _leave_out("rank", [rank for one in scenarios for column in _COLUMNS for rank in _ranks(one[column])])
    usual |= _leave_out("scenario", scenarios)
    return {**data, "usual": usual, "lines": lines.values, "shared": shared.values, "scenarios": scenarios}


def unpacked(data: _Object) -> _Object:
    """Return the data of a report as the values that it is read into have it; data that is not packed, unchanged.

    Data of another shape passes through: whoever decodes it says what is wrong.

    Raises:
        MismatchError: a number in it is that of no entry, or entries are used so often that memory would not hold them.

    """
    if not data.keys() & _FIELDS:
        return data
    try:
        return _unpacked(data)
    except RecursionError as error:
        raise MismatchError("is nested too deeply", ".shared") from error


def _unpacked(data: _Object) -> _Object:
    read = _Reader(data)
    scenarios = data.get("scenarios")
    rest = {name: value for name, value in data.items() if name not in _FIELDS}
    return {**rest, "scenarios": [read.scenario(each) for each in scenarios]} if type(scenarios) is list else rest


class _Numbers:
    """Values that stand once in a list, and their numbers there."""

    def __init__(self) -> None:
        self.values: list[Any] = []
        self._numbers: dict[str, int] = {}

    def of(self, value: Any) -> int:
        text = json.dumps(value)
        if text not in self._numbers:
            self._numbers[text] = len(self.values)
            self.values.append(value)
        return self._numbers[text]


def _kind(collective: _Object) -> _Object:
    return {name: value for name, value in collective.items() if name not in ("started_ns", "duration_ns")}


def _ranks(result: _Object | None) -> list[_Object]:
    return result.get("ranks", []) if result else []


def _most_frequent(objects: Iterable[_Object]) -> _Object:
    """Return for each field of `objects`, which all have the same, the most frequent value that is there twice."""
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    for one in objects:
        for name, value in one.items():
            counts[name][json.dumps(value)] += 1
    frequent = {name: values.most_common(1)[0] for name, values in counts.items()}
    return {name: json.loads(text) for name, (text, times) in frequent.items() if times > 1}


def _without(value: _Object, usual: _Object) -> _Object:
    return {name: field for name, field in value.items() if name not in usual or usual[name] != field}


def _leave_out(kind: str, objects: list[_Object]) -> dict[str, _Object]:
    """Take what is usual out of `objects`, and return it."""
    usual = _most_frequent(objects)
    for one in objects:
        for name in [name for name, field in one.items() if name in usual and usual[name] == field]:
            del one[name]
    return {kind: usual}


class _Reader:
    """Unpacks, and keeps count of how long the report becomes."""

    def __init__(self, data: _Object) -> None:
        self._usual: Any = data.get("usual")
        self._shared = _Entries("shared", data.get("shared"), self._spend)
        self._lines = _Entries("lines", data.get("lines"), self._spend)
        if type(self._usual) is not dict or any(type(kind) is not dict for kind in self._usual.values()):
            raise MismatchError("must be an object of objects", ".usual")
        self._lengths = {kind: len(json.dumps(fields)) for kind, fields in self._usual.items()}
        self._length = 0

    def scenario(self, value: Any) -> Any:
        """Unpack a scenario."""
        value = self._whole("scenario", value)
        for column in _COLUMNS:
            value = _with(value, column, lambda result: self._result(column, result))  # noqa: B023
        return value

    def _result(self, column: str, value: Any) -> Any:
        value = self._whole(column, value)
        return _each(_each(value, "findings", self._finding), "ranks", self._rank)

    def _finding(self, value: Any) -> Any:
        return _with(self._shared.entry(value), "explanation", self._text)

    def _rank(self, value: Any) -> Any:
        value = self._whole("rank", value)
        for name in _TEXTS:
            value = _with(value, name, lambda text: self._text(self._shared.entry(text)))
        return _with(value, "collectives", self._collectives)

    def _collectives(self, rows: Any) -> Any:
        if type(rows) is not list:
            return rows
        found, now_ns = [], 0
        for row in rows:
            kind = self._shared.entry(row[0]) if _is_row(row) else None
            if type(kind) is dict:
                now_ns += row[1]
                found.append({**self._whole("collective", kind), "started_ns": now_ns, "duration_ns": row[2]})
            else:
                found.append(row)
        return found

    def _text(self, value: Any) -> Any:
        return "\n".join(map(self._line, value)) if type(value) is list else value

    def _line(self, number: Any) -> str:
        line = self._lines.entry(number)
        if type(line) is not str:
            raise MismatchError("must hold texts, and numbers of them must stand for them", ".lines")
        return line

    def _whole(self, kind: str, value: Any) -> Any:
        if type(value) is not dict:
            return value
        self._spend(self._lengths.get(kind, 0) + _OBJECT_CHARACTERS)
        return {**self._usual.get(kind, {}), **value}

    def _spend(self, length: int) -> None:
        self._length += length
        if self._length > _MOST_CHARACTERS:
            raise MismatchError(f"the report would have more than {_MOST_CHARACTERS:,} characters unpacked", ".shared")


class _Entries:
    """A list of a packed report, to which numbers refer."""

    def __init__(self, name: str, values: Any, spend: Callable[[int], None]) -> None:
        if type(values) is not list:
            raise MismatchError("must be a list", f".{name}")
        self._name, self._values, self._spend = name, values, spend
        self._lengths = [len(json.dumps(value)) for value in values]

    def entry(self, number: Any) -> Any:
        """Return the entry of that number; what is no number, unchanged."""
        if type(number) is not int:
            return number
        if not 0 <= number < len(self._values):
            raise MismatchError(f"refers to entry {number} of {len(self._values)}", f".{self._name}")
        self._spend(self._lengths[number])
        return self._values[number]


def _is_row(row: Any) -> bool:
    return type(row) is list and len(row) == 3 and all(type(number) is int for number in row)


def _with(data: Any, name: str, change: Callable[[Any], Any]) -> Any:
    return {**data, name: change(data[name])} if type(data) is dict and name in data else data


def _each(data: Any, name: str, change: Callable[[Any], Any]) -> Any:
    return _with(data, name, lambda items: [change(item) for item in items] if type(items) is list else items)
