"""Program `composed`: plays a composed training, judged after every backward and every step."""

import contextlib
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import PrefixStore
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

from conformance.composed import numerics
from conformance.composed.comm_hook import mean_in_wider_numbers
from conformance.composed.modules import DeliberateError
from conformance.composed.refusal import refusal
from conformance.composed.snapshots import AT_THE_END, CONSTRUCTED, OBSERVED
from conformance.composed.trainee import JOIN_TURNS, Trainee, Wrapping
from conformance.composed.training import WITH_BACKWARD, Training
from conformance.composed.transforms import FORWARD_MODE
from conformance.errors import instance
from conformance.observation import Facts, Raised
from conformance.programs import RankContext, program, truth_of
from conformance.programs.bare_group import bare_group
from conformance.scenario import Scenario
from conformance.truth.difference import Difference, difference
from conformance.truth.expected import AnyOf, Raises

#: The value of facts after the refusal.
ENDED = "ended by the refusal before"
#: Options with which a forward may use no parameter on one rank and some on others.
_ALLOW_IDLE_RANKS = ("find_unused_parameters", "static_graph")
#: The exceptions of a refusal; a TypeError, a KeyError or an AssertionError is a bug.
_REFUSALS = Raises(("RuntimeError", "ValueError", "NotImplementedError"))


@program(
    "composed",
    invariants=("same_until_refused", "refuses_together", "leaves_no_trace"),
    preload=FORWARD_MODE,
    speaks_for={CONSTRUCTED: ("COMPOSED-02",), AT_THE_END: ("COMPOSED-02",)},
)
def composed(ctx: RankContext) -> None:
    """Play argument `training`. All ranks run it.

    Observes `<index>.<action>`: all parameters, gradients and buffers after that action; where the DDP refuses, the
    exception, and then ENDED. A refusal in a forward replaces the facts before it if a DDP may refuse late
    (`refusal.Refusal.late`), and on an accelerator, where a rank need not wait for its device in backward to report
    another rank's refusal. A training that a DDP may not refuse raises the exception. Observes the training's
    surroundings (`observable`) as `constructed` and `at the end`.
    """
    training = Training.of(ctx.scenario)
    with _own_group(ctx, training) as own_group:
        _play(ctx, training, own_group)


def _play(ctx: RankContext, training: Training, own_group: dist.ProcessGroup | None) -> None:
    may = refusal(training, ctx.scenario.options)
    kept: dict[str, Any] = {}
    last_synchronised = 0
    refused: Raised | None = None
    phase = ""

    def enter(name: str) -> AbstractContextManager[None]:
        nonlocal phase
        phase = name
        return ctx.phase(name)

    try:
        trainee = Trainee(
            training, ctx.rank, ctx.scenario.seed, _wrapping(ctx, training, own_group), device=ctx.device, phase=enter
        )
        for snapshot in trainee.play():
            last_synchronised = len(kept) if snapshot.synchronised else last_synchronised
            kept[snapshot.name] = snapshot.facts
        if may and ctx.device.type != "cpu":
            phase = "forward"  # which would begin with this check
            getattr(trainee.model, "_check_reducer_finalized", lambda: None)()
    except Exception as error:
        if not may:
            raise
        refused = Raised.of(error)
        if may.late or (phase == "forward" and ctx.device.type != "cpu"):
            kept = dict(list(kept.items())[:last_synchronised])
    names = observed_names(training)
    for name in names:
        if name in kept:
            value = _idle_forwards_may_require_gradients(ctx, trainee, kept[name]) if name == AT_THE_END else kept[name]
            ctx.observe(name, kept[name], must=AnyOf(value, _REFUSALS, ENDED) if may else value)
        elif refused is not None:
            # The truth, too, may refuse: a comm hook that ranks call with gradients of different layouts raises.
            ctx.observe(name, refused if len(kept) == names.index(name) else ENDED, must=AnyOf(_REFUSALS, ENDED))


@contextlib.contextmanager
def _own_group(ctx: RankContext, training: Training) -> Iterator[dist.ProcessGroup | None]:
    if training.beside is None or not training.beside.own_group:
        yield None
        return
    group = instance(dist.new_group(list(range(ctx.world_size))), dist.ProcessGroup)
    yield group
    dist.destroy_process_group(group)


def _wrapping(ctx: RankContext, training: Training, own_group: dist.ProcessGroup | None) -> Wrapping:
    group = {} if own_group is None else {"process_group": own_group}
    options = {} if training.beside is None else training.beside.options
    return Wrapping(
        partial(_wrap, ctx, training),
        lambda module: ctx.wrap_with(module, {**options, **group}),
        ctx.wrap,
        lambda tensor: dist.all_reduce(tensor, group=ctx.process_group),
    )


