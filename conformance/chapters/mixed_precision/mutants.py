"""Mutants of chapter mixed_precision: DDPs with one bug each; `mutants.toml` names the requirements that detect it."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Collection, Iterator, Sequence
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from ddp_impl import DistributedDataParallel, casts, distributed, mixed_precision, replicas
from ddp_impl.bucket import ManagedParameter
from ddp_impl.casts import Casts
from ddp_impl.mixed_precision import PrecisionCaster
from ddp_impl.replicas import Replica


class _Casting(DistributedDataParallel):
    """Gives a DDP the caster that a mutant defines."""

    OwnCaster: type[PrecisionCaster] = PrecisionCaster

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        with mock.patch.object(distributed, "PrecisionCaster", self.OwnCaster):
            super().__init__(*args, **kwargs)


class ReducesInParamDtype(DistributedDataParallel):
    """BUG: `reduce_dtype` is ignored; gradients travel in `param_dtype`."""

    def _attach_reducer(self, members: Sequence[ManagedParameter]) -> None:
        if self._caster is not None:
            self._options = dataclasses.replace(self._options, reduce_dtype=self._caster.config.param_dtype)
        super()._attach_reducer(members)


class ReducesInFullPrecision(DistributedDataParallel):
    """BUG: gradients travel in full precision whatever was asked for."""

    def _attach_reducer(self, members: Sequence[ManagedParameter]) -> None:
        self._options = dataclasses.replace(self._options, reduce_dtype=None)
        super()._attach_reducer(members)


class RoundsParameters(DistributedDataParallel):
    """BUG: each forward leaves the parameters rounded to `param_dtype`."""

    def _post_forward(self, output: Any) -> Any:
        if self._caster is not None and self._caster.config.param_dtype is not None:
            for parameter in self.module.parameters():
                if parameter.is_floating_point():
                    parameter.data.copy_(parameter.data.to(self._caster.config.param_dtype))
        return super()._post_forward(output)


class CastsIgnored(_Casting):
    """BUG: ignored parameters and buffers are cast as well."""

    class OwnCaster(PrecisionCaster):
        """Ignores nothing."""

        def __init__(self, module: nn.Module, config: Any, ignored: Collection[str]) -> None:
            """Cast everything."""
            super().__init__(module, config, ())


class BuffersStayFull(_Casting):
    """BUG: `buffer_dtype` is ignored."""

    class OwnCaster(PrecisionCaster):
        """Casts no buffer."""

        def __init__(self, module: nn.Module, config: Any, ignored: Collection[str]) -> None:
            """Leave buffers alone."""
            super().__init__(module, dataclasses.replace(config, buffer_dtype=None), ignored)


class RecomputesInFull(_Casting):
    """BUG: a layer that checkpointing runs again in backward computes in full precision there."""

    class OwnCaster(PrecisionCaster):
        """Casts in forward only."""

        def _cast_while_recomputing(self, module: nn.Module) -> None:
            pass


class CastsLoneInputs(_Casting):
    """BUG: only inputs that are tensors themselves are cast, not those in containers."""

    class OwnCaster(PrecisionCaster):
        """Looks into no container but that of the arguments."""

        def cast_inputs(self, value: Any) -> Any:
            """Cast what is a tensor."""
            cast = super().cast_inputs
            if isinstance(value, dict):
                return {name: cast(item) if isinstance(item, Tensor) else item for name, item in value.items()}
            return tuple(cast(item) if isinstance(item, Tensor) else item for item in value)


class CastsIntegers(_Casting):
    """BUG: integer inputs are cast like those of floating point."""

    class OwnCaster(PrecisionCaster):
        """Casts every tensor."""

        def cast_inputs(self, value: Any) -> Any:
            """Cast every tensor."""
            dtype = self.config.param_dtype
            if dtype is None or not self.config.cast_forward_inputs:
                return value
            return tree_map(lambda leaf: leaf.to(dtype) if isinstance(leaf, Tensor) else leaf, value)


class CastsInputsAlways(_Casting):
    """BUG: `cast_forward_inputs=False` is ignored."""

    class OwnCaster(PrecisionCaster):
        """Casts inputs."""

        def __init__(self, module: nn.Module, config: Any, ignored: Collection[str]) -> None:
            """Switch casting on."""
            super().__init__(module, dataclasses.replace(config, cast_forward_inputs=True), ignored)


class NothingStaysFull(_Casting):
    """BUG: `full_precision_modules` is ignored."""

    class OwnCaster(PrecisionCaster):
        """Casts every module."""

        def __init__(self, module: nn.Module, config: Any, ignored: Collection[str]) -> None:
            """Forget which modules stay."""
            super().__init__(module, dataclasses.replace(config, full_precision_modules=()), ignored)


class CastsNoParameters(_Casting):
    """BUG: parameters are not cast: the module computes in full precision."""

    class OwnCaster(PrecisionCaster):
        """Leaves parameters as they are."""

        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            if self._casts is not None:
                self._casts.read = self._cast  # type: ignore[method-assign]

        def _cast(self, parameter: Tensor) -> Tensor:
            return parameter


class ReducingMeansComputing(_Casting):
    """BUG: a configuration that names only `reduce_dtype` computes in it too."""

    class OwnCaster(PrecisionCaster):
        """Confuses the two."""

        def __init__(self, module: nn.Module, config: Any, ignored: Collection[str]) -> None:
            """Take one for the other."""
            super().__init__(module, dataclasses.replace(config, param_dtype=config.communication_dtype), ignored)


class TakesAnyPrecision(DistributedDataParallel):
    """BUG: a configuration that makes no sense is ignored."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        try:
            super().__init__(*args, **kwargs)
        except TypeError:
            super().__init__(*args, **{**kwargs, "mixed_precision": None})


