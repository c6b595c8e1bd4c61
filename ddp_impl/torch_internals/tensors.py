"""What tensors and modules do not tell of themselves, the hooks on them, and operators on lists of tensors."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from operator import attrgetter, methodcaller
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch._subclasses import FakeTensor
from torch.autograd.graph import Node
from torch.optim import Optimizer
from torch.utils._pytree import tree_map_only

if TYPE_CHECKING:
    from torch.utils.hooks import RemovableHandle


import sys
from collections.abc import Callable, Collection

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from ddp_impl.torch_internals.names import OWN_STEPS, TRANSFORMS, needed_for, required

__all__ = [
    "tree_map_only",
]

#: Which tensor of C++'s a Python tensor is; `torch.utils.swap_tensors` makes it another, with other hooks.
tensor_in_cpp = attrgetter("_cdata")

# One kernel, or few, for a list of tensors. torch's optimizers are built on these; there is no public spelling.
foreach_zero_ = torch._foreach_zero_
foreach_div_ = torch._foreach_div_
#: The same as an operator, for graphs.
foreach_div_operator: Any = torch.ops.aten._foreach_div.Tensor
#: Collectives as operators, for graphs: `torch.distributed` has no traceable public ones.
functional_collectives: Any = torch.ops._c10d_functional


def foreach_copy_(targets: list[Tensor], sources: list[Tensor]) -> None:
    """Copy `sources` into `targets`, past autograd; one after the other where there is no kernel for lists."""
    try:
        torch._foreach_copy_(targets, sources)
    except RuntimeError:
        for target, source in zip(targets, sources, strict=True):
            target.copy_(source)


#: Returns a new 1-D tensor of the values of tensors of one dtype and device, one behind the other.
flattened: Callable[[list[Tensor]], Tensor] = torch._C._nn.flatten_dense_tensors


#: Returns the parts of a flat tensor in the shapes of the tensors of which it was made: views, row-major.
unflattened: Callable[[Tensor, list[Tensor]], list[Tensor]] = torch._C._nn.unflatten_dense_tensors


def is_lazy(tensor: Tensor) -> bool:
    """Whether memory holds other values than the tensor has: a bit says that they are conjugated or negated."""
    return tensor.is_conj() or tensor.is_neg()


def has_operators(tensor: Tensor) -> bool:
    """Whether the class of `tensor`, fake ones apart, says itself what operations on it are."""
    return type(tensor).__torch_dispatch__ != Tensor.__torch_dispatch__ and not isinstance(tensor, FakeTensor)


def plain_alias(tensor: Tensor) -> Tensor | None:
    """Return a plain tensor in the memory of one of a class of its own; None if it has no memory itself."""
    try:
        has_memory = tensor.numel() == 0 or tensor.untyped_storage().data_ptr() != 0
    except (RuntimeError, NotImplementedError):
        return None
    if not has_memory:
        return None
    with torch._C.DisableTorchFunctionSubclass(), torch._C._DisableTorchDispatch():
        return tensor.detach().as_subclass(Tensor)


#: How many values a sparse tensor stores, coalesced or not.
num_stored: Callable[[Tensor], int] = Tensor._nnz


#: References to the memory of a tensor that nobody else uses: the tensor's own, and that of the Python object below.
_OWN_USES = 2


def keeping_versions(tensors: Iterable[Tensor]) -> AbstractContextManager[None]:
    """Return a block whose changes to `tensors` in place autograd does not count. In inference mode it counts none."""
    counted = tuple([tensor for tensor in tensors if not tensor.is_inference()])
    return torch.autograd._unsafe_preserve_version_counter(counted)  # type: ignore[attr-defined]


def owns_its_memory(tensor: Tensor) -> bool:
    """Whether no other tensor uses the memory of `tensor`, as gradients of a sum may: autograd lets them share it."""
    storage = tensor.untyped_storage()
    return torch._C._storage_Use_Count(storage._cdata) <= _OWN_USES


def has_tensor_hooks(tensor: Tensor) -> bool:
    """Whether a user registered a hook on the gradient of `tensor`; torch has no public way to ask."""
    return bool(tensor._backward_hooks)


def post_accumulate_hooks(tensor: Tensor) -> dict[int, Any]:
    """Return the table of hooks of `register_post_accumulate_grad_hook` on a tensor, in the order of their calls."""
    table: dict[int, Any] | None = tensor._post_accumulate_grad_hooks
    return {} if table is None else table


def num_post_accumulate_hooks(tensor: Tensor) -> int:
    """Return how many hooks `register_post_accumulate_grad_hook` put on a tensor; torch has no public way to ask."""
    return len(post_accumulate_hooks(tensor))


#: How often a tensor was changed in place.
version_of: Callable[[Tensor], int] = attrgetter("_version")


#: Whether a tensor belongs to a level of a function transform (vmap, grad).
is_bound_to_transform: Callable[[Tensor], bool] = needed_for(
    TRANSFORMS, "torch._C._functorch.is_functorch_wrapped_tensor", instead=lambda tensor: False
)
_get_unwrapped = needed_for(TRANSFORMS, "torch._C._functorch.get_unwrapped")


def nodes_behind(output: Tensor) -> list[Node]:
    """Return the nodes to which a backward from `output` comes: of a view that of its base too, of a transform none."""
    while is_bound_to_transform(output):
        output = _get_unwrapped(output)
    node = output.grad_fn
    nodes = [] if node is None else [node]
    if output._is_view() and output._base is not None and output._base.grad_fn is not None:
        nodes.append(output._base.grad_fn)
    return nodes


def owner_in_graph(tensor: Tensor) -> Tensor | None:
    """Return `tensor`, or that of which it is a view; None if it has no graph or must not be changed in place."""
    if not tensor._is_view():
        return tensor if tensor.grad_fn is not None else None
    owner = tensor._base
    is_ordinary = torch._C._autograd._get_creation_meta(tensor) == torch._C._autograd.CreationMeta.DEFAULT
    return owner if is_ordinary and owner is not None and owner.grad_fn is not None else None


def is_more_than_a_view(view: Tensor) -> bool:
    """Whether somebody has put a hook on it, keeps its gradient, or has made it a class of its own."""
    return bool(view._backward_hooks) or view.retains_grad or type(view) is not Tensor


#: How many nodes this thread has put into graphs: a node has the number that this was before.
num_nodes = torch._C._autograd._get_sequence_nr


#: The number of a node, as its thread counts. No function of Python: each output of each forward is asked.
node_number = methodcaller("_sequence_nr")


def is_in_graph_since(tensor: Tensor, since: int) -> bool:
    """Whether `tensor` has a node, and the owner of its memory a node younger than `since`, as this thread counts."""
    owner = owner_in_graph(tensor)
    owner = tensor if owner is None else owner
    return owner.grad_fn is not None and owner.grad_fn._sequence_nr() >= since


def view_again(view: Tensor, owner: Tensor) -> Tensor:
    """Return the same view of `owner`, by whose present graph its gradients go."""
    again: Tensor = view._view_func(owner)  # type: ignore[attr-defined]
    return again


def has_sizes(tensor: Tensor) -> bool:
    """Whether functions in Python can take `tensor`: not if it is nested with strides, which have no sizes."""
    return not tensor.is_nested or tensor.layout is torch.jagged


#: Whether any function transform (vmap, grad) is running.
transforms_active: Callable[[], bool] = needed_for(
    TRANSFORMS, "torch._C._are_functorch_transforms_active", instead=lambda: False
)
_without_transforms = needed_for(TRANSFORMS, "torch._functorch.pyfunctorch.temporarily_clear_interpreter_stack")


def outside_transforms() -> AbstractContextManager[Any]:
    """Return a block that computes as if no function transform (vmap, grad), which keeps its tensors, ran around it."""
    return _without_transforms() if transforms_active() else nullcontext()


def in_backward_optimizers(parameter: Tensor) -> Sequence[Optimizer]:
    """Return the optimizers that `torch.distributed.optim._apply_optimizer_in_backward` gave to a parameter."""
    optimizers: Sequence[Optimizer] = getattr(parameter, "_in_backward_optimizers", ())
    return optimizers


def in_backward_hooks(parameter: Tensor) -> Sequence[RemovableHandle]:
    """Return the handles of the hooks that would step those optimizers."""
    module = "torch.distributed.optim.apply_optimizer_in_backward"
    found: Sequence[RemovableHandle] = required(OWN_STEPS, f"{module}.param_to_optim_hook_handle_map").get(
        parameter, []
    )
    return found


#: The base class of torch's batch normalisations.
BatchNorm = _BatchNorm


#: The table of parameters of a module; it may hold None, and for a while plain tensors.
parameter_table: Callable[[nn.Module], dict[str, Any]] = attrgetter("_parameters")
#: That of its children; `named_children` builds new tuples at every call.
child_table: Callable[[nn.Module], dict[str, Any]] = attrgetter("_modules")
#: That of its buffers.
buffer_table: Callable[[nn.Module], dict[str, Any]] = attrgetter("_buffers")


def saves_state() -> bool:
    """Whether the function that calls the present one is that in which a module reads itself for `state_dict()`."""
    return sys._getframe(2).f_code is nn.Module._save_to_state_dict.__code__


def set_parameter_table(module: nn.Module, table: dict[str, Any]) -> None:
    """Have a module keep its own parameters in `table`."""
    module.__dict__["_parameters"] = table


def drop_forward_hooks(module: nn.Module, drops: Callable[[Any], bool]) -> None:
    """Take away the forward hooks that `drops` names, before and after forward, from `module` and all modules in it."""
    for part in module.modules():
        for hooks, others in (
            (part._forward_pre_hooks, (part._forward_pre_hooks_with_kwargs,)),
            (part._forward_hooks, (part._forward_hooks_with_kwargs, part._forward_hooks_always_called)),
        ):
            for key in [key for key, hook in hooks.items() if drops(hook)]:
                del hooks[key]
                for other in others:
                    other.pop(key, None)


def refresh_recurrent(module: nn.Module) -> None:
    """Let a recurrent layer compute with what is in its table of parameters: it keeps a second list of them."""
    if isinstance(module, nn.RNNBase):
        module._flat_weights = [getattr(module, name, None) for name in module._flat_weights_names]


def ignored_names(module: nn.Module) -> Collection[str]:
    """Return the parameters and buffers that DDP must leave alone: the module's attribute that torch's DDP reads."""
    names: Collection[str] = getattr(module, "_ddp_params_and_buffers_to_ignore", ())
    return names


def set_ignored_names(module: nn.Module, names: Collection[str]) -> None:
    """Have DDP leave these parameters and buffers of `module` alone."""
    module._ddp_params_and_buffers_to_ignore = names  # type: ignore[assignment]
