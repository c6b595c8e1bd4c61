"""`Changes`: a training loop's changes of its module between forwards, on every rank or on rank 0 alone."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from conformance.composed.modules import SMALL_UNIT, UNIT, Composed, make_block, with_small_weights
from conformance.composed.training import Action, Block, Training
from conformance.models.integers import integers

#: The actions that change the module without running it.
CHANGES = ("freeze", "unfreeze", "replace", "relayout", "append", "hook", "gradients")


def is_meant(action: Action, rank: int) -> bool:
    """Whether a rank does the action."""
    return rank == 0 or action.how != "rank_0"


def block_of(module: Composed, action: Action) -> Any:
    """Return the block that `action` is about."""
    return module.blocks[action.block % len(module.blocks)]


def unit_of(training: Training, parameter: Tensor) -> int:
    """Return the unit of the values that a loop computes with a parameter."""
    return SMALL_UNIT if training.precision or parameter.dtype is torch.float16 else UNIT


class Changes:
    """One rank's changes in a training, and the hooks that it has registered."""

    def __init__(self, training: Training, rank: int, seed: int, device: torch.device | str, module: Composed) -> None:
        """Note which parameters of the wrapped `module` its DDP averages."""
        self._training = training
        self._rank = rank
        self._seed = seed
        self._device = device
        self._handles: list[RemovableHandle] = []
        self._given = {name for name, parameter in module.named_parameters() if parameter.requires_grad}

    def make(self, module: Composed, action: Action) -> None:
        """Change `module`."""
        getattr(self, f"_{action.kind}")(module, action)

    def remove_hooks(self) -> None:
        """Remove all hooks."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _freeze(self, module: Composed, action: Action) -> None:
        self._set_requires_grad(module, action, False)

    def _unfreeze(self, module: Composed, action: Action) -> None:
        self._set_requires_grad(module, action, True)

    def _set_requires_grad(self, module: Composed, action: Action, value: bool) -> None:
        """Freeze or unfreeze a block; on one rank only the DDP's parameters: for others a rank would wait in vain."""
        mine = set(block_of(module, action).parameters())
        # A rank without another parameter would have no backward, like a rank that left.
        if not value:
            mine -= set(module.first.parameters())
        if action.how == "rank_0" and not module.first.weight.requires_grad:
            mine.clear()
        for name, parameter in module.named_parameters():
            is_known = action.how == "every_rank" or name in self._given
            if parameter in mine and is_known and is_meant(action, self._rank):
                parameter.requires_grad_(value)

    def _replace(self, module: Composed, action: Action) -> None:
        index = action.block % len(module.blocks)
        if action.how == "block":
            block = self._training.blocks[index % len(self._training.blocks)]
            module.blocks[index] = self._new_block(module, block, index)
        else:
            layer, name = _first_parameter(module.blocks[index])
            old = getattr(layer, name)
            new = integers(*old.shape, key=("replaced", self._seed, index), largest=2, dtype=old.dtype).to(self._device)
            if action.how == "data":
                old.data = new
            else:
                setattr(layer, name, nn.Parameter(new, requires_grad=old.requires_grad))

    def _relayout(self, module: Composed, action: Action) -> None:
        """Give parameters and gradients other memory, with dimensions in reverse order, as `module.to` does."""
        if is_meant(action, self._rank):
            for parameter in block_of(module, action).parameters():
                parameter.data = _in_reverse(parameter.data)
                if parameter.grad is not None and not parameter.grad.is_sparse:
                    parameter.grad.data = _in_reverse(parameter.grad.data)

    def _append(self, module: Composed, action: Action) -> None:
        """Add a block at the end, or a parameter to a block, which the loss then uses."""
        if action.how == "block":
            module.blocks.append(self._new_block(module, Block(), len(module.blocks)))
        else:
            layer, name = _first_parameter(block_of(module, action))
            old = getattr(layer, name)
            dtype = torch.float32 if old.dtype is torch.float16 else old.dtype
            values = integers(*old.shape, key=("mask", self._seed), largest=1, dtype=dtype)
            layer.register_parameter("mask", nn.Parameter(values.to(self._device)))
            layer.register_forward_hook(_add_mask)

    def _hook(self, module: Composed, action: Action) -> None:
        if action.how == "remove":
            self.remove_hooks()
        elif action.how == "module":
            self._handles.append(block_of(module, action).register_forward_hook(lambda block, args, rows: rows * 2))
        else:
            for parameter in block_of(module, action).parameters():
                if action.how == "post_accumulate" and parameter.requires_grad:
                    self._handles.append(parameter.register_post_accumulate_grad_hook(lambda parameter: None))
                elif parameter.requires_grad:
                    self._handles.append(parameter.register_hook(_doubled))

    def _gradients(self, module: Composed, action: Action) -> None:
        """Change the gradients of a block as a loop may between backward and step, or before backward."""
        for name, parameter in block_of(module, action).named_parameters():
            match action.how:
                case "set":
                    key = ("set", name, self._rank)
                    mine = integers(*parameter.shape, key=key, largest=1, dtype=parameter.dtype)
                    parameter.grad = torch.empty_like(parameter).copy_(unit_of(self._training, parameter) * mine)
                case "clone" if parameter.grad is not None:
                    parameter.grad = parameter.grad.clone()
                case "double" if parameter.grad is not None:
                    parameter.grad.mul_(2)
                case "drop":
                    parameter.grad = None

    def _new_block(self, module: Composed, block: Block, index: int) -> nn.Module:
        with torch.random.fork_rng(devices=[]):
            made = make_block(block, module.first)
        if block.kind != "shared":
            with_small_weights(made, "new", index, self._seed)
        return made.to(self._device)


def _first_parameter(block: nn.Module) -> tuple[nn.Module, str]:
    for module in block.modules():
        for name, _ in module.named_parameters(recurse=False):
            return module, name
    raise AssertionError("every block has a parameter")


def _add_mask(layer: Any, args: Any, rows: Tensor) -> Tensor:
    return rows + layer.mask.sum().real.to(rows.dtype)


def _in_reverse(tensor: Tensor) -> Tensor:
    reverse = list(reversed(range(tensor.dim())))
    return tensor.permute(reverse).clone(memory_format=torch.contiguous_format).permute(reverse)


def _doubled(gradient: Tensor | None) -> Tensor | None:
    return None if gradient is None else gradient * 2
