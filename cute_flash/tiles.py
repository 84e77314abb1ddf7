"""Tile shapes: one literal table per architecture, each row checked against shared memory and citing its measurement."""

from __future__ import annotations

from dataclasses import dataclass, field

from cute_flash.arch import ArchSpec
from cute_flash.problem import UnsupportedError

ELEMENT_BYTES = 2
WARP_ROWS = 16  # rows of one mma.sync m16n8k16
WARP_KEYS = 16  # keys of one ldmatrix.x4 of K or V


@dataclass(frozen=True)
class FwdTile:
    """A block of `tile_m` query rows against blocks of `tile_n` keys, `num_warps` warps stacked along the rows."""

    head_dim: int  # width of the tile; smaller head dims are padded to it
    tile_m: int
    tile_n: int
    num_warps: int
    stages: int  # K/V buffers; 1 overlaps K's copy with P V and V's with Q K^T, 2 prefetch a whole block ahead
    q_in_regs: bool = False  # keep Q's fragments in registers instead of re-reading shared memory for every block
    min_blocks: int = 0  # blocks per SM the compiler must leave registers for; 0: its own choice
    measured: str = field(default="", compare=False)  # evidence: GPU, dtype, shape, TFLOP/s

    def __post_init__(self) -> None:
        rows = WARP_ROWS * self.num_warps
        if self.tile_m % rows:
            raise ValueError(f"{self.tile_m=} must be a multiple of {rows}: {self.num_warps} warps of {WARP_ROWS} rows")
        if self.tile_n % WARP_KEYS or self.tile_n <= 0:
            raise ValueError(f"{self.tile_n=} must be a positive multiple of {WARP_KEYS}")
        if self.head_dim % 32 or not 32 <= self.head_dim <= 256:
            raise ValueError(f"{self.head_dim=} must be a multiple of 32 up to 256")
        if self.tile_n % self.copy_rows or self.tile_m % self.copy_rows:
            raise ValueError(f"{self.tile_m=} and {self.tile_n=} must be multiples of {self.copy_rows}, the rows one copy covers")
        if self.stages not in (1, 2):
            raise ValueError(f"{self.stages=} must be 1 or 2")

    @property
    def num_threads(self) -> int:
        return 32 * self.num_warps

    @property
    def copy_rows(self) -> int:
        """Rows that all threads together copy at once, 16 bytes each, 128 or 64 bytes of a row side by side."""
        row_bytes = 128 if self.head_dim % 64 == 0 else 64
        return self.num_threads * 16 // row_bytes

    @property
    def smem_bytes(self) -> int:
        """Q (whose space O takes over at the end) + K and V stages."""
        return (self.tile_m + 2 * self.stages * self.tile_n) * self.head_dim * ELEMENT_BYTES

    @property
    def accumulator_registers(self) -> int:
        """fp32 registers a thread needs for O and S; with Q's fragments if they stay."""
        rows = self.tile_m // self.num_warps
        registers = rows * (self.head_dim + self.tile_n) // 32
        return registers + (rows * self.head_dim // 64 if self.q_in_regs else 0)

    def fits(self, arch: ArchSpec) -> bool:
        return self.smem_bytes <= arch.smem_per_block

    def __str__(self) -> str:
        regs = ", Q in registers" if self.q_in_regs else ""
        return f"{self.tile_m}x{self.tile_n}x{self.head_dim}, {self.num_warps} warps, {self.stages} K/V stage(s){regs}"


# Placeholder rows until the sweep on the GPU has chosen them.
_SM80_FWD = (
    FwdTile(64, 128, 64, 4, 2, q_in_regs=True),
    FwdTile(96, 128, 64, 4, 1),
    FwdTile(128, 128, 64, 4, 1),
    FwdTile(192, 128, 64, 8, 1),
    FwdTile(256, 128, 64, 8, 1),
)


def fwd_tile(arch: ArchSpec, head_dim: int) -> FwdTile:
    for tile in _SM80_FWD:
        if tile.head_dim >= head_dim and tile.fits(arch):
            return tile
    raise UnsupportedError(f"head_dim={head_dim}: no tile fits {arch.name}")
