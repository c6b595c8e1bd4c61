"""The content of a collective in a line, and the lines of code that issued it: to replay a failure."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from types import FrameType

import torch
from torch import Tensor

from conformance.observation import Carried

_MOST_VALUES = 4
_RECORDER, _TORCH = str(Path(__file__).parent), str(Path(torch.__file__).parent)
_NOT_THE_CALLER = (_RECORDER, _TORCH, "<")


class Look:
    """A look at one collective when it is issued, and when it has completed and was waited for."""

    def __init__(self, given: Sequence[Tensor], written: Sequence[Tensor]) -> None:
        self._given, self._issued_at = in_short(given), _issued_at(sys._getframe(1))
        self.written: Sequence[Tensor] = written
        self._left = ""

    def land(self) -> None:
        """Look at the result."""
        self._left, self.written = in_short(self.written), ()

    def carried(self) -> Carried:
        """Return what was seen."""
        return Carried(self._issued_at, self._given, self._left)


def in_short(tensors: Sequence[Tensor]) -> str:
    """Return e.g. `[1, 2.5, 0, -1, ...] sum 40` of all tensors one after the other; no sum of complex ones."""
    with torch.no_grad():
        dense = [tensor.detach().to_dense() if tensor.is_sparse else tensor.detach() for tensor in tensors]
        flat = [tensor.reshape(-1) for tensor in dense if tensor.numel()]
        num_values = sum(tensor.numel() for tensor in flat)
        first = list(chain.from_iterable(tensor[:_MOST_VALUES].tolist() for tensor in flat[:_MOST_VALUES]))
        is_complex = any(tensor.is_complex() for tensor in flat)
        total = "" if is_complex else f" sum {sum(tensor.double().sum().item() for tensor in flat):.6g}"
    values = [f"{value:.6g}" if isinstance(value, float) else str(value) for value in first[:_MOST_VALUES]]
    if num_values <= _MOST_VALUES:
        return f"[{', '.join(values)}]"
    return f"[{', '.join([*values, '...'])}]{total}"


def _issued_at(frame: FrameType | None) -> str:
    """Return the innermost place outside of torch and the recorder, and its caller in another file.

    As `file.py:12 in function, from other.py:34 in caller`: a DDP may have its own file for collectives.
    """
    places: dict[str, str] = {}
    while frame is not None and len(places) < 2:
        file = frame.f_code.co_filename
        if not file.startswith(_NOT_THE_CALLER) and file not in places:
            places[file] = f"{'/'.join(Path(file).parts[-2:])}:{frame.f_lineno} in {frame.f_code.co_name}"
        frame = frame.f_back
    return ", from ".join(places.values())