def _wrap(ctx: RankContext, training: Training, module: nn.Module) -> nn.Module:
    numerics.before_wrapping(training, module)
    options: dict[str, Any] = {**numerics.options_of(training)}
    if training.store:
        options["process_group"] = _over_a_used_store(ctx)
    ignored = getattr(module, "_ddp_params_and_buffers_to_ignore", ())
    blocks = [(name, each) for name, each in module.named_parameters() if name.startswith("blocks.")]
    blocks = [(name, each) for name, each in blocks if name not in ignored]
    delayed = [(name, parameter) for name, parameter in blocks if parameter.requires_grad]
    if training.delays and delayed:
        options["delay_all_reduce_named_params"] = delayed
        options["param_to_hook_all_reduce"] = next(each for each in module.parameters() if each.requires_grad)
    model: Any = ctx.wrap(module, **options)
    if training.comm_hook == "allreduce":
        model.register_comm_hook(None, default_hooks.allreduce_hook)
    elif training.comm_hook == "wider":
        model.register_comm_hook(None, mean_in_wider_numbers)
    numerics.after_wrapping(training, model)
    if training.finalizes:
        ctx.finalize_by_hand(model)
    return model


def _over_a_used_store(ctx: RankContext) -> dist.ProcessGroup:
    """Return a group of all ranks whose store has served a run that an exception ended. All ranks must call it."""
    store = PrefixStore(ctx.scenario.id, dist.distributed_c10d._get_default_store())
    with torch.random.fork_rng(devices=[]):
        module: Any = nn.Sequential(nn.Linear(1, 1)).to(ctx.device)
    model = ctx.wrap_with(module, {"process_group": bare_group(ctx, ctx.process_group, store)})
    model(torch.ones(1, 1, device=ctx.device)).sum().backward()
    module.register_buffer("seen", torch.ones(1, device=ctx.device))
    module[0].weight.register_hook(_end_the_run)
    with contextlib.suppress(DeliberateError):
        model(torch.ones(1, 1, device=ctx.device)).sum().backward()
    return bare_group(ctx, ctx.process_group, store)


def _end_the_run(_: Tensor) -> None:
    raise DeliberateError("the run ends here")


@composed.expects
def _as_over_any_store(scenario: Scenario) -> Mapping[int, Facts]:
    return truth_of(scenario.replace(arguments=replace(Training.of(scenario), store="").to_json()))


def observed_names(training: Training) -> list[str]:
    """Return the names of the facts of `training`, in their order."""
    acts = [f"{index}.{action.kind}" for index, action in enumerate(training.all_actions) if action.kind in OBSERVED]
    return [CONSTRUCTED, *acts, AT_THE_END]


def _idle_forwards_may_require_gradients(ctx: RankContext, trainee: Trainee, end: Mapping[str, Any]) -> Any:
    """Return the expected observables at the end on this rank: the output of an idle forward requires no gradient.

    If ranks may be idle, the output of a synchronised forward may require one, and be otherwise unchanged: so the rank
    takes part in a backward in which another rank has gradients (`docs/decisions/order_of_communication.md`). A
    parameter that is an output stays the module's own.
    """
    synchronised = set(_synchronised_forwards(Training.of(ctx.scenario)))
    alone = ctx.world_size == 1 or not any(ctx.scenario.options.get(name) for name in _ALLOW_IDLE_RANKS)
    must, idle = dict(end), dict[str, Any]()
    for number in trainee.observables.idle_forwards:
        if (seen := end.get(name := f"forward {number}")) is None:
            continue
        parts = [part for part in seen if part.startswith("output") and part.endswith(": requires_grad")]
        must[name] = seen | dict.fromkeys(parts, False) | dict.fromkeys(map(_leaf, parts), True)
        parts = [part for part in parts if seen[part.replace(": requires_grad", ": type")] != "Parameter"]
        if parts and number in synchronised and not alone:
            idle[name] = must[name] | dict.fromkeys(parts, True) | dict.fromkeys(map(_leaf, parts), False)
    return _WithIdleForwards(must, idle) if idle else must


def _leaf(part: str) -> str:
    return part.replace(": requires_grad", ": is_leaf")


class _WithIdleForwards(AnyOf):
    """The value `seen`, in which each forward named in `idle` may have that value instead."""

    def __init__(self, seen: Mapping[str, Any], idle: Mapping[str, Any]) -> None:
        super().__init__(seen, {**seen, **idle})

    def mismatch(self, got: Any) -> Difference | None:
        seen, with_idle = self.choices
        if not isinstance(got, Mapping):
            return difference(seen, got)
        return difference({**seen, **{name: value for name, value in with_idle.items() if got.get(name) == value}}, got)


def _synchronised_forwards(training: Training) -> Iterator[int]:
    """Yield the numbers of the forwards that are not under `no_sync`, `no_grad` or `inference_mode`."""
    number = 0
    for action in training.all_actions:
        if action.kind == "join":
            yield from range(number, number + JOIN_TURNS)
            number += JOIN_TURNS
        elif action.kind in ("forward", "no_sync", "fail"):
            if action.how in (*WITH_BACKWARD, "backward_only") or action.kind == "fail":
                yield number
            number += 1
