"""`torch.compile` of a wrapped module splits graphs, touches no flag and no other module, and trains right."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.backends.registry import lookup_backend

from ddp_impl import DistributedDataParallel
from ddp_impl.tests.compiled_models import WIDTH, Recorder, assert_same, gradients, layers
from ddp_impl.tests.ranks import group_of_one

#: With these caps every layer of `layers()` is a bucket of its own.
ONE_LAYER_MB = 4 * WIDTH * (WIDTH + 1) / 2**20


@pytest.fixture
def alone() -> Iterator[None]:
    torch._dynamo.reset()
    with group_of_one():
        yield


def compile_wrapper(model: nn.Module, backend: Recorder) -> tuple[DistributedDataParallel, Callable[..., Any]]:
    ddp = DistributedDataParallel(model, bucket_cap_mb=ONE_LAYER_MB)
    return ddp, torch.compile(ddp, backend=backend)


@pytest.mark.usefixtures("alone")
def test_without_compilation_nothing_is_compiled() -> None:
    ddp = DistributedDataParallel(layers(2))
    ddp(torch.ones(2, WIDTH)).sum().backward()
    assert ddp._compiled_calls.splits == []


@pytest.mark.usefixtures("alone")
def test_no_flag_is_set_and_other_modules_are_compiled_whole() -> None:
    settings_before = torch._dynamo.config.get_config_copy(), torch._inductor.config.get_config_copy()
    backend = Recorder(lookup_backend("aot_eager"))
    _, call = compile_wrapper(layers(3), backend)
    call(torch.ones(2, WIDTH)).sum().backward()
    backend.graphs.clear()
    other = layers(3)
    torch.compile(other, backend=backend)(torch.ones(2, WIDTH)).sum().backward()
    assert len(backend.graphs) == 1
    assert (torch._dynamo.config.get_config_copy(), torch._inductor.config.get_config_copy()) == settings_before


@pytest.mark.usefixtures("alone")
def test_a_bare_module_that_was_compiled_wrapped_stays_whole_when_called_bare() -> None:
    model, backend = layers(3), Recorder(lookup_backend("aot_eager"))
    _, call = compile_wrapper(model, backend)
    call(torch.ones(2, WIDTH)).sum().backward()
    backend.graphs.clear()
    torch.compile(model, backend=backend)(torch.ones(2, WIDTH))
    assert len(backend.graphs) == 1


@pytest.mark.usefixtures("alone")
def test_the_same_backend_compiles_once_and_stances_are_obeyed() -> None:
    recorder = Recorder(lookup_backend("aot_eager"))
    ddp, call = compile_wrapper(layers(3), recorder)
    x = torch.ones(2, WIDTH)
    expected = call(x)
    torch.compile(ddp, backend=recorder)(x)
    assert len(recorder.graphs) == 3
    with torch.compiler.set_stance("force_eager"):
        assert torch.equal(call(x), expected)
    with torch.compiler.set_stance("fail_on_recompile"):
        assert torch.equal(call(x), expected)
        with pytest.raises(RuntimeError, match="fail_on_recompile"):
            call(torch.ones(2, WIDTH, requires_grad=True))
    with torch.compiler.set_stance("eager_on_recompile"):
        call(torch.ones(2, WIDTH, requires_grad=True))
    assert len(recorder.graphs) == 3


@pytest.mark.usefixtures("alone")
@pytest.mark.nightly
@pytest.mark.parametrize("fullgraph", [False, True])
def test_compiled_autograd_is_refused_and_what_the_error_advises_works(fullgraph: bool) -> None:
    model = layers(2)
    x = torch.ones(2, WIDTH)
    truth = gradients(model, model, x)
    refused = DistributedDataParallel(model, find_unused_parameters=not fullgraph)
    call = torch.compile(refused, backend="aot_eager")
    compiled_autograd = torch._dynamo.compiled_autograd._enable
    compiler = torch.compile(backend="eager", fullgraph=fullgraph)
    with compiled_autograd(compiler), pytest.raises(RuntimeError, match=r'rank 0.*optimize_ddp = "python_reducer"'):
        call(x).sum().backward()
    assert_same(gradients(model, call, x), truth)
    refused.reducer.remove_hooks()
    ddp = DistributedDataParallel(model)
    call = torch.compile(ddp, backend="aot_eager")
    compiler = torch.compile(backend="eager", fullgraph=True)
    with torch._dynamo.config.patch(optimize_ddp="python_reducer"), compiled_autograd(compiler):
        assert_same(gradients(model, call, x), truth)
    assert ddp.reducer.telemetry.num_iterations == 0, "the reducer averaged what the graph was to average"
    with compiled_autograd(torch.compile(backend="eager")):
        assert_same(gradients(model, call, x), truth)
    assert ddp.reducer.telemetry.num_iterations == 1


@pytest.mark.usefixtures("alone")
def test_parameters_added_after_wrapping_are_named() -> None:
    model = layers(2)
    ddp, call = compile_wrapper(model, Recorder())
    model.append(nn.Linear(WIDTH, WIDTH))
    with pytest.raises(RuntimeError, match=r"3\.bias\.(.|\n)*wrap it anew on every rank"):
        call(torch.ones(2, WIDTH))
    del ddp
