"""`PlainDDP`: what a DDP must do, said once and as plainly as possible; every other DDP is measured against it.

There are no buckets, nothing overlaps, and nothing depends on the order in which gradients come. Ranks meet in four
places: at construction (rank 0's state goes to all), before a forward (rank 0's buffers), at the end of a backward
(each parameter that any rank used gets the mean of all ranks' gradients), and in a join context. Ranks bring values to
a meeting and take values away from it, so it does not matter how they meet: `Place` says what is needed.

Sources are torch's documentation of DistributedDataParallel (torch 2.13), its design note "Distributed Data Parallel",
and the issues named at a rule.
"""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join, Joinable
from torch.distributed.optim.apply_optimizer_in_backward import param_to_optim_hook_handle_map
from torch.nn.parallel.distributed import _BufferCommHookLocation

from conformance.own_mistake import present
from conformance.truth.backwards import backwards_of_this_rank
from conformance.truth.casts import LowPrecision, map_tensors
from conformance.truth.means import mean_of
from conformance.truth.plain_bucket import PlainBucket
from conformance.truth.plain_join import PlainJoin, PlainJoinHook

#: The gradients that ranks take away, by the names of their parameters; None where a comm hook is to reduce.
Means = dict[str, Tensor | None]


@dataclass(frozen=True)
class Brought:
    """What a rank brings: its gradients, what it has used since the last mean, and whether any gradient came now."""

    gradients: Mapping[str, Tensor]
    used: frozenset[str]
    has_some: bool


_NOTHING = Brought({}, frozenset(), has_some=False)


class Place(Protocol):
    """Where the ranks of a group meet: each brings a value and takes one away."""

    def rank(self) -> int:
        """Return this rank's number in the group."""

    def size(self) -> int:
        """Return the number of ranks."""

    def come(self, of: object, what: str, value: Any, combine: Callable[[list[Any]], Sequence[Any]]) -> Any:
        """Bring `value`; the result is for `outcome`. `combine` turns what ranks brought into what each gets."""

    def outcome(self, meeting: Any) -> Any:
        """Return what this rank gets; waits for the others."""


