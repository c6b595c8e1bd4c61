"""Programs about a DDP's surroundings: backends with fewer features, and users and frameworks that access internals."""

import gc
import inspect
import tempfile
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import PrefixStore, Work

from conformance.chapters.compatibility.changed_settings import all_changed
from conformance.models.integers import RankStep, with_integer_weights
from conformance.observation import Facts
from conformance.programs import RankContext, observe_run, program, rank_step, run_steps, truth_of
from conformance.programs.bare_group import bare_group
from conformance.programs.holders import holder_of
from conformance.programs.offered import offered_beside
from conformance.scenario import Scenario
from conformance.truth.expected import Raises

_INVARIANTS = ("same_collectives", "nothing_in_flight", "leaves_no_trace")
_NUM_STEPS = 3


class Counting(nn.Module):
    """Two layers, another that at most the first rank uses, and a buffer that counts forwards."""

    count: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 3)
        self.last = nn.Linear(3, 2)
        self.spare = nn.Linear(3, 2)
        self.register_buffer("count", torch.zeros(1))

    def forward(self, inputs: Tensor, with_spare: bool) -> Tensor:
        with torch.no_grad():
            self.count += 1
        output: Tensor = self.last(self.first(inputs))
        return output + self.spare(inputs) if with_spare else output


def _build(scenario: Scenario) -> nn.Module:
    return with_integer_weights(Counting(), scenario.seed)


def _uses_spare(scenario: Scenario, rank: int) -> bool:
    return not scenario.options.get("find_unused_parameters") or rank == 0


def _step(scenario: Scenario, model: Any, turn: RankStep, num_seen: int = 9) -> Mapping[str, Any]:
    if scenario.arguments.get("served"):  # a buffer that each run has in a size of its own, and not from the beginning
        model.module.register_buffer("seen", model.module.count.new_zeros(num_seen))
    output = turn.forward(model, turn.inputs(4, 3), _uses_spare(scenario, turn.rank))
    if scenario.arguments.get("by_hand"):
        model.require_forward_param_sync = True
        model.reducer._rebuild_buckets()
        model.reducer.prepare_for_backward([output] if scenario.options.get("find_unused_parameters") else [])
    turn.backward(turn.loss(output))
    return {"count": model.module.count.clone()}


@contextmanager
def _without_results() -> Iterator[None]:
    """Make every Work raise in `result`, as backends may that do not override it."""

    def result(work: Any) -> Any:
        raise NotImplementedError("this backend's Work has no result()")

    before = Work.result
    Work.result = result  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        Work.result = before  # type: ignore[method-assign]


@program("compatible_training", invariants=_INVARIANTS)
def compatible_training(ctx: RankContext) -> None:
    """Train three steps: with `no_results` on groups whose Work has none, with `by_hand` preparing backward once more.

    With `bare_group` the wrapper is given a group that was made without torch.distributed; with `served`, one whose
    store has served earlier runs, each of which ended as it says. Observes gradients and the buffer; with `changed`, in
    a process with other settings than usual, also which of these are `changed` then. All ranks run it.
    """
    group = {"process_group": bare_group(ctx, ctx.process_group)} if ctx.arguments.get("bare_group") else {}
    if served := ctx.arguments.get("served"):
        store = PrefixStore(ctx.scenario.id, dist.distributed_c10d._get_default_store())
        for ending in served.split("-"):
            _earlier_run(ctx, ending, bare_group(ctx, ctx.process_group, store))
        group = {"process_group": bare_group(ctx, ctx.process_group, store)}
    module = _build(ctx.scenario).to(ctx.device)
    others = all_changed() if ctx.arguments.get("changed") else nullcontext(list[str]())
    with others as changed, _without_results() if ctx.arguments.get("no_results") else nullcontext():
        model = ctx.wrap(module, **group)
        observe_run(ctx, lambda: run_steps(ctx, module, model, lambda m, t: _step(ctx.scenario, m, t), _NUM_STEPS))
    if ctx.arguments.get("changed"):
        ctx.observe("changed", changed)


def _earlier_run(ctx: RankContext, ending: str, group: dist.ProcessGroup) -> None:
    """Train two steps over `group`; they end the run as they should, or the second raises on every rank (`raised`)."""
    module = _build(ctx.scenario).to(ctx.device)
    model = ctx.wrap(module, process_group=group)
    for index in range(2):
        if raises := ending == "raised" and index == 1:
            next(module.parameters()).register_hook(_refuse)
        with suppress(ArithmeticError) if raises else nullcontext():
            _step(ctx.scenario, model, rank_step(ctx, index), num_seen=len(ending))


