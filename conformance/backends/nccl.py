"""The NCCL backend, on CUDA devices.

A run may have more ranks than devices. NCCL refuses two ranks on one device whose host hash and bus id agree, so each
of these ranks gets its own host id, and they communicate over loopback sockets.

The communicator is made with the group, as by `init_process_group` with a `device_id`. Otherwise the first message
between two ranks would make one for the two, and a ring of ranks that all send first would hang.

After a timeout torch's watchdog ends the process, and nothing raises ("Environment variables" of ProcessGroupNCCL,
TORCH_NCCL_ASYNC_ERROR_HANDLING). So NCCL declares no `timeouts`.
"""

import os
from datetime import timedelta

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Backend as GroupBackend
from torch._C._distributed_c10d import Store

from conformance.backends.backend import CAPABILITIES, Backend


def _unavailable() -> str:
    if not dist.is_nccl_available():
        return "this torch was built without NCCL"
    return "" if torch.cuda.is_available() else "no CUDA device is visible"


def _device(rank: int) -> str:
    return f"cuda:{rank % torch.cuda.device_count()}"


def _device_bytes() -> int:
    indices = range(torch.cuda.device_count())
    return min((torch.cuda.get_device_properties(index).total_memory for index in indices), default=0)


def _create(store: Store, rank: int, world_size: int, timeout: timedelta) -> GroupBackend:
    if world_size > torch.cuda.device_count():  # set before NCCL's first call in this process, which reads them once
        os.environ["NCCL_HOSTID"] = f"rank{rank}"
        os.environ["NCCL_SOCKET_IFNAME"] = "lo"
    if not dist.is_initialized():  # a further group numbers its ranks anew
        torch.cuda.set_device(_device(rank))
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timeout
    group = dist.ProcessGroupNCCL(store, rank, world_size, options)
    group.eager_connect_single_device(torch.device("cuda", torch.cuda.current_device()))
    return group


NCCL = Backend(
    name="nccl",
    device_type="cuda",
    capabilities=CAPABILITIES
    - {"any_source", "bitwise", "int16", "notices_death", "reconfigure", "set_timeout", "sparse", "tags", "timeouts"}
    - {"unordered_groups"},
    max_world_size=lambda: None,
    unavailable=_unavailable,
    device=_device,
    create=_create,
    device_bytes=_device_bytes,
)
