"""Program `hook_calls`: when the DDP calls a comm hook, what it passes, and what it does with the result."""

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import GradBucket
from torch.futures import Future

from conformance.errors import ScenarioError, certain, present
from conformance.models.integers import RankStep, with_integer_weights
from conformance.programs import UNSTATED, RankContext, program, rank_step
from conformance.programs.agreement import same_bits_everywhere
from conformance.scenario import Scenario
from conformance.truth.expected import Satisfies

NUM_STEPS = 4

#: What a scenario may require besides right gradients: raw gradients in the buckets; buckets in index order; every
#: parameter once, and no call under no_sync; the bucket's surface; the same buckets on all ranks; one state object;
#: gradients that live in the bucket that the hook saw; lists that the hook may empty.
ASPECTS = ("raw", "order", "once", "surface", "same_buckets", "state", "storage", "lists")

_SHAPES = ((5,), (3, 4), (2, 3, 2), (7,), (1,), (4, 2), (6,), (3,))


class Factors(nn.Module):
    """Parameters of many shapes; each forward multiplies those it is given factors for, so that gradients are those."""

    def __init__(self, dtypes: Sequence[torch.dtype], frozen: Sequence[int]) -> None:
        super().__init__()
        self.weights = nn.ParameterList(
            nn.Parameter(torch.empty(shape, dtype=dtypes[place % len(dtypes)]), requires_grad=place not in frozen)
            for place, shape in enumerate(_SHAPES)
        )

    def forward(self, factors: Sequence[Tensor | None]) -> Tensor:
        terms = [
            (weight * factor).sum().real.to(torch.float32)
            for weight, factor in zip(self.weights, factors, strict=True)
            if factor is not None
        ]
        return torch.stack(terms).sum()


def _build(scenario: Scenario) -> nn.Module:
    dtypes = [getattr(torch, name) for name in scenario.arguments.get("dtypes", ["float32"])]
    module = Factors(dtypes, scenario.arguments.get("frozen", ()))
    return with_integer_weights(module, scenario.seed)


def _is_unused(scenario: Scenario, place: int, rank: int) -> bool:
    """Whether a rank does not use a weight: with argument `unused`, the third on odd ranks and, on all, the fifth.

    With `unused` = "last" all leave out the first two, which are all of the last small bucket.
    """
    unused = scenario.arguments.get("unused")
    if unused == "last":
        return place < 2
    return bool(unused) and (place == 4 or (place == 2 and rank % 2 == 1))


def _backward(scenario: Scenario, model: Any, turn: RankStep, micro: int = 0) -> None:
    factors = [
        None
        if _is_unused(scenario, place, turn.rank)
        else turn.inputs(*weight.shape, micro=100 * micro + place, dtype=weight.dtype)
        for place, weight in enumerate(model.module.weights)
    ]
    turn.backward(turn.loss(turn.forward(model, factors), micro=micro))


@dataclass
class Journal:
    """The state of the hook: what the DDP passed to it in this step."""

    group: Any
    names: Mapping[int, str]
    empties_lists: bool
    calls: list[Any] = field(default_factory=list)
    raw: dict[str, Tensor] = field(default_factory=dict)
    lists: list[tuple[int, int]] = field(default_factory=list)
    unfulfilled: list[tuple[Future[Any], Tensor]] = field(default_factory=list)

    def note(self, bucket: Any) -> None:
        buffer, parameters, views = bucket.buffer(), bucket.parameters(), bucket.gradients()
        names = [self.names[id(parameter)] for parameter in parameters]
        surface = {
            "flat": buffer.dim() == 1,
            "dtype": all(view.dtype == buffer.dtype for view in views),
            "shapes": [view.shape for view in views] == [parameter.shape for parameter in parameters],
            "numel": sum(view.numel() for view in views) == buffer.numel(),
            "views": all(view.untyped_storage().data_ptr() == buffer.untyped_storage().data_ptr() for view in views),
            "index": type(bucket.index()) is int,
            "without a graph": not any(one.requires_grad for one in (buffer, *views)) and buffer.is_leaf,
            "grad mode off": not torch.is_grad_enabled(),
            "autocast off": not torch.is_autocast_enabled(buffer.device.type),
        }
        self.calls.append((bucket.index(), bucket.is_last(), names, surface, buffer.untyped_storage().data_ptr()))
        self.raw |= {name: view.clone() for name, view in zip(names, views, strict=False)}  # "surface" counts them
        if self.empties_lists:
            parameters.clear()
            views.clear()
        self.lists.append((len(bucket.parameters()), len(bucket.gradients())))

    def clear(self) -> None:
        self.calls.clear()
        self.raw.clear()
        self.lists.clear()


