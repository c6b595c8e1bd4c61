"""`PlainDDP`: what a DDP must do, said once and as plainly as possible; every other DDP is measured against it.

There are no buckets, nothing overlaps, and nothing depends on the order in which gradients become ready. Ranks exchange
values on four occasions: at construction (rank 0's state goes to all), before a forward (rank 0's buffers), at the end
of a backward (each parameter that any rank used gets the mean of all ranks' gradients), and in a join context. A
`Place` (`place.py`) exchanges the values; `Backwards` (`backwards.py`) calls `bring_gradients` and `take_means` when a
backward is over.

Read `__init__`, `forward`, `gradient_ready`, `bring_gradients`, `_means` and `take_means` first: they are a DDP. Every
other passage is about one option or one unusual use. This module does not define traffic or refusals. `passages.toml`
lists the requirements that each passage defines.

Sources are torch's documentation of DistributedDataParallel (torch 2.13), its design note "Distributed Data Parallel",
and the issues named at a rule.
"""

from __future__ import annotations

import contextlib
import os
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join, Joinable

from conformance.errors import present
from conformance.truth.asking import asking
from conformance.truth.backwards import Backwards, Noticed
from conformance.truth.casts import LowPrecision
from conformance.truth.means import NOTHING, Brought, Means, mean_of
from conformance.truth.place import Place, wrapper_number
from conformance.truth.plain_bucket import PlainBucket
from conformance.truth.plain_join import PlainJoin, PlainJoinHook
from conformance.truth.tensors import a_copy, laid_out, leads_to, nodes_behind, outside_transforms, tensors_in


