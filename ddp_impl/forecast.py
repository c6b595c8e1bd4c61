"""What every rank knows of the gradients that a backward will bring, before the first bucket leaves.

With `find_unused_parameters` ranks use different parameters. A bucket that left with the last gradient that *this* rank
awaits would leave at another moment on another rank, and between two of the user's own collectives, or another
wrapper's, each rank would meet a different one (pytorch/pytorch#72843). So when their backward begins, ranks tell each
other what they expect, and a bucket leaves within it only if all of them expect the same of each of its parameters.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from ddp_impl import collectives

#: What a rank adds for a parameter of which it cannot tell; more than a group has ranks.
_PERHAPS = 1 << 16
_SURELY = 1


@dataclass(frozen=True, slots=True)
class Forecast:
    """`alike[i]`: all ranks get a gradient of parameter i, or none does; `expected[i]`: some rank may have one."""

    alike: Sequence[bool]
    expected: Sequence[bool]


class PendingForecast:
    """An exchange of what ranks expect. Every rank of the group makes it between the same two collectives.

    `coming[i]`: this backward will bring parameter i a gradient; `possible[i]`: it may, or there is one that awaits its
    first reduction. With `shadows` this rank has no data: it follows whatever the others expect.

    The host waits for the other ranks' hosts and not for the device, which is busy with the forward: on an accelerator
    the exchange has a stream of its own.
    """

    def __init__(
        self,
        coming: Sequence[bool],
        possible: Sequence[bool],
        group: dist.ProcessGroup,
        device: torch.device,
        *,
        shadows: bool = False,
    ) -> None:
        """Start the exchange."""
        told = [_SURELY if comes else _PERHAPS if may else 0 for comes, may in zip(coming, possible, strict=True)]
        told = [0] * (len(told) + 1) if shadows else [*told, 1]
        flags = torch.tensor(told, dtype=torch.int32, device="cpu")
        self._stream = None if device.type == "cpu" else torch.Stream(device)
        if self._stream is None:
            self._flags, self._work = flags, collectives.all_reduce_sum(flags, group)
        else:
            with self._stream:
                self._flags = flags.pin_memory().to(device, non_blocking=True)
                self._work = collectives.all_reduce_sum(self._flags, group)

    def result(self) -> Forecast:
        """Wait for all ranks, and return what they expect."""
        if self._stream is None:
            self._work.wait()
            *counts, num_telling = self._flags.tolist()
        else:
            with self._stream:
                self._work.wait()
                *counts, num_telling = self._flags.tolist()
        if counts.count(num_telling) == len(counts):
            return Forecast(alike=[True] * len(counts), expected=[num_telling > 0] * len(counts))
        return Forecast(alike=[count in (0, num_telling) for count in counts], expected=[count > 0 for count in counts])
