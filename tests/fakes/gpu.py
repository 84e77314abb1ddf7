"""A GPU on the CPU: launches are recorded, checked, and computed by the reference.

`with use_gpu(FakeGpu("sm_90")): launcher.forward(q, k, v, args)` takes CPU tensors. A launch raises an
error for arguments that the compiled kernel would not accept. So if results equal the CPU path's, the host passed the
right arguments.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from cute_flash.planning.plan import CompileKey
from cute_flash.runtime.gpu import use_gpu
from cute_flash.spec.arch import ARCHS
from cute_flash.spec.family import FAMILIES
from tests.fakes.checks import check
from tests.fakes.kernels import kernel_of
from tests.fakes.recording import RecordingGpu


@dataclass(frozen=True)
class Launch:
    kernel: str  # of `planning.registry`
    key: CompileKey
    arguments: dict[str, Any]  # by the names of operands

    def __getitem__(self, name: str) -> Any:
        return self.arguments[name]


class Present(dict):
    """The arguments of a launch by name; None for operands that the kernel does not have."""

    def __missing__(self, name: str) -> None:
        return None


class FakeGpu(RecordingGpu):
    """A fake GPU. `launches` are in launch order, `keys` in the order of compilation."""

    def __init__(self, name: str) -> None:
        super().__init__(ARCHS[name])
        self.name = name
        self.launches: list[Launch] = []
        self.device: int | None = None  # the index of the CPU, where the tensors are
        self.entered: list[int | None] = []  # devices that were made current

    @property
    def family(self) -> str:
        """The default kernel family."""
        return next(name for name, runs_on in FAMILIES.items() if runs_on(self.spec))

    @property
    def wide_kernel(self) -> str:
        """The backward kernel of head dims above 128."""
        return "bwd_sm90_wide" if self.family == "sm90" else "bwd_sm80"

    def current_device(self) -> int | None:  # type: ignore[override]
        return self.device

    def on_device(self, index: int | None, launch: Callable[..., Any], *arguments: Any) -> Any:
        self.entered.append(index)
        before, self.device = self.device, index
        try:
            return launch(*arguments)
        finally:
            self.device = before

    def kernel(self, key: CompileKey) -> Callable[..., None]:
        self.keys.append(key)

        def launch(*arguments: Any) -> None:
            assert self.device is None, "the tensors' device is not the current one"
            named = dict(zip(key.operands, arguments, strict=True))
            check(key, named)
            self.launches.append(Launch(key.kernel, key, named))
            with torch.no_grad():
                kernel_of(key.kernel)(key, Present(named))

        return launch

    @property
    def kernels(self) -> list[str]:
        """The names of the launched kernels, in order."""
        return [launch.kernel for launch in self.launches]

    def last(self, prefix: str = "") -> Launch:
        """The last launch of a kernel with this prefix of its name."""
        return next(x for x in reversed(self.launches) if x.kernel.startswith(prefix))

    @property
    def main(self) -> Launch:
        """The last launch of a kernel that computes attention, or its gradients."""
        return next(x for x in reversed(self.launches) if x.kernel.startswith(("fwd_sm", "bwd_sm")))


@contextmanager
def fake_gpu(name: str) -> Iterator[FakeGpu]:
    """Launch through a `FakeGpu`. New memory holds NaN, so that elements that no kernel writes are detected."""
    with use_gpu(FakeGpu(name)) as gpu, poisoned_memory():
        yield gpu  # type: ignore[misc]


@contextmanager
def poisoned_memory() -> Iterator[None]:
    """Fill uninitialised memory: NaN in floats, the largest value in integers.

    Torch does so in its deterministic mode. With `warn_only` this mode does not make gradients deterministic.
    """
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        assert torch.empty(3).isnan().all()
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def is_shared(x: Tensor, other: Tensor) -> bool:
    """Whether two tensors start at the same address."""
    return x.data_ptr() == other.data_ptr()