class PlainDDP(nn.Module, Joinable):
    """Averages the gradients of `module` over the ranks of a place at the end of every synchronised backward.

    All ranks must build it, run forwards and backwards, and call its methods equally often.
    """

    def __init__(self, module: nn.Module, place: Place, **options: Any) -> None:
        super().__init__()
        self.module = module
        self.require_backward_grad_sync = True
        self._ignored = frozenset(getattr(module, "_ddp_params_and_buffers_to_ignore", ()))
        self._may_be_unused = bool(options.get("find_unused_parameters") or options.get("static_graph"))
        self._casts = LowPrecision.of(options.get("mixed_precision"))
        self._choose_buffers(options)
        self._begin(place)
        if not self._averaged:
            raise RuntimeError("no parameter of the module requires a gradient")
        if options.get("init_sync", True):
            self.share_state(0)
        self._casts.convert_buffers(module, self._ignored)
        self._casts.stay_in_backward(module)

    def _begin(self, place: Place) -> None:
        Joinable.__init__(self)
        self.place = place
        self._of = next(_wrappers_of(place))
        self._divisor = place.size()
        self._hook: Callable[[Any], Any] | None = None
        self._buffer_hook: tuple[Any, Callable[[Mapping[str, Tensor]], Any]] | None = None
        self._used: set[str] = set()
        self._awaits_backward = False
        self._buffers_are_due = True
        self._optimizers_are_ours = False
        self.forget_backward()
        self._averaged: dict[str, nn.Parameter] = {}
        self._known: dict[str, nn.Parameter] = {}
        self._listen()
        self._backwards = backwards_of_this_rank()
        self._backwards.add(self)

    # -- copies: a wrapper of its own over the default group, without what was registered (`__getstate__`, torch) -----

    def __getstate__(self) -> dict[str, Any]:
        """Return what a copy has of its original."""
        own = ("place", "_backwards", "_hook", "_buffer_hook", "_join_config")
        return {name: value for name, value in vars(self).items() if name not in own}

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        """Begin as a copy."""
        super().__setstate__(dict(state))
        self._begin(self.place_of(dist.group.WORLD))

    @staticmethod
    def place_of(group: Any) -> Place:
        """Return where the ranks of a process group meet: a plain group is such a place."""
        place: Place = group
        return place

    # -- state: all ranks begin with rank 0's parameters and buffers ("Construction", design note) --------------------

    def share_state(self, root: int) -> None:
        """Give every rank the parameters of `root`, frozen ones too, and its buffers; not what is to be ignored."""
        tensors: dict[str, Tensor] = {**dict(self.module.named_parameters())}
        if self._shares_buffers_at_first:
            tensors |= dict(self.module.named_buffers())
        self._share("state", tensors, root)

    def _share(self, what: str, tensors: Mapping[str, Tensor], root: int) -> None:
        mine = {name: tensor for name, tensor in tensors.items() if name not in self._ignored}
        brought = {name: _copy(tensor) for name, tensor in mine.items()}
        theirs = self._meet(what, brought, lambda all_brought: [all_brought[root]] * len(all_brought))
        if self.place.rank() != root:
            with torch.no_grad():
                for name, tensor in mine.items():
                    tensor.data.copy_(theirs[name])  # what autograd has saved of a buffer does not change by it

    # -- buffers: rank 0's before a forward, if the forward before it was synchronised (`forward_sync_buffers`) -------

    def _choose_buffers(self, options: Mapping[str, Any]) -> None:
        """`broadcast_buffers`, the older name, also says whether they are shared at first."""
        older, newer = options.get("broadcast_buffers"), options.get("forward_sync_buffers")
        self.forward_sync_buffers = bool(newer if newer is not None else older is None or older)
        self._shares_buffers_at_first = newer is not None or older is None or bool(older)

    def _share_buffers(self, root: int) -> None:
        if self._buffers_need_it and self._buffer_hook is None:
            self._share("buffers", dict(self.module.named_buffers()), root)
        self._ask_buffer_hook(_BufferCommHookLocation.PRE_FORWARD)

    @property
    def _buffers_need_it(self) -> bool:
        return self.forward_sync_buffers and self._buffers_are_due and next(self.module.buffers(), None) is not None

    def _register_buffer_comm_hook(
        self, state: Any, hook: Callable[[Any, Mapping[str, Tensor]], Any],
        comm_hook_location: Any = _BufferCommHookLocation.POST_FORWARD,
    ) -> None:  # fmt: skip
        """Let `hook(state, buffers)` do what is to be done with buffers, before or after a forward."""
        self._buffer_hook = comm_hook_location, lambda buffers: hook(state, buffers)

    def _ask_buffer_hook(self, location: Any) -> None:
        if self._buffer_hook is not None and self._buffer_hook[0] == location and self._buffers_need_it:
            self._buffer_hook[1](dict(self.module.named_buffers()))

    # -- forward ------------------------------------------------------------------------------------------------------

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Return what the module returns. Its backward is synchronised unless it runs under `no_sync` or `no_grad`.

        That is decided here, wherever the backward runs ("no_sync", documentation). Of several forwards before one
        backward all belong to it.
        """
        self._listen()
        self._take_over_optimizers()
        if torch._C._current_graph_task_id() == -1:
            self._backwards.forget()
        synchronises = torch.is_grad_enabled() and self.require_backward_grad_sync
        self._share_buffers(self._agree_in_join(synchronises))
        self._buffers_are_due = synchronises
        output = self._casts.call(self.module, inputs, kwargs, self._ignored)
        self._ask_buffer_hook(_BufferCommHookLocation.POST_FORWARD)
        if synchronises:
            self._awaits_backward = True
            output = self._asking_for_gradients(output)
        for tensor in _tensors(output):
            if tensor.requires_grad and not isinstance(tensor, nn.Parameter):
                tensor.register_hook(partial(self._output_reached, synchronises, self._leads_to_mine(tensor)))
        return output

    def _leads_to_mine(self, tensor: Tensor) -> bool:
        """Whether a backward from `tensor` brings a gradient of a parameter here; one that nothing hides."""
        mine = set(map(id, self._averaged.values()))
        waiting, seen = [tensor.grad_fn], set[Any]()
        while waiting:
            if (node := waiting.pop()) is not None and node not in seen:
                seen.add(node)
                if id(getattr(node, "variable", None)) in mine:
                    return True
                waiting += [following for following, _ in node.next_functions]
        return False

    def _asking_for_gradients(self, output: Any) -> Any:
        """Return the output, which asks for a gradient even where this rank used no parameter.

        Other ranks may have used some: this one must have a backward, too, so that it comes to the mean.
        """
        if not self._may_be_unused or any(tensor.requires_grad for tensor in _tensors(output)):
            return output
        return map_tensors(_asking, output)

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Let forwards within the block be local: their gradients are accumulated, and averaged with the next ones."""
        before, self.require_backward_grad_sync = self.require_backward_grad_sync, False
        try:
            yield
        finally:
            self.require_backward_grad_sync = before

    # -- backward -----------------------------------------------------------------------------------------------------

    def _listen(self) -> None:
        """Notice every gradient: a parameter is used once it gets one, in a local backward too, till the next mean."""
        for name, parameter in self.module.named_parameters():
            if self._known.get(name) is parameter or name in self._ignored or not parameter.is_leaf:
                continue
            self._known[name] = parameter
            if parameter.requires_grad:
                self._averaged[name] = parameter
                self._used.discard(name)
                parameter.register_post_accumulate_grad_hook(lambda parameter, name=name: self._came(name, parameter))

    def _came(self, name: str, parameter: Tensor) -> None:
        if parameter.requires_grad:  # else it was frozen after the forward, and nothing has come
            self._used.add(name)
            self._has_gradients = True
            if self._awaits_backward:
                self._backwards.reached()

    def _output_reached(self, synchronises: bool, leads_to_mine: bool, _: Any) -> None:
        if not synchronises:
            self._is_local = True
            return
        self._is_reached = True
        self._needs_no_gradients |= not leads_to_mine
        self._backwards.reached()

    def forget_backward(self) -> None:
        """Forget what was noticed of the last backward."""
        self._is_reached = self._needs_no_gradients = self._is_local = self._has_gradients = False

    @property
    def takes_part(self) -> bool:
        """Whether the backward that is over is one of this wrapper's.

        It is if it reached an output of a synchronised forward; and if it is the first after one that brought gradients
        and reached no output: outputs may hide in objects, and a loss may use parameters that it did not get by way of
        an output. It is none if it brought nothing where it should have: `torch.autograd.grad` accumulates nothing.
        """
        if self._is_reached:
            return self._has_gradients or self._needs_no_gradients
        return self._awaits_backward and self._has_gradients and not self._is_local

    def bring_gradients(self) -> Any:
        """Bring what this rank has at the end of a backward; to be done before anything of it is handed out."""
        mine = {name: _copy(one.grad) for name, one in self._averaged.items() if one.grad is not None}
        return self._come_for_means(Brought(mine, frozenset(self._used), self._has_gradients))

    def _come_for_means(self, brought: Brought) -> Any:
        return self.place.come(self._of, "gradients", brought, self._means)

    def _means(self, ranks: Sequence[Brought]) -> list[Means | None]:
        """Return the mean of each parameter that any rank has used; None if no rank has got a gradient of any.

        A rank that has no gradient of such a parameter counts as zero. A parameter that nobody has used is left alone:
        its gradient stays what it is, or None (`find_unused_parameters`, documentation).
        """
        if not any(each.has_some for each in ranks):
            return [None] * len(ranks)
        means: Means = {}
        for name in self._averaged:
            gradients = [each.gradients[name] for each in ranks if name in each.gradients]
            if gradients and any(name in each.used for each in ranks):
                wire = self._casts.communication_dtype
                means[name] = mean_of(gradients, self._divisor, wire) if self._hook is None else None
        return [means] * len(ranks)

    def take_means(self, meeting: Any) -> None:
        """Replace this rank's gradients by the means, and step optimizers that were given to single parameters."""
        means: Means | None = self.place.outcome(meeting)
        if means is None:
            return
        self._awaits_backward = False
        self._used.clear()
        for name, mean in means.items():
            parameter = self._averaged[name]
            parameter.grad = _laid_out(self._ask_hook(name) if mean is None else mean, parameter)
        self._step_optimizers(means)

    # -- comm hooks: what the hook's future holds is the gradient, not divided ("DDP Communication Hooks") ------------

    def register_comm_hook(self, state: Any, hook: Callable[[Any, Any], Any]) -> None:
        """Let `hook(state, bucket)` reduce; here each parameter is a bucket of its own, in order of their names."""
        self._hook = lambda bucket: hook(state, bucket)

    def _register_builtin_comm_hook(self, kind: Any) -> None:
        """Average as ever for ALLREDUCE, in half precision for FP16_COMPRESS."""
        if "FP16" in str(kind):
            self._casts.communication_dtype = torch.float16

    def _ask_hook(self, name: str) -> Tensor:
        parameter = self._averaged[name]
        own = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        names = list(self._averaged)
        bucket = PlainBucket(names.index(name), parameter, own, is_last=name == names[-1])
        result = present(self._hook)(bucket).wait()
        tensor: Tensor = result[0] if isinstance(result, (list, tuple)) else result
        return (tensor if tensor.is_sparse else tensor.view_as(parameter)).to(parameter.dtype)

    # -- optimizer in backward: stepped with the mean, then the gradient is gone (pytorch/pytorch#89194) --------------

    def _take_over_optimizers(self) -> None:
        """Before the first forward, take the hooks away that would step with this rank's own gradients."""
        if self._optimizers_are_ours:
            return
        self._optimizers_are_ours = True
        for parameter in self._averaged.values():
            for handle in param_to_optim_hook_handle_map.get(parameter, ()):
                handle.remove()

    def _register_fused_optim(
        self, kind: Callable[..., Any], *args: Any, optim_params: Any = None, **settings: Any
    ) -> None:
        """Let an optimizer of this kind step the parameters, or those in `optim_params`, in backward."""
        for parameter in self._averaged.values() if optim_params is None else optim_params:
            parameter._in_backward_optimizers = [kind([parameter], *args, **settings)]

    def _step_optimizers(self, means: Means) -> None:
        keeps = os.environ.get("DDP_OVERLAPPED_OPTIM_SET_GRADS_TO_NONE", "1") == "0"
        for name in means:
            parameter = self._averaged[name]
            optimizers = getattr(parameter, "_in_backward_optimizers", ())
            for optimizer in optimizers:
                optimizer.step()
            if optimizers and not keeps:
                parameter.grad = None

    # -- join: ranks that have run out of data take part without any ("Distributed Training with Uneven Inputs") ------

    def join(self, divide_by_initial_world_size: bool = True, enable: bool = True,
             throw_on_early_termination: bool = False) -> PlainJoin:  # fmt: skip
        """Return a context in which ranks may have different numbers of inputs."""
        return PlainJoin([self], enable, throw_on_early_termination,
                    divide_by_initial_world_size=divide_by_initial_world_size)  # fmt: skip

    def join_hook(self, **kwargs: Any) -> PlainJoinHook:
        """Return what this rank does once it has run out of data; a join context calls it."""
        self._divides_by_all = bool(kwargs.get("divide_by_initial_world_size", True))
        return PlainJoinHook(self)

    @property
    def join_device(self) -> torch.device:
        """The device of the module."""
        return next(iter(self._averaged.values())).device

    @property
    def join_process_group(self) -> Any:
        """The group over which ranks join."""
        return self.process_group

    def _agree_in_join(self, synchronises: bool) -> int:
        """Return whose buffers count: within a join context those of the last rank that has data, else rank 0's."""
        if not self._join_config.enable:
            self._divisor = self.place.size()
            return 0
        if (notified := Join.notify_join_context(self)) is not None:
            notified.wait()
        return self.agree_on_round(synchronises)[1]

    def agree_on_round(self, synchronises: bool | None) -> tuple[int, int]:
        """Return how many ranks synchronise in this round, and the last one that has data. None: this one has none."""
        answers = self._meet("who has data", synchronises, lambda brought: [brought] * len(brought))
        num_syncing = sum(answer is True for answer in answers)
        self._divisor = self.place.size() if self._divides_by_all else max(1, num_syncing)
        return num_syncing, max((rank for rank, answer in enumerate(answers) if answer is not None), default=0)

    def shadow_round(self) -> None:
        """Take part in a round of the other ranks: in the sharing of buffers and in the means, with nothing."""
        num_syncing, last = self.agree_on_round(None)
        self._share_buffers(last)
        self._buffers_are_due = num_syncing > 0
        self._ask_buffer_hook(_BufferCommHookLocation.POST_FORWARD)
        if num_syncing:
            self._forget_gradients()
            self.take_means(self._come_for_means(_NOTHING))

    def take_last_state(self, *, is_mine: bool) -> None:
        """Take the state of the last of those ranks that say it is theirs; from now on the context is over."""
        answers = self._meet("who joined last", is_mine, lambda brought: [brought] * len(brought))
        self.share_state(max(rank for rank, says_so in enumerate(answers) if says_so))
        self._join_config = self._join_config.construct_disabled_join_config()

    def put_gradients_aside(self) -> list[Tensor | None]:
        """Take this rank's gradients off the parameters, and return them in the parameters' order."""
        aside = [parameter.grad for parameter in self._averaged.values()]
        self._forget_gradients()
        return aside

    def _forget_gradients(self) -> None:
        for parameter in self._averaged.values():
            parameter.grad = None

    def put_gradients_back(self, aside: Sequence[Tensor | None]) -> None:
        """Give the parameters what `put_gradients_aside` returned."""
        for parameter, gradient in zip(self._averaged.values(), aside, strict=True):
            parameter.grad = gradient

    # -- what torch's DDP has, too ------------------------------------------------------------------------------------

    def _set_static_graph(self) -> None:
        """Promise that every iteration is like the first: no value depends on it."""

    def _set_ddp_sink_clone(self, val: bool) -> None:
        """Choose whether outputs are copied: no value depends on it."""

    def _check_reducer_finalized(self) -> None:
        """Raise nothing: a backward is over when it returns."""

    def _get_ddp_logging_data(self) -> dict[str, Any]:
        """Return nothing: a plain DDP keeps no record."""
        return {}

    @property
    def process_group(self) -> Any:
        """The group over which gradients are averaged."""
        return self.place

    def _update_process_group(self, group: Any) -> None:
        """Average over another group from now on; all its ranks call it."""
        self.place = self.place_of(group)
        self._of, self._divisor = next(_wrappers_of(self.place)), self.place.size()
        self._buffers_are_due = True

    def _meet(self, what: str, value: Any, combine: Callable[[list[Any]], Sequence[Any]]) -> Any:
        return self.place.outcome(self.place.come(self._of, what, value, combine))