class PlainDDP(nn.Module, Joinable):
    """Averages the gradients of `module` over the ranks of a place at the end of every synchronised backward.

    All ranks must build it, run forwards and backwards, and call its methods equally often.
    """

    __slots__ = ("_for_outputs",)  # the object that outputs hold: the two share one `__dict__`, which must not hold it
    _for_outputs: PlainDDP

    def __init__(self, module: nn.Module, place: Place, backwards: Backwards, **options: Any) -> None:
        super().__init__()
        Joinable.__init__(self)
        self._begin_to_be_held()
        self.module = module
        self.place = place
        self._options = options
        self._registered: dict[str, tuple[Any, ...]] = {}  # by the method that a copy calls again
        self.require_backward_grad_sync = True
        self._number = wrapper_number(place, options.get("copy_of"))
        self._backwards = backwards
        self._ignored = frozenset(getattr(module, "_ddp_params_and_buffers_to_ignore", ()))
        self._all: dict[str, nn.Parameter] = {}  # frozen ones, too
        # Parameters that have ever required a gradient, in a copy or its original.
        had, known = dict(module.named_parameters()), options.get("averaged", ())
        self._averaged: dict[str, nn.Parameter] = {name: had[name] for name in known if name in had}
        self._hooked: dict[str, nn.Parameter] = {}  # with a hook that calls `gradient_ready`
        self._used: set[str] = set()  # with a new gradient since the last mean
        self._allows_unused = bool(options.get("find_unused_parameters") or options.get("static_graph"))
        self._hook_parameters()
        if not self._averaged:
            raise RuntimeError("no parameter of the module requires a gradient")
        self._awaits_backward = False  # between a synchronised forward and its means
        self._finalizes_by_hand = False
        self._not_final: list[Any] = []  # means that wait for `finalize_backward`
        self.noticed = Noticed()
        self._divisor = place.size()
        self._hook: Callable[[Any], Any] | None = None
        self._casts = LowPrecision.of(options.get("mixed_precision"))
        self._optimizers_are_ours = False
        self._choose_buffers(options)
        if options.get("init_sync", True):
            self._share_model(0, with_buffers=self._shares_buffers_at_first)
        self._casts.convert_buffers(module, self._ignored)
        self._casts.stay_in_backward(module)
        backwards.add(self._for_outputs)

    # -- holders: outputs hold a wrapper as its user does; once they alone do, other backwards are the user's own ------

    def _begin_to_be_held(self) -> None:
        """Make a second object with the same `__dict__` for outputs to hold: only the user holds this one."""
        double = object.__new__(type(self))
        object.__setattr__(double, "__dict__", self.__dict__)
        object.__setattr__(self, "_for_outputs", double)
        self._user, self._noticing = weakref.ref(self), weakref.ref(double)

    @property
    def _is_left_by_its_user(self) -> bool:
        return self._user() is None

    # -- state: all ranks begin with rank 0's parameters and buffers ("Construction", design note) --------------------

    def _share_model(self, root: int, *, with_buffers: bool) -> None:
        """Give every rank the parameters of `root`, frozen ones too, and its buffers, except ignored ones."""
        tensors: dict[str, Tensor] = {**dict(self.module.named_parameters())}
        if with_buffers:
            tensors |= dict(self.module.named_buffers())
        self._share("state", tensors, root)

    def _share(self, what: str, tensors: Mapping[str, Tensor], root: int) -> None:
        mine = {name: tensor for name, tensor in tensors.items() if name not in self._ignored}
        brought = {name: a_copy(tensor) for name, tensor in mine.items()}
        theirs = self._meet(what, brought, lambda all_brought: [all_brought[root]] * len(all_brought))
        if self.place.rank() != root:
            with torch.no_grad():
                for name, tensor in mine.items():
                    tensor.data.copy_(theirs[name])  # `data`: the version that autograd has saved stays

    # -- buffers: rank 0's before a forward, if the forward before it was synchronised (`forward_sync_buffers`) -------

    def _choose_buffers(self, options: Mapping[str, Any]) -> None:
        """Read both names of the option; `broadcast_buffers`, the older, also applies at construction."""
        older, newer = options.get("broadcast_buffers"), options.get("forward_sync_buffers")
        self.forward_sync_buffers = bool(newer if newer is not None else older is None or older)
        self._shares_buffers_at_first = newer is not None or older is None or bool(older)
        self._buffers_are_due = True
        self._buffer_hook: Callable[[Any], Any] | None = None
        self._buffer_hook_goes_first = False

    def will_sync_module_buffers(self) -> bool:
        """Whether the next forward begins with rank 0's buffers."""
        return self.forward_sync_buffers and self._buffers_are_due and any(True for _ in self.module.buffers())

    def _share_buffers(self, root: int) -> None:
        if self._buffer_hook is None and self.will_sync_module_buffers():
            with outside_transforms():  # the exchange is not part of the user's transform
                self._share("buffers", dict(self.module.named_buffers()), root)

    # -- buffer hooks: a function of the user's shares them instead, behind a forward or before it --------------------

    def _register_buffer_comm_hook(
        self, state: Any, hook: Callable[[Any, Any], Any], comm_hook_location: Any = ""
    ) -> None:
        """Let `hook(state, buffers by name)` share buffers in place, before a forward if the location says so."""
        self._registered["_register_buffer_comm_hook"] = state, hook, comm_hook_location
        self._buffer_hook = lambda buffers: hook(state, buffers)
        self._buffer_hook_goes_first = "PRE_FORWARD" in str(comm_hook_location)

    def _ask_buffer_hook(self) -> None:
        with torch.no_grad():
            buffers = {name: one.data for name, one in self.module.named_buffers() if name not in self._ignored}
            for future in present(self._buffer_hook)(buffers) or ():
                future.wait()

    # -- forward ------------------------------------------------------------------------------------------------------

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Return what the module returns; its backward is synchronised unless this is under `no_sync` or `no_grad`.

        Where the backward runs does not matter ("no_sync", documentation). All forwards before a backward belong to it.
        """
        if self._not_final and torch.is_grad_enabled():
            raise RuntimeError("the last backward is not final: call finalize_backward")
        self._hook_parameters()
        self._take_over_optimizers()
        if torch._C._current_graph_task_id() == -1:  # else this forward runs within a backward, as in a checkpoint
            self._backwards.forget()
        synchronises = torch.is_grad_enabled() and self.require_backward_grad_sync
        root = self._agree_in_join(synchronises)
        self._share_buffers(root)
        is_hooked = self._buffer_hook is not None and self.will_sync_module_buffers()
        if is_hooked and self._buffer_hook_goes_first:
            self._ask_buffer_hook()
        output = self._casts.call(self.module, inputs, kwargs, self._ignored)
        self._buffers_are_due = synchronises  # a forward that raises counts for nothing
        if is_hooked and not self._buffer_hook_goes_first:
            self._ask_buffer_hook()
        if synchronises:
            self._awaits_backward = True
            output = self._asking_for_gradients(output)
        for tensor in tensors_in(output):
            is_ours = self._allows_unused or self._uses_ours(tensor)
            for node in nodes_behind(tensor):
                node.register_prehook(partial(self._for_outputs._output_reached, synchronises, is_ours))
        return output

    def _asking_for_gradients(self, output: Any) -> Any:
        """Return the output, which requires a gradient even if this rank used no parameter.

        Another rank may have used one: this rank must have a backward, too, to take part in the mean.
        """
        if self.place.size() == 1 or not self._allows_unused or any(map(self._uses_ours, tensors_in(output))):
            return output
        return asking(output, self._for_outputs._reached_without_parameters)

    def _uses_ours(self, tensor: Tensor) -> bool:
        return leads_to(tensor, self._averaged.values())

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Make forwards in the block local: their gradients accumulate, and are averaged with the next ones."""
        before, self.require_backward_grad_sync = self.require_backward_grad_sync, False
        try:
            yield
        finally:
            self.require_backward_grad_sync = before

    # -- backward -----------------------------------------------------------------------------------------------------

    def _hook_parameters(self) -> None:
        """Notice every gradient: it marks its parameter as used until the next mean, also in a local backward.

        Parameters that were added since the last forward are averaged, too, but no tensors that replace parameters in
        one call (`torch.func.functional_call`).
        """
        for name, parameter in self.module.named_parameters():
            if name in self._ignored or not isinstance(parameter, nn.Parameter):
                continue
            self._all[name] = parameter
            if name in self._averaged:
                self._averaged[name] = parameter
            if parameter.requires_grad and self._hooked.get(name) is not parameter:
                self._averaged[name] = self._hooked[name] = parameter
                self._used.discard(name)
                parameter.register_post_accumulate_grad_hook(partial(_gradient_ready, self._noticing, name))

    def gradient_ready(self, name: str, parameter: Tensor) -> None:
        """Note a new gradient of the parameter that is called `name`."""
        if parameter.requires_grad:  # else it was frozen after the forward, and has no gradient
            self._used.add(name)
            self.noticed.brought.add(parameter)
            if self._awaits_backward:
                self._backwards.reached()

    def _output_reached(self, synchronises: bool, is_ours: bool, _: Any) -> None:
        self._hook_parameters()  # also a new parameter for which another tensor stood in during forward
        self.noticed.reached_output(synchronised=synchronises, used_a_parameter=is_ours)
        self._backwards.reached()  # also for a local backward: it may run within a checkpoint's

    def _reached_without_parameters(self, _: Any) -> None:
        self.noticed.may_bring_nothing = True
        self._backwards.reached()

    @property
    def takes_part(self) -> bool:
        """Whether the backward that is over belongs to this wrapper.

        It does if it reached an output of a synchronised forward, unless that used a parameter and none got a gradient:
        `torch.autograd.grad` accumulates nothing. If it reached no output it does, too, provided that it brought
        gradients, a synchronised forward awaits its backward, and the user holds the wrapper: an output may be hidden,
        or a loss may use a parameter directly. Gradients of parameters that another wrapper shares belong to the
        wrapper whose output was reached.
        """
        if self.noticed.may_bring_nothing:
            return True
        awaits = self._awaits_backward and not self.noticed.local and not self._is_left_by_its_user
        return bool(self.noticed.brought) and (self.noticed.synchronised or awaits)

    def bring_gradients(self) -> Any:
        """Bring this rank's gradients at the end of a backward; all wrappers do before any takes a mean."""
        mine = {name: a_copy(one.grad) for name, one in self._all.items() if one.grad is not None}
        return self._bring(Brought(mine, frozenset(self._used)))

    def _bring(self, brought: Brought) -> Any:
        return self.place.arrive(self._number, "gradients", brought, self._means)

    def _means(self, ranks: Sequence[Brought]) -> list[Means | None]:
        """Return the mean of each parameter that any rank has used; None if no rank has used any.

        A rank without a gradient counts as zero. The gradient of a parameter that no rank has used does not change
        (`find_unused_parameters`, documentation).
        """
        if not any(each.used for each in ranks):
            return [None] * len(ranks)
        means: Means = {}
        for name in self._all:
            gradients = [each.gradients[name] for each in ranks if name in each.gradients]
            if gradients and any(name in each.used for each in ranks):
                wire = self._casts.communication_dtype
                # A comm hook reduces by itself: it needs the name, and whether the gradient is sparse.
                means[name] = mean_of(gradients, self._divisor, wire) if self._hook is None else gradients[0]
        return [means] * len(ranks)

    def take_means(self, meeting: Any) -> None:
        """Replace this rank's gradients by the means, or keep them for `finalize_backward`."""
        if self._finalizes_by_hand:
            self._awaits_backward = False
            self._not_final = [meeting]
        else:
            self._take(meeting)

    # -- finalization by hand: the means are taken when the user says so (pytorch/pytorch#196651) ---------------------

    @property
    def require_manual_backward_finalization(self) -> bool:
        """Whether the user finalizes backwards; may be set while none is awaited."""
        return self._finalizes_by_hand

    @require_manual_backward_finalization.setter
    def require_manual_backward_finalization(self, required: bool) -> None:
        if required != self._finalizes_by_hand and (self._awaits_backward or self._not_final):
            raise RuntimeError("who finalizes is chosen before a forward")
        self._finalizes_by_hand = required

    should_finalize_after_backward = property(lambda self: self._finalizes_by_hand)

    def finalize_backward(self) -> None:
        """Take the means of the last backward; raises if there are none."""
        if not self._not_final:
            raise RuntimeError("finalize_backward: no backward has left any means")
        self._take(self._not_final.pop())

    def _take(self, meeting: Any) -> None:
        """Replace this rank's gradients by the means; then step the optimizers in backward."""
        means: Means | None = self.place.outcome(meeting)
        if means is None:
            return
        self._awaits_backward = False
        self._used.clear()
        reduced = means if self._hook is None else self._reduced_by_hook(means)
        for name in means:  # also on a rank that has frozen the parameter
            parameter = self._all[name]
            parameter.grad = laid_out(reduced[name], parameter)
        self._step_optimizers(means)

    # -- comm hooks: what the hook's future holds is the gradient, not divided ("DDP Communication Hooks") ------------

    def register_comm_hook(self, state: Any, hook: Callable[[Any, Any], Any]) -> None:
        """Reduce by `hook(state, bucket)`; each parameter is a bucket, in the module's order."""
        self._registered["register_comm_hook"] = state, hook
        self._hook = lambda bucket: hook(state, bucket)

    def _register_builtin_comm_hook(self, kind: Any) -> None:
        """Average as usual for ALLREDUCE, in half precision for FP16_COMPRESS."""
        self._registered["_register_builtin_comm_hook"] = (kind,)
        if "FP16" in str(kind):
            self._casts.communication_dtype = torch.float16

    def _reduced_by_hook(self, means: Means) -> Means:
        """Hand the hook every bucket, and then wait for what its futures hold."""
        buckets = {name: self._bucket_of(name, means.get(name)) for name in self._averaged}
        futures = {name: present(self._hook)(bucket) for name, bucket in buckets.items()}
        return {name: buckets[name].reduced(future.wait()) for name, future in futures.items()}

    def _bucket_of(self, name: str, like: Tensor | None) -> PlainBucket:
        parameter, names = self._averaged[name], list(self._averaged)
        own = torch.zeros_like(parameter if like is None else like) if parameter.grad is None else parameter.grad
        return PlainBucket(names.index(name), parameter, own, is_last=name == names[-1])

    # -- optimizer in backward: stepped with the mean, then the gradient is gone (pytorch/pytorch#89194) --------------

    def _take_over_optimizers(self) -> None:
        """Before the first forward, remove torch's hooks, which would step with local gradients."""
        if self._optimizers_are_ours:
            return
        self._optimizers_are_ours = True
        if (of_torch := sys.modules.get("torch.distributed.optim.apply_optimizer_in_backward")) is None:
            return  # nobody has called it
        for parameter in self._averaged.values():
            for handle in of_torch.param_to_optim_hook_handle_map.get(parameter, ()):
                handle.remove()

    def _register_fused_optim(
        self, kind: Callable[..., Any], *args: Any, optim_params: Any = None, **settings: Any
    ) -> None:
        """Step the parameters, or `optim_params`, in backward by an optimizer of this kind."""
        chosen: Any = self._averaged.values() if optim_params is None else optim_params
        for parameter in chosen:
            parameter._in_backward_optimizers = [kind([parameter], *args, **settings)]

    def _step_optimizers(self, means: Means) -> None:
        keeps = os.environ.get("DDP_OVERLAPPED_OPTIM_SET_GRADS_TO_NONE", "1") == "0"
        for name in filter(means.__contains__, self._averaged):
            parameter = self._all[name]
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
        """Return the hook of a rank without data; a join context calls it."""
        self._divides_by_all = bool(kwargs.get("divide_by_initial_world_size", True))
        return PlainJoinHook(self)

    @property
    def join_device(self) -> torch.device:
        """The device of the module."""
        return next(iter(self._averaged.values())).device

    @property
    def process_group(self) -> Any:
        """The group over which gradients are averaged."""
        return self.place.group

    @property
    def join_process_group(self) -> Any:
        """The group over which ranks join."""
        return self.process_group

    def _agree_in_join(self, synchronises: bool) -> int:
        """Return the rank that shares its buffers: in a join context the last rank with data, else 0."""
        if not self._join_config.enable:  # torch's `Joinable` has it; `enable` is True within a join context
            self._divisor = self.place.size()
            return 0
        if (notified := Join.notify_join_context(self)) is not None:
            notified.wait()
        return self.agree_on_round(synchronises)[1]

    def agree_on_round(self, synchronises: bool | None) -> tuple[int, int]:
        """Return how many ranks synchronise in this round, and the last rank with data; None: this rank has none."""
        answers = self._meet("who has data", synchronises, lambda brought: [brought] * len(brought))
        num_syncing = sum(answer is True for answer in answers)
        self._divisor = self.place.size() if self._divides_by_all else max(1, num_syncing)
        return num_syncing, max((rank for rank, answer in enumerate(answers) if answer is not None), default=0)

    def shadow_round(self) -> None:
        """Take part in a round of the other ranks without data: in the sharing of buffers and in the means."""
        num_syncing, last = self.agree_on_round(None)
        self._share_buffers(last)
        if self._buffer_hook is not None and self.will_sync_module_buffers():
            self._ask_buffer_hook()
        self._buffers_are_due = num_syncing > 0
        if num_syncing:
            for parameter in self._averaged.values():
                parameter.grad = None
            self._take(self._bring(NOTHING))

    def take_last_state(self, *, is_mine: bool) -> None:
        """Take the state of the last rank whose `is_mine` is true; the context is over."""
        answers = self._meet("who joined last", is_mine, lambda brought: [brought] * len(brought))
        last = max(rank for rank, says_so in enumerate(answers) if says_so)
        self._share_model(last, with_buffers=self.forward_sync_buffers)
        self._join_config = self._join_config.construct_disabled_join_config()

    # -- copies: pickled or deep-copied, a wrapper is one of a copy of its module, over the default group --------------

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Build the copy with the same comm hooks, without communication."""
        options = {**self._options, "init_sync": False, "averaged": tuple(self._averaged), "copy_of": self._number}
        return _built_again, (type(self), self.module, options, self._registered), {"training": self.training}

    # -- what torch's DDP has, too ------------------------------------------------------------------------------------

    def _update_process_group(self, group: Any) -> None:
        """Average over another group. All its ranks call it; other ranks, whose group is a number, may."""
        if not isinstance(group, int):
            place = self._place_of(group)
            self.place, self._number, self._divisor = place, wrapper_number(place), place.size()
            self._buffers_are_due = True

    def _place_of(self, group: Any) -> Place:
        return group

    def _remove_autograd_hooks(self) -> None:
        """Stop: backwards are local from now on."""
        self._backwards.remove(self._for_outputs)

    def _meet(self, what: str, value: Any, combine: Callable[[list[Any]], Sequence[Any]]) -> Any:
        return self.place.outcome(self.place.arrive(self._number, what, value, combine))


def _built_again(kind: Callable[..., PlainDDP], module: nn.Module, options: Any, registered: Any) -> PlainDDP:
    wrapper = kind(module, **options)
    for method, arguments in registered.items():
        getattr(wrapper, method)(*arguments)
    return wrapper


def _gradient_ready(wrapper: weakref.ref[PlainDDP], name: str, parameter: Tensor) -> None:
    """Report a new gradient to the wrapper, if it is alive: a hook's strong reference would leak it."""
    if (noticing := wrapper()) is not None:
        noticing.gradient_ready(name, parameter)
