"""A `Gpu` that collects the kernels to compile. Launches do nothing, and tensors may be on the CPU."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from cute_flash.planning.launch import CompileKey, LaunchChain, LaunchKey
from cute_flash.runtime import launcher
from cute_flash.runtime.gpu import Gpu, use_gpu
from cute_flash.spec.arch import ArchSpec
from cute_flash.spec.args import AttentionArgs
from cute_flash.spec.features import Buffer
from cute_flash.spec.shapes import outputs

# The address of a tile counter, which only a GPU would read.
COUNTER = 1 << 40


class RecordingGpu(Gpu):
    current_device = staticmethod(lambda: None)  # the index of the CPU

    def __init__(self, spec: ArchSpec) -> None:
        self.spec = spec
        self.keys: list[CompileKey] = []  # in the order in which launches were bound
        self.host_calls: list[LaunchKey] = []  # the compiled functions of these launches
        self.workspaces: list[tuple[tuple[int, ...], ...]] = []  # shapes of the shared workspace of each call

    def arch(self, index: int | None) -> ArchSpec:
        return self.spec

    def kernel(self, key: CompileKey) -> Callable[..., None]:
        self.keys.append(key)
        self.host_calls.append(key)
        return lambda *arguments: None

    def chain(self, key: LaunchChain) -> Callable[..., None]:
        """Launch the kernels one by one."""
        before = list(self.host_calls)
        launches = [(one, self.kernel(one)) for one in key.keys]
        self.host_calls[:] = [*before, key]

        def launch(*arguments: Any) -> None:
            named = dict(zip([x.name for x in key.parameters], arguments, strict=True))
            for one, kernel in launches:
                kernel(*[named[x.name] if one.takes(x) else None for x in one.parameters])

        return launch

    def tile_counter(self, index: int) -> tuple[Tensor, int]:
        return torch.zeros(1, dtype=torch.int32), COUNTER

    def workspace(self, buffers: tuple[Buffer, ...], index: int, num_launches: int) -> Callable[[], tuple[Tensor, ...]]:
        """New tensors for every call, so that uninitialised memory is detected."""

        def fetch() -> tuple[Tensor, ...]:
            self.workspaces.append(tuple([buffer.shape for buffer in buffers]))
            make = {"zeros": torch.zeros, "empty": torch.empty}
            return tuple([make[x.init](x.shape, dtype=getattr(torch, x.dtype)) for x in buffers])

        return fetch

    def scratch(self, shape: tuple[int, ...], index: int) -> Tensor:
        return torch.empty(shape)

    def on_device(self, index: int, launch: Callable[..., Any], *arguments: Any) -> Any:
        raise AssertionError("tensors on another device")


def forward_keys(q: Tensor, k: Tensor, v: Tensor, args: AttentionArgs, arch: ArchSpec) -> list[LaunchKey]:
    """The compiled functions that a forward call needs."""
    gpu = RecordingGpu(arch)
    with use_gpu(gpu):
        launcher.forward(q, k, v, args)
    return gpu.host_calls


def backward_keys(
    q: Tensor, k: Tensor, v: Tensor, args: AttentionArgs, arch: ArchSpec, has_dlse: bool = False
) -> list[LaunchKey]:
    """The compiled functions that the gradients of a call need."""
    out, lse, _max_logit = outputs(q, v, args)
    gpu = RecordingGpu(arch)
    with use_gpu(gpu):
        launcher.backward(out, lse if has_dlse else None, q, k, v, out, lse, args)
    return gpu.host_calls


def kernels_of(host_calls: Iterable[LaunchKey]) -> list[CompileKey]:
    """The kernels that compiled functions launch, each once."""
    return list(dict.fromkeys(key for call in host_calls for key in call.keys))


def main_key(host_calls: list[LaunchKey]) -> CompileKey:
    """The kernel that computes attention, or its gradients."""
    return next(key for key in kernels_of(host_calls) if key.kernel.startswith(("fwd_s", "bwd_sm")))