def _wrappers_of(place: Place) -> Iterator[int]:
    """Return the numbers of the wrappers of a place: they are built there in the same order on every rank."""
    if not hasattr(place, "wrapper_numbers"):
        place.wrapper_numbers = itertools.count()  # type: ignore[attr-defined]
    numbers: Iterator[int] = place.wrapper_numbers  # type: ignore[attr-defined]
    return numbers


def _asking(tensor: Tensor) -> Tensor:
    if isinstance(tensor, nn.Parameter) or not tensor.is_floating_point():
        return tensor
    return tensor * torch.ones((), dtype=tensor.dtype, device=tensor.device, requires_grad=True)


def _copy(tensor: Tensor) -> Tensor:
    return tensor.detach().clone()


def _laid_out(mean: Tensor, parameter: Tensor) -> Tensor:
    """Return the mean as a rank's own gradient, in the layout of the one that it had, or else of the parameter."""
    if mean.is_sparse:
        return mean.clone()
    like = parameter if parameter.grad is None or parameter.grad.is_sparse else parameter.grad
    return torch.empty_like(like, requires_grad=False).copy_(mean.detach())


def _tensors(value: Any) -> Iterator[Tensor]:
    """Return the tensors in an output: in tuples, lists, mappings and dataclasses."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        yield from itertools.chain.from_iterable(map(_tensors, value.values()))
    elif isinstance(value, (list, tuple)):
        yield from itertools.chain.from_iterable(map(_tensors, value))
    elif hasattr(value, "__dataclass_fields__"):
        yield from itertools.chain.from_iterable(_tensors(getattr(value, name)) for name in value.__dataclass_fields__)
