"""The generated function of a plan: its source, its tracebacks, and the objects that it keeps."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from cute_flash.planning.plan import CompileKey
from cute_flash.planning.registry import KERNELS
from cute_flash.runtime import launcher
from cute_flash.runtime.binder import source_of
from cute_flash.runtime.gpu import Gpu, bound, current_gpu, use_gpu
from tests.fakes.gpu import FakeGpu
from tests.runtime.calls import inputs, plain, run_backward, run_forward


def last_bound() -> Callable[..., Any]:
    return next(reversed(bound.values()))


def test_the_source_of_a_plain_call(sm_90: FakeGpu) -> None:
    run_forward(inputs(heads_kv=4), plain(right=0))
    source = source_of(last_bound())
    assert "def forward(q, k, v, args):" in source
    call = next(line for line in source.splitlines() if line.strip().startswith("fwd_sm90("))
    assert len(call.split("(", 1)[1].split(",")) == len(KERNELS["fwd_sm90"].operands)
    # Operands of features are absent, not looked up.
    assert call.rstrip().endswith("None)") and "window_left" not in call and "args.window_right" in call


def test_calls_that_differ_in_values_share_one_source(gpu: FakeGpu) -> None:
    functions = []
    for sk in (9, 10):
        run_forward(inputs(sk=sk))
        functions.append(last_bound())
    assert functions[0].__code__ is functions[1].__code__
    run_forward(inputs(), plain(softcap=1.0))
    assert last_bound().__code__ is not functions[0].__code__


def test_tracebacks_show_the_generated_lines() -> None:
    class Failing(FakeGpu):
        def kernel(self, key: CompileKey) -> Callable[..., None]:
            def launch(*arguments: Any) -> None:
                raise RuntimeError("an illegal memory access was encountered")

            return launch

    with use_gpu(Failing("sm_90")), pytest.raises(RuntimeError, match="illegal memory access") as error:
        launcher.forward(*inputs(heads_kv=4), plain())
    assert "fwd_sm90(q, k, v, out, lse, scale" in "".join(traceback.format_exception(error.value))


def test_bound_functions_hold_no_tensor_and_no_address(gpu: FakeGpu) -> None:
    """They may run on any stream, and inside a captured graph."""
    run_forward(inputs(), plain(right=0, softcap=1.0, sinks=torch.ones(4), return_max_logit=True))
    run_backward(inputs(), plain(right=0, alibi=torch.ones(4)))
    assert len(bound) == 2
    for function in bound.values():
        for cell in function.__closure__ or ():
            assert not isinstance(cell.cell_contents, Tensor)


def test_another_gpu_may_be_used_for_a_while() -> None:
    real = current_gpu()
    assert type(real) is Gpu
    before = dict(bound)
    with pytest.raises(ZeroDivisionError), use_gpu(FakeGpu("sm_80")) as fake:
        assert current_gpu() is fake and bound == {}
        launcher.forward(*inputs(), plain())
        raise ZeroDivisionError
    assert current_gpu() is real and bound == before
