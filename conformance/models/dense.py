"""Models of fully connected layers: a plain one, and variants with one unusual feature each."""

import torch
from torch import Tensor, nn

from conformance.models.batches import Batch
from conformance.models.catalogue import ALL_REAL, ModelFixture


def regression_loss(model: nn.Module, batch: Batch) -> Tensor:
    """Return the mean squared error of `model` on 8 random inputs of 12 features with 4 random targets."""
    return squared_error(model(batch.normal(8, 12)), batch.normal(8, 4))


def squared_error(output: Tensor, target: Tensor) -> Tensor:
    """Return the mean of |output - target|**2, a real scalar for complex tensors as well."""
    difference = output - target
    return (difference * difference.conj()).real.mean() if difference.is_complex() else difference.square().mean()


class ManySmallLayers(nn.Module):
    """Twelve residual blocks of mixed widths: 48 parameters from 3 to 144 elements, so that buckets cut anywhere."""

    WIDTHS = (3, 12, 5, 8, 1, 10, 7, 12, 2, 9, 4, 6)

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.ModuleList(nn.Linear(12, width) for width in self.WIDTHS)
        self.up = nn.ModuleList(nn.Linear(width, 12) for width in self.WIDTHS)
        self.head = nn.Linear(12, 4)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = inputs
        for down, up in zip(self.down, self.up, strict=True):
            hidden = hidden + up(torch.tanh(down(hidden)))
        return self.head(hidden / 4)


class MixedDtypes(nn.Module):
    """A float32 layer, a float64 layer and a float32 layer: gradients of two dtypes, never in one bucket."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(12, 16)
        self.precise = nn.Linear(16, 16).double()
        self.last = nn.Linear(16, 4)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = torch.tanh(self.first(inputs))
        hidden = torch.tanh(self.precise(hidden.double())).to(inputs.dtype)
        return self.last(hidden)


def _mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(12, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 4))


def _batchnorm_mlp() -> nn.Module:
    return nn.Sequential(
        nn.Linear(12, 16, bias=False),  # batch normalisation would cancel a bias
        nn.BatchNorm1d(16),
        nn.ReLU(),
        nn.Linear(16, 8, bias=False),
        nn.BatchNorm1d(8),
        nn.Linear(8, 4),
    )


def _wide() -> nn.Module:
    # 65,536 weights in the middle: so many that a DDP may treat them otherwise than the few around them.
    return nn.Sequential(nn.Linear(12, 256), nn.Tanh(), nn.Linear(256, 256), nn.Tanh(), nn.Linear(256, 4))


def _complex() -> nn.Module:
    return nn.Sequential(nn.Linear(12, 8, dtype=torch.complex64), nn.Linear(8, 4, dtype=torch.complex64))


def _frozen() -> nn.Module:
    model = _mlp()
    model.get_submodule("2").requires_grad_(False)
    model.get_parameter("4.bias").requires_grad_(False)
    return model


FIXTURES = (
    ModelFixture("mlp", _mlp, regression_loss, dtypes=ALL_REAL),
    ModelFixture("batchnorm_mlp", _batchnorm_mlp, regression_loss, uses_buffers=True),
    ModelFixture("many_small_layers", ManySmallLayers, regression_loss, dtypes=ALL_REAL),
    ModelFixture("wide", _wide, regression_loss, dtypes=ALL_REAL),
    ModelFixture("mixed_dtypes", MixedDtypes, regression_loss, dtypes=("float32",)),
    ModelFixture("complex", _complex, regression_loss, dtypes=("complex64",)),
    ModelFixture("frozen", _frozen, regression_loss, dtypes=ALL_REAL),
)