class CastsTheModule(DistributedDataParallel):
    """BUG: the module's own parameters are cast to `param_dtype` and back around each forward, and lose bits."""

    def __init__(self, module: nn.Module, *args: Any, **kwargs: Any) -> None:
        super().__init__(module, *args, **kwargs)
        if self._caster is not None and self._caster.config.param_dtype is not None:
            for parameter in module.parameters():
                if parameter.is_floating_point():
                    parameter.data = parameter.data.to(self._caster.config.param_dtype).to(parameter.dtype)


class ComparesNoOptions(DistributedDataParallel):
    """BUG: ranks with different options are not told so."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        describe = replicas.describe

        def without(*args: Any, **options: Any) -> Replica:
            return dataclasses.replace(describe(*args, **options), options={})

        with mock.patch.object(distributed, "describe", without):
            super().__init__(*args, **kwargs)


class CastsAtOnce(_Casting):
    """BUG: each forward casts all parameters before it begins, used or not, and keeps the copies until it ends."""

    class OwnCaster(PrecisionCaster):
        """Casts as for a compiled module."""

        @contextlib.contextmanager
        def casting(self, device: torch.device, *, at_once: bool) -> Iterator[None]:
            """Cast all parameters in the order of their registration."""
            with super().casting(device, at_once=True):
                yield


class _CastsLike(_Casting):
    """Gives a DDP the casts that a mutant defines."""

    OwnCasts: type[Casts] = Casts

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        with mock.patch.object(mixed_precision, "Casts", self.OwnCasts):
            super().__init__(*args, **kwargs)


class CastsAtEachRead(_CastsLike):
    """BUG: a parameter is cast as often as forward reads it."""

    class OwnCasts(Casts):
        """Remembers no copy."""

        def read(self, parameter: nn.Parameter) -> Tensor:
            """Cast again."""
            self._copies.pop(parameter, None)
            return super().read(parameter)


class KeepsCopies(_CastsLike):
    """BUG: low-precision copies are kept until the next forward."""

    class OwnCasts(Casts):
        """Lets go of nothing that it may need again."""

        _all: list[Tensor]

        @contextlib.contextmanager
        def during_forward(self, device: torch.device) -> Iterator[None]:
            """Drop the copies of the last forward."""
            self._all = []
            with super().during_forward(device):
                yield

        def read(self, parameter: nn.Parameter) -> Tensor:
            """Keep what is read."""
            self._all.append(super().read(parameter))
            return self._all[-1]


class KeepsFrozenCasts(_CastsLike):
    """BUG: the copy of a frozen parameter is kept until its version changes, which `.data` does not."""

    class OwnCasts(Casts):
        """Casts frozen parameters once."""

        def __init__(self, dtype: torch.dtype) -> None:
            super().__init__(dtype)
            self._frozen: dict[tuple[nn.Parameter, int], Tensor] = {}

        def read(self, parameter: nn.Parameter) -> Tensor:
            """Look at the version alone."""
            if parameter.requires_grad:
                return super().read(parameter)
            key = (parameter, parameter._version)
            if key not in self._frozen:
                self._frozen[key] = super().read(parameter)
            return self._frozen[key]


class CastsWithoutGraph(_CastsLike):
    """BUG: a parameter that forward reads under `no_grad` first gets no gradient."""

    class OwnCasts(Casts):
        """Casts in the mode of the first read."""

        def read(self, parameter: nn.Parameter) -> Tensor:
            """Take over the mode."""
            self._with_gradients = torch.is_grad_enabled()
            return super().read(parameter)


class CastsInTheWay(_CastsLike):
    """BUG: parameters are cast when they are read, on the stream that computes."""

    class OwnCasts(Casts):
        """Knows no streams."""

        @contextlib.contextmanager
        def during_forward(self, device: torch.device) -> Iterator[None]:
            """Do as on a CPU."""
            with super().during_forward(torch.device("cpu")):
                yield


class ReadsCastsInFlight(DistributedDataParallel):
    """BUG: the stream that computes does not wait for casts on another one."""

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Let each batch wait for nothing."""
        with mock.patch.object(casts._Batch, "wait"):
            return super().forward(*inputs, **kwargs)