def _refuse(_: torch.Tensor) -> None:
    raise ArithmeticError("the run ends here")


@compatible_training.expects
def _as_without(scenario: Scenario) -> Mapping[int, Facts]:
    """Return the same training's truth on ordinary groups, with nothing prepared by hand."""
    usual = truth_of(scenario.replace(program="compatible_training", arguments={}))
    changed: Facts = {"changed": []} if scenario.arguments.get("changed") else {}
    return {rank: {**facts, **changed} for rank, facts in usual.items()}


@program("dropped_wrapper", invariants=_INVARIANTS)
def dropped_wrapper(ctx: RankContext) -> None:
    """Train three steps and drop the wrapper and, unless argument `keeps` is set, the module.

    Observes `alive`: parameters that live on, and who holds them. Of a kept module it observes `hooks` instead:
    what holds hooks that it did not hold before. With `at_once`, garbage is not collected. All ranks run it.
    """
    module = _build(ctx.scenario).to(ctx.device)
    before = _hooked(module)
    collect = (lambda: 0) if ctx.arguments.get("at_once") else gc.collect
    with _uncollected():
        _train_and_drop(ctx, module)
        # A thread of autograd's own, which a device has, drops a backward at the latest when it runs another one.
        torch.ones((), device=ctx.device, requires_grad=True).clone().backward()
        collect()
        if ctx.arguments.get("keeps"):
            ctx.observe("hooks", sorted(_hooked(module) - before), must=[])
            return
        parameters = {name: weakref.ref(one) for name, one in module.named_parameters()}
        del module
        collect()
        alive = {name: one for name, reference in parameters.items() if (one := reference()) is not None}
    held: dict[str, list[str]] = {}
    for name, one in alive.items():
        held.setdefault(holder_of(one, [alive]), []).append(name)
    ctx.observe("alive", [f"{', '.join(names)}: held by {holder}" for holder, names in held.items()], must=[])


@contextmanager
def _uncollected() -> Iterator[None]:
    """Have Python free only what nothing refers to, in the block."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _train_and_drop(ctx: RankContext, module: nn.Module) -> None:
    model = ctx.wrap(module)
    run_steps(ctx, module, model, lambda wrapped, turn: _step(ctx.scenario, wrapped, turn), _NUM_STEPS)


def _hooked(module: nn.Module) -> set[str]:
    """Return which parts and parameters hold hooks, in which of torch's tables."""
    tables = [*(name for name in vars(nn.Module()) if name.endswith("_hooks")), "_post_accumulate_grad_hooks"]
    parts = (*module.named_modules(), *module.named_parameters())
    return {f"{name}: {table}" for name, part in parts for table in tables if getattr(part, table, None)}


@program("moved_arguments", invariants=("leaves_no_trace",))
def moved_arguments(ctx: RankContext) -> None:
    """Call `to_kwargs`; observe its result, the device of its tensors, and which methods exist. All ranks run it."""
    model: Any = ctx.wrap(_build(ctx.scenario).to(ctx.device))
    inputs = (torch.ones(2), [torch.zeros(1), "text"], 3)
    moved_inputs, moved_keywords = model.to_kwargs(inputs, {"more": torch.ones(1), "flag": True}, ctx.device.index or 0)
    ctx.observe("inputs", list(moved_inputs))
    ctx.observe("keywords", list(moved_keywords))
    tensors = (moved_inputs[0][0], moved_inputs[0][1][0], moved_keywords[0]["more"])
    ctx.observe("moved", [tensor.device.type == ctx.device.type for tensor in tensors])
    ctx.observe(
        "methods", [name for name in ("to_kwargs", "scatter", "gather") if callable(getattr(model, name, None))]
    )


@moved_arguments.expects
def _moved_arguments(scenario: Scenario) -> Mapping[int, Facts]:
    facts = {
        "inputs": [[torch.ones(2), [torch.zeros(1), "text"], 3]],
        "keywords": [{"more": torch.ones(1), "flag": True}],
        "moved": [True] * 3,
        "methods": ["to_kwargs", "scatter", "gather"],
    }
    return dict.fromkeys(range(scenario.world_size), facts)


