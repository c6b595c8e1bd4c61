"""The ways in which a DDP takes the place of torch's in a client, as docs/migration.md describes them."""

from __future__ import annotations

from dataclasses import dataclass

#: What a recorded class is called, whichever DDP it is: the one difference that is wanted.
THE_DDP = "the DDP"


@dataclass(frozen=True, slots=True)
class Way:
    """How a script gets its DDP; `ddp_class` is what it must then record as the class of its model.

    `module` takes the place of `torch.nn.parallel` where the script imports the DDP; "" leaves the script alone.
    `launcher` are the words between torchrun and the script.
    """

    name: str
    ddp_class: str
    module: str = ""
    launcher: tuple[str, ...] = ()


TORCH = Way("torch", "torch.nn.parallel.distributed.DistributedDataParallel")
_OURS = "ddp_impl.api.distributed.DistributedDataParallel"
BY_IMPORT = Way("import", _OURS, module="ddp_impl")
BY_LAUNCHER = Way("python -m ddp_impl", _OURS, launcher=("-m", "ddp_impl"))
