"""`PlainDDP`: what a DDP must do, said once and as plainly as possible; every other DDP is measured against it.

There are no buckets, nothing overlaps, and nothing depends on the order in which gradients come. Ranks exchange values
on four occasions: at construction (rank 0's state goes to all), before a forward (rank 0's buffers), at the end of a
backward (each parameter that any rank used gets the mean of all ranks' gradients), and in a join context. How values
travel is not said here: `Place` (`place.py`) hands them over, and `Backwards` (`backwards.py`) calls `bring_gradients`
and `take_means` when a backward is over.

Whoever reads this for the first time reads `__init__`, `forward`, `came`, `bring_gradients`, `_means` and `take_means`:
that is a DDP. Every other passage is about one option or one unusual use. Nothing here says how much is sent, when, or
what is refused. `passages.toml` says which requirements each passage defines.

Sources are torch's documentation of DistributedDataParallel (torch 2.13), its design note "Distributed Data Parallel",
and the issues named at a rule.
"""

from __future__ import annotations

import contextlib
import os
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join, Joinable
from torch.distributed.optim.apply_optimizer_in_backward import param_to_optim_hook_handle_map

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
        self._state_and_hook: tuple[Any, ...] = ()
        self.require_backward_grad_sync = True
        self._number = wrapper_number(place, options.get("copy_of"))
        self._backwards = backwards
        self._ignored = frozenset(getattr(module, "_ddp_params_and_buffers_to_ignore", ()))
        self._all: dict[str, nn.Parameter] = {}  # frozen ones, too
        # Those that have ever required a gradient: of a copy, those of the original.
        had, known = dict(module.named_parameters()), options.get("averaged", ())
        self._averaged: dict[str, nn.Parameter] = {name: had[name] for name in known if name in had}
        self._listened_to: dict[str, nn.Parameter] = {}  # those with a hook that calls `came`
        self._used: set[str] = set()  # those that have got a gradient since the last mean
        self._allows_unused = bool(options.get("find_unused_parameters") or options.get("static_graph"))
        self._listen()
        if not self._averaged:
            raise RuntimeError("no parameter of the module requires a gradient")
        self._awaits_backward = False  # a synchronised forward has run, and its means have not come
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
        """Make a second object of the same `__dict__`: outputs hold that one, so that the user alone holds this one."""
        double = object.__new__(type(self))
        object.__setattr__(double, "__dict__", self.__dict__)
        object.__setattr__(self, "_for_outputs", double)
        self._user, self._noticing = weakref.ref(self), weakref.ref(double)

    @property
    def _is_left_by_its_user(self) -> bool:
        return self._user() is None

    # -- state: all ranks begin with rank 0's parameters and buffers ("Construction", design note) --------------------

    def _share_model(self, root: int, *, with_buffers: bool) -> None:
        """Give every rank the parameters of `root`, frozen ones too, and its buffers; not what is to be ignored."""
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
                    tensor.data.copy_(theirs[name])  # what autograd has saved of a buffer does not change by it

    # -- buffers: rank 0's before a forward, if the forward before it was synchronised (`forward_sync_buffers`) -------

    def _choose_buffers(self, options: Mapping[str, Any]) -> None:
        """Read both names of the option; the older, `broadcast_buffers`, also rules the sharing at construction."""
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
            with outside_transforms():  # what ranks exchange is no part of what the user transforms
                self._share("buffers", dict(self.module.named_buffers()), root)

    # -- buffer hooks: a function of the user's shares them instead, behind a forward or before it --------------------

    def _register_buffer_comm_hook(
        self, state: Any, hook: Callable[[Any, Any], Any], comm_hook_location: Any = ""
    ) -> None:
        """Let `hook(state, buffers by name)` share buffers in place, before a forward if the location says so."""
        self._buffer_hook = lambda buffers: hook(state, buffers)
        self._buffer_hook_goes_first = "PRE_FORWARD" in str(comm_hook_location)

    def _ask_buffer_hook(self) -> None:
        with torch.no_grad():
            buffers = {name: one.data for name, one in self.module.named_buffers() if name not in self._ignored}
            for future in present(self._buffer_hook)(buffers) or ():
                future.wait()

    # -- forward ------------------------------------------------------------------------------------------------------

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Return what the module returns. Its backward is synchronised unless it runs under `no_sync` or `no_grad`.

        That is decided here, wherever the backward runs ("no_sync", documentation). Of several forwards before one
        backward all belong to it.
        """
        if self._not_final and torch.is_grad_enabled():
            raise RuntimeError("the last backward is not final: call finalize_backward")
        self._listen()
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
        """Return the output, which asks for a gradient even where this rank used no parameter.

        Other ranks, if there are any, may have used some: this one must have a backward, too, and so come to the mean.
        """
        if self.place.size() == 1 or not self._allows_unused or any(map(self._uses_ours, tensors_in(output))):
            return output
        return asking(output, self._for_outputs._nothing_came)

    def _uses_ours(self, tensor: Tensor) -> bool:
        return leads_to(tensor, self._averaged.values())

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
        """Notice every gradient: a parameter is used once it gets one, in a local backward too, till the next mean.

        Parameters that have come into the module since the last forward are averaged as well; tensors that stand in for
        parameters in one call (`torch.func.functional_call`) are none.
        """
        for name, parameter in self.module.named_parameters():
            if name in self._ignored or not isinstance(parameter, nn.Parameter):
                continue
            self._all[name] = parameter
            if name in self._averaged:
                self._averaged[name] = parameter
            if parameter.requires_grad and self._listened_to.get(name) is not parameter:
                self._averaged[name] = parameter
                self._listened_to[name] = parameter
                self._used.discard(name)
                parameter.register_post_accumulate_grad_hook(partial(_came, self._noticing, name))

    def came(self, name: str, parameter: Tensor) -> None:
        """Take note of a gradient of the parameter that is called `name`."""
        if parameter.requires_grad:  # else it was frozen after the forward, and nothing has come
            self._used.add(name)
            self.noticed.brought.add(parameter)
            if self._awaits_backward:
                self._backwards.reached()

    def _output_reached(self, synchronises: bool, is_ours: bool, _: Any) -> None:
        self._listen()  # where other tensors stood in for a new parameter in forward, it is seen now
        self.noticed.came_to_output(synchronised=synchronises, used_a_parameter=is_ours)
        self._backwards.reached()  # of a local backward, too: what a checkpoint runs within is no backward by itself

    def _nothing_came(self, _: Any) -> None:
        self.noticed.may_bring_nothing = True
        self._backwards.reached()

    @property
    def takes_part(self) -> bool:
        """Whether the backward that is over is one of this wrapper's.

        A backward that reached an output of a synchronised forward is, unless that used a parameter and no gradient
        came: `torch.autograd.grad` accumulates none. One that brought gradients and reached no output is, while such a
        forward awaits its backward and the user holds the wrapper: outputs may hide, or a loss use a parameter
        past them. Gradients of what it shares with a wrapper whose output was reached are that wrapper's.
        """
        if self.noticed.may_bring_nothing:
            return True
        awaits = self._awaits_backward and not self.noticed.local and not self._is_left_by_its_user
        return bool(self.noticed.brought) and (self.noticed.synchronised or awaits)

    def bring_gradients(self) -> Any:
        """Bring what this rank has at the end of a backward; to be done before anything of it is handed out."""
        mine = {name: a_copy(one.grad) for name, one in self._all.items() if one.grad is not None}
        return self._come_for_means(Brought(mine, frozenset(self._used)))

    def _come_for_means(self, brought: Brought) -> Any:
        return self.place.come(self._number, "gradients", brought, self._means)

    def _means(self, ranks: Sequence[Brought]) -> list[Means | None]:
        """Return the mean of each parameter that any rank has used; None if no rank has used any.

        A rank that has no gradient of such a parameter counts as zero. A parameter that nobody has used is left alone:
        its gradient stays what it is, or None (`find_unused_parameters`, documentation).
        """
        if not any(each.used for each in ranks):
            return [None] * len(ranks)
        means: Means = {}
        for name in self._all:
            gradients = [each.gradients[name] for each in ranks if name in each.gradients]
            if gradients and any(name in each.used for each in ranks):
                wire = self._casts.communication_dtype
                # A comm hook reduces by itself: then only the name counts, and whether the gradient is sparse.
                means[name] = mean_of(gradients, self._divisor, wire) if self._hook is None else gradients[0]
        return [means] * len(ranks)

    def take_means(self, meeting: Any) -> None:
        """Replace this rank's gradients by the means, or leave that to `finalize_backward`."""
        if self._finalizes_by_hand:
            self._awaits_backward = False
            self._not_final = [meeting]
        else:
            self._take(meeting)

    # -- finalization by hand: the means are taken when the user says so (pytorch/pytorch#196651) ---------------------

    @property
    def require_manual_backward_finalization(self) -> bool:
        """Whether a backward leaves the means to the user; may be set while none is expected."""
        return self._finalizes_by_hand

    @require_manual_backward_finalization.setter
    def require_manual_backward_finalization(self, required: bool) -> None:
        if required != self._finalizes_by_hand and (self._awaits_backward or self._not_final):
            raise RuntimeError("who finalizes is chosen before a forward")
        self._finalizes_by_hand = required

    should_finalize_after_backward = property(lambda self: self._finalizes_by_hand)

    def finalize_backward(self) -> None:
        """Take the means that the last backward has left; raises if there are none."""
        if not self._not_final:
            raise RuntimeError("finalize_backward: no backward has left any means")
        self._take(self._not_final.pop())

    def _take(self, meeting: Any) -> None:
        """Replace this rank's gradients by the means; then step the optimizers that run in backward."""
        means: Means | None = self.place.outcome(meeting)
        if means is None:
            return
        self._awaits_backward = False
        self._used.clear()
        reduced = (
            means if self._hook is None else {name: self._ask_hook(name, means.get(name)) for name in self._averaged}
        )
        for name in means:  # a rank that has frozen a parameter gets the mean of the others'
            parameter = self._all[name]
            parameter.grad = laid_out(reduced[name], parameter)
        self._step_optimizers(means)

    # -- comm hooks: what the hook's future holds is the gradient, not divided ("DDP Communication Hooks") ------------

    def register_comm_hook(self, state: Any, hook: Callable[[Any, Any], Any]) -> None:
        """Let `hook(state, bucket)` reduce; here each parameter is a bucket of its own, in the module's order."""
        self._state_and_hook = state, hook
        self._hook = lambda bucket: hook(state, bucket)

    def _register_builtin_comm_hook(self, kind: Any) -> None:
        """Average as ever for ALLREDUCE, in half precision for FP16_COMPRESS."""
        if "FP16" in str(kind):
            self._casts.communication_dtype = torch.float16

    def _ask_hook(self, name: str, like: Tensor | None) -> Tensor:
        parameter, names = self._averaged[name], list(self._averaged)
        own = torch.zeros_like(parameter if like is None else like) if parameter.grad is None else parameter.grad
        bucket = PlainBucket(names.index(name), parameter, own, is_last=name == names[-1])
        return bucket.reduced_by(present(self._hook))

    # -- optimizer in backward: stepped with the mean, then the gradient is gone (pytorch/pytorch#89194) --------------

    def _take_over_optimizers(self) -> None:
        """Before the first forward, remove torch's hooks, which would step with this rank's own gradients."""
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
        """Return what this rank does once it has run out of data; a join context calls it."""
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
        """Return whose buffers count: within a join context those of the last rank that has data, else rank 0's."""
        if not self._join_config.enable:  # torch's `Joinable` has it; `enable` is True within a join context
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
        if self._buffer_hook is not None and self.will_sync_module_buffers():
            self._ask_buffer_hook()
        self._buffers_are_due = num_syncing > 0
        if num_syncing:
            for parameter in self._averaged.values():
                parameter.grad = None
            self._take(self._come_for_means(NOTHING))

    def take_last_state(self, *, is_mine: bool) -> None:
        """Take the state of the last of those ranks that say it is theirs; from now on the context is over."""
        answers = self._meet("who joined last", is_mine, lambda brought: [brought] * len(brought))
        last = max(rank for rank, says_so in enumerate(answers) if says_so)
        self._share_model(last, with_buffers=self.forward_sync_buffers)
        self._join_config = self._join_config.construct_disabled_join_config()

    # -- copies: pickled or deep-copied, a wrapper is one of a copy of its module, over the default group --------------

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Say how to build the copy, which has a comm hook if this one has; it communicates nothing."""
        options = {**self._options, "init_sync": False, "averaged": tuple(self._averaged), "copy_of": self._number}
        return _built_again, (type(self), self.module, options, self._state_and_hook), {"training": self.training}

    # -- what torch's DDP has, too ------------------------------------------------------------------------------------

    def _update_process_group(self, group: Any) -> None:
        """Average over another group from now on. All its ranks call it; others may, who have a number for a group."""
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
        return self.place.outcome(self.place.come(self._number, what, value, combine))


def _built_again(kind: Callable[..., PlainDDP], module: nn.Module, options: Any, hooked: tuple[Any, ...]) -> PlainDDP:
    wrapper = kind(module, **options)
    if hooked:
        wrapper.register_comm_hook(*hooked)
    return wrapper


def _came(wrapper: weakref.ref[PlainDDP], name: str, parameter: Tensor) -> None:
    """Tell the wrapper, if it is there, of a gradient; what a parameter's hooks hold is never collected as garbage."""
    if (noticing := wrapper()) is not None:
        noticing.came(name, parameter)