class RecomputesCalledAlone(_Casting):
    """BUG: where checkpointing runs a layer again, it finds casts of its own parameters but not of its children's."""

    class OwnCaster(PrecisionCaster):
        """Recomputes with what is called itself."""

        def _cast_while_recomputing(self, module: nn.Module) -> None:
            for part in module.modules():
                if not [*part.children()]:
                    super()._cast_while_recomputing(part)


class KeepsWhatIsNotOffered(DistributedDataParallel):
    """BUG: an option of the configuration that the DDP does not know is ignored, as torch's DDP does."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        with mock.patch.object(mixed_precision, "_refuse_other_options"):
            super().__init__(*args, **kwargs)


class CastsMakePlainDicts(_Casting):
    """BUG: inputs in subclasses of dict, list and tuple arrive in plain ones."""

    class OwnCaster(PrecisionCaster):
        """Copies containers into plain ones, then casts."""

        def cast_inputs(self, value: Any) -> Any:
            """Return `value`, cast."""
            return super().cast_inputs(_plain(value))


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_plain(item) for item in value]
    is_tuple = isinstance(value, tuple) and not hasattr(value, "_fields")
    return tuple(_plain(item) for item in value) if is_tuple else value


class CastsLoseAttributes(_Casting):
    """BUG: dictionaries of inputs arrive in new ones of their class, which lack the attributes."""

    class OwnCaster(PrecisionCaster):
        """Makes dictionaries anew, then casts."""

        def cast_inputs(self, value: Any) -> Any:
            """Return `value`, cast."""
            return super().cast_inputs(_anew(value))


def _anew(value: Any) -> Any:
    if isinstance(value, dict):
        made = type(value).__new__(type(value))
        for key, item in value.items():
            made[key] = _anew(item)
        return made
    return tuple(_anew(item) for item in value) if type(value) is tuple else value
