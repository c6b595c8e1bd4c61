"""The hooks with which a reducer listens to autograd, and what it asks: which gradients a backward will bring."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from itertools import chain, takewhile
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.graph import Node, get_gradient_edge

from ddp_impl.buckets.arrivals import Arrivals
from ddp_impl.buckets.bucket import ManagedParameter
from ddp_impl.buckets.gradients import EarlyMoves
from ddp_impl.torch_internals.autograd import brought_by_backward, shown_to_profilers
from ddp_impl.torch_internals.compile import keep_out_of_graphs
from ddp_impl.torch_internals.tensors import node_number, nodes_behind, post_accumulate_hooks


class Listener(Protocol):
    """What the hooks report to; held weakly, because the parameters hold the hooks and the listener the parameters."""

    early_moves: EarlyMoves

    def bucket_is_full(self, bucket: int) -> None: ...
    def take_gradient(self, index: int) -> None: ...
    def anchor_reached(self) -> None: ...


#: Held in hooks where parameters are on several devices, for each of which autograd has a thread. All reducers have the
#: same lock, because one has another send. Compiled autograd would stumble over it elsewhere.
one_thread = threading.RLock()


def one_at_a_time(hook: Callable[[Any], None]) -> Callable[[Any], None]:
    """Return `hook`, called by one thread at a time."""

    def alone(given: Any) -> None:
        with one_thread:
            hook(given)

    return keep_out_of_graphs(alone)


class AutogradHooks:
    """Listens to the gradients of parameters, and counts those that `Arrivals` awaits once and need no report."""

    def __init__(
        self, members: Sequence[ManagedParameter], arrivals: Arrivals, listener: Listener, *, has_threads: bool = False
    ) -> None:
        """Register a hook on every parameter, which reports to `listener` as long as it lives."""
        self._has_threads = has_threads
        self._arrivals, self._moves_early = arrivals, listener.early_moves.takes
        self._listener = weakref.ref(listener)
        self.captures = False  # torch.distributed.autograd captures the gradients of this iteration
        self._node_handles: list[Any] = []
        self._handles: list[Any] = []
        for index, member in enumerate(members):
            hook: Any = self._guarded(index)
            hook.reducers_hooks = weakref.ref(self)
            self._handles.append(member.parameter.register_post_accumulate_grad_hook(hook))
        self._tables = [post_accumulate_hooks(member.parameter) for member in members]
        self._keys = [handle.id for handle in self._handles]
        self._shared: frozenset[int] | None = None
        self._have_others_look()

    def _have_others_look(self) -> None:
        """Have all reducers that listen to one of the parameters search for shared parameters anew."""
        for hook in chain.from_iterable(list(table.values()) for table in self._tables if len(table) > 1):
            if (hooks := _hooks_behind(hook)) is not None:
                hooks._shared = None

    def remove(self) -> None:
        """Remove all hooks: gradients stay local from now on."""
        self._have_others_look()
        for handle in self._handles + self._node_handles:
            handle.remove()
        self._handles, self._node_handles, self._tables, self._keys = [], [], [], []

    @property
    def are_removed(self) -> bool:
        """Whether gradients stay local."""
        return not self._handles

    def shared(self) -> frozenset[int]:
        """Return the indices of the parameters to which another reducer listens, too."""
        if self._shared is None:
            # Of copies: a wrapper that is freed meanwhile takes its hooks out of the tables.
            nums = [sum(_hooks_behind(hook) is not None for hook in list(table.values())) for table in self._tables]
            self._shared = frozenset(index for index, num in enumerate(nums) if num > 1)
        return self._shared

    def unshared(self, nodes: Sequence[Node]) -> Sequence[Node]:
        """Return the nodes of the parameters to which no other reducer listens."""
        shared = self.shared()
        return [node for index, node in enumerate(nodes) if index not in shared] if shared else nodes

    def run_after_user_hooks(self) -> bool:
        """Have hooks that the user registered later be called before these; return whether there were any."""
        if max(map(len, self._tables), default=0) <= 1:  # in C, as the next line
            return False
        if list(map(next, map(reversed, self._tables))) == self._keys:  # an empty table ends it
            return False
        late = [index for index, key in enumerate(self._keys) if _follows_user(self._tables[index], key)]
        for index in late:
            table, key = self._tables[index], self._keys[index]
            table[key] = table.pop(key)
        return bool(late)

    def listen_to_nodes(self, nodes: Iterable[Node]) -> None:
        """Listen also where torch.distributed.autograd captures gradients; it never calls the parameters' own hooks."""
        if not self._node_handles:
            self._node_handles = [node.register_hook(self._capturing(index)) for index, node in enumerate(nodes)]

    def on_backward(
        self, outputs: Iterable[Tensor], report: Callable[[], None], keeps: object = None, *, since: int, of: str
    ) -> bool:
        """Call `report` whenever a backward reaches one of `outputs`; return whether it can reach one.

        A graph that is older than forward, which began at node number `since`, may outlive many forwards that return
        it: the hook of the latest one `of` a kind takes the place of the one before.
        """
        reached, can_reach = _reporter(report, keeps), False
        for output in outputs:
            for node in nodes_behind(output):
                handle = node.register_prehook(reached)
                can_reach = True
                if node_number(node) < since:
                    latest = node.metadata.setdefault(  # type: ignore[attr-defined]
                        f"ddp_impl {of}", weakref.WeakKeyDictionary()
                    )
                    if (before := latest.get(self)) is not None:
                        before.remove()
                    latest[self] = handle
        return can_reach

    def counting(self, index: int) -> Callable[[Tensor], None]:
        """Return the hook of a parameter."""
        # The hot path. It does what `Arrivals._await_no_more` does, without a call.
        due, bucket_of, pending = self._arrivals.due, self._arrivals.bucket_of, self._arrivals.pending
        moves_early = self._moves_early
        listener: Any = self._listener

        def gradient_arrived(_: Tensor) -> None:
            if due[index] == 1:
                if moves_early[index]:
                    listener().early_moves.move(index)
                due[index] = 0
                bucket = bucket_of[index]
                left = pending[bucket] - 1
                pending[bucket] = left
                if not left:
                    listener().bucket_is_full(bucket)
            elif (reducer := listener()) is not None:
                reducer.take_gradient(index)

        return keep_out_of_graphs(gradient_arrived)

    def _guarded(self, index: int) -> Callable[[Any], None]:
        hook = self.counting(index)
        return one_at_a_time(hook) if self._has_threads else hook

    def _capturing(self, index: int) -> Callable[[Any, Any], None]:
        due = self._arrivals.due
        gradient_arrived = self._guarded(index)

        def gradient_captured(_: Any, __: Any) -> None:
            if self.captures and due[index]:
                gradient_arrived(None)

        return keep_out_of_graphs(gradient_captured)


