"""That facts arrive as they were observed."""

import pytest
import torch
from torch import Tensor

from conformance.observation import Collective, Ending, Observation, Raised, Unmeasured
from conformance.workers.channel import pair
from conformance.workers.messages import Answer, FromRank
from conformance.workers.tensors import portable

DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64, torch.int64, torch.bool)


def sent(observation: Observation) -> Observation:
    ours, theirs = pair(FromRank, None)
    theirs.send(Answer(7, portable(observation)))
    answer = ours.receive(5.0)
    assert answer.number == 7
    assert isinstance(answer.observation, Observation)
    return answer.observation


def travelled(tensor: Tensor) -> Tensor:
    arrived = sent(Observation(0, Ending("returned"), facts={"fact": tensor})).facts["fact"]
    assert isinstance(arrived, Tensor)
    return arrived


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 3), (2, 0, 4)], ids=str)
def test_dense_tensors(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = torch.testing.make_tensor(shape, dtype=dtype, device="cpu")
    arrived = travelled(tensor)
    assert arrived.dtype == dtype
    assert arrived.shape == tensor.shape
    assert torch.equal(arrived, tensor)


def test_not_a_number_and_minus_zero_keep_their_bits() -> None:
    tensor = torch.tensor([float("nan"), -0.0, float("inf")])
    assert torch.equal(travelled(tensor).view(torch.int32), tensor.view(torch.int32))


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(24.0).view(1, 2, 3, 4).to(memory_format=torch.channels_last),
        torch.arange(6.0).view(2, 3).t(),
        torch.complex(torch.arange(4.0), torch.ones(4)).conj(),
    ],
    ids=["channels_last", "transposed", "conjugate"],
)
def test_values_and_strides(tensor: Tensor) -> None:
    arrived = travelled(tensor)
    assert arrived.stride() == tensor.stride()
    assert torch.equal(arrived, tensor)


def test_a_view_takes_only_its_own_elements_along() -> None:
    view = torch.zeros(1_000_000)[:2]
    carried = portable(Observation(0, Ending("returned"), facts={"fact": view})).facts["fact"]
    assert len(carried.data) < 1000
    expanded = torch.ones(1).expand(1000)
    assert torch.equal(travelled(expanded), expanded)


@pytest.mark.parametrize("coalesced", [True, False])
def test_sparse_tensors(coalesced: bool) -> None:
    indices, values = torch.tensor([[1, 1, 0]]), torch.tensor([[1.0], [2.0], [3.0]])
    tensor = torch.sparse_coo_tensor(indices, values, (4, 1), check_invariants=True)
    tensor = tensor.coalesce() if coalesced else tensor
    arrived = travelled(tensor)
    assert arrived.is_coalesced() == coalesced
    assert torch.equal(arrived.to_dense(), tensor.to_dense())
    assert arrived._nnz() == tensor._nnz()


def test_an_observation() -> None:
    observation = Observation(
        1,
        Ending("killed", 9, "killed by SIGKILL"),
        facts={"construct": Raised("E", ("E", "Exception"), "m"), "loss": 1.5, "grad": None, "size": Unmeasured("why")},
        history=(Collective(0, "all_reduce", "default", ((2, 3),), ("float32",), "sum"),),
    )
    assert sent(observation) == observation
