"""Optimizers that programs and the truth share, so that equal gradients give bitwise equal parameters."""

from torch import nn, optim

from conformance.models.catalogue import ModelFixture

#: Powers of two: multiplying by them is exact, so that a fused multiply-add rounds like two operations.
LEARNING_RATE = 0.125
MOMENTUM = 0.5

#: Environment variable. Unless it is "0", an optimizer in backward leaves None where it has used a gradient.
SETS_TO_NONE = "DDP_OVERLAPPED_OPTIM_SET_GRADS_TO_NONE"


def sgd(module: nn.Module, fixture: ModelFixture) -> optim.SGD:
    """Return SGD over all of `module`'s parameters; without momentum for sparse gradients.

    A momentum buffer of sparse gradients is a sum whose order, and so whose rounding, depends on coalescing.
    """
    return optim.SGD(module.parameters(), lr=LEARNING_RATE, momentum=0.0 if fixture.sparse else MOMENTUM)
