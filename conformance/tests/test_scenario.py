"""A scenario travels as JSON: it comes back as it was, or an error names what is wrong with it."""

import copy
import functools
import json
import operator
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from conformance.errors import ScenarioError
from conformance.scenario import Fault, Scenario, Step

ONE = Scenario(
    "joins/JOIN-01/one", ("JOIN-01",), "train", options={"static_graph": True},
    schedule=(Step(2), Step(zero_grad="keep")), faults=(Fault("kill", 1),), needs=("join",),
    arguments={"uneven": [1, None]},
)  # fmt: skip
DATA = ONE.to_json()


#: Scenario files as release 0.1.0 wrote them, one of each chapter, with their digests.
RECORDED = Path(__file__).parents[2] / "fixtures" / "scenarios"


def paths(data: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Every place in the scenario but what belongs to the DDP and the program."""
    items = data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list) else ()
    for key, value in items:
        if key not in ("options", "arguments"):
            yield (*path, key)
            yield from paths(value, (*path, key))


def test_scenario_files_of_an_earlier_release_are_still_read() -> None:
    digests = [line.split() for line in (RECORDED / "digests.txt").read_text().splitlines()]
    assert {name for _, name in digests} == {path.name for path in RECORDED.glob("*.json")}
    for digest, name in digests:
        text = (RECORDED / name).read_text()
        assert Scenario.loads(text).digest == digest, f"{name} is another scenario now"
        assert Scenario.loads(text).dumps() == text, f"{name} is written in another way now"


def test_a_scenario_comes_back_as_it_was() -> None:
    assert Scenario.loads(ONE.dumps()) == ONE
    assert Scenario.loads(ONE.dumps()).digest == ONE.digest
    assert Scenario.from_json({"schema_version": 1, "id": "a", "requirements": ["B"], "program": "train"}) == Scenario(
        "a", ("B",), "train"
    )


def test_a_scenario_comes_back_from_a_pickle_as_it_was() -> None:
    back = pickle.loads(pickle.dumps(ONE))
    assert back == ONE
    with pytest.raises(TypeError):
        back.options["static_graph"] = False


@pytest.mark.parametrize("wrong", [{"a": 1}, ["x"], 1.5, "x", True, None, -1])
def test_a_value_of_another_type_is_refused_wherever_it_is(wrong: Any) -> None:
    seen = 0
    for path in paths(DATA):
        data = copy.deepcopy(DATA)
        holder = functools.reduce(operator.getitem, path[:-1], data)
        kind, holder[path[-1]] = type(holder[path[-1]]), wrong
        if path != ("schema_version",) and (type(wrong) is not kind or isinstance(wrong, dict)):
            if kind is float and type(wrong) is int:
                continue
            with pytest.raises(ScenarioError):
                Scenario.from_json(data)
            seen += 1
    assert seen > 15


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (json.dumps({**DATA, "deadline_s": float("nan")}), "NaN is no JSON number"),
        (json.dumps({**DATA, "faults": [{"kind": "kill", "rank": "1"}]}), "faults[0].rank: Expected `int`, got `str`"),
        (json.dumps({**DATA, "faults": [{"kind": "kill"}]}), "faults[0]: Object missing required field `rank`"),
        (json.dumps({**DATA, "schedule": [{"steps": 1}]}), "schedule[0].steps: this field is not known"),
        (json.dumps({**DATA, "faults": [{"kind": "kill", "rank": 2}]}), "fault on rank 2, but world_size is 2"),
        (json.dumps({**DATA, "min_collectives": 2**70}), "is larger than 64 bits"),
        (json.dumps({**DATA, "arguments": {"deep": [10**400]}}), "is larger than 64 bits"),
        (json.dumps({**DATA, "id": "half of a pair: \ud800"}), "surrogates not allowed"),
        (json.dumps({**DATA, "deadline_s": 1e308}), "deadline_s must be > 0 and at most 86400 seconds"),
        (ONE.dumps().rstrip().removesuffix("}") + ', "seed": 7}', "an object has 'seed' twice"),
        ("[" * 100_000, "not valid JSON"),
        (ONE.dumps()[:-50], "the file ends early"),
    ],
)
def test_what_is_wrong_is_named(text: str, message: str) -> None:
    with pytest.raises(ScenarioError) as caught:
        Scenario.loads(text)
    assert message in str(caught.value)