def _reporter(report: Callable[[], None], keeps: object) -> Callable[[object], None]:
    def reached(_: object, keeps: object = keeps) -> None:
        report()

    return reached


keep_out_of_graphs(_reporter(lambda: None, None))  # all that it returns have one code


def is_averaged(parameter: Tensor) -> bool:
    """Whether a reducer of this process listens to the parameter."""
    return any(_hooks_behind(hook) is not None for hook in post_accumulate_hooks(parameter).values())


def _hooks_behind(hook: Any) -> AutogradHooks | None:
    """Return the hooks of the reducer that lives, of which `hook` is one; None for one of the user's."""
    found: Callable[[], AutogradHooks | None] | None = getattr(hook, "reducers_hooks", None)
    return None if found is None else found()


def _follows_user(table: dict[int, Any], own: int) -> bool:
    """Whether the hook with key `own` is there, and a user's comes behind it."""
    behind = takewhile(own.__ne__, reversed(table))
    return own in table and any(_hooks_behind(table[key]) is None for key in behind)


class GraphSearch:
    """Searches graphs for the nodes that accumulate into the parameters, which it keeps alive."""

    def __init__(self, parameters: Sequence[Tensor]) -> None:
        with torch.enable_grad():
            self.nodes = [get_gradient_edge(parameter).node for parameter in parameters]
        self._known = set(self.nodes)

    def uses_any(self, outputs: Iterable[Tensor]) -> bool:
        """Whether any parameter is reachable from `outputs`; a few steps if one is, the whole graph if none."""
        tensors = [tensor for tensor in outputs if tensor.requires_grad]
        leaves = [tensor for tensor in tensors if tensor.grad_fn is None]  # which have no node within a transform
        if any(getattr(node, "variable", None) is leaf for leaf in leaves for node in self.nodes):
            return True
        stack = [tensor.grad_fn for tensor in tensors if tensor.grad_fn is not None]
        seen = set[Node](stack)
        while stack:
            node = stack.pop()
            if node in self._known:
                return True
            for following, _ in node.next_functions:
                if following is not None and following not in seen:
                    seen.add(following)
                    stack.append(following)
        return False

    def certain_to_arrive(self) -> list[bool]:
        """Return for each parameter whether the running backward is certain to bring it a gradient."""
        with shown_to_profilers("torch.distributed.ddp.reducer::search_unused_parameters"):
            return brought_by_backward(self.nodes)
