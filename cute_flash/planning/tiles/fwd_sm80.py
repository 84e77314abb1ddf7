"""Tiles of the mma.sync forward, and the table that chooses one per GPU and head dimension."""

from __future__ import annotations

from dataclasses import dataclass, field

from cute_flash.planning.tiles.common import (
    ANY_WEIGHT,
    ELEMENT_BYTES,
    HEAVY,
    LIGHT,
    MOST,
    WARP_KEYS,
    WARP_ROWS,
    _aligned,
    _check_layout,
    copy_rows,
)
from cute_flash.smem.tile import VARIANTS, SmemTile
from cute_flash.spec.arch import ArchSpec


@dataclass(frozen=True)
class FwdTile:
    """`tile_m` query rows, in `num_warps` warps stacked along them, against blocks of `tile_n` keys."""

    head_dim: int  # width of the tile; smaller head dims are padded to it
    tile_m: int
    tile_n: int
    num_warps: int
    stages: (
        int  # K/V buffers; 1 overlaps K's copy with P V and V's with Q K^T, 2 prefetch a whole block ahead
    )
    q_steps: int = (
        0  # steps of 16 columns whose Q fragments stay in registers instead of being re-read for every block
    )
    max_bounds: int = 2  # sides of the band it can mask; with more the registers would spill
    layout: str = VARIANTS[0]  # of Q, K, V and O in shared memory; others only for study
    max_weight: int = field(default=ANY_WEIGHT, compare=False)  # of features; with more it would spill
    measured: str = field(default="", compare=False)  # evidence: GPU, dtype, shape, TFLOP/s

    def __post_init__(self) -> None:
        if self.num_warps not in (1, 2, 4, 8):
            raise ValueError(f"{self.num_warps=} must be 1, 2, 4 or 8")
        rows = WARP_ROWS * self.num_warps
        if self.tile_m % rows or self.tile_m <= 0:
            raise ValueError(
                f"{self.tile_m=} must be a multiple of {rows}: {self.num_warps} warps of {WARP_ROWS} rows"
            )
        if self.tile_n % WARP_KEYS or self.tile_n <= 0:
            raise ValueError(f"{self.tile_n=} must be a positive multiple of {WARP_KEYS}")
        if self.head_dim % 32 or not 32 <= self.head_dim <= 256:
            raise ValueError(f"{self.head_dim=} must be a multiple of 32 up to 256")
        if self.tile_n % self.copy_rows or self.tile_m % self.copy_rows:
            raise ValueError(
                f"{self.tile_m=} and {self.tile_n=} must be multiples of {self.copy_rows}, "
                "the rows one copy covers"
            )
        if self.stages not in (1, 2):
            raise ValueError(f"{self.stages=} must be 1 or 2")
        if not 0 <= self.q_steps <= self.head_dim // 16:
            raise ValueError(f"{self.q_steps=} must be 0 to {self.head_dim // 16}, the steps of 16 columns")
        _check_layout(self.layout, VARIANTS, "not among those that mma.sync kernels are built with")

    @property
    def num_threads(self) -> int:
        return 32 * self.num_warps

    @property
    def copy_rows(self) -> int:
        return copy_rows(self.head_dim, self.num_threads)

    def smem(self, rows: int) -> SmemTile:
        """A tile of Q, K or V in shared memory."""
        return SmemTile(rows, self.head_dim, ELEMENT_BYTES, self.layout)

    @property
    def smem_bytes(self) -> int:
        """Q (whose space O takes over at the end) + K and V stages."""
        q, kv = self.smem(self.tile_m).bytes, self.stages * self.smem(self.tile_n).bytes
        return _aligned(q) + _aligned(kv) + kv

    @property
    def accumulator_registers(self) -> int:
        """fp32 registers a thread needs for O and S; with Q's fragments if they stay."""
        rows = self.tile_m // self.num_warps
        registers = rows * (self.head_dim + self.tile_n) // 32
        return registers + rows * self.q_steps // 4

    def fits(self, arch: ArchSpec) -> bool:
        return self.smem_bytes <= arch.smem_per_block

    def __str__(self) -> str:
        regs = f", {self.q_steps} of {self.head_dim // 16} steps of Q in registers" if self.q_steps else ""
        stages = f"{self.stages} K/V stage{'s' if self.stages > 1 else ''}"
        study = "" if self.layout == VARIANTS[0] else f", {self.layout}"
        return f"{self.tile_m}x{self.tile_n}x{self.head_dim}, {self.num_warps} warps, {stages}{regs}{study}"


_H200 = "H200, bf16, 16384 tokens, hidden 2048, S=512/2048/16384 full; causal: "
_WITH_ROOM = "not measured: for softcap and dropout, which would spill in the row before"
_FOR_MAPS = (
    "for functions and block maps: H200, bf16, B=4, S=4096, documents 1.80 ms; 192x128 1.98; 128x96 2.01"
)
_FOR_FUNCTIONS = "not measured: for functions and a bias together, which would spill in the rows before"
_BY_RULE = "not measured on this part: chosen by the rules above the table"

