"""The function transforms (`torch.func`) in which a training calls its model; they accumulate no gradients."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from conformance.composed.modules import Where, rows_of

_Given = Mapping[str, Tensor]


def _of_rows(transform: Callable[[Callable[[Tensor], Tensor], Tensor], Any], model: Any, inputs: Tensor,
             where: Where) -> _Given:  # fmt: skip
    given = transform(lambda rows: rows_of(model(rows, where=where)), inputs)
    return {"transformed": given.detach().clone()}


def _of_stand_ins(model: Any, inputs: Tensor, where: Where) -> _Given:
    def loss(stand_ins: dict[str, Tensor]) -> Tensor:
        output = torch.func.functional_call(model, stand_ins, (inputs,), {"where": where}, tie_weights=False)
        return rows_of(output).sum()

    stand_ins = {name: parameter.detach() for name, parameter in model.named_parameters()}
    given = torch.func.grad(loss)(stand_ins)
    return {f"transformed: {name}": gradient.detach().clone() for name, gradient in given.items()}


#: What torch imports, and compiles, at a process's first forward-mode derivative: for 0.2 s of a processor.
FORWARD_MODE = ("torch._decomp.decompositions_for_jvp",)

#: Functions of the model, rows and the place of the forward; each returns facts by name.
TRANSFORMS: Mapping[str, Callable[[Any, Tensor, Where], _Given]] = {
    "grad": partial(_of_rows, lambda call, inputs: torch.func.grad(lambda rows: call(rows).sum())(inputs)),
    "jvp": partial(_of_rows, lambda call, inputs: torch.func.jvp(call, (inputs,), (inputs,))[1]),
    "vmap": partial(_of_rows, lambda call, inputs: torch.func.vmap(call)(inputs)),
    "stand_ins": _of_stand_ins,
}
