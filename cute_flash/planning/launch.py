"""Keys of compiled functions: `CompileKey` of one kernel, and `LaunchChain` of several that one host call launches."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from cute_flash.planning.registry import KERNELS
from cute_flash.spec.features import Operand


class KernelStatic(Protocol):
    """The part of a call that is compiled into a kernel: `Static`, `DecodeStatic` or `MergeStatic`."""

    @property
    def dtype(self) -> str:
        """The dtype of q."""

    @property
    def head_dim(self) -> int: ...

    @property
    def width_v(self) -> int:
        """The head dim of V and of the output."""

    @property
    def mma_dtype(self) -> str: ...

    @property
    def varlen(self) -> bool:
        """Whether rows are (T, H, D) and statistics (H, T), instead of (B, H, S, D) and (B, H, S)."""

    def element_dtype(self, element: str) -> str:
        """The dtype of the element types "dtype", "out" and "cache" of an `Operand`."""


@dataclass(frozen=True)
class CompileKey:
    """The key of a compiled kernel: all that determines its machine code, except the source files."""

    kernel: str  # name in `registry.KERNELS`
    static: Any  # a KernelStatic
    tile: Any  # Tile, SchedulerTile, SumTile, DecodeTile or MergeTile
    target: str  # architecture of the compiler: "sm_80", "sm_90a"
    operands: tuple[str, ...]  # names of the launch's arguments, in order

    @staticmethod
    def of(kernel: str, static: KernelStatic, tile: Any, target: str) -> CompileKey:
        return CompileKey(kernel, static, tile, target, KERNELS[kernel].names)

    @property
    def keys(self) -> tuple[CompileKey, ...]:
        """The kernels that the compiled function launches, as in a `LaunchChain`."""
        return (self,)

    @property
    def parameters(self) -> tuple[Operand, ...]:
        """The arguments of the compiled function, in order."""
        return KERNELS[self.kernel].operands

    def takes(self, operand: Operand) -> bool:
        """Whether the kernel takes an operand. It is compiled with None for the others."""
        return operand.when is None or operand.when(self)

    @property
    def tile_text(self) -> str:
        has_pieces = getattr(self.tile, "pieces", 1) > 1
        return f"{self.tile}" + (", two fp16 pieces of each element" if has_pieces else "")


@dataclass(frozen=True)
class LaunchChain:
    """The key of a compiled function that launches several kernels, one after the other.

    Calling it takes less host time than a call for each kernel, because tensors that several kernels take are passed
    once. The machine code of the kernels is the same.
    """

    keys: tuple[CompileKey, ...]

    @property
    def kernel(self) -> str:
        """The name of the compiled function."""
        return "_then_".join(key.kernel for key in self.keys)

    @property
    def target(self) -> str:
        return self.keys[0].target

    @property
    def parameters(self) -> tuple[Operand, ...]:
        """The operands that the kernels take, each once, in order."""
        operands = {operand.name: operand for key in self.keys for operand in key.parameters if key.takes(operand)}
        return tuple(operands.values())

    def takes(self, operand: Operand) -> bool:
        return operand in self.parameters


LaunchKey = CompileKey | LaunchChain