# Rows are tried in order; the first one that is wide enough, fits and can mask is taken. Rules for parts that
# are not at hand: two blocks of four warps on an SM if shared memory allows, 32 rows a warp while O and S fit
# in registers (the fewer rows, the more shared memory is read per MMA), no spills.
_SM_80 = (
    FwdTile(64, 128, 64, 4, 2, q_steps=4, max_weight=LIGHT, measured=_BY_RULE),
    FwdTile(64, 128, 64, 4, 2, q_steps=2, max_weight=MOST, measured=_BY_RULE),
    FwdTile(64, 64, 64, 4, 2, q_steps=4, measured=_FOR_FUNCTIONS),
    FwdTile(96, 128, 64, 4, 2, q_steps=2, max_weight=LIGHT, measured=_BY_RULE),
    FwdTile(96, 128, 64, 4, 2, max_weight=HEAVY, measured=_BY_RULE),
    FwdTile(96, 128, 32, 4, 2, max_weight=MOST, measured=_BY_RULE),
    FwdTile(96, 64, 64, 4, 2, measured=_FOR_FUNCTIONS),
    FwdTile(128, 128, 48, 4, 2, max_weight=LIGHT, measured=_BY_RULE),
    FwdTile(128, 128, 32, 4, 2, max_weight=HEAVY, measured=_BY_RULE),
    FwdTile(128, 64, 64, 4, 2, q_steps=8, measured=_BY_RULE),
    FwdTile(192, 64, 64, 4, 1, q_steps=12, max_weight=LIGHT, measured=_BY_RULE),
    FwdTile(192, 64, 64, 4, 1, q_steps=6, max_weight=MOST, measured=_BY_RULE),
    FwdTile(192, 64, 32, 4, 1, measured=_FOR_FUNCTIONS),
    FwdTile(256, 128, 64, 8, 1, max_weight=MOST, measured=_BY_RULE),
    FwdTile(256, 128, 32, 8, 1, measured=_FOR_FUNCTIONS),
)
# 99 KB a block and 100 KB an SM: smaller key blocks keep two blocks alive.
_SM_86 = (
    FwdTile(64, 128, 64, 4, 2, q_steps=4, max_weight=LIGHT, measured=_BY_RULE),
    FwdTile(64, 128, 64, 4, 2, q_steps=2, max_weight=MOST, measured=_BY_RULE),
    FwdTile(64, 64, 64, 4, 2, q_steps=4, measured=_FOR_FUNCTIONS),
    FwdTile(96, 128, 64, 4, 1, max_weight=HEAVY, measured=_BY_RULE),
    FwdTile(96, 128, 32, 4, 1, max_weight=MOST, measured=_BY_RULE),
    FwdTile(96, 64, 64, 4, 1, measured=_FOR_FUNCTIONS),
    FwdTile(128, 128, 32, 4, 1, max_weight=HEAVY, measured=_BY_RULE),
    FwdTile(128, 64, 64, 4, 1, q_steps=8, measured=_BY_RULE),
    FwdTile(192, 64, 32, 4, 1, q_steps=12, max_weight=MOST, measured=_BY_RULE),
    FwdTile(192, 64, 32, 4, 1, measured=_FOR_FUNCTIONS),
    FwdTile(256, 128, 32, 8, 1, measured=_BY_RULE),
)
_SM_90 = (
    FwdTile(64, 128, 64, 4, 2, 4, max_weight=LIGHT, measured=_H200 + "296/344/363; 207/308/356 TFLOP/s"),
    FwdTile(64, 128, 64, 4, 2, 2, max_weight=MOST, measured=_WITH_ROOM),
    FwdTile(64, 64, 32, 4, 2, 4, measured=_FOR_FUNCTIONS),
    FwdTile(96, 128, 64, 4, 2, 2, max_weight=LIGHT, measured=_H200 + "307/358/387; 211/316/383 TFLOP/s"),
    FwdTile(96, 128, 64, 4, 2, max_weight=HEAVY, measured=_WITH_ROOM),
    FwdTile(96, 128, 32, 4, 2, max_weight=MOST, measured=_WITH_ROOM),
    FwdTile(96, 64, 64, 4, 2, measured=_FOR_FUNCTIONS),
    FwdTile(
        128,
        128,
        48,
        4,
        2,
        max_bounds=1,
        max_weight=LIGHT,
        measured=_H200 + "310/376/398; 221/322/408 TFLOP/s",
    ),
    FwdTile(128, 128, 32, 4, 2, max_weight=HEAVY, measured=_H200 + "309/371/390; 216/316/397 TFLOP/s"),
    FwdTile(128, 64, 64, 4, 2, q_steps=8, measured=_WITH_ROOM),
    FwdTile(192, 64, 64, 4, 1, 12, max_weight=LIGHT, measured=_H200 + "289/329/346; 221/304/364 TFLOP/s"),
    FwdTile(192, 64, 64, 4, 1, 6, max_weight=MOST, measured=_WITH_ROOM),
    FwdTile(192, 64, 32, 4, 1, measured=_FOR_FUNCTIONS),
    FwdTile(
        256,
        64,
        64,
        4,
        1,
        6,
        1,
        max_weight=LIGHT,
        measured=f"q_steps=8: {_H200}274/322/344; 213/282/339 TFLOP/s",
    ),
    FwdTile(256, 64, 64, 4, 1, 4, max_weight=LIGHT, measured=_H200 + "271/314/339; 208/280/327 TFLOP/s"),
    FwdTile(256, 64, 64, 4, 1, max_weight=MOST, measured=_WITH_ROOM),
    FwdTile(256, 64, 32, 4, 1, measured=_FOR_FUNCTIONS),
)
SM80_FWD = {"sm_80": _SM_80, "sm_86": _SM_86, "sm_89": _SM_86, "sm_90": _SM_90}
