"""Tiles of the mma.sync backward, and their tables for each architecture."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

from cute_flash.planning.tiles.common import CONSUMER_BLACKWELL, ELEMENT_BYTES, WARP_KEYS, WARP_ROWS, WITH_99_KB, Tile
from cute_flash.smem.tile import CHUNK_BYTES, SmemTile

CHUNK_COLS = CHUNK_BYTES // ELEMENT_BYTES  # 16-bit elements that a thread copies at once


@dataclass(frozen=True)
class BwdTileSm80(Tile):
    """`tile_n` keys against blocks of `tile_m` queries, on mma.sync.

    Each product has its own grid of warps: `warps_*` along its rows, the others along its columns. If all warps are
    along the keys, P and dS stay in registers as operands of the next product. Otherwise they go through shared memory,
    but each operand is read by fewer warps.
    """

    stages: int  # of Q, and of dO; with 1 stage their copies overlap only with the product dQ
    warps_s: int = 8  # along the keys of S^T and dP^T (keys x queries)
    warps_kv: int = 8  # along the keys of dK and dV (keys x head_dim)
    warps_q: int = 4  # along the queries of dQ (queries x head_dim)
    num_warps: int = 8
    # Half of the warps compute dK, the others dV; `warps_kv` counts the warps of a half. A warp then has a tile twice
    # as large, and reads less shared memory per MMA.
    splits_kv: bool = False
    # Half of the warps compute S, the others dP; `warps_s` counts the warps of a half. dP goes through shared memory.
    # Small tiles of scores do not have 16x16 of them for each warp.
    splits_s: bool = False
    pieces: int = 1  # 16-bit pieces per element of Q, K, V, dO, P and dS; 2 for fp32
    allows_deterministic: bool = field(default=True, compare=False)  # False: deterministic gradients would spill
    allows_fp16: bool = field(default=True, compare=False)  # False: fp16 would spill

    def __post_init__(self) -> None:
        if self.num_warps not in (4, 8) or self.stages not in (1, 2):
            raise ValueError(f"{self.num_warps=} must be 4 or 8, and {self.stages=} 1 or 2")
        if self.tile_m not in (16, 32, 64, 128):
            raise ValueError(f"{self.tile_m=} must be 16, 32, 64 or 128")
        if self.head_dim % 32 or not 32 <= self.head_dim <= 512:
            raise ValueError(f"{self.head_dim=} must be a multiple of 32 up to 512")
        for name, rows, columns, warps, unit in (
            ("warps_s", self.tile_n, self.tile_m, self.warps_per_score, 8 if self.splits_s else WARP_KEYS),
            ("warps_kv", self.tile_n, self.head_dim, self.warps_per_gradient, WARP_KEYS),
            ("warps_q", self.tile_m, self.head_dim, self.num_warps, WARP_KEYS),
        ):
            along = getattr(self, name)
            if along not in (1, 2, 4, 8) or along > warps:
                raise ValueError(f"{name}={along} must be 1, 2, 4 or 8, up to {warps} warps")
            across = warps // along
            if rows % (WARP_ROWS * along) or columns % (unit * across) or rows <= 0:
                raise ValueError(f"{name}={along}: {rows}x{columns} is not {along}x{across} parts of 16x{unit}")
        if (self.splits_kv or self.splits_s) and self.pieces > 1:
            raise ValueError(f"{self.splits_kv=}, {self.splits_s=}: not implemented for fp32")
        at_once = self.num_threads * CHUNK_COLS // self.copy_cols
        if self.tile_n % at_once or self.tile_m % at_once or self.row_cols % self.copy_cols:
            raise ValueError(f"{self.tile_m=}, {self.tile_n=} must be multiples of {at_once}: rows of one copy")

    def allows(self, dtype: str, deterministic: bool) -> bool:
        return (self.allows_fp16 or dtype != "float16") and (self.allows_deterministic or not deterministic)

    @property
    def dalibi_warps(self) -> int:
        """Warps of a CTA that hold partial sums of the slopes' gradients."""
        return self.num_warps

    @property
    def num_threads(self) -> int:
        return 32 * self.num_warps

    @property
    def row_cols(self) -> int:
        """16-bit elements of a row of Q, K, V or dO."""
        return self.pieces * self.head_dim

    @property
    def copy_cols(self) -> int:
        """Columns of a row of Q, K, V or dO that neighbouring threads copy; more in tiles of few rows."""
        least = self.num_threads * CHUNK_COLS // math.gcd(self.tile_m, self.tile_n)
        return max(SmemTile(self.tile_m, self.row_cols).copy_cols, least)

    @property
    def warps_per_score(self) -> int:
        """Warps that compute S; as many compute dP."""
        return self.num_warps // 2 if self.splits_s else self.num_warps

    @property
    def queries_per_warp(self) -> int:
        """Contiguous queries of a warp in S and dP."""
        return self.tile_m * self.warps_s // self.warps_per_score

    @property
    def warps_per_gradient(self) -> int:
        """Warps that compute dK; as many compute dV."""
        return self.num_warps // 2 if self.splits_kv else self.num_warps

    @property
    def p_in_registers(self) -> bool:
        """Whether P and dS stay in registers as operands of dV and dK."""
        return self.warps_s == self.warps_kv == self.num_warps

    @property
    def smem_bytes(self) -> int:
        """K and V, the stages of Q and dO with their statistics, dS, and P unless it stays in registers."""
        rows = 2 * self.tile_n + 2 * self.stages * self.tile_m
        scores = (1 if self.p_in_registers else 2) * self.tile_m * self.tile_n
        statistics = 2 * self.stages * self.tile_m
        return (rows * self.head_dim + scores) * self.pieces * ELEMENT_BYTES + 4 * statistics

    @property
    def accumulator_registers(self) -> int:
        """Registers of a thread for dK, dV, S and dP in fp32."""
        gradients = 2 * self.tile_n * self.head_dim // self.num_threads
        return gradients + 2 * self.tile_n * self.tile_m // (32 * self.warps_per_score)

    def prefetches_bias(self, mod_ops: int, maps_scores: bool) -> bool:
        """See `BwdTileSm90.prefetches_bias`."""
        return mod_ops <= 24

    def __str__(self) -> str:
        stages = f"{self.stages} stage{'s' if self.stages > 1 else ''} of Q and dO"
        where = "P in registers" if self.p_in_registers else "P in shared memory"
        split = ", S and dP split" * self.splits_s + ", dK and dV split" * self.splits_kv
        return f"{self.tile_m}x{self.tile_n}x{self.head_dim}, {self.num_warps} warps, {stages}, {where}{split}"


