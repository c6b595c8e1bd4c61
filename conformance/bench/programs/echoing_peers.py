"""A process group of any size in one process: every other rank says what this one says, at once.

With it one process shows what a DDP itself does among thousands of ranks, without their machines: what it compares,
plans and keeps. What the network takes is not in it.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future


class _Done(dist.Work):
    def __init__(self, outputs: Any) -> None:
        super().__init__()
        self._outputs = outputs
        self._future: Future[Any] = Future()
        self._future.set_result(outputs)

    def wait(self, timeout: Any = None) -> bool:
        return True

    def is_completed(self) -> bool:
        return True

    def is_success(self) -> bool:
        return True

    def result(self) -> Any:
        return self._outputs

    def get_future(self) -> Future[Any]:
        return self._future


class EchoingPeers(dist.ProcessGroup):
    """Rank 0 of `world_size` ranks, of which all others send what it sends."""

    def __init__(self, world_size: int) -> None:
        super().__init__(0, world_size)  # type: ignore[call-arg]
        self._world_size = world_size

    def getBackendName(self) -> str:  # noqa: N802 - torch's name
        """Return the backend's name."""
        return "echo"

    def getGroupName(self) -> str:  # noqa: N802
        """Return the group's name."""
        return "echo"

    def getGroupDesc(self) -> str:  # noqa: N802
        """Return the group's description."""
        return "echo"

    def size(self) -> int:
        """Return how many ranks there seem to be."""
        return self._world_size

    def rank(self) -> int:
        """Return 0."""
        return 0

    def allreduce(self, *args: Any, **kwargs: Any) -> _Done:
        """Reduce what every rank has, which is the same: only a sum is another value then."""
        tensors: list[Tensor] = args[0]
        options = args[1] if len(args) > 1 else kwargs.get("opts")
        if options is None or options.reduceOp == dist.ReduceOp.SUM:
            for tensor in tensors:
                tensor.mul_(self._world_size)
        return _Done(tensors)

    def broadcast(self, *args: Any, **kwargs: Any) -> _Done:
        """Leave everything as it is: rank 0 has it too."""
        return _Done(args[0])

    def allgather(self, *args: Any, **kwargs: Any) -> _Done:
        """Hand this rank's tensors out as everybody's."""
        outputs, inputs = args[:2]
        for gathered, mine in zip(outputs, inputs, strict=True):
            torch._foreach_copy_(gathered, [mine] * len(gathered))
        return _Done(outputs)

    def all_gather_single(self, *args: Any, **kwargs: Any) -> _Done:
        """Hand this rank's tensor out as everybody's; torch < 2.12 calls it `_allgather_base`."""
        output, mine = args[:2]
        output.view(self._world_size, -1).copy_(mine.reshape(1, -1).expand(self._world_size, -1))
        return _Done([output])

    _allgather_base = all_gather_single

    def barrier(self, *args: Any, **kwargs: Any) -> _Done:
        """Return at once."""
        return _Done([])
