"""Mutants of chapter mixed_precision: DDPs with one bug each; `mutants.toml` names the requirements that detect it."""

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from conformance.mutants.bases import with_options
from conformance.mutants.patches import Call, as_part, replaces
from ddp_impl import DistributedDataParallel as Ours
from ddp_impl.api import distributed
from ddp_impl.base.nested_tensors import cast
from ddp_impl.module import mixed_precision, replicas
from ddp_impl.module.mixed_precision import Casts, MixedPrecision, PrecisionCaster
from ddp_impl.module.replicas import Replica


@replaces(Ours, "__init__")
def ReducesInParamDtype(ddp: Ours, init: Call, *args: Any, mixed_precision: Any = None, **kwargs: Any) -> None:
    """BUG: `reduce_dtype` is ignored; gradients travel in `param_dtype`."""
    dtype = None if mixed_precision is None else MixedPrecision.of(mixed_precision).param_dtype
    with with_options(reduce_dtype=dtype):
        init(*args, mixed_precision=mixed_precision, **kwargs)


@replaces(Ours, "__init__")
def ReducesInFullPrecision(ddp: Ours, init: Call, *args: Any, **kwargs: Any) -> None:
    """BUG: gradients travel in full precision whatever was asked for."""
    with with_options(reduce_dtype=None):
        init(*args, **kwargs)


@replaces(Ours, "_post_forward")
def RoundsParameters(ddp: Ours, post_forward: Call, output: Any) -> Any:
    """BUG: each forward leaves the parameters rounded to `param_dtype`."""
    if ddp._caster is not None and ddp._caster.config.param_dtype is not None:
        for parameter in ddp.module.parameters():
            if parameter.is_floating_point():
                parameter.data.copy_(parameter.data.to(ddp._caster.config.param_dtype))
    return post_forward(output)


@replaces(PrecisionCaster, "__init__")
def CastsIgnored(caster: PrecisionCaster, init: Call, module: nn.Module, config: Any, ignored: Any) -> None:
    """BUG: ignored parameters and buffers are cast as well."""
    init(module, config, ())


@replaces(PrecisionCaster, "__init__")
def BuffersStayFull(caster: PrecisionCaster, init: Call, module: nn.Module, config: Any, ignored: Any) -> None:
    """BUG: `buffer_dtype` is ignored."""
    init(module, dataclasses.replace(config, buffer_dtype=None), ignored)


@replaces(PrecisionCaster, "cast_while_recomputing")
def RecomputesInFull(caster: PrecisionCaster, cast_while_recomputing: Call, module: nn.Module) -> None:
    """BUG: a layer that checkpointing runs again in backward computes in full precision there."""


@replaces(PrecisionCaster, "cast_inputs")
def CastsLoneInputs(caster: PrecisionCaster, cast: Call, value: Any) -> Any:
    """BUG: only inputs that are tensors themselves are cast, not those in containers."""
    if isinstance(value, dict):
        return {name: cast(item) if isinstance(item, Tensor) else item for name, item in value.items()}
    return tuple(cast(item) if isinstance(item, Tensor) else item for item in value)


@replaces(PrecisionCaster, "cast_inputs")
def CastsIntegers(caster: PrecisionCaster, cast_inputs: Call, value: Any) -> Any:
    """BUG: integer inputs are cast like those of floating point."""
    dtype = caster.config.param_dtype
    if dtype is None or not caster.config.cast_forward_inputs:
        return value
    return tree_map(lambda leaf: leaf.to(dtype) if isinstance(leaf, Tensor) else leaf, value)


@replaces(PrecisionCaster, "__init__")
def CastsInputsAlways(caster: PrecisionCaster, init: Call, module: nn.Module, config: Any, ignored: Any) -> None:
    """BUG: `cast_forward_inputs=False` is ignored."""
    init(module, dataclasses.replace(config, cast_forward_inputs=True), ignored)


@replaces(PrecisionCaster, "__init__")
def NothingStaysFull(caster: PrecisionCaster, init: Call, module: nn.Module, config: Any, ignored: Any) -> None:
    """BUG: `full_precision_modules` is ignored."""
    init(module, dataclasses.replace(config, full_precision_modules=()), ignored)


