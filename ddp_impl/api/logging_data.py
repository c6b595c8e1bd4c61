"""The dictionary that `_get_ddp_logging_data` returns: torch's keys, filled from our own state."""

from __future__ import annotations

from torch import nn

from ddp_impl.api.torch_names import TorchSurface
from ddp_impl.base.telemetry import environment
from ddp_impl.torch_internals.distributed import num_gloo_threads
from ddp_impl.wire.groups import backend_of, rank_in, size_of


def logging_data(ddp: TorchSurface) -> dict[str, int | str]:
    """Describe configuration, buckets and times of `ddp`; local, any rank may ask."""
    reducer, learnt = ddp.reducer, ddp.reducer.reduction.learnt
    parameters = [member.parameter for member in reducer.members]
    sizes = ", ".join(str(bucket.num_bytes) for bucket in reducer.buckets)
    indices = " ".join("".join(f"{member.index} " for member in bucket.members).strip() for bucket in reducer.buckets)
    variables = environment()
    data: dict[str, int | str] = {
        "world_size": size_of(ddp.process_group),
        "rank": rank_in(ddp.process_group),
        "module_name": type(ddp.module).__name__,
        "device_ids": ", ".join(str(index) for index in ddp.device_ids or ()),
        "output_device": -1 if ddp.output_device is None else ddp.output_device,
        "backend_name": backend_of(ddp.process_group),
        "broadcast_buffers": int(ddp.forward_sync_buffers),
        "bucket_cap_bytes": ddp.bucket_bytes_cap,
        "find_unused_parameters": int(ddp.find_unused_parameters),
        "gradient_as_bucket_view": int(ddp.gradient_as_bucket_view),
        "static_graph": int(ddp.static_graph),
        "is_multi_device_module": int(ddp.is_multi_device_module),
        "has_sync_bn": int(any(isinstance(layer, nn.SyncBatchNorm) for layer in ddp.module.modules())),
        "num_parameter_tensors": len(parameters),
        "total_parameter_size_bytes": sum(p.numel() * p.element_size() for p in parameters),
        "dtypes": ", ".join(dict.fromkeys(_dtype_name(p.dtype) for p in parameters)),
        "has_rebuilt_buckets": int(learnt.has_rebuilt_buckets),
        "bucket_sizes": sizes,
        "join_uneven_inputs": int(reducer.telemetry.joined_uneven_inputs),
        "unused_parameter_size": sum(reducer.planning.specs[index].num_bytes for index in learnt.last_unused or ()),
        "prev_iteration_grad_ready_order_indices": ", ".join(map(str, reducer.arrivals.order)),
        "num_buckets_reduced": reducer.telemetry.num_buckets_reduced,
        "can_set_static_graph": int(learnt.looks_static),
    }
    if learnt.caps.measured:
        data["auto_bucket_caps"] = f"{learnt.caps.first_bytes}, {learnt.caps.cap_bytes}"
        data["bucket_cap_bytes"] = learnt.caps.cap_bytes
    if learnt.has_rebuilt_buckets:
        data["rebuilt_bucket_sizes"] = sizes
        data["rebuilt_per_bucket_param_indices"] = indices
    backend = str(data["backend_name"])
    for name, value in variables.items():
        if _concerns(name, backend):
            data.setdefault(name.lower(), value)  # RANK and WORLD_SIZE are the group's here, not the environment's
    if data["backend_name"] == "gloo":
        data["gloo_num_threads"] = _num_gloo_threads(ddp)
    return data | reducer.telemetry.logging_data()


def _num_gloo_threads(ddp: TorchSurface) -> int:
    return num_gloo_threads(ddp.process_group, ddp.device)


def _concerns(variable: str, backend: str) -> bool:
    return backend in variable.lower() or not any(name in variable for name in ("NCCL", "GLOO"))


def _dtype_name(dtype: object) -> str:
    name = str(dtype).removeprefix("torch.")
    return {"float32": "float", "float64": "double", "float16": "c10::Half", "bfloat16": "c10::BFloat16"}.get(
        name, name
    )
