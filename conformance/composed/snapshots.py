"""`Snapshot`: the facts of a training at a moment; `Observables`: what it can observe besides its tensors."""

import contextlib
import gc
import weakref
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor, nn

from conformance.composed.modules import Composed
from conformance.surroundings.observable import belongings, of_input, of_module, of_output, of_process

#: The actions after which there are facts.
OBSERVED = ("backward", "no_sync", "step", "join", "wrapper", "transform")
#: When a training takes its observables.
CONSTRUCTED, AT_THE_END = "constructed", "at the end"


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The facts of a training at a moment; `synchronised`: a synchronised backward ran since the last snapshot."""

    name: str
    facts: Mapping[str, Any]
    synchronised: bool = False


class Observables:
    """What one rank's training can observe besides its tensors, see `observable`, and the process's changes."""

    def __init__(self, module: Composed, nested_block: int | None) -> None:
        #: The forwards in which no output of the module requires a gradient.
        self.idle_forwards: list[int] = []
        self._process = of_process()
        self._within = f"blocks.{nested_block}"  # a nested wrapper has its own type and attributes
        own = (f"{self._within}:", f"{self._within}.")
        self._belongings = {each for each in belongings(module) if not each.startswith(own)}
        self._seen: dict[str, Any] = {}
        self._made: list[tuple[int, weakref.ref[Tensor]]] = []

    def note_idle(self, forward: int) -> partial[None]:
        """Return a function that notes whether an output of this forward requires a gradient.

        It must not hold `self`: a checkpoint keeps it in the graph, where garbage collection does not see the cycle.
        """
        return partial(_note_idle, self.idle_forwards, forward)

    def look_at(self, forward: int, inputs: Tensor, output: Any, rows: Tensor) -> None:
        """Observe the inputs and the output of forward number `forward`; `rows` are in `output`."""
        self._seen[f"forward {forward}"] = {**of_input(inputs), **of_output(output)}
        self._made += [(forward, weakref.ref(inputs)), (forward, weakref.ref(rows))]

    def of(self, module: Composed, num_forwards: int) -> Mapping[str, Any]:
        """Return the observables of the wrapped `module` and of the forwards so far."""
        changed = {name: value for name, value in of_process().items() if value != self._process[name]}
        return {
            "the process": changed,
            "kept of earlier forwards": self._kept(num_forwards - 1),
            "taken away": sorted(self._belongings - set(belongings(module))),
            **{name: seen for name, seen in of_module(module).items() if not name.startswith(f"{self._within}: ")},
            **self._seen,
        }

    def _kept(self, last: int) -> list[int]:
        """Return the forwards before the `last` whose input or output is still alive."""

        def kept() -> list[int]:
            return sorted({number for number, made in self._made if number < last and made() is not None})

        if kept():
            gc.collect()
        return kept()


def values_of(module: nn.Module, prefix: str = "") -> dict[str, Tensor | None]:
    """Return copies of all parameters, gradients and buffers by name; of those that consist of several, each part."""
    found: dict[str, Tensor | None] = {}
    for name, parameter in module.named_parameters():
        found[f"{prefix}parameter {name}"] = _copy(parameter)
        found[f"{prefix}grad {name}"] = None if parameter.grad is None else _copy(parameter.grad)
    for name, buffer in module.named_buffers():
        for part in getattr(buffer, "__tensor_flatten__", lambda: ([""], None))()[0]:
            kept = getattr(buffer, part) if part else buffer
            found[" ".join(filter(None, (f"{prefix}buffer {name}", part)))] = _copy(kept)
    return found


def _copy(tensor: Tensor) -> Tensor:
    copy = tensor.detach().clone()
    return copy if type(copy) is Tensor else copy.as_subclass(Tensor)


def _note_idle(forwards: list[int], number: int, output: Any) -> None:
    if not any(value for name, value in of_output(output).items() if name.endswith(": requires_grad")):
        forwards.append(number)


@contextlib.contextmanager
def returned_by(module: Composed, *, wanted: bool) -> Iterator[list[Any]]:
    """Collect the module's own outputs in the block, if `wanted`."""
    returned: list[Any] = []
    if not wanted:
        yield returned
        return
    handle = module.register_forward_hook(lambda *called: returned.append(called[-1]))
    try:
        yield returned
    finally:
        handle.remove()