@replaces(PrecisionCaster, "__init__")
def LayersAloneStayFull(caster: PrecisionCaster, init: Call, module: nn.Module, config: Any, ignored: Any) -> None:
    """BUG: of `full_precision_modules` those that hold others compute in low precision."""
    holders = {type(part) for part in module.modules() if next(part.children(), None) is not None}
    types = tuple(each for each in config.full_precision_modules if each not in holders)
    init(module, dataclasses.replace(config, full_precision_modules=types), ignored)


@replaces(Casts, "read")
def EvaluatesWithOldCasts(casts: Casts, read: Call, parameter: Tensor) -> Tensor:
    """BUG: an evaluation computes with the casts of the last training forward."""
    old: dict[Tensor, Tensor] = casts.__dict__.setdefault("old", {})
    cast: Tensor = read(parameter)
    if casts.with_gradients:
        old[parameter] = cast
    return old.get(parameter, cast)


@as_part
class CastsNoParameters(PrecisionCaster):
    """BUG: parameters are not cast: the module computes in full precision."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        if self._casts is not None:
            self._casts.read = self.cast_parameter  # type: ignore[method-assign]

    def cast_parameter(self, parameter: Tensor) -> Tensor:
        return parameter


@replaces(PrecisionCaster, "__init__")
def ReducingMeansComputing(caster: PrecisionCaster, init: Call, module: nn.Module, config: Any, ignored: Any) -> None:
    """BUG: a configuration that names only `reduce_dtype` computes in it too."""
    init(module, dataclasses.replace(config, param_dtype=config.communication_dtype), ignored)


@replaces(Ours, "__init__")
def TakesAnyPrecision(ddp: Ours, init: Call, *args: Any, **kwargs: Any) -> None:
    """BUG: a configuration that makes no sense is ignored."""
    try:
        init(*args, **kwargs)
    except TypeError:
        init(*args, **{**kwargs, "mixed_precision": None})


@replaces(Ours, "__init__")
def CastsTheModule(ddp: Ours, init: Call, module: nn.Module, *args: Any, **kwargs: Any) -> None:
    """BUG: the module's own parameters are cast to `param_dtype` and back around each forward, and lose bits."""
    init(module, *args, **kwargs)
    if ddp._caster is not None and ddp._caster.config.param_dtype is not None:
        for parameter in module.parameters():
            if parameter.is_floating_point():
                parameter.data = parameter.data.to(ddp._caster.config.param_dtype).to(parameter.dtype)


@replaces(Ours, "__init__")
def ComparesNoOptions(ddp: Ours, init: Call, *args: Any, **kwargs: Any) -> None:
    """BUG: ranks with different options are not refused, and wait for collectives that others never issue."""
    describe = replicas.describe

    def without(*args: Any, **options: Any) -> Replica:
        return dataclasses.replace(describe(*args, **options), options={})

    with mock.patch.object(distributed, "describe", without):
        init(*args, **kwargs)


@replaces(PrecisionCaster, "casting")
@contextlib.contextmanager
def CastsAtOnce(caster: PrecisionCaster, casting: Call, device: torch.device, *, at_once: bool) -> Iterator[None]:
    """BUG: each forward casts all parameters before it begins, used or not, and keeps the copies until it ends."""
    with casting(device, at_once=True):
        yield


@replaces(Casts, "read")
def CastsAtEachRead(casts: Casts, read: Call, parameter: Tensor) -> Tensor:
    """BUG: a parameter is cast as often as forward reads it."""
    return parameter.to(casts.dtype) if parameter.is_floating_point() else parameter


@as_part
class KeepsCopies(Casts):
    """BUG: low-precision copies are kept until the next forward."""

    _all: list[Tensor]

    @contextlib.contextmanager
    def during_forward(self, device: torch.device) -> Iterator[None]:
        self._all = []
        with super().during_forward(device):
            yield

    def read(self, parameter: Tensor) -> Tensor:
        self._all.append(super().read(parameter))
        return self._all[-1]


