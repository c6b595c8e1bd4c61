"""Batch normalisation over the batches of all ranks, on any device: torch's own layer refuses to train on a CPU."""

from __future__ import annotations

from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from ddp_impl.base.errors import ReductionError
from ddp_impl.torch_internals.tensors import BatchNorm, buffer_table, parameter_table
from ddp_impl.wire import collectives
from ddp_impl.wire.collectives import size_of


class SyncBatchNorm(nn.SyncBatchNorm):
    """`torch.nn.SyncBatchNorm`, made of ordinary operators and two collectives, so that every device has it.

    Every rank of `process_group` must call forward and backward equally often, with rows or none; in a join context ask
    for `throw_on_early_termination`. In evaluation mode it is `torch.nn.BatchNorm1d` and its kin. A gradient of a
    gradient, as a penalty needs it, is refused with `RuntimeError`.
    """

    @classmethod
    def convert_sync_batchnorm(cls, module: nn.Module, process_group: dist.ProcessGroup | None = None) -> nn.Module:
        """Return `module` with every batch normalisation in it replaced; parameters and buffers stay what they are."""
        if isinstance(module, BatchNorm) and not isinstance(module, cls):
            return cls._like(module, process_group)
        for name, child in module.named_children():
            setattr(module, name, cls.convert_sync_batchnorm(child, process_group))
        return module

    @classmethod
    def _like(cls, module: BatchNorm, process_group: dist.ProcessGroup | None) -> Self:
        layer = cls(
            module.num_features, module.eps, module.momentum, module.affine, module.track_running_stats, process_group
        )
        parameter_table(layer).update(parameter_table(module))
        buffer_table(layer).update(buffer_table(module))
        return layer.train(module.training)

    def forward(self, input: Tensor) -> Tensor:
        """Normalise `input` of shape (rows, features, ...). Collective in training mode."""
        uses_batch = self.training or self.running_mean is None
        group = self._group()
        if not self.training or group is None or size_of(group) <= 1:  # -1: this rank is not in it
            return self._normalise_alone(input, uses_batch)
        self._check_input_dim(input)
        self._check_non_zero_input_channels(input)
        mean, variance, count = _statistics_of_all(input, group)
        if self.track_running_stats:
            self._track(mean, variance, count)
        output: Tensor = NormaliseOverRanks.apply(
            input, self.weight, self.bias, mean, torch.rsqrt(variance + self.eps), count, group
        )
        return output

    def _group(self) -> dist.ProcessGroup | None:
        if not dist.is_initialized():
            return None
        group: dist.ProcessGroup | None = dist.group.WORLD if self.process_group is None else self.process_group
        return group

    def _normalise_alone(self, rows: Tensor, uses_batch: bool) -> Tensor:
        factor = self._count_batch() if self.training and self.track_running_stats else 0.0
        keeps = not self.training or self.track_running_stats
        mean, variance = (self.running_mean, self.running_var) if keeps else (None, None)
        output: Tensor = F.batch_norm(rows, mean, variance, self.weight, self.bias, uses_batch, factor, self.eps)
        return output

    def _count_batch(self) -> float:
        """Count one more batch; return its weight in the running statistics."""
        if self.num_batches_tracked is None:
            return self.momentum or 0.0
        self.num_batches_tracked.add_(1)
        return 1.0 / float(self.num_batches_tracked) if self.momentum is None else float(self.momentum)

    def _track(self, mean: Tensor, variance: Tensor, count: Tensor) -> None:
        if self.running_mean is None or self.running_var is None:
            return
        factor = self._count_batch()
        with torch.no_grad():
            unbiased = variance * (count / (count - 1))
            self.running_mean.lerp_(mean.to(self.running_mean.dtype), factor)
            self.running_var.lerp_(unbiased.to(self.running_var.dtype), factor)


def check_sync_batch_norm(module: nn.Module, device_type: str) -> None:
    """Raise `ValueError` if `module` is on a CPU and has layers that normalise on accelerators only: torch's."""
    for name, layer in module.named_modules():
        if device_type == "cpu" and isinstance(layer, nn.SyncBatchNorm) and not isinstance(layer, SyncBatchNorm):
            raise ValueError(
                f"SyncBatchNorm layers only work with GPU modules, but layer '{name}' is on a CPU, where torch's "
                "cannot train: convert the module with ddp_impl.SyncBatchNorm.convert_sync_batchnorm, or use BatchNorm"
            )