# Rules: many keys, because each K/V tile reads all of Q and dO and adds to all of dQ; warp grids that read little
# shared memory per MMA; two stages if they fit; no spills on sm_80. Rows without `measured` were not compared with
# other tiles. The numbers in table names are the KB of shared memory that a CTA can have.
_H200 = "H200, bf16, 16384 tokens, hidden 2048, TFLOP/s of S=1024/4096 full; causal: "
# fmt: off
# Wide heads. dK and dV of 32 keys take 128 registers at 512 columns.
_WIDE_320 = BwdTileSm80(head_dim=320, tile_m=32, tile_n=32, stages=2, warps_s=2, splits_s=True, warps_kv=1,
                        splits_kv=True, warps_q=2)
_WIDE_384 = replace(_WIDE_320, head_dim=384, warps_q=1)
_WIDE_512 = replace(_WIDE_384, head_dim=512)
_WIDE_99 = (
    replace(_WIDE_320, stages=1),
    replace(_WIDE_384, tile_m=16),
    replace(_WIDE_512, tile_m=16, stages=1),
)
_BWD_163 = (
    BwdTileSm80(head_dim=64, tile_m=128, tile_n=128, stages=2, warps_s=2, warps_kv=4, splits_kv=True, warps_q=4,
                measured=_H200 + "266/302; 209/286"),
    BwdTileSm80(head_dim=96, tile_m=128, tile_n=128, stages=1, warps_s=2, warps_kv=2, splits_kv=True, warps_q=4,
                allows_deterministic=False, measured=_H200 + "273/315; 215/298"),
    BwdTileSm80(head_dim=96, tile_m=64, tile_n=128, stages=2, warps_s=4, warps_kv=2, splits_kv=True, warps_q=4,
                measured=_H200 + "257/291; 205/276"),
    BwdTileSm80(head_dim=128, tile_m=64, tile_n=128, stages=2, warps_s=4, warps_kv=2, splits_kv=True, warps_q=2,
                measured=_H200 + "279/317; 225/310"),
    BwdTileSm80(head_dim=192, tile_m=64, tile_n=96, stages=1, warps_s=2, warps_kv=2, warps_q=2,
                allows_deterministic=False, allows_fp16=False, measured=_H200 + "236/265; 202/267"),
    BwdTileSm80(head_dim=192, tile_m=64, tile_n=64, stages=2, warps_s=4, warps_kv=1, splits_kv=True, warps_q=2,
                measured=_H200 + "224/250; 192/244"),
    BwdTileSm80(head_dim=256, tile_m=64, tile_n=64, stages=1, warps_s=4, warps_kv=1, splits_kv=True, warps_q=2,
                measured=_H200 + "229/254; 194/247"),
    BwdTileSm80(head_dim=320, tile_m=32, tile_n=64, stages=1, warps_s=4, warps_kv=1, splits_kv=True, warps_q=2,
                allows_deterministic=False),
    _WIDE_320,
    replace(_WIDE_384, tile_n=48, warps_s=1, stages=1, allows_deterministic=False),
    _WIDE_384,
    replace(_WIDE_512, stages=1),
)
_BWD_227 = (
    *_BWD_163[:3],
    # Up to 512 keys it is faster than the next row: 239, causal 166 TFLOP/s instead of 232, 155.
    replace(_BWD_163[3], max_keys=512),
    BwdTileSm80(head_dim=128, tile_m=128, tile_n=96, stages=2, warps_s=2, warps_kv=1, splits_kv=True, warps_q=4,
                allows_deterministic=False, measured=_H200 + "292/354; 219/314"),
    _BWD_163[3],
    BwdTileSm80(head_dim=192, tile_m=64, tile_n=96, stages=2, warps_s=2, warps_kv=2, warps_q=2,
                allows_deterministic=False, measured=_H200 + "249/282; 212/282"),
    _BWD_163[5],
    BwdTileSm80(head_dim=256, tile_m=128, tile_n=64, stages=1, warps_s=2, warps_kv=1, splits_kv=True, warps_q=4,
                allows_deterministic=False, measured=_H200 + "269/305; 213/289"),
    _BWD_163[6],
    replace(_BWD_163[7], stages=2),
    _WIDE_320,
    replace(_BWD_163[9], stages=2),
    _WIDE_384,
    _WIDE_512,
)
_BWD_99 = (
    BwdTileSm80(head_dim=64, tile_m=64, tile_n=128, stages=2, warps_s=4, warps_kv=2, splits_kv=True, warps_q=4,
                measured=_H200 + "235/262; 186/246"),
    BwdTileSm80(head_dim=96, tile_m=64, tile_n=128, stages=1, warps_s=8, warps_kv=8, warps_q=4),
    BwdTileSm80(head_dim=128, tile_m=32, tile_n=128, stages=1, warps_s=4, warps_kv=4, warps_q=2),
    BwdTileSm80(head_dim=192, tile_m=32, tile_n=64, stages=1, warps_s=4, warps_kv=2, warps_q=2),
    BwdTileSm80(head_dim=256, tile_m=32, tile_n=32, num_warps=4, stages=1, warps_s=2, warps_kv=1, warps_q=1),
    *_WIDE_99,
)
SM80_BWD = {"sm_80": _BWD_163, "sm_90": _BWD_227, **dict.fromkeys(WITH_99_KB, _BWD_99)}
# With score features or a block mask, and deterministic with varlen: smaller tiles, which do not spill.
_SCORE_163 = (
    _BWD_99[0],
    BwdTileSm80(head_dim=96, tile_m=64, tile_n=64, stages=2, warps_s=4, warps_kv=4, warps_q=4),
    BwdTileSm80(head_dim=128, tile_m=64, tile_n=64, stages=2, warps_s=4, warps_kv=2, warps_q=2),
    BwdTileSm80(head_dim=192, tile_m=32, tile_n=64, stages=2, warps_s=4, warps_kv=2, warps_q=2),
    BwdTileSm80(head_dim=256, tile_m=64, tile_n=32, stages=1, warps_s=2, warps_kv=2, warps_q=2),
    _WIDE_320,
    _WIDE_384,
    replace(_WIDE_512, stages=1),
)
_SCORE_227 = (*_SCORE_163[:-1], _WIDE_512)
_SCORE_99 = (
    *_SCORE_163[:2],
    BwdTileSm80(head_dim=128, tile_m=64, tile_n=64, stages=1, warps_s=4, warps_kv=2, warps_q=2),
    BwdTileSm80(head_dim=192, tile_m=32, tile_n=64, stages=1, warps_s=4, warps_kv=2, warps_q=2),
    BwdTileSm80(head_dim=256, tile_m=64, tile_n=16, num_warps=4, stages=1, warps_s=1, warps_kv=1, warps_q=2),
    *_WIDE_99,
)
SM80_BWD_SCORE = {"sm_80": _SCORE_163, "sm_90": _SCORE_227, **dict.fromkeys(WITH_99_KB, _SCORE_99)}
# fp32, as two fp16 pieces.
_FP32 = "H200, 16384 tokens, hidden 2048, TFLOP/s of S=1024/4096 full; causal: "
# Rows with max_cost=0 would spill with features.
_FP32_163 = (
    BwdTileSm80(head_dim=64, tile_m=64, tile_n=128, stages=1, warps_s=4, warps_kv=4, warps_q=4, pieces=2, max_cost=0,
                measured=_FP32 + "97/113; 74/106"),
    BwdTileSm80(head_dim=64, tile_m=64, tile_n=64, stages=1, warps_s=4, warps_kv=4, warps_q=4, pieces=2),
    BwdTileSm80(head_dim=128, tile_m=64, tile_n=64, stages=1, warps_s=4, warps_kv=2, warps_q=2, pieces=2, max_cost=0,
                measured=_FP32 + "94/109; 75/104"),
    BwdTileSm80(head_dim=128, tile_m=32, tile_n=64, stages=1, warps_s=4, warps_kv=4, warps_q=2, pieces=2),
)
_FP32_99 = (
    _FP32_163[1],
    BwdTileSm80(head_dim=128, tile_m=32, tile_n=32, num_warps=4, stages=1, warps_s=2, warps_kv=2, warps_q=2, pieces=2),
)
# 64x64 would spill with a bias on sm_120.
_FP32_120 = (
    replace(_FP32_99[0], max_cost=0),
    BwdTileSm80(head_dim=64, tile_m=32, tile_n=64, stages=1, warps_s=4, warps_kv=4, warps_q=2, pieces=2),
    _FP32_99[1],
)
SM80_BWD_FP32 = {
    "sm_80": _FP32_163,
    "sm_90": _FP32_163,
    **dict.fromkeys(WITH_99_KB, _FP32_99),
    **dict.fromkeys(CONSUMER_BLACKWELL, _FP32_120),
}
# For user mods with more than `MAX_MOD_OPS` operations per score, at head dims up to 64.
SM80_BWD_LONG_MOD = BwdTileSm80(head_dim=64, tile_m=64, tile_n=64, stages=2, warps_s=4, warps_kv=4, warps_q=4)
# fmt: on
