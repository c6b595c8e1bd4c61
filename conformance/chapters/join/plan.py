"""`UnevenPlan`: how a training goes in which ranks run out of data at different times."""

from __future__ import annotations

from dataclasses import dataclass

from conformance.errors import ScenarioError
from conformance.scenario import Scenario


@dataclass(frozen=True)
class UnevenPlan:
    """How a training on uneven inputs goes; read from a scenario's `arguments`.

    `num_inputs[r]` is how many inputs rank r has in each join context, of which `contexts` follow each other. Every
    `sync_every`-th input of a rank is synchronised and followed by an optimizer step, the others run under `no_sync`.
    `evaluate`: before each input a forward under `no_grad`. `even_steps` steps of all ranks follow outside of any
    context. `divide_by_initial_world_size` is the context's option. `hook`: a comm hook divides by the initial world
    size and doubles.
    """

    num_inputs: tuple[int, ...]
    contexts: int = 1
    sync_every: int = 1
    evaluate: bool = False
    even_steps: int = 0
    divide_by_initial_world_size: bool = True
    hook: bool = False

    @staticmethod
    def of(scenario: Scenario) -> UnevenPlan:
        """Read the plan; other arguments are the program's own. Raises `ScenarioError` if ranks are missing."""
        known = {name: scenario.arguments[name] for name in UnevenPlan.__annotations__ if name in scenario.arguments}
        plan = UnevenPlan(**{**known, "num_inputs": tuple(scenario.arguments["num_inputs"])})
        if len(plan.num_inputs) != scenario.world_size:
            raise ScenarioError(f"{scenario.id}: num_inputs of {len(plan.num_inputs)} ranks for {scenario.world_size}")
        return plan

    def active(self, index: int) -> list[int]:
        return [rank for rank, count in enumerate(self.num_inputs) if index < count]

    def last_joiners(self) -> list[int]:
        return [rank for rank, count in enumerate(self.num_inputs) if count == max(self.num_inputs)]

    def step_number(self, context: int, index: int) -> int:
        """Return the step number of input `index` of a context; numbers continue from one context to the next."""
        return context * max(self.num_inputs) + index

    def is_synchronised(self, index: int) -> bool:
        return (index + 1) % self.sync_every == 0