class _Referring(nn.Module):
    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.inner = module

    def forward(self, inputs: Tensor, with_spare: bool) -> Any:
        """Return an RRef of rows of 2, which this process owns; the rows themselves where there is no RPC."""
        output = self.inner(inputs, with_spare)
        return dist.rpc.RRef(output) if dist.rpc.api._is_current_rpc_agent_set() else output  # type: ignore[attr-defined]


@contextmanager
def _alone_in_rpc() -> Iterator[None]:
    """Initialise RPC with this process as the only worker: an RRef needs an owner, and no other worker."""
    with tempfile.TemporaryDirectory() as directory:
        meeting = f"file://{Path(directory) / 'rpc'}"
        options = dist.rpc.TensorPipeRpcBackendOptions(init_method=meeting)
        dist.rpc.init_rpc("owner", rank=0, world_size=1, rpc_backend_options=options)
        try:
            yield
        finally:
            dist.rpc.shutdown()


def _referred_step(ctx: RankContext, model: Any, turn: RankStep) -> Mapping[str, Any]:
    def loss(micro: int) -> Tensor:
        output = turn.forward(model, turn.inputs(4, 3, micro=micro), _uses_spare(ctx.scenario, turn.rank))
        return turn.loss(output if isinstance(output, Tensor) else output.local_value(), micro=micro)

    if ctx.arguments.get("distributed"):
        found = _distributed(model.module, turn, lambda: loss(0))
        return {f"distributed/{name}": gradient for name, gradient in found.items()}
    awaited = loss(0)
    if ctx.arguments.get("local_between"):
        with ctx.no_sync(model):
            between = loss(1)
        turn.backward(between)
    turn.backward(awaited)
    return {}


def _distributed(module: nn.Module, turn: RankStep, loss: Callable[[], Tensor]) -> dict[str, Tensor]:
    """Return the gradients that torch.distributed.autograd leaves in the context of a forward; without RPC, `.grad`."""
    named = {name: parameter for name, parameter in module.named_parameters() if parameter.requires_grad}
    if dist.rpc.api._is_current_rpc_agent_set():  # type: ignore[attr-defined]
        with dist.autograd.context() as number:
            awaited = loss()
            with turn.phase("backward"):
                dist.autograd.backward(number, [awaited])  # type: ignore[attr-defined]
            found: Mapping[Tensor, Tensor] = dist.autograd.get_gradients(number)  # type: ignore[attr-defined]
    else:
        turn.backward(loss())
        found = {one: one.grad for one in named.values() if one.grad is not None}
        module.zero_grad()
    return {name: found[one] for name, one in named.items() if one in found}


@program("remote_references", invariants=("same_collectives", "nothing_in_flight"))
def remote_references(ctx: RankContext) -> None:
    """Train three steps of a module that returns an RRef. Observes gradients. All ranks run it.

    With argument `rpc` false it returns what the RRef would hold. With `local_between` a forward and a backward under
    no_sync lie between a step's forward and its backward; with `distributed` that is torch.distributed.autograd's, and
    its gradients are observed.
    """
    module = _Referring(_build(ctx.scenario)).to(ctx.device)
    with _alone_in_rpc() if ctx.arguments.get("rpc", True) else nullcontext():
        observe_run(
            ctx,
            lambda: run_steps(ctx, module, ctx.wrap(module), lambda m, t: _referred_step(ctx, m, t), _NUM_STEPS),
        )


@remote_references.expects
def _of_rows(scenario: Scenario) -> Mapping[int, Facts]:
    return truth_of(scenario.replace(arguments={**scenario.arguments, "rpc": False}))


@program("documented_names")
def documented_names(ctx: RankContext) -> None:
    """Observe `undocumented`: public names of the wrapper's class that have no docstring. All ranks run it."""
    cls = type(ctx.wrap(_build(ctx.scenario).to(ctx.device)))
    public = {
        name: value
        for base in cls.__mro__
        if base not in (nn.Module, object)
        for name, value in vars(base).items()
        if not name.startswith("_") and (callable(value) or isinstance(value, (property, classmethod, staticmethod)))
    }
    # forward overrides a method of Module, and inherits its documentation.
    missing = [f"{cls.__name__}.{name}" for name in sorted(public) if not inspect.getdoc(getattr(cls, name))]
    ctx.observe("undocumented", missing + ([] if inspect.getdoc(cls) else [cls.__name__]), must=[])


