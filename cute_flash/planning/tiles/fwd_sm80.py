"""Tiles of the mma.sync forward, and their table for each architecture."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

from cute_flash.planning.tiles.common import (
    CONSUMER_BLACKWELL,
    COST_ALIBI,
    COST_ALL_SCORE_FEATURES,
    COST_DROPOUT,
    ELEMENT_BYTES,
    WARP_KEYS,
    WARP_ROWS,
    WITH_99_KB,
    Tile,
    align_smem,
    check_layout,
    copy_rows,
)
from cute_flash.smem.tile import VARIANTS, SmemTile
from cute_flash.spec.arch import ARCHS
from cute_flash.spec.problem import MAX_HEAD_DIM, Static


def may_speculate(static: Static) -> bool:
    """Whether the row max may be speculative.

    batch_invariant and max_logit need the exact row max of every block. Dropout, fp32 and mods are not implemented.
    """
    features = {"dropout", "return_max_logit"} & {*static.features}
    return not (static.batch_invariant or static.is_fp32 or static.has_mods or features)


@dataclass(frozen=True)
class FwdTileSm80(Tile):
    """`tile_m` query rows, split among `num_warps` warps, against K/V blocks of `tile_n` keys."""

    num_warps: int
    stages: int  # K/V stages; 1: the copy of K overlaps P V, that of V overlaps Q K^T; 2: copies run one block ahead
    q_steps: int = 0  # k-steps of 16 columns of Q that stay in registers; the others are read for every block
    max_bounds: int = 2  # bounds of the band (left, right) that it can mask; more would spill
    layout: str = VARIANTS[0]  # of Q, K, V and O in shared memory; other layouts are for experiments
    pieces: int = 1  # 16-bit pieces per element of Q, K and V; 2 for fp32
    speculative_max: bool = False  # blocks use the old row max, and keep S until their row sums are checked
    # 1, 2 or 4 warps share their rows. Each has a part of the keys of S and of the columns of O; see
    # `device/mma/row_warps.py`.
    row_warps: int = 1

    def __post_init__(self) -> None:
        if self.num_warps not in (1, 2, 4, 8):
            raise ValueError(f"{self.num_warps=} must be 1, 2, 4 or 8")
        if self.row_warps not in (1, 2, 4) or self.row_warps > self.num_warps:
            raise ValueError(f"{self.row_warps=} must be 1, 2 or 4, and at most {self.num_warps=}")
        if self.row_warps > 1 and self.stages > 1:
            raise ValueError(f"{self.row_warps=} needs one stage")
        rows = WARP_ROWS * self.warps_m
        if self.tile_m % rows or self.tile_m <= 0:
            raise ValueError(f"{self.tile_m=} must be a multiple of {rows}: {self.warps_m} warps of {WARP_ROWS} rows")
        if self.tile_n % WARP_KEYS or self.tile_n <= 0:
            raise ValueError(f"{self.tile_n=} must be a positive multiple of {WARP_KEYS}")
        if self.head_dim % 32 or not 32 <= self.head_dim <= MAX_HEAD_DIM:
            raise ValueError(f"{self.head_dim=} must be a multiple of 32 up to {MAX_HEAD_DIM}")
        if self.tile_n % self.copy_rows or self.tile_m % self.copy_rows:
            raise ValueError(
                f"{self.tile_m=} and {self.tile_n=} must be multiples of {self.copy_rows}, the rows one copy covers"
            )
        if self.stages not in (1, 2):
            raise ValueError(f"{self.stages=} must be 1 or 2")
        if not 0 <= self.q_steps <= self.head_dim // 16:
            raise ValueError(f"{self.q_steps=} must be 0 to {self.head_dim // 16}, the steps of 16 columns")
        # A warp's columns of O are n16 tiles, and its keys are a run of columns that a swizzle permutes within itself.
        if self.row_warps > 1 and (self.head_dim % 64 or self.warp_keys not in (16, 32, 64, 128)):
            raise ValueError(
                f"{self.row_warps=} needs a multiple of 64 columns, and 16, 32, 64 or 128 times as many keys"
            )
        if self.pieces > 1 and (self.speculative_max or self.row_warps > 1):
            raise ValueError(f"{self.speculative_max=} and {self.row_warps=} are not implemented for fp32")
        check_layout(self.layout, VARIANTS, "not among those that mma.sync kernels are built with")

    @property
    def num_threads(self) -> int:
        return 32 * self.num_warps

    @property
    def warps_m(self) -> int:
        """Warps over the rows."""
        return self.num_warps // self.row_warps

    @property
    def warp_keys(self) -> int:
        """Keys of a block for which a warp computes S."""
        return self.tile_n // self.row_warps

    @property
    def thread_rows(self) -> int:
        """Number of rows of S, and of O, in the registers of one thread."""
        return self.tile_m // (8 * self.warps_m)

    @property
    def copy_rows(self) -> int:
        """Rows that all threads copy at once."""
        return copy_rows(self.row_cols, self.num_threads)

    @property
    def row_cols(self) -> int:
        """16-bit elements of a row of Q, K or V."""
        return self.pieces * self.head_dim

    def smem(self, rows: int) -> SmemTile:
        """A tile of Q, K or V in shared memory."""
        return SmemTile(rows, self.row_cols, ELEMENT_BYTES, self.layout)

    @property
    def smem_p(self) -> SmemTile:
        """P in shared memory, if warps share rows."""
        return SmemTile(self.tile_m, self.tile_n)

    @property
    def exchange_bytes(self) -> int:
        """P and the row statistics, if warps share rows."""
        statistics = 4 * self.num_threads * self.thread_rows
        return self.smem_p.bytes + statistics if self.row_warps > 1 else 0

    @property
    def smem_bytes(self) -> int:
        """Q, whose memory O reuses at the end, the stages of K and V, and what warps exchange."""
        q, kv = self.smem(self.tile_m).bytes, self.stages * self.smem(self.tile_n).bytes
        if self.row_warps == 1:
            return align_smem(q) + align_smem(kv) + kv
        return align_smem(q) + 2 * align_smem(kv) + self.exchange_bytes

    @property
    def accumulator_registers(self) -> int:
        """Registers of a thread for O and S in fp32, and for the part of Q that stays in registers."""
        registers = self.tile_m * (self.head_dim + self.tile_n) // self.num_threads
        return registers + self.tile_m // self.warps_m * self.q_steps // 4

    def serves(self, static: Static) -> bool:
        """Whether the row has the width and the registers for a problem's head dim, mask and features."""
        bounds = static.has_left + static.has_right
        if bounds and (static.varlen or static.batch_invariant):
            # The lengths of a varlen sequence take registers; those of dense calls are kernel arguments. With
            # batch_invariant, dense calls use the tile of varlen calls, so that results have the same bits.
            bounds = 2
        # All warps read the index lists of a block mask, or the origin of a dropout mask, which takes registers.
        cost = static.feature_cost + static.block_sparse + static.dropout_origin
        has_registers = self.max_bounds >= bounds and self.max_cost >= cost
        is_for_features = may_speculate(static) or not self.speculative_max
        is_wide_enough = self.head_dim >= static.widest and self.divides_block_mask(static)
        return is_wide_enough and has_registers and is_for_features and self.is_for(static)

    def __str__(self) -> str:
        regs = f", {self.q_steps} of {self.head_dim // 16} steps of Q in registers" if self.q_steps else ""
        stages = f"{self.stages} K/V stage{'s' if self.stages > 1 else ''}"
        ways = ", speculative max" * self.speculative_max
        study = "" if self.layout == VARIANTS[0] else f", {self.layout}"
        warps = f"{self.num_warps} warps" + f", {self.row_warps} for the same rows" * (self.row_warps > 1)
        return f"{self.tile_m}x{self.tile_n}x{self.head_dim}, {warps}, {stages}{regs}{ways}{study}"


