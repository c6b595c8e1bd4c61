"""When a device comes to places in its work: its events tell it afterwards, and the host does not wait meanwhile."""

from __future__ import annotations

import torch


class DeviceTimes:
    """Notes places in the work of `device`, in whatever stream is current there.

    The host's clock would tell when work was launched: on an accelerator long before it is done.
    """

    def __init__(self, device: torch.device) -> None:
        """Begin with nothing noted."""
        self._device = device
        self._begin = self._event()
        self._at: dict[int, torch.Event] = {}

    def begin(self) -> None:
        """Forget what was noted; times count from here."""
        self._at.clear()
        self._begin = self._event()
        self._record(self._begin)

    def note(self, name: int) -> None:
        """Note this place as `name`, unless there is one of that name."""
        if name not in self._at:
            self._at[name] = self._event()
            self._record(self._at[name])

    def seconds(self) -> dict[int, float]:
        """Return how long after the beginning the device came to each place; makes the host wait for the last one."""
        for event in self._at.values():
            event.synchronize()
        return {name: self._begin.elapsed_time(event) / 1000 for name, event in self._at.items()}

    def _event(self) -> torch.Event:
        return torch.Event(self._device, enable_timing=True)

    def _record(self, event: torch.Event) -> None:
        event.record(torch.accelerator.current_stream(self._device))
