"""Programs about copies of a wrapper (pickled, deep-copied, saved) and about using its bare module."""

import copy
import gc
import io
import pickle
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import BuiltinCommHookType
from torch.nn.modules.utils import consume_prefix_in_state_dict_if_present
from torch.nn.parallel.distributed import _BufferCommHookLocation

from conformance.checkers.protocol import is_gradient
from conformance.errors import present
from conformance.models.integers import RankStep, with_integer_weights
from conformance.models.low_precision import precision_option
from conformance.programs import RankContext, observe_run, program, rank_step
from conformance.programs.storages import marks_of_options, num_storages
from conformance.scenario import Scenario
from conformance.truth.expected import Raises
from conformance.truth.steps import gradients

#: How often `counted_hook` and `counted_buffer_hook` were called: a pickled hook is found again by its name.
_calls: list[str] = []


class Parts(nn.Module):
    """Two layers beside each other, of which a forward uses one or both, and a buffer that adds up the inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(3, 2)
        self.b = nn.Linear(3, 2)
        self.seen: Tensor
        self.register_buffer("seen", torch.zeros(2))

    def forward(self, inputs: Tensor, uses: str) -> Tensor:
        with torch.no_grad():
            self.seen += inputs.sum()
        return torch.stack([self.get_submodule(name)(inputs) for name in uses]).sum(0)


def counted_hook(state, bucket):  # type: ignore[no-untyped-def]  # torch compares annotations with its own types
    """Return twice the mean over the default group, which no DDP does without the hook."""
    _calls.append("gradients")
    work = present(dist.all_reduce(bucket.buffer().div_(dist.get_world_size()), async_op=True))
    return work.get_future().then(lambda future: future.value()[0] * 2)


def counted_buffer_hook(_: None, buffers: Mapping[str, Tensor]) -> list[Any]:
    """Give every rank of the default group rank 0's buffers and 1, which no DDP does without the hook."""
    _calls.append("buffers")
    for buffer in buffers.values():
        dist.broadcast(buffer, 0)
        buffer.add_(1)
    return []


#: What argument `hook` names: registers it with a wrapper.
HOOKS: Mapping[str, Callable[[Any], None]] = {
    "gradients": lambda model: model.register_comm_hook(None, counted_hook),
    "half": lambda model: model._register_builtin_comm_hook(BuiltinCommHookType.FP16_COMPRESS),
    "buffers": lambda model: model._register_buffer_comm_hook(None, counted_buffer_hook),
    "buffers-before": lambda model: model._register_buffer_comm_hook(
        None, counted_buffer_hook, _BufferCommHookLocation.PRE_FORWARD
    ),
}


def _pickled(model: Any) -> Any:
    return pickle.loads(pickle.dumps(model))


def _saved(model: Any) -> Any:
    file = io.BytesIO()
    torch.save(model, file)
    return torch.load(io.BytesIO(file.getvalue()), weights_only=False)


WAYS: Mapping[str, Callable[[Any], Any]] = {"pickle": _pickled, "deepcopy": copy.deepcopy, "save": _saved}

_SETTINGS = (
    "find_unused_parameters", "gradient_as_bucket_view", "static_graph", "forward_sync_buffers", "bucket_bytes_cap",
    "device_ids", "dim",
)  # fmt: skip


def _build(scenario: Scenario) -> Parts:
    return with_integer_weights(Parts(), scenario.seed)


def _backward(scenario: Scenario, model: Any, turn: RankStep, micro: int = 0) -> Tensor:
    uses = "ab"
    if scenario.options.get("find_unused_parameters"):
        uses = "a" if (turn.rank + turn.step) % 2 else "ab"
    output: Tensor = turn.forward(model, turn.inputs(4, 3, micro=micro), uses)
    turn.backward(turn.loss(output, micro))
    return output.detach()


def _learn(module: nn.Module) -> None:
    """Take an optimizer's step; gradients do not depend on the weights."""
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.grad is not None:
                parameter.sub_(parameter.grad * 2.0**-6)