_H200 = "H200, bf16, 16384 tokens, hidden 2048, TFLOP/s of S=512/2048/16384 full; causal: "
_NOV_18 = "H200, bf16, 16384 tokens, hidden 2048, 2026-11-18, TFLOP/s of S=512/1024/4096/16384: "
_FOR_FEATURES = "not measured: for features that would spill in the row before"
_FOR_MODS = "not measured: for mods and features that would spill in the rows before"

_WIDE = "not measured: the most rows whose O fits the registers, and the fewest reads of shared memory per MMA"

_pairs = partial(FwdTileSm80, speculative_max=True, row_warps=2)
_wide = partial(FwdTileSm80, num_warps=8, stages=1, row_warps=4, measured=_WIDE)
_wide_pairs = partial(_wide, row_warps=2)

# The first row that supports a problem and fits is chosen. Rules for GPUs that were not measured: two CTAs of four
# warps on an SM if shared memory allows; 32 rows per warp while O and S fit in registers, because fewer rows read more
# shared memory per MMA; otherwise 32 rows per pair of warps, if that was faster on an H200; no spills. Columns:
# head_dim, tile_m, tile_n, num_warps, stages.
#
# Above head dim 256, O of 64 rows takes up to 128 registers of 256 threads, so one CTA fills an SM. Shared memory
# limits these kernels: Q, K and V take it all, and of warps that share rows, four read less of V than two. A block of
# 64 keys for four warps needs more than 163 KB above head dim 384, where a pair has blocks of 32 keys. With 99 KB, one
# CTA of four warps has 32 rows, except at head dim 320. Q takes the registers that O and S leave.
# fmt: off
_WIDE_64 = (
    _wide(320,  64,  64, q_steps=8, speculative_max=True, max_cost=COST_ALIBI),
    _wide(320,  64,  64),
    _wide(384,  64,  64, q_steps=6, speculative_max=True, max_cost=COST_ALIBI),
    _wide(384,  64,  64),
    _wide(448,  64,  64, q_steps=2, speculative_max=True, max_cost=COST_ALIBI),
    _wide(448,  64,  64),
    _wide(512,  64,  64, q_steps=3, speculative_max=True, max_cost=COST_ALIBI),
    _wide(512,  64,  64),
)
_WIDE_99_KB = (
    _wide_pairs(320,  64,  32, q_steps=20, speculative_max=True, max_cost=COST_ALIBI),
    _wide_pairs(320,  64,  32),
    _wide_pairs(384,  32,  32, num_warps=4, q_steps=16, speculative_max=True, max_cost=COST_ALIBI),
    _wide_pairs(384,  32,  32, num_warps=4),
    _wide_pairs(448,  32,  32, num_warps=4, q_steps=12, speculative_max=True, max_cost=COST_ALIBI),
    _wide_pairs(448,  32,  32, num_warps=4),
    _wide_pairs(512,  32,  32, num_warps=4, q_steps=8, speculative_max=True, max_cost=COST_ALIBI),
    _wide_pairs(512,  32,  32, num_warps=4),
)
_SM_80 = (
    FwdTileSm80( 64, 128,  64, 4, 2, q_steps=4, max_cost=COST_ALIBI),
    FwdTileSm80( 64, 128,  64, 4, 2, q_steps=2, max_cost=COST_ALL_SCORE_FEATURES),
    FwdTileSm80( 64,  64,  64, 4, 2, q_steps=4, measured=_FOR_MODS),
    FwdTileSm80( 96, 128,  64, 4, 2, q_steps=2, max_cost=COST_ALIBI),
    FwdTileSm80( 96, 128,  64, 4, 2, max_cost=COST_DROPOUT),
    FwdTileSm80( 96, 128,  32, 4, 2, max_cost=COST_ALL_SCORE_FEATURES),
    FwdTileSm80( 96,  64,  64, 4, 2, measured=_FOR_MODS),
    FwdTileSm80(128, 128,  48, 4, 2, max_cost=COST_ALIBI),
    FwdTileSm80(128, 128,  32, 4, 2, max_cost=COST_DROPOUT),
    FwdTileSm80(128,  64,  64, 4, 2, q_steps=8),
    FwdTileSm80(192,  64,  64, 4, 1, q_steps=12, max_cost=COST_ALIBI),
    FwdTileSm80(192,  64,  64, 4, 1, q_steps=6, max_cost=COST_ALL_SCORE_FEATURES),
    FwdTileSm80(192,  64,  32, 4, 1, measured=_FOR_MODS),
    _pairs(256, 128,  64, 8, 1, q_steps=2, max_cost=COST_ALIBI,
           measured=_NOV_18 + "279/312/350/365; causal 191/250/333/366"),
    FwdTileSm80(256, 128,  64, 8, 1, max_cost=COST_ALL_SCORE_FEATURES),
    FwdTileSm80(256, 128,  32, 8, 1, measured=_FOR_MODS),
    *_WIDE_64[:4],
    _wide_pairs(448,  64,  32, q_steps=12, speculative_max=True, max_cost=COST_ALIBI),
    _wide_pairs(448,  64,  32),
    _wide_pairs(512,  64,  32, q_steps=8, speculative_max=True, max_cost=COST_ALIBI),
    _wide_pairs(512,  64,  32),
)
# 99 KB of shared memory for a CTA and 100 KB for an SM: smaller K/V blocks leave room for two CTAs.
_SM_86 = (
    *_SM_80[:3],
    FwdTileSm80( 96, 128,  64, 4, 1, max_cost=COST_DROPOUT),
    FwdTileSm80( 96, 128,  32, 4, 1, max_cost=COST_ALL_SCORE_FEATURES),
    FwdTileSm80( 96,  64,  64, 4, 1, measured=_FOR_MODS),
    FwdTileSm80(128, 128,  32, 4, 1, max_cost=COST_DROPOUT),
    FwdTileSm80(128,  64,  64, 4, 1, q_steps=8),
    FwdTileSm80(192,  64,  32, 4, 1, q_steps=12, max_cost=COST_ALL_SCORE_FEATURES),
    FwdTileSm80(192,  64,  32, 4, 1, measured=_FOR_MODS),
    FwdTileSm80(256, 128,  32, 8, 1),
    *_WIDE_99_KB,
)
# With two steps of Q in registers, all features together would spill on sm_120.
_SM_120 = (_SM_86[0], replace(_SM_86[1], q_steps=1), *_SM_86[2:])
_SM_90 = (
    FwdTileSm80( 64, 128,  64, 4, 2, q_steps=4, is_bounded=False, max_keys=512, max_cost=COST_ALIBI,
                measured=_NOV_18 + "295/330/350/359"),
    FwdTileSm80( 64, 128,  64, 4, 2, q_steps=4, speculative_max=True, is_bounded=False, max_cost=COST_ALIBI,
                measured=_NOV_18 + "292/334/365/375"),
    FwdTileSm80( 64, 128,  64, 4, 2, q_steps=4, max_cost=COST_ALIBI, measured=_H200 + "296/344/363; 207/308/356"),
    FwdTileSm80( 64, 128,  64, 4, 2, q_steps=2, max_cost=COST_ALL_SCORE_FEATURES, measured=_FOR_FEATURES),
    FwdTileSm80( 64,  64,  32, 4, 2, q_steps=4, measured=_FOR_MODS),
    FwdTileSm80( 96, 128,  64, 4, 2, q_steps=2, max_cost=COST_ALIBI, measured=_H200 + "307/358/387; 211/316/383"),
    FwdTileSm80( 96, 128,  64, 4, 2, max_cost=COST_DROPOUT, measured=_FOR_FEATURES),
    FwdTileSm80( 96, 128,  32, 4, 2, max_cost=COST_ALL_SCORE_FEATURES, measured=_FOR_FEATURES),
    FwdTileSm80( 96,  64,  64, 4, 2, measured=_FOR_MODS),
    FwdTileSm80(128, 128,  48, 4, 2, max_bounds=1, max_cost=COST_ALIBI, measured=_H200 + "310/376/398; 221/322/408"),
    FwdTileSm80(128, 128,  32, 4, 2, max_cost=COST_DROPOUT, measured=_H200 + "309/371/390; 216/316/397"),
    FwdTileSm80(128,  64,  64, 4, 2, q_steps=8, measured=_FOR_FEATURES),
    _pairs(192,  64,  64, 4, 1, q_steps=5, max_cost=COST_ALIBI,
           measured=_NOV_18 + "295/330/365/371; causal 232/290/355/373 (next row: 296/329/355/361; 230/287/346/365)"),
    FwdTileSm80(192,  64,  64, 4, 1, q_steps=12, max_cost=COST_ALIBI, measured=_H200 + "289/329/346; 221/304/364"),
    FwdTileSm80(192,  64,  64, 4, 1, q_steps=6, max_cost=COST_ALL_SCORE_FEATURES, measured=_FOR_FEATURES),
    FwdTileSm80(192,  64,  32, 4, 1, measured=_FOR_MODS),
    _pairs(256,  64,  64, 4, 1, q_steps=4, is_bounded=False, max_cost=0,
           measured=_NOV_18 + "309/338/370/383"),
    _pairs(256,  64,  64, 4, 1, q_steps=2, max_cost=COST_ALIBI,
           measured=_NOV_18 + "309/336/362/385; causal 235/289/356/372 (next row: 291/309/327/339; 226/272/320/335)"),
    FwdTileSm80(256,  64,  64, 4, 1, q_steps=6, max_bounds=1, max_cost=COST_ALIBI,
                measured=f"q_steps=8: {_H200}274/322/344; 213/282/339 TFLOP/s"),
    FwdTileSm80(256,  64,  64, 4, 1, q_steps=4, max_cost=COST_ALIBI, measured=_H200 + "271/314/339; 208/280/327"),
    FwdTileSm80(256,  64,  64, 4, 1, max_cost=COST_ALL_SCORE_FEATURES, measured=_FOR_FEATURES),
    FwdTileSm80(256,  64,  32, 4, 1, measured=_FOR_MODS),
    *_WIDE_64,
)
# fmt: on
SM80_FWD = {
    "sm_80": _SM_80,
    "sm_90": _SM_90,
    **dict.fromkeys(WITH_99_KB, _SM_86),
    **dict.fromkeys(CONSUMER_BLACKWELL, _SM_120),
}


# fp32, as two fp16 pieces. On an H200, 128x64 at D = 64 and 128x32 at D = 128 are faster (3 % and 14 %), but spill.
_FP32 = "H200, 16384 tokens, hidden 2048, TFLOP/s of S=1024/4096 full; causal: "
# fmt: off
_ROWS_FP32 = (
    FwdTileSm80( 64, 128,  32, 4, 1, pieces=2, max_cost=COST_DROPOUT + COST_ALIBI, measured=_FP32 + "94/119; 70/107"),
    FwdTileSm80( 64,  64,  32, 4, 1, pieces=2, measured="not measured: for features"),
    FwdTileSm80(128,  64,  32, 4, 1, pieces=2, measured=_FP32 + "93/117; 72/103"),
)
# With a window or chunks, 64x32 would spill on sm_120.
_ROWS_FP32_120 = (*_ROWS_FP32[:2], FwdTileSm80(128,  64,  16, 4, 1, pieces=2))
# fmt: on
SM80_FWD_FP32 = {**dict.fromkeys(ARCHS, _ROWS_FP32), **dict.fromkeys(CONSUMER_BLACKWELL, _ROWS_FP32_120)}