def _done(tensor: Tensor) -> Future[Any]:
    future: Future[Any] = Future()
    future.set_result(tensor)
    return future


def _summed(journal: Journal, tensor: Tensor) -> Future[Any]:
    work = present(dist.all_reduce(tensor, group=journal.group, async_op=True))
    total: Future[Any] = work.get_future().then(lambda _: tensor)
    return total


def _average(journal: Journal, bucket: Any) -> Future[Any]:
    size = dist.get_world_size(journal.group)
    mean: Future[Any] = _summed(journal, bucket.buffer()).then(lambda future: future.value() / size)
    return mean


def _in_place(_: Journal, bucket: Any) -> Future[Any]:
    return _done(bucket.buffer().mul_(3))


def _through_views(_: Journal, bucket: Any) -> Future[Any]:
    for view in bucket.gradients():
        view.mul_(2)
    return _done(bucket.buffer())


def _several_collectives(journal: Journal, bucket: Any) -> Future[Any]:
    buffer = bucket.buffer()
    gathered = [torch.empty_like(buffer) for _ in range(dist.get_world_size(journal.group))]
    dist.all_gather(gathered, buffer.clone(), group=journal.group)
    both: Future[Any] = _summed(journal, buffer.clone()).then(lambda got: got.value() + torch.stack(gathered).sum(0))
    return both


def _blocking(journal: Journal, bucket: Any) -> Future[Any]:
    dist.all_reduce(bucket.buffer(), group=journal.group)
    return _done(bucket.buffer())


def _exchanged(_: Journal, bucket: Any) -> Future[Any]:
    bucket.set_buffer(bucket.buffer() * 2)
    return _done(bucket.buffer())


def _future_value(journal: Journal, bucket: Any) -> Future[Any]:
    """Sum, and return what the future of torch's collective holds: of complex numbers their parts."""
    work = present(dist.all_reduce(bucket.buffer(), group=journal.group, async_op=True))
    return work.get_future().then(lambda future: future.value()[0])


def _with_the_last(journal: Journal, bucket: Any) -> Future[Any]:
    """Double each bucket, and fulfil every future once the last bucket is there: that of the first bucket last."""
    future: Future[Any] = Future()
    journal.unfulfilled.append((future, bucket.buffer() * 2))
    while bucket.is_last() and journal.unfulfilled:
        waiting, doubled = journal.unfulfilled.pop()
        waiting.set_result(doubled)
    return future


#: What a hook does.
ANSWERS: Mapping[str, Callable[[Journal, Any], Future[Any]]] = {
    "identity": lambda _, bucket: _done(bucket.buffer()),
    "average": _average,
    "sum": lambda journal, bucket: _summed(journal, bucket.buffer()),
    "new_tensor": lambda _, bucket: _done(bucket.buffer() * 2),
    "in_place": _in_place,
    "through_views": _through_views,
    "several_collectives": _several_collectives,
    "blocking": _blocking,
    "exchanged": _exchanged,
    "future_value": _future_value,
    "with_the_last": _with_the_last,
}

_Respond = Callable[[Any, Any], Any]


class _Callable:
    def __init__(self, respond: _Respond) -> None:
        self.respond = respond

    # Without annotations: these are the user's functions, and most are written like this.
    def method(self, state, bucket):  # type: ignore[no-untyped-def]
        return self.respond(state, bucket)

    def __call__(self, state, bucket):  # type: ignore[no-untyped-def]
        return self.respond(state, bucket)


