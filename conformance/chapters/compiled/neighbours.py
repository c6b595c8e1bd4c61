"""Program `compiled_neighbours`: what compiling a wrapped module must not change in the rest of the process."""

from collections.abc import Mapping
from typing import Any

import torch

from conformance.chapters.compiled.cases import Three
from conformance.chapters.compiled.compiling import PRELOAD, compiling
from conformance.observation import Facts
from conformance.programs import RankContext, program, rank_step
from conformance.scenario import Scenario


@program("compiled_neighbours", invariants=("same_collectives", "leaves_no_trace"), preload=PRELOAD)
def compiled_neighbours(ctx: RankContext) -> None:
    """Train a compiled wrapped module; then compile another of the same class or, with argument `bare`, the same bare.

    Observes `settings`, the names of torch's compiler settings that are not what they were; `graphs`, how many graphs
    the same backend was given for the other module; and `averaged`, whether its backward communicated. All ranks run
    it.
    """
    module, neighbour = (Three("plain").to(ctx.device) for _ in range(2))
    with compiling(ctx) as (inside, watch):
        before = _settings()
        model = inside.wrap(module)
        for index in range(2):
            turn = rank_step(inside, index)
            turn.backward(turn.loss(turn.forward(model, turn.inputs(4, 3))))
        after = _settings()
        ctx.observe("settings", sorted(name for name, value in after.items() if before[name] != value))
        other = module if ctx.arguments.get("bare") else neighbour
        so_far, issued = len(watch.captured), len(ctx.collectives())
        # The bare module's parameters keep the DDP's hooks; inside no_sync these do nothing.
        with model.no_sync(), inside.phase("backward", 2):
            inside.compile(other)(torch.ones(5, 3, device=ctx.device)).sum().backward()
        ctx.observe("graphs", len(watch.captured) - so_far)
        ctx.observe("averaged", len(ctx.collectives()) > issued)


def _settings() -> dict[str, Any]:
    import torch._functorch.config
    import torch._inductor.config

    found = {}
    for module in (torch._dynamo.config, torch._inductor.config, torch._functorch.config):
        for name, value in module.get_config_copy().items():
            found[f"{module.__name__}.{name}"] = repr(value)
    return found


@compiled_neighbours.expects
def _untouched(scenario: Scenario) -> Mapping[int, Facts]:
    facts: Facts = {"settings": [], "graphs": 1, "averaged": False}
    return dict.fromkeys(range(scenario.world_size), facts)
