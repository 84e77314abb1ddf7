"""The host function that launches several kernels, one after the other."""

from typing import Any

import cutlass
import cutlass.cute as cute
from cuda.bindings.driver import CUstream

from cute_flash.planning.launch import CompileKey


class KernelChain:
    """The function of a `planning.launch.LaunchChain`; each kernel is an object whose call launches it."""

    def __init__(self, kernels: list[tuple[Any, CompileKey]]) -> None:
        self.kernels = kernels

    @cute.jit
    def __call__(self, stream: CUstream, **operands):
        for kernel, key in cutlass.const_expr(self.kernels):
            kernel(stream, **{x.name: operands[x.name] if key.takes(x) else None for x in key.parameters})
