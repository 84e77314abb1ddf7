"""The checked mode: wrong lengths, offsets and indices of a call on CUDA raise an error before its launch."""

from __future__ import annotations

import re
import runpy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from cute_flash import attn_decode, attn_varlen, ops, ops_decode, use_checks
from cute_flash.planning.launch import CompileKey
from cute_flash.runtime import decode, launcher
from cute_flash.runtime.gpu import use_gpu
from cute_flash.spec import checked
from cute_flash.spec.arch import SM_90
from tests.decode.test_bad_input import WRONG_VALUES, ints
from tests.fakes.cuda import claiming_cuda
from tests.fakes.recording import RecordingGpu


class LaunchingGpu(RecordingGpu):
    """Collects the names of the kernels that are launched."""

    def __init__(self) -> None:
        super().__init__(SM_90)
        self.launches: list[str] = []

    def kernel(self, key: CompileKey) -> Callable[..., None]:
        return lambda *arguments: self.launches.append(key.kernel)


@pytest.fixture
def gpu() -> Iterator[LaunchingGpu]:
    with use_gpu(LaunchingGpu()) as gpu, claiming_cuda():
        yield gpu


def halves(arguments: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a call that CUDA supports: q, caches and new rows in fp16."""
    names = ("q", "k_cache", "v_cache", "k_new", "v_new")
    is_single = lambda name, x: name in names and isinstance(x, Tensor) and x.dtype == torch.float32  # noqa: E731
    return {name: x.half() if is_single(name, x) else x for name, x in arguments.items()}


@pytest.mark.parametrize(("arguments", "message"), WRONG_VALUES, ids=[text[:50] for _, text in WRONG_VALUES])
def test_decode(gpu: LaunchingGpu, arguments: dict[str, Any], message: str) -> None:
    arguments = halves(arguments)
    attn_decode(**arguments)
    assert gpu.launches.pop() == "decode" and not gpu.launches
    with use_checks(), pytest.raises(ValueError, match=re.escape(message)):
        attn_decode(**arguments)
    assert not gpu.launches


Q = torch.zeros(8, 4, 32, dtype=torch.float16)
OFFSETS: dict[str, tuple[dict[str, Any], str]] = {
    "decreasing": (dict(cu_seqlens_q=ints(0, 5, 3, 8)), "cu_seqlens_q[2]=3 is less than cu_seqlens_q[1]=5"),
    "first": (dict(cu_seqlens_k=ints(1, 3, 5, 8)), "cu_seqlens_k begins with 1: expected 0"),
    "last": (dict(cu_seqlens_k=ints(0, 3, 5, 9)), "cu_seqlens_k ends with 9: there are 8 tokens in k"),
    "used": (dict(seqused_k=ints(3, 3, 3)), "seqused_k[1]=3: sequence 1 has 2 keys, use 0 to 2"),
    "negative": (dict(seqused_k=ints(3, -1, 3)), "seqused_k[1]=-1: sequence 1 has 2 keys"),
    "longest": (dict(max_seqlen_q=2), "max_seqlen_q=2: sequence 0 has 3 tokens, use that or more"),
}


def varlen(**changes: Any) -> Tensor:
    offsets = {"cu_seqlens_q": ints(0, 3, 5, 8), "cu_seqlens_k": ints(0, 3, 5, 8)}
    return attn_varlen(*(Q.clone().requires_grad_() for _ in range(3)), **offsets | changes)


@pytest.mark.parametrize("name", OFFSETS)
def test_varlen(gpu: LaunchingGpu, name: str) -> None:
    changes, message = OFFSETS[name]
    varlen(**changes)
    assert gpu.launches
    gpu.launches.clear()
    with use_checks(), pytest.raises(ValueError, match=re.escape(message)):
        varlen(**changes)
    assert not gpu.launches


def test_a_backward_whose_offsets_were_written_to(gpu: LaunchingGpu) -> None:
    offsets = ints(0, 3, 5, 8)
    with use_checks():
        out = varlen(cu_seqlens_q=offsets)
        assert gpu.launches
        gpu.launches.clear()
        offsets.data.copy_(ints(0, 3, 2, 8))  # autograd does not notice the write
        with pytest.raises(ValueError, match=r"cu_seqlens_q\[2\]=2 is less than cu_seqlens_q\[1\]=3"):
            out.sum().backward()
    assert not gpu.launches


def test_right_calls_pass(gpu: LaunchingGpu) -> None:
    call = halves(WRONG_VALUES[0][0]) | {"cache_seqlens": ints(5, 9)}
    with use_checks():
        varlen().sum().backward()
        attn_decode(**call)
        attn_varlen(Q[:0], Q[:0], Q[:0], ints(0), ints(0))
    assert gpu.launches[-1] == "decode"


def test_unchecked_calls_run_the_functions_themselves() -> None:
    """A plain call takes no time for checks."""

    def functions() -> tuple[Any, ...]:
        return ops._cuda.forward, ops._cuda.backward, ops_decode._cuda.run

    plain = launcher.forward, launcher.backward, decode.run
    assert functions() == plain
    with use_checks():
        assert not {*functions()} & {*plain}
        with use_checks(False):
            assert functions() == plain
    assert functions() == plain


@pytest.mark.parametrize(("value", "is_checked"), [("1", True), ("0", False), ("", False)])
def test_the_environment_checks_all_calls_of_a_process(
    value: str, is_checked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUTE_FLASH_CHECK", value)
    seen: list[float] = []
    functions = runpy.run_path(checked.__file__)["CudaFunctions"]("math", floor=seen.append)
    assert functions.floor(2.5) == 2 and functions.ceil(2.5) == 3
    assert seen == [2.5] * is_checked