@program("copied_wrapper", invariants=("same_collectives", "nothing_in_flight", "leaves_no_trace"))
def copied_wrapper(ctx: RankContext) -> None:
    """Copy a wrapper as argument `way` says, at the `moment` given, then train the copy and, after it, the original.

    Moments: `constructed`, `trained` (two steps later), `no_sync` (inside it), `gradients` (before they are zeroed),
    `forward` (between forward and backward), `join` (inside that context). `hook` names what is registered first; with
    `twice` the copy is copied once more; `ignored` names what the DDP must ignore. Where the requirement lets a DDP
    raise an error, `outcome` holds all facts, or the exception. All ranks run it.
    """
    moment = ctx.arguments["moment"]
    hook = ctx.arguments.get("hook")
    called = hook not in (None, "half")
    must: dict[str, Any] = {"settings": dict.fromkeys(_SETTINGS, True), "said": True, "hook_called": called}
    for prefix in ("copy", "original"):
        must |= {f"{prefix}/{name}": number for name, number in _marks(ctx).items()}
    refusal = None
    if hook or moment in ("forward", "join"):
        word = {"forward": "backward", "join": "join"}.get(moment, "hook")
        refusal = Raises(("RuntimeError", "TypeError"), (word,))
    observe_run(ctx, lambda: _copy_and_train(ctx), must=must, refusal=refusal)


def _marks(ctx: RankContext) -> dict[str, Any]:
    precision = precision_option(ctx.scenario.options).get("mixed_precision")
    wire = {"wire": [str(precision.communication_dtype).removeprefix("torch.")]} if precision else {}
    if ctx.arguments.get("hook") == "half":
        wire = {"wire": ["float16"]}
    return wire | marks_of_options(ctx.scenario.options, len(list(Parts().parameters())), ctx.world_size)


def _copy_and_train(ctx: RankContext) -> dict[str, Any]:
    _calls.clear()
    scenario, moment = ctx.scenario, ctx.arguments["moment"]
    module = _build(scenario).to(ctx.device)
    module._ddp_params_and_buffers_to_ignore = list(ctx.arguments.get("ignored", ()))  # type: ignore[assignment]
    model: Any = ctx.wrap(module, **precision_option(scenario.options))
    if ctx.arguments.get("hook"):
        HOOKS[ctx.arguments["hook"]](model)
    facts: dict[str, Any] = {}
    for index in range(0 if moment == "constructed" else 2):
        module.zero_grad()
        _backward(scenario, model, rank_step(ctx, index))
        _learn(module)
    if moment != "gradients":
        module.zero_grad()
    before = len(ctx.collectives())
    other = _copy_at(ctx, model, moment, facts)
    if ctx.arguments.get("twice"):
        other = WAYS[ctx.arguments["way"]](other)
    if moment not in ("forward", "join"):  # in which the program communicates itself
        facts["num_collectives"] = len(ctx.collectives()) - before
    facts["class"] = type(other) is type(model)
    facts["settings"] = {name: _setting(other, name) == _setting(model, name) for name in _SETTINGS}
    facts["shared"] = _num_shared(model, other)
    _calls.clear()
    facts |= _train(ctx, "copy", other, 10)
    facts["hook_called"] = bool(_calls)
    module.zero_grad()
    facts |= _train(ctx, "original", model, 20)
    if moment == "join":  # whose end gives every rank the buffers of one of them
        del facts["original/seen"]
    return facts


def _copy_at(ctx: RankContext, model: Any, moment: str, facts: dict[str, Any]) -> Any:
    way = WAYS[ctx.arguments["way"]]
    if moment == "no_sync":
        with model.no_sync():
            return way(model)
    if moment == "forward":
        turn = rank_step(ctx, 2)
        loss = turn.loss(turn.forward(model, turn.inputs(4, 3), "ab"))
        other = way(model)
        turn.backward(loss)
        return other
    if moment == "join":
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            with model.join():
                other = way(model)
        facts["said"] = any("join" in str(each.message) for each in caught)
        return other
    return way(model)


def _setting(model: Any, name: str) -> str:
    return str(getattr(model, name, "not there, as in an older torch"))


def _num_shared(model: nn.Module, other: nn.Module) -> int:
    mine = {tensor.data_ptr() for tensor in (*model.parameters(), *model.buffers())}
    return sum(tensor.data_ptr() in mine for tensor in (*other.parameters(), *other.buffers()))


def _train(ctx: RankContext, prefix: str, model: Any, first: int) -> dict[str, Any]:
    facts: dict[str, Any] = {}
    for index in range(3):
        model.zero_grad()
        before = len(ctx.collectives())
        facts[f"{prefix}{index}/output"] = _backward(ctx.scenario, model, rank_step(ctx, first + index))
        facts |= gradients(f"{prefix}{index}", model.module)
        _learn(model.module)
    reduced = [each for each in ctx.collectives()[before:] if is_gradient(each)]
    found = {
        "num_buckets": len(reduced),
        "wire": sorted({dtype for each in reduced for dtype in each.dtypes}),
        "num_storages": num_storages(model.module),
    }
    facts |= {f"{prefix}/{name}": found[name] for name in _marks(ctx)}
    for name, tensor in (*model.module.named_parameters(), *model.module.named_buffers()):
        facts[f"{prefix}/{name}"] = tensor.detach().clone()
    return facts


