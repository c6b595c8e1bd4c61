"""What every rank knows of the gradients that a backward will bring, before the first bucket leaves.

With `find_unused_parameters` ranks use different parameters. A bucket that left with the last gradient that *this* rank
awaits would leave at another moment on another rank, and between two of the user's own collectives, or another
wrapper's, each rank would meet a different one (pytorch/pytorch#72843). So when their backward begins, ranks tell each
other which gradients are sure to come, and a bucket leaves within it only if all of its own will on every rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass

import torch
import torch.distributed as dist

from ddp_impl.torch_internals.distributed import reduces_on_host
from ddp_impl.wire import agreement, collectives
from ddp_impl.wire.groups import size_of


@dataclass(frozen=True, slots=True)
class Told:
    """What all ranks know: `sure[i]`, that parameter i gets a gradient; whether their digests are `alike`.

    `by_all`: no rank is without data.
    """

    sure: list[bool]
    alike: bool
    by_all: bool


class Forecast:
    """An exchange of what is sure to come. Every rank of the group makes it between the same two collectives.

    `coming[i]`: this backward is sure to bring parameter i a gradient. None of a rank that has no data and follows
    whatever the others expect. `digest`: some bytes about the last iteration, which may be alike on all others.

    The host waits for the other ranks' hosts and not for the device, which is busy with the forward: the exchange is
    one between hosts where the group can do that, and has a stream of its own on an accelerator where it cannot.
    """

    def __init__(
        self,
        coming: Sequence[bool] | None,
        num_parameters: int,
        digest: bytes,
        group: dist.ProcessGroup,
        device: torch.device,
    ) -> None:
        """Start the exchange."""
        self._num_parameters, self._num_ranks = num_parameters, size_of(group)
        told = [*(coming or ()), True, *agreement.to_sum(digest)]
        if coming is None:
            told = [0] * (num_parameters + 1 + 2 * len(digest))
        flags = torch.tensor(told, dtype=torch.int32, device="cpu")
        self._stream = None if device.type == "cpu" or reduces_on_host(group) else torch.Stream(device)
        if self._stream is None:
            self._flags, self._work = flags, collectives.all_reduce_sum(flags, group)
        else:
            with self._stream:
                self._flags = flags.pin_memory().to(device, non_blocking=True)
                self._work = collectives.all_reduce_sum(self._flags, group)

    def result(self) -> Told:
        """Wait for all ranks; return what they have told."""
        with self._stream or nullcontext():
            collectives.finished(self._work, "all_reduce", [self._flags])
            counts = self._flags.tolist()
        num_telling = counts[self._num_parameters]
        alike = all(agreement.are_alike(counts[self._num_parameters + 1 :], num_telling))
        sure = [count == num_telling for count in counts[: self._num_parameters]]
        return Told(sure, alike, num_telling == self._num_ranks)
