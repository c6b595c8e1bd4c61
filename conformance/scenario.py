"""`Scenario`: everything that determines a run, as one frozen value that is also a JSON file.

pytest, the command line, `replay`, `explore` and mutants all run the same value, so a failing scenario is a file that
anybody can run. Loading a file executes nothing, and raises `ScenarioError` with the name of a wrong field.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from conformance.codec import MismatchError, decode, encode, parse_object
from conformance.errors import ScenarioError

SCHEMA_VERSION = 1

#: Limits against typing errors: no host can run as many processes, and no rank should hang for a day.
MAX_WORLD_SIZE = 1024
MAX_DEADLINE_S = 86_400.0

ZERO_GRAD = ("none", "zeros", "keep")
FAULT_KINDS = ("kill", "stop", "loop", "slow", "exit", "segfault", "raise")
DTYPES = ("float32", "float64", "float16", "bfloat16", "complex64")

#: How long ranks may go without progress; a scenario that compiles has a longer deadline.
DEFAULT_DEADLINE_S = 20.0


def leading_requirement(scenario_id: str, requirements: Sequence[str]) -> str:
    """Return the requirement in a scenario's id if `requirements` has it, else the first of them, else nothing."""
    parts = scenario_id.split("/")
    return parts[1] if len(parts) == 3 and parts[1] in requirements else next(iter(requirements), "")


@dataclass(frozen=True, slots=True)
class Step:
    """One optimiser step of a schedule.

    The order within a step is: `zero_grad`, then `local_backwards` times forward and backward under `no_sync`, then
    (if `synchronised`) one forward and backward that synchronises, then (if `optimizer`) the optimiser's step.
    """

    local_backwards: int = 0
    synchronised: bool = True
    optimizer: bool = True
    zero_grad: str = "none"

    def __post_init__(self) -> None:
        if self.local_backwards < 0:
            raise ScenarioError(f"local_backwards must be >= 0, got {self.local_backwards}")
        if self.zero_grad not in ZERO_GRAD:
            raise ScenarioError(f"zero_grad must be one of {', '.join(ZERO_GRAD)}, got {self.zero_grad!r}")


@dataclass(frozen=True, slots=True)
class Fault:
    """One injected failure: the harness does `kind` to `rank` when it reaches `at` for the `occurrence`-th time.

    `at` is a phase (`forward`, `backward`, `step`, ...) or `collective`. `occurrence` counts from 0.
    """

    kind: str
    rank: int
    at: str = "backward"
    occurrence: int = 0

    def __post_init__(self) -> None:
        if self.kind not in FAULT_KINDS:
            raise ScenarioError(f"fault kind must be one of {', '.join(FAULT_KINDS)}, got {self.kind!r}")