def _with_extra(respond: _Respond, extra, state, bucket):  # type: ignore[no-untyped-def]
    certain(extra == "extra", "functools.partial passes what it was given")
    return respond(state, bucket)


def _other_name(respond: _Respond) -> Any:
    return lambda state, gradients_of_bucket: respond(state, gradients_of_bucket)


def _positional(respond: _Respond) -> Any:
    return lambda state, bucket, /: respond(state, bucket)


def _star(respond: _Respond) -> Any:
    return lambda *both: respond(*both)


def _annotated(respond: _Respond) -> Any:
    hook: Any = lambda state, bucket: respond(state, bucket)  # noqa: E731
    hook.__annotations__ = {"state": object, "bucket": GradBucket, "return": Future[Tensor]}
    return hook


def _postponed(respond: _Respond) -> Any:
    """Return a hook whose annotations are strings, as with `from __future__ import annotations`."""
    hook: Any = lambda state, bucket: respond(state, bucket)  # noqa: E731
    hook.__annotations__ = {"state": "object", "bucket": "GradBucket", "return": "Future[Tensor]"}
    return hook


def _closed_over_later(respond: _Respond) -> Any:
    """Return a hook that closes over a variable without a value until it is called."""
    index = 0

    def hook(state, bucket):  # type: ignore[no-untyped-def]
        nonlocal index
        index = bucket.index()
        return respond(state, bucket)

    del index
    return hook


#: Kinds of callables: each makes one of a function that does the work.
CALLABLES: Mapping[str, Callable[[_Respond], Any]] = {
    "lambda": lambda respond: lambda state, bucket: respond(state, bucket),
    "method": lambda respond: _Callable(respond).method,
    "object": _Callable,
    "partial": lambda respond: functools.partial(_with_extra, respond, "extra"),
    "other_name": _other_name,
    "positional": _positional,
    "star": _star,
    "annotated": _annotated,
    "postponed": _postponed,
    "closed_over_later": _closed_over_later,
}


@program("hook_calls", invariants=("same_collectives", "nothing_in_flight", "leaves_no_trace"))
def hook_calls(ctx: RankContext) -> None:
    """Train `Factors` with a comm hook that records its calls. All ranks run it.

    Arguments: `answer`, one of `ANSWERS`; `callable`, one of `CALLABLES`; `judge`, which of `ASPECTS` are required;
    `dtypes` of the weights, in turn; `frozen`, positions of weights without gradients; `unused`, to leave some
    weights out, see `_is_unused`; `local_backwards` under no_sync in every step; `registered_at`, the step before
    which the hook is registered.
    """
    answer = ANSWERS[ctx.arguments["answer"]]
    module: Any = _build(ctx.scenario).to(ctx.device)
    names = {id(weight): name for name, weight in module.named_parameters()}
    journal = Journal(ctx.process_group, names, "lists" in ctx.arguments["judge"])
    states: set[int] = set()

    def respond(state: Any, bucket: Any) -> Any:
        states.add(id(state))
        journal.note(bucket)
        answered = answer(journal, bucket)
        storages = {tensor.untyped_storage().data_ptr() for tensor in (bucket.buffer(), *bucket.gradients())}
        journal.calls[-1][3]["views of what the hook leaves there"] = len(storages) == 1
        return answered

    model: Any = ctx.wrap(module)
    for index in range(NUM_STEPS):
        if index == ctx.arguments.get("registered_at", 0):
            model.register_comm_hook(journal, CALLABLES[ctx.arguments.get("callable", "lambda")](respond))
        module.zero_grad()
        journal.clear()
        turn = rank_step(ctx, index)
        for micro in range(ctx.arguments.get("local_backwards", 0)):
            with ctx.no_sync(model):
                _backward(ctx.scenario, model, turn, micro + 1)
        calls_in_no_sync = len(journal.calls)
        _backward(ctx.scenario, model, turn)
        ctx.observe_gradients(f"step{index}", module)
        found = {"calls_in_no_sync": calls_in_no_sync, **_found(ctx, module, journal)}
        if index >= ctx.arguments.get("registered_at", 0):
            for name, must in _judged(ctx.scenario, index, module).items():
                ctx.observe(f"step{index}/{name}", found[name], must=must)
    if "state" in ctx.arguments["judge"]:
        ctx.observe("state", states == {id(journal)}, must=True)


