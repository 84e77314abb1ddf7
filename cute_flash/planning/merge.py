"""The kernel that merges partial outputs over disjoint keys, for context parallelism."""

from __future__ import annotations

from dataclasses import dataclass

from cute_flash.planning.launch import CompileKey
from cute_flash.spec.arch import ArchSpec

MAX_PARTIALS = 4  # of one launch


@dataclass(frozen=True)
class MergeStatic:
    """The part of a merge that is compiled into its kernel."""

    dtype: str  # of the merged output; partial outputs are fp32
    head_dim: int  # of the values
    num_partials: int

    varlen = False

    @property
    def width_v(self) -> int:
        return self.head_dim

    @property
    def mma_dtype(self) -> str:
        return self.dtype

    def element_dtype(self, element: str) -> str:
        return self.dtype


@dataclass(frozen=True)
class MergeTile:
    """`rows` rows of the output for each CTA, 16 bytes of each partial output for each thread and row."""

    rows: int = 64
    num_threads: int = 256

    smem_bytes = 0


def merge_key(dtype: str, head_dim: int, num_partials: int, arch: ArchSpec) -> CompileKey:
    return CompileKey.of("merge_partials", MergeStatic(dtype, head_dim, num_partials), MergeTile(), arch.target)