@replaces(Casts, "read")
def KeepsFrozenCasts(casts: Casts, read: Call, parameter: nn.Parameter) -> Any:
    """BUG: the copy of a frozen parameter is kept until its version changes, which `.data` does not."""
    if parameter.requires_grad:
        return read(parameter)
    kept = vars(casts).setdefault("frozen", {})
    key = (parameter, parameter._version)
    if key not in kept:
        kept[key] = read(parameter)
    return kept[key]


@replaces(Casts, "read")
def CastsWithoutGraph(casts: Casts, read: Call, parameter: nn.Parameter) -> Any:
    """BUG: a parameter that forward reads under `no_grad` first gets no gradient."""
    casts.with_gradients = torch.is_grad_enabled()
    return read(parameter)


@replaces(Casts, "during_forward")
@contextlib.contextmanager
def CastsInTheWay(casts: Casts, during_forward: Call, device: torch.device) -> Iterator[None]:
    """BUG: parameters are cast when they are read, on the stream that computes."""
    with during_forward(torch.device("cpu")):
        yield


@replaces(Ours, "forward")
def ReadsCastsInFlight(ddp: Ours, forward: Call, /, *inputs: Any, **kwargs: Any) -> Any:
    """BUG: the stream that computes does not wait for casts on another one."""
    with mock.patch.object(mixed_precision.Batch, "wait"):
        return forward(*inputs, **kwargs)


@replaces(PrecisionCaster, "cast_while_recomputing")
def RecomputesCalledAlone(caster: PrecisionCaster, cast_while_recomputing: Call, module: nn.Module) -> None:
    """BUG: where checkpointing runs a layer again, it finds casts of its own parameters but not of its children's."""
    for part in module.modules():
        if not [*part.children()]:
            cast_while_recomputing(part)


@replaces(Ours, "__init__")
def KeepsWhatIsNotOffered(ddp: Ours, init: Call, *args: Any, **kwargs: Any) -> None:
    """BUG: an option of the configuration that the DDP does not support is ignored, as torch's DDP does."""
    with mock.patch.object(mixed_precision, "refuse_other_options"):
        init(*args, **kwargs)


@replaces(PrecisionCaster, "cast_inputs")
def CastsMakePlainDicts(caster: PrecisionCaster, cast_inputs: Call, value: Any) -> Any:
    """BUG: inputs in subclasses of dict, list and tuple arrive in plain ones."""
    return cast_inputs(_plain(value))


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_plain(item) for item in value]
    is_tuple = isinstance(value, tuple) and not hasattr(value, "_fields")
    return tuple(_plain(item) for item in value) if is_tuple else value


@replaces(PrecisionCaster, "cast_inputs")
def CastsLoseAttributes(caster: PrecisionCaster, cast_inputs: Call, value: Any) -> Any:
    """BUG: dictionaries of inputs arrive in new ones of their class, which lack the attributes."""
    return cast_inputs(_anew(value))


def _anew(value: Any) -> Any:
    if isinstance(value, dict):
        made = type(value).__new__(type(value))
        for key, item in value.items():
            made[key] = _anew(item)
        return made
    return tuple(_anew(item) for item in value) if type(value) is tuple else value


@replaces(Casts, "read")
def CastsNoStandIns(casts: Casts, read: Call, parameter: Tensor) -> Any:
    """BUG: what stands in for a parameter in one call is not cast."""
    return read(parameter) if isinstance(parameter, nn.Parameter) else parameter


@replaces(Ours, "__setstate__")
def CopiesNoPrecision(ddp: Ours, setstate: Call, state: Mapping[str, Any]) -> None:
    """BUG: the copy of a wrapper computes and reduces in full precision."""
    setstate({**state, "mixed_precision": None})


@replaces(PrecisionCaster, "cast_inputs")
def CastsInputsToSingle(caster: PrecisionCaster, cast_inputs: Call, value: Any) -> Any:
    """BUG: where nothing is to be cast, inputs become single precision, which may be less than the module's own."""
    return cast_inputs(value) if caster.config.param_dtype is not None else cast(value, torch.float32)
