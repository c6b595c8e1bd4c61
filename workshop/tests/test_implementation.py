"""The size of `ddp_impl` is counted as its description says."""

from pathlib import Path

from workshop.implementation import measure

SOURCE = """\
@dataclass(frozen=True)
class Value:
    never: bool = False


@dataclass(slots=True)
class Changes:
    flag: bool
    number: int = 0


class Plain:
    switch = True

    def __init__(self) -> None:
        self.on, self.list, other.attribute = False, [], 1

    def turn(self) -> None:
        self.on = self.works = True
        local = False
"""


def test_fields_and_flags_of_objects_that_change_are_counted_once(tmp_path: Path) -> None:
    (tmp_path / "tests").mkdir()
    for name in ("one.py", "tests/test_one.py"):
        (tmp_path / name).write_text(SOURCE)
    found = measure(tmp_path)
    assert (found.lines, found.files) == (20, 1)
    assert (found.fields, found.flags) == (5, 3), "flag, number; on, list, works"