@program("copied_module", invariants=("same_collectives", "nothing_in_flight", "leaves_no_trace"))
def copied_module(ctx: RankContext) -> None:
    """Take the bare module out of a wrapper that was trained, as argument `case` says, and train it locally.

    `copy`: a deep copy of it, while the wrapper lives on (and is trained after it); `freed`: itself, after the wrapper
    is gone. Observes gradients, and `num_collectives` while the bare module was trained. All ranks run it.
    """
    module = _build(ctx.scenario).to(ctx.device)
    model: Any = ctx.wrap(module)
    for index in range(2):
        module.zero_grad()
        _backward(ctx.scenario, model, rank_step(ctx, index))
    module.zero_grad()
    if ctx.arguments["case"] == "freed":
        del model
        gc.collect()
        bare: Any = module
    else:
        bare = copy.deepcopy(model.module)
    before = len(ctx.collectives())
    for index in range(3):
        bare.zero_grad()
        _backward(ctx.scenario, bare, rank_step(ctx, 10 + index))
        ctx.observe_gradients(f"bare{index}", bare)
    ctx.observe("num_collectives", len(ctx.collectives()) - before)
    if ctx.arguments["case"] == "copy":
        for name, value in _train(ctx, "original", model, 20).items():
            if "/grad/" in name:
                ctx.observe(name, value)


@program("copied_in_group", invariants=("leaves_no_trace",))
def copied_in_group(ctx: RankContext) -> None:
    """Copy a wrapper of another group than the default one as argument `way` says; observe `answer`."""
    group = dist.new_group(list(range(ctx.world_size)))
    model = ctx.wrap(_build(ctx.scenario).to(ctx.device), process_group=group)
    with ctx.catching("answer", must=Raises(("RuntimeError",), ("default",))):
        WAYS[ctx.arguments["way"]](model)
    dist.barrier(group=ctx.process_group)
    dist.destroy_process_group(group)


@program("carried_state", invariants=("same_collectives", "nothing_in_flight", "leaves_no_trace"))
def carried_state(ctx: RankContext) -> None:
    """Save and load a trained wrapper's state_dict into the module that argument `to` names, and train that.

    `wrapper`: a new wrapper of the same kind; `torch`: torch's own DDP; `from_torch`: from torch's own to a new
    wrapper; `bare`: a bare module, without the prefix. Observes the keys, the keys that load_state_dict reports as
    missing or unexpected, and the training of the receiver. All ranks run it.
    """
    scenario, to = ctx.scenario, ctx.arguments["to"]
    module = _build(scenario).to(ctx.device)
    model: Any = (
        ctx.wrap_in("torch", module, process_group=ctx.process_group) if to == "from_torch" else ctx.wrap(module)
    )
    for index in range(2):
        module.zero_grad()
        _backward(scenario, model, rank_step(ctx, index))
        _learn(module)
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    state = torch.load(io.BytesIO(file.getvalue()), weights_only=True)
    ctx.observe("keys", list(state))
    fresh = _build(scenario.replace(seed=scenario.seed + 1 + ctx.rank)).to(ctx.device)
    receiver: Any = fresh
    if to in ("wrapper", "from_torch"):
        receiver = ctx.wrap(fresh)
    elif to == "torch":
        receiver = ctx.wrap_in("torch", fresh, process_group=ctx.process_group)
    else:
        consume_prefix_in_state_dict_if_present(state, "module.")
    found = receiver.load_state_dict(state)
    ctx.observe("missing", list(found.missing_keys))
    ctx.observe("unexpected", list(found.unexpected_keys))
    for name, tensor in fresh.state_dict().items():
        ctx.observe(f"loaded/{name}", tensor)
    for index in range(2):
        receiver.zero_grad()
        before = len(ctx.collectives())
        _backward(scenario, receiver, rank_step(ctx, 10 + index))
        if ctx.world_size > 1:
            reduced = any(map(is_gradient, ctx.collectives()[before:]))
            ctx.observe(f"step{index}/reduced", reduced, must=to != "bare")
        ctx.observe_gradients(f"step{index}", fresh)