class _Looking(Counting):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, int]] = []
        self.boxed = False

    def forward(self, inputs: Tensor, with_spare: bool) -> Any:
        """Return rows of 2; if it is `boxed`, in a list in a dictionary."""
        weight: Any = self.first.weight
        local = weight.to_local() if hasattr(weight, "to_local") else weight
        placements = ", ".join(map(str, getattr(weight, "placements", ("plain",))))
        self.seen.append((placements, local.data_ptr()))
        rows = super().forward(inputs, with_spare)
        return {"rows": [rows]} if self.boxed else rows


@program("replicated_views", invariants=("same_collectives", "nothing_in_flight"))
def replicated_views(ctx: RankContext) -> None:
    """Train in a block of replicated parameters; observe gradients, what forward saw, and the state afterwards.

    `outputs`: the classes of two outputs in the block, the second one in a dictionary.
    """
    module: Any = with_integer_weights(_Looking(), ctx.scenario.seed).to(ctx.device)
    before = dict(module.named_parameters())
    storage = module.first.weight.data_ptr()
    model: Any = ctx.wrap(module)
    replicated = offered_beside(type(model), "replicated_parameters")
    if replicated is None:
        raise AttributeError(f"expected a function replicated_parameters in the package of {type(model)}")
    with replicated(model):
        observe_run(ctx, lambda: run_steps(ctx, module, model, lambda m, t: _step(ctx.scenario, m, t), _NUM_STEPS))
        plain = model(inputs := rank_step(ctx, 0).inputs(4, 3), False)
        module.boxed = True
        ctx.observe("outputs", [type(each).__name__ for each in (plain, model(inputs, False)["rows"][0])])
    ctx.observe("seen", sorted({placements for placements, _ in module.seen}))
    ctx.observe("same_storage", all(pointer == storage for _, pointer in module.seen))
    ctx.observe("unchanged", all(before[name] is parameter for name, parameter in module.named_parameters()))


@replicated_views.expects
def _replicated(scenario: Scenario) -> Mapping[int, Facts]:
    after = {"seen": ["R"], "same_storage": True, "unchanged": True, "outputs": ["Tensor", "Tensor"]}
    return {rank: {**facts, **after} for rank, facts in _as_without(scenario).items()}


class _SharedSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        total = values.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        total = grads[0].contiguous().clone()
        dist.all_reduce(total, group=ctx.group)
        return total, None


class _Centred(nn.Module):
    """Layers with a normalisation between them that takes from each feature its sum over the whole batch."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 3)
        self.last = nn.Linear(3, 2)

    def forward(self, inputs: Tensor, group: dist.ProcessGroup) -> Tensor:
        hidden = self.first(inputs)
        total: Any = _SharedSum.apply(hidden.sum(0), group)
        output: Tensor = self.last(hidden + total)
        return output


@program("synchronised_statistics", invariants=_INVARIANTS)
def synchronised_statistics(ctx: RankContext) -> None:
    """Train three steps of a module that sums its activations over all ranks. Observes gradients. All ranks run it."""
    module = with_integer_weights(_Centred(), ctx.scenario.seed).to(ctx.device)

    def step(model: Any, turn: RankStep) -> None:
        turn.backward(turn.loss(turn.forward(model, turn.inputs(4, 3), ctx.process_group)))

    observe_run(ctx, lambda: run_steps(ctx, module, ctx.wrap(module), step, _NUM_STEPS))


class _WithGhost(Counting):
    """Has a buffer on a device of another type, which forward does not read."""

    ghost: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("ghost", torch.empty(2, device="meta"))


@program("misplaced_buffer", invariants=_INVARIANTS)
def misplaced_buffer(ctx: RankContext) -> None:
    """Wrap and train a module with a buffer elsewhere. Observes `outcome`: gradients, or the refusal. All ranks."""
    module: Any = with_integer_weights(_WithGhost(), ctx.scenario.seed)
    for part in module.children():
        part.to(ctx.device)
    module.count = module.count.to(ctx.device)
    observe_run(
        ctx,
        lambda: run_steps(ctx, module, ctx.wrap(module), lambda m, t: _step(ctx.scenario, m, t), _NUM_STEPS),
        refusal=Raises(("ValueError", "RuntimeError"), ("ghost",)),
    )
