"""Sharded parameters: what their gradients are averaged as, and the example of docs/drop_in.md."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor

from ddp_impl.base.nested_tensors import describe_placement, is_distributed, local_gradient, set_local_gradient
from ddp_impl.tests.ranks import run_ranks

_DOCUMENT = Path(__file__).parents[2] / "docs" / "drop_in.md"


def _example() -> dict[str, Any]:
    blocks = re.findall(r"```python\n(.*?)```", _DOCUMENT.read_text(encoding="utf-8"), re.DOTALL)
    names: dict[str, Any] = {}
    exec(compile("\n".join(blocks), str(_DOCUMENT), "exec"), names)
    return names


def _run_example(rank: int, folder: str) -> dict[str, Tensor]:
    names = _example()
    seen: list[Any] = []
    names["model_on"] = _remembering(names["model_on"], seen)
    names["train_and_move"](folder)
    values: dict[str, Tensor] = {}
    for which, model in zip(("saved", "loaded"), seen, strict=True):
        for name, parameter in model.module.named_parameters():
            assert isinstance(parameter, DTensor)
            values[f"{which} {name}"] = parameter.full_tensor().detach()
    return values


def _remembering(build: Any, seen: list[Any]) -> Any:
    def build_and_remember(*shape: int) -> Any:
        torch.manual_seed(sum(shape))
        model, row = build(*shape)
        seen.append(model)
        return model, row

    return build_and_remember


def test_the_documented_example_trains_and_moves(tmp_path: Path) -> None:
    results = run_ranks(_run_example, 4, tmp_path / "ranks", str(tmp_path / "checkpoint"))
    for values in results:
        for name in ("0.weight", "0.bias", "2.weight", "2.bias"):
            assert torch.equal(values[f"loaded {name}"], results[0][f"saved {name}"])


def _local_gradients(rank: int) -> list[tuple[Tensor, Tensor, bool]]:
    """Return, per case, the local gradient, what it should be, and whether the gradient then lies as the parameter."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    whole = torch.arange(6.0).view(3, 2)
    found = []
    for parameter_placement in (Shard(0), Shard(1), Replicate()):
        for gradient in (Shard(0), Shard(1), Replicate(), Partial()):
            parameter = nn.Parameter(distribute_tensor(torch.zeros(3, 2), mesh, [parameter_placement]))
            parameter.grad = _gradient(whole, mesh, gradient, rank)
            wanted = distribute_tensor(whole, mesh, [parameter_placement]).to_local()
            local = local_gradient(parameter)
            assert local is not None
            assert isinstance(parameter.grad, DTensor)
            assert isinstance(parameter, DTensor)
            found.append((local, wanted, parameter.grad.placements == parameter.placements))
    return found


def _gradient(whole: Tensor, mesh: DeviceMesh, placement: Placement, rank: int) -> DTensor:
    if isinstance(placement, Partial):  # rank 0 has three times the sum, rank 1 takes two of them away
        return DTensor.from_local(whole * (3 if rank == 0 else -2), mesh, [placement])
    return distribute_tensor(whole, mesh, [placement])


def test_gradients_are_brought_into_the_placement_of_their_parameters(tmp_path: Path) -> None:
    for found in run_ranks(_local_gradients, 2, tmp_path):
        assert len(found) == 12
        for local, wanted, placed in found:
            assert torch.equal(local, wanted)
            assert placed


def _put_gradients(rank: int) -> tuple[Tensor, str, str]:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    parameter = nn.Parameter(distribute_tensor(torch.zeros(3, 2), mesh, [Shard(0)]))
    rows = 2 - rank  # three rows over two ranks
    set_local_gradient(parameter, torch.full((rows, 2), float(rank)))
    assert isinstance(parameter.grad, DTensor)
    replicated = distribute_tensor(torch.zeros(3, 2), mesh, [Replicate()])
    return parameter.grad.full_tensor(), describe_placement(parameter), describe_placement(replicated)


def test_a_gradient_is_put_together_from_uneven_shards_and_placements_tell_shards_apart(tmp_path: Path) -> None:
    first, second = run_ranks(_put_gradients, 2, tmp_path)
    assert torch.equal(first[0], torch.tensor([[0.0, 0.0], [0.0, 0.0], [1.0, 1.0]]))
    assert torch.equal(second[0], first[0])
    assert first[1] != second[1], "the ranks hold different shards, which must not be averaged"
    assert first[2] == second[2], "what is replicated may be averaged"


@pytest.mark.parametrize("tensor", [torch.zeros(2), nn.Parameter(torch.zeros(2)), nn.Buffer(torch.zeros(2))])
def test_plain_tensors_are_left_alone(tensor: Tensor) -> None:
    assert not is_distributed(tensor)
    assert describe_placement(tensor) == ""
    gradient = torch.ones(2)
    set_local_gradient(tensor, gradient)
    assert tensor.grad is gradient
    assert local_gradient(tensor) is gradient