@dataclass(frozen=True)
class Scenario:
    """One run of one program on `world_size` ranks, and the requirements that it tests.

    `options` are keyword arguments of the DDP under test; `arguments` are read by the program. Both hold JSON only.
    `needs` names capabilities of backend or subject without which the verdict is UNSUPPORTED. If any rank records fewer
    than `min_collectives` collectives, the run exercised nothing and the verdict is HARNESS_ERROR. With `apart` each
    rank runs in its own interpreter, as with a launcher: with its own seed of hashes and its own addresses.
    """

    id: str
    requirements: tuple[str, ...]
    program: str
    model: str = "mlp"
    world_size: int = 2
    options: Mapping[str, Any] = field(default_factory=dict)
    schedule: tuple[Step, ...] = (Step(), Step())
    dtype: str = "float32"
    seed: int = 0
    faults: tuple[Fault, ...] = ()
    needs: tuple[str, ...] = ()
    arguments: Mapping[str, Any] = field(default_factory=dict)
    min_collectives: int = 1
    deadline_s: float = DEFAULT_DEADLINE_S
    recorded: bool = True
    apart: bool = False

    def __post_init__(self) -> None:
        set_field = object.__setattr__
        for name in ("requirements", "schedule", "faults", "needs"):
            set_field(self, name, tuple(getattr(self, name)))
        for name in ("options", "arguments"):
            value = getattr(self, name)
            if not isinstance(value, Mapping):
                raise ScenarioError(f"{name} must be an object, got {type(value).__name__}")
            set_field(self, name, MappingProxyType(dict(value)))
        if not self.id or not isinstance(self.id, str):
            raise ScenarioError("id must be a non-empty string")
        if not self.requirements:
            raise ScenarioError(f"{self.id}: a scenario must name at least one requirement")
        if type(self.world_size) is not int or not 1 <= self.world_size <= MAX_WORLD_SIZE:
            raise ScenarioError(
                f"{self.id}: world_size must be an integer from 1 to {MAX_WORLD_SIZE}, got {self.world_size!r:.40}"
            )
        if self.dtype not in DTYPES:
            raise ScenarioError(f"{self.id}: dtype must be one of {', '.join(DTYPES)}, got {self.dtype!r}")
        if not 0 < self.deadline_s <= MAX_DEADLINE_S:
            raise ScenarioError(
                f"{self.id}: deadline_s must be > 0 and at most {MAX_DEADLINE_S:g} seconds, got {self.deadline_s:g}"
            )
        for fault in self.faults:
            if not 0 <= fault.rank < self.world_size:
                raise ScenarioError(f"{self.id}: fault on rank {fault.rank}, but world_size is {self.world_size}")

    def __reduce__(self) -> tuple[type[Scenario], tuple[Any, ...]]:
        """Pickle the fields: immutable mappings cannot be pickled."""
        values = (getattr(self, one.name) for one in dataclasses.fields(self))
        return Scenario, tuple(dict(value) if isinstance(value, Mapping) else value for value in values)

    @property
    def chapter(self) -> str:
        """The first part of the id: the chapter of the specification that owns this scenario."""
        return self.id.split("/", 1)[0]

    @property
    def leading_requirement(self) -> str:
        """The requirement that the id names, or the first one."""
        return leading_requirement(self.id, self.requirements)

    @property
    def expected_dead(self) -> frozenset[int]:
        """The ranks in argument `doomed`, which the program ends: their death is no finding, a wait for them is."""
        return frozenset(self.arguments.get("doomed", ()))

    @property
    def kind_of_ranks(self) -> tuple[int, bool, bool]:
        """The number of ranks, whether they are recorded, and whether each has its own interpreter."""
        return self.world_size, self.recorded, self.apart

    @property
    def digest(self) -> str:
        """SHA-256 of all fields: two runs with equal digests ran the same scenario."""
        text = json.dumps(self.to_json(), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()

    def replace(self, **changes: Any) -> Scenario:
        """Return a copy with `changes`, validated like a new one."""
        return dataclasses.replace(self, **changes)

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON data; `from_json` gives back an equal scenario."""
        data = {"schema_version": SCHEMA_VERSION, **encode(self)}
        if not self.apart:  # a later field: scenarios without it keep their files and digests
            del data["apart"]
        return data

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> Scenario:
        """Build a scenario from parsed JSON; raises `ScenarioError`, which names the wrong field."""
        rest = dict(data)
        version = rest.pop("schema_version", None)
        if version != SCHEMA_VERSION:
            raise ScenarioError(f"schema_version {version!r} is not supported; this release reads {SCHEMA_VERSION}")
        try:
            return decode(rest, Scenario)
        except MismatchError as error:
            raise ScenarioError(str(error)) from error

    def dumps(self) -> str:
        """Return the scenario as indented JSON text."""
        return json.dumps(self.to_json(), indent=2) + "\n"

    @staticmethod
    def loads(text: str) -> Scenario:
        """Parse JSON text; raises `ScenarioError`, with line and column if the text is truncated or no JSON."""
        try:
            data = parse_object(text, "a scenario")
        except ValueError as error:
            raise ScenarioError(str(error)) from error
        return Scenario.from_json(data)
