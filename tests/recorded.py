"""Kernels that record what they are launched with and write something into their outputs, on CPU tensors that
are taken for CUDA ones; and the operators' way to them, beside the direct one.
"""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from cute_flash.direct import Direct
from torch import Tensor

from cute_flash import api, backward, backward_general, custom, forward, general, operands, ops, packed_cuda
from cute_flash.jit import compile as compiling
from cute_flash.planning.plan import CompileKey, Plan
from cute_flash.runtime import counters
from cute_flash.spec import arch
from tests.fake_gpu import COUNTER

# On CUDA, by operator.
KERNELS = {
    "fwd": ops.fwd_cuda,
    "bwd": backward.bwd_cuda,
    "general_fwd": general._fwd_cuda,
    "general_bwd": general._bwd_cuda,
    "custom_fwd": custom._fwd_cuda,
    "custom_bwd": custom._bwd_cuda,
}


@dataclass
class Recorded:
    """`launches`: names of kernels with their arguments as they were. `num_direct`: calls past autograd's
    operators.
    """

    launches: list[tuple[str, list[Any]]] = field(default_factory=list)
    num_direct: int = 0

    def compiled(self, plan: Plan) -> Callable[..., None]:
        return self.kernel(plan.key.kernel, (3, 4))

    def compiled_kernel(self, key: CompileKey) -> Callable[..., None]:
        name = key.kernel
        outputs = (9, 8) if name.startswith("bwd_sm") else (1,) if name.startswith("bwd_post") else ()
        # Statistics that the gradients of sinks are made of.
        return self.kernel(name, (3, 4) if name.startswith("bwd_pre") else outputs)

    def kernel(self, name: str, outputs: tuple[int, ...]) -> Callable[..., None]:
        def launch(*args: Any) -> None:
            self.launches.append((name, [_as_it_is(x) for x in args]))
            for i in outputs:
                x = args[i]
                x.copy_(torch.linspace(-1, 1, x.numel()).view(x.shape) + 0.1 * i)

        return launch


def _as_it_is(x: Any) -> Any:
    if isinstance(x, (list, tuple)):
        return [_as_it_is(one) for one in x]
    return (x.clone(), x.stride()) if isinstance(x, Tensor) else x


def assert_same(mine: Any, other: Any) -> None:
    assert type(mine) is type(other)
    if isinstance(mine, (list, tuple)):
        assert len(mine) == len(other)
        for one, another in zip(mine, other):
            assert_same(one, another)
    elif isinstance(mine, Tensor):
        assert mine.dtype == other.dtype and torch.equal(mine, other)
    else:
        assert mine == other


def on_cpu(monkeypatch: pytest.MonkeyPatch) -> Recorded:
    """CPU tensors are taken for CUDA ones, and go the direct way; operators do not."""
    recorded = Recorded()
    monkeypatch.setattr(arch, "detect", lambda index: arch.ARCHS["sm_90"])
    monkeypatch.setattr(compiling, "compiled", recorded.compiled)
    monkeypatch.setattr(compiling, "compiled_kernel", recorded.compiled_kernel)
    monkeypatch.setattr(counters, "counter", lambda index: (None, COUNTER))
    monkeypatch.setattr(operands, "current_device", lambda: None)
    for module, name in (
        (ops, "_launches"), (forward, "_launches"), (backward, "_launches"), (backward_general, "_launches"),
        (packed_cuda, "_launches"), (packed_cuda, "_bwd_launches"),
    ):  # fmt: skip
        monkeypatch.setattr(module, name, {})
    for owner, name in (
        (torch, "empty"), (torch, "empty_like"), (torch, "empty_strided"), (Tensor, "new_empty"),
    ):  # fmt: skip
        monkeypatch.setattr(owner, name, _zeroed(getattr(owner, name)))
    monkeypatch.setattr(Tensor, "is_cuda", property(lambda self: True))

    class Counted:
        @staticmethod
        def apply(*args: Any) -> Any:
            recorded.num_direct += 1
            return Direct.apply(*args)

    monkeypatch.setattr(api, "Direct", Counted)
    return recorded


def _zeroed(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
    @functools.wraps(make)
    def made(*args: Any, **kwargs: Any) -> Tensor:
        return make(*args, **kwargs).zero_()

    return made


@contextlib.contextmanager
def by_operators() -> Iterator[None]:
    """The operators' kernels for the CPU are those for CUDA, and nothing is direct."""
    direct = ops.is_direct
    with torch.library._scoped_library("cute_flash", "IMPL") as library:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns of kernels that take the place of others
            for name, kernel in KERNELS.items():
                library.impl(name, kernel, "CPU", allow_override=True)
        ops.is_direct = lambda *tensors: False
        try:
            yield
        finally:
            ops.is_direct = direct
