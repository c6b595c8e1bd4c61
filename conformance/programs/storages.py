"""Where gradients are stored, and what that reveals about a DDP's options."""

from collections.abc import Mapping
from typing import Any

from torch import nn


def num_storages(module: nn.Module) -> int:
    """Return how many storages hold the gradients of `module`."""
    present = [parameter.grad for parameter in module.parameters() if parameter.grad is not None]
    return len({gradient.untyped_storage().data_ptr() for gradient in present})


def marks_of_options(options: Mapping[str, Any], num_gradients: int, world_size: int) -> dict[str, int]:
    """Return facts that show whether a DDP obeys `options`, for a module that fits one bucket of the default size.

    `num_buckets` counts the gradient collectives of a step with `num_gradients` gradients (one rank need not
    communicate); `num_storages` is as the function of that name counts.
    """
    each_alone = options.get("bucket_cap_mb", 25) < 1
    in_one = options.get("gradient_as_bucket_view") and not each_alone
    marks = {"num_storages": 1 if in_one else num_gradients}
    return marks if world_size == 1 else marks | {"num_buckets": num_gradients if each_alone else 1}