def _found(ctx: RankContext, module: nn.Module, journal: Journal) -> dict[str, Any]:
    """Return what the hook has seen in a step, by the names of facts. All ranks must call it."""
    storages = {name: pointer for _, _, names, _, pointer in journal.calls for name in names}
    in_bucket = [
        parameter.grad is not None and parameter.grad.untyped_storage().data_ptr() == storages.get(name)
        for name, parameter in module.named_parameters()
    ]
    places = {name: place for place, (name, _) in enumerate(module.named_parameters())}
    layout = torch.full((len(places),), -1, device=ctx.device)
    for index, _, names, *_ in journal.calls:
        for position, name in enumerate(names):
            layout[places[name]] = 100 * index + position
    return {
        "raw": journal.raw,
        "indices": [index for index, *_ in journal.calls],
        "is_last": [is_last for _, is_last, *_ in journal.calls],
        "parameters": sorted(name for _, _, names, *_ in journal.calls for name in names),
        "surface": [surface for *_, surface, _ in journal.calls],
        "storage": all(in_bucket),
        "asked again": [
            [len(names), *found] for (_, _, names, *_), found in zip(journal.calls, journal.lists, strict=True)
        ],
        "same_buckets": same_bits_everywhere(ctx, [layout]),
    }


def _judged(scenario: Scenario, index: int, module: nn.Module) -> Mapping[str, Any]:
    judge = scenario.arguments["judge"]
    if unknown := set(judge) - set(ASPECTS):
        raise ScenarioError(f"{scenario.id}: cannot judge {sorted(unknown)}; known: {', '.join(ASPECTS)}")
    trained = sorted(name for name, parameter in module.named_parameters() if parameter.requires_grad)
    possible: dict[str, dict[str, Any]] = {
        "raw": {"raw": UNSTATED},
        # The DDP may leave out a bucket whose parameters no rank uses.
        "order": {"indices": _ASCENDING if scenario.arguments.get("unused") else _FROM_0, "is_last": _LAST_ONCE},
        "once": {"parameters": trained, "calls_in_no_sync": 0},
        "surface": {"surface": _ALL_TRUE},
        "same_buckets": {"same_buckets": True},
        # The first buckets are given up once the order of the gradients is known.
        "storage": {"storage": True} if index >= 2 else {},
        "state": {},
        "lists": {"asked again": _AS_LONG},
    }
    return {name: must for aspect in judge for name, must in possible[aspect].items()}


def _are_from_0(got: list[int]) -> bool:
    return bool(got) and got == list(range(len(got)))


def _are_ascending(got: list[int]) -> bool:
    return bool(got) and got == sorted(set(got))


def _is_last_alone(got: list[bool]) -> bool:
    return bool(got) and got == [False] * (len(got) - 1) + [True]


def _are_all_true(got: list[dict[str, bool]]) -> bool:
    return bool(got) and all(all(each.values()) for each in got)


def _are_as_long(got: list[list[int]]) -> bool:
    return bool(got) and all(len(set(each)) == 1 for each in got)


_FROM_0 = Satisfies("0, 1, 2, ...", _are_from_0)
_ASCENDING = Satisfies("ascending", _are_ascending)
_LAST_ONCE = Satisfies("True for the last bucket alone", _is_last_alone)
_AS_LONG = Satisfies("as many parameters and gradients as before the hook emptied its lists", _are_as_long)
_ALL_TRUE = Satisfies("true in every respect", _are_all_true)
