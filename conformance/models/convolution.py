"""Convolutional models on the digit images, with the buffers of batch normalisation and with memory formats."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from conformance.models.batches import Batch
from conformance.models.catalogue import ModelFixture


class DigitsCnn(nn.Module):
    """Two convolutions with batch normalisation and a linear classifier: size x 1 x 8 x 8 images to 10 logits."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 12, 3, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(12)
        self.conv2 = nn.Conv2d(12, 24, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(24)
        self.classifier = nn.Linear(24 * 2 * 2, 10)

    def forward(self, images: Tensor) -> Tensor:
        hidden = F.max_pool2d(F.relu(self.norm1(self.conv1(images))), 2)
        hidden = F.max_pool2d(F.relu(self.norm2(self.conv2(hidden))), 2)
        return self.classifier(hidden.flatten(1))


class PointwiseCnn(nn.Module):
    """1 x 1 and 3 x 3 convolutions in channels-last format: strides of a 1 x 1 kernel are ambiguous."""

    def __init__(self) -> None:
        super().__init__()
        self.expand = nn.Conv2d(1, 8, 1)
        self.mix = nn.Conv2d(8, 8, 3, stride=2, padding=1)
        self.pointwise = nn.Conv2d(8, 16, 1)
        self.classifier = nn.Linear(16, 10)
        self.to(memory_format=torch.channels_last)  # type: ignore[call-overload]

    def forward(self, images: Tensor) -> Tensor:
        hidden = torch.tanh(self.expand(images.contiguous(memory_format=torch.channels_last)))
        hidden = torch.tanh(self.pointwise(torch.tanh(self.mix(hidden))))
        return self.classifier(hidden.mean((2, 3)))


def digits_loss(model: nn.Module, batch: Batch) -> Tensor:
    """Return the cross entropy of `model` on 8 digit images."""
    images, labels = batch.digits(8)
    return F.cross_entropy(model(images), labels)


FIXTURES = (
    ModelFixture("cnn", DigitsCnn, digits_loss, uses_buffers=True),
    ModelFixture("channels_last_cnn", PointwiseCnn, digits_loss),
)
