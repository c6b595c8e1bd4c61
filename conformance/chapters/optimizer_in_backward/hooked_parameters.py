"""Program `hooked_parameters`: hooks of the user's own on the gradients of parameters, some of which step them."""

import warnings
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn, optim

from conformance.errors import present
from conformance.models.integers import with_integer_weights
from conformance.programs import RankContext, program, run_steps, step_on
from conformance.truth.expected import Satisfies

WIDTH = 4
NUM_STEPS = 3
#: So small that no weight moves, and gradients stay exact, whatever the hooks do.
RATE = 2.0**-40

Hook = Callable[[Tensor], None]
_ordinary = step_on(3, WIDTH)


def _steps_and_clears(parameter: Tensor) -> Hook:
    optimizer = optim.SGD([parameter], lr=RATE)

    def hook(_: Tensor) -> None:
        optimizer.step()
        optimizer.zero_grad()

    return hook


def _steps(parameter: Tensor) -> Hook:
    optimizer = optim.SGD([parameter], lr=RATE)
    return lambda _: optimizer.step()


def _by_hand(_: Tensor) -> Hook:
    def hook(parameter: Tensor) -> None:
        parameter.data -= RATE * present(parameter.grad)
        parameter.grad = None

    return hook


def _reads(_: Tensor) -> Hook:
    norms: list[Tensor] = []

    def hook(parameter: Tensor) -> None:
        norms.append(present(parameter.grad).norm())

    return hook


#: Makes the hook of one parameter.
HOOKS: Mapping[str, Callable[[Tensor], Hook]] = {
    "steps_and_clears": _steps_and_clears,
    "steps": _steps,
    "steps_by_hand": _by_hand,
    "reads": _reads,
}


@program("hooked_parameters", invariants=("leaves_no_trace",))
def hooked_parameters(ctx: RankContext) -> None:
    """Train with the hooks that argument `hook` names on every parameter, put there `order` wrapping. All ranks run it.

    With the order `later` the wrapper has trained without them first.

    Observes `answers`, the texts of the warnings about hooks, and, if the hooks step nothing, `step<k>/grad/<name>`.
    Does not apply on devices where the hooks run after the DDP's and find a bucket's memory in `.grad`: on the stream
    that they run on nothing waits for the collective, which is the user's race and no DDP's.
    """
    in_flight = ctx.arguments["order"] == "after" and ctx.scenario.options.get("gradient_as_bucket_view")
    if in_flight and ctx.device.type != "cpu":
        ctx.unsupported("hooks that run after the DDP's would read buckets in flight")
    module = with_integer_weights(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2)), ctx.scenario.seed)
    module.to(ctx.device)
    make = HOOKS[ctx.arguments["hook"]]

    def put() -> None:
        for parameter in module.parameters():
            parameter.register_post_accumulate_grad_hook(make(parameter))

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if ctx.arguments["order"] == "before":
            put()
        model = ctx.wrap(module)
        if ctx.arguments["order"] == "after":
            put()
        if ctx.arguments["order"] == "later":
            run_steps(ctx, module, model, _ordinary, NUM_STEPS)
            put()
        facts = run_steps(ctx, module, model, _ordinary, NUM_STEPS)
    answer: Any = Satisfies("one warning, which names '0.weight'", _is_one_warning, ("0.weight",))
    if ctx.arguments["hook"] == "reads":
        answer = []
        for name, value in facts.items():
            ctx.observe(name, value)
    texts = [str(each.message) for each in caught]
    ctx.observe("answers", [text for text in texts if "register_post_accumulate_grad_hook" in text], must=answer)


def _is_one_warning(got: Any, name: str) -> bool:
    return len(got) == 1 and name in got[0]