def _statistics_of_all(rows: Tensor, group: dist.ProcessGroup) -> tuple[Tensor, Tensor, Tensor]:
    """Return mean and biased variance per feature over all ranks' rows, and how many values each feature has.

    Ranks send mean, squared deviations and count, which loses no digits; the host waits where it has one value at most.
    Raises `ReductionError` on every rank when all together have one.
    """
    with torch.no_grad():
        values = rows.detach().movedim(1, 0).flatten(1)  # (features, values)
        values = values.to(torch.promote_types(values.dtype, torch.float32))
        number = values.shape[1]
        mean = values.mean(1) if number else values.new_zeros(values.shape[0])
        deviations = (values - mean[:, None]).square().sum(1)
        mine = torch.cat([mean, deviations, mean.new_full((1,), number)])
        everyone = collectives.stack_ranks(mine, group)
        means, deviations, numbers = everyone.split([len(mean), len(mean), 1], dim=1)
        count = numbers.sum()
        if number < 2 and count < 2:
            raise ReductionError(
                f"SyncBatchNorm in training mode expects more than 1 value per feature over all ranks, got {int(count)}"
            )
        mean = (means * numbers).sum(0) / count
        variance = (deviations + numbers * (means - mean).square()).sum(0) / count
        return mean, variance, count


class NormaliseOverRanks(torch.autograd.Function):
    """Normalisation by statistics to which the rows of every rank contributed."""

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor, scale: Tensor, count: Tensor,
        group: dist.ProcessGroup,
    ) -> Tensor:  # fmt: skip
        """Return the normalised rows; every rank must call it."""
        ctx.save_for_backward(rows, weight, mean, scale, count)
        ctx.group = group
        normal = (rows.to(mean.dtype) - _per_feature(mean, rows)) * _per_feature(scale, rows)
        if weight is not None and bias is not None:
            normal = normal * _per_feature(weight, rows) + _per_feature(bias, rows)
        return normal.to(rows.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of rows, weight and bias; every rank must call it."""
        rows, weight, mean, scale, count = ctx.saved_tensors
        found: tuple[Tensor | None, ...] = _gradients(grads[0], rows, weight, mean, scale, count, ctx.group)
        if torch.is_grad_enabled():
            found = tuple(None if one is None else _First.apply(one, grads[0], rows, weight) for one in found)
        return *found, None, None, None, None


class _First(torch.autograd.Function):
    """A gradient that depends on tensors in a way that autograd does not know."""

    @staticmethod
    def forward(ctx: Any, gradient: Tensor, *depends_on: Tensor | None) -> Tensor:
        return gradient.view_as(gradient)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        raise RuntimeError(
            "a gradient of a gradient through ddp_impl.SyncBatchNorm is not computed: it needs what the statistics "
            "of all ranks depend on. Leave the layer out of what is differentiated twice, or use another normalisation"
        )


@torch.no_grad()
def _gradients(
    gradient: Tensor, rows: Tensor, weight: Tensor | None, mean: Tensor, scale: Tensor, count: Tensor,
    group: dist.ProcessGroup,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:  # fmt: skip
    """Return the gradients of the rows, the weight and the bias. All ranks must call it."""
    gradient = gradient.to(mean.dtype)
    normal = (rows.to(mean.dtype) - _per_feature(mean, rows)) * _per_feature(scale, rows)
    own_dims = [dim for dim in range(rows.dim()) if dim != 1]
    for_bias, for_weight = gradient.sum(own_dims), (gradient * normal).sum(own_dims)
    sums = torch.stack([for_bias, for_weight])
    collectives.all_reduce_now(sums, group)
    through_mean, through_scale = sums / count
    factor = scale if weight is None else scale * weight
    centred = gradient - _per_feature(through_mean, rows) - normal * _per_feature(through_scale, rows)
    for_rows = (centred * _per_feature(factor, rows)).to(rows.dtype)
    if weight is None:
        return for_rows, None, None
    return for_rows, for_weight.to(weight.dtype), for_bias.to(weight.dtype)


def _per_feature(vector: Tensor, rows: Tensor) -> Tensor:
    return vector.view(1, -1, *[1] * (rows.dim() - 2))
