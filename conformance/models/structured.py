"""Models whose output is a structure of tensors."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from conformance.models.batches import Batch
from conformance.models.catalogue import ALL_REAL, ModelFixture
from conformance.models.dense import squared_error


@dataclass
class Prediction:
    """An output as a dataclass: the prediction (size x 4), features (size x 8) and something that is no tensor."""

    prediction: Tensor
    features: Tensor
    label: str = "regression"


class DataclassOutput(nn.Module):
    """Returns a `Prediction`."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Linear(12, 8)
        self.head = nn.Linear(8, 4)

    def forward(self, inputs: Tensor) -> Prediction:
        features = torch.tanh(self.trunk(inputs))
        return Prediction(self.head(features), features)


class NestedOutput(nn.Module):
    """Returns tensors nested in a dict, a tuple and a list, beside values that are no tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Linear(12, 8)
        self.heads = nn.ModuleList(nn.Linear(8, 4) for _ in range(3))

    def forward(self, inputs: Tensor) -> dict[str, Any]:
        hidden = torch.tanh(self.trunk(inputs))
        first, second, third = (head(hidden) for head in self.heads)
        return {"first": first, "rest": (second, [None, {"third": third}]), "count": 3}


def _dataclass_loss(model: nn.Module, batch: Batch) -> Tensor:
    output = model(batch.normal(8, 12))
    return squared_error(output.prediction, batch.normal(8, 4)) + squared_error(output.features, batch.normal(8, 8))


def _nested_loss(model: nn.Module, batch: Batch) -> Tensor:
    output = model(batch.normal(8, 12))
    second, (_, inner) = output["rest"]
    outputs = torch.stack((output["first"], second, inner["third"]))
    return squared_error(outputs, batch.normal(3, 8, 4))


FIXTURES = (
    ModelFixture("dataclass_output", DataclassOutput, _dataclass_loss, dtypes=ALL_REAL),
    ModelFixture("nested", NestedOutput, _nested_loss, dtypes=ALL_REAL),
)
