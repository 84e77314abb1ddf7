"""The host function that launches several kernels, one after the other."""

from typing import Any

import cutlass
import cutlass.cute as cute
from cuda.bindings.driver import CUstream

from cute_flash.planning.launch import CompileKey


class KernelChain:
    """The function of a `planning.launch.LaunchChain`."""

    def __init__(self, kernels: dict[CompileKey, Any]) -> None:
        """`kernels`: by key, in launch order, objects whose call launches the kernel."""
        self.kernels = kernels

    @cute.jit
    def __call__(self, stream: CUstream, **operands):
        for key, kernel in cutlass.const_expr(self.kernels.items()):
            kernel(stream, **{x.name: operands[x.name] if key.takes(x) else None for x in key.parameters})
