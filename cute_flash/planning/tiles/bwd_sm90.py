"""Tiles of the Hopper backward kernels, and their tables."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from cute_flash.planning.tiles.common import (
    COST_ALIBI,
    COST_DROPOUT,
    COST_SOFTCAP,
    COST_USER_MOD,
    ELEMENT_BYTES,
    WARPGROUP_ROWS,
    Tile,
)
from cute_flash.spec.problem import Static

# For up to `max_queries_claimed` queries, the first K/V tile that is ready stores dQ of an m_block, and the others add
# to it (`device.gradients.dq_claims`). For more queries the preprocess kernel stores zeros, and all K/V tiles add. With
# deterministic gradients see `first_tile_stores`.
ALL_QUERIES = (1 << 31) - 1
PIECES = 8  # of half of a warpgroup's dQ with 256 columns; a piece is four registers of each thread (`BwdTileSm90Wide`)
MAX_CTA_HEAD_DIM = 256  # columns of one CTA; a cluster of two CTAs has up to twice as many
HALVES = 2  # of a warpgroup's dQ of an m_block, which pass through shared memory one after the other
# Layouts of `SmemTile` by the columns of an atom.
_VARIANTS = {64: "swizzled", 32: "swizzled64", 16: "swizzled32"}


@dataclass(frozen=True)
class BwdTileSm90(Tile):
    """`tile_n` keys, 64 for each of two consumer warpgroups, against blocks of `tile_m` queries."""

    stages: int = 2  # of Q, and of dO
    early_lse: bool = False  # the LSE is read during the MMA of S^T; delta reuses its registers
    early_dropout: bool = False  # dropout masks are computed before S^T and dP^T take registers
    bias_stages: int = 0  # of a bias that TMA loads; 0: threads load the bias, or there is none

    needs_wgmma: ClassVar[bool] = True
    dalibi_warps: ClassVar[int] = 8  # of a CTA, with partial sums of the slopes' gradients
    num_threads: ClassVar[int] = 3 * 128
    max_queries_claimed: ClassVar[int] = ALL_QUERIES
    # K/V tiles that claim the same m_block at the same time wait for one of them. `BwdTileSm90Wide` must not begin
    # apart: its claims are free of deadlocks only if all K/V tiles visit the m_blocks in the same order.
    begins_apart: ClassVar[bool] = True
    cluster: ClassVar[int] = 1
    smem_variant: ClassVar[str] = "swizzled"  # of Q, K, V and dO

    def __post_init__(self) -> None:
        if self.tile_m not in (64, 128):
            raise ValueError(f"{self.tile_m=} must be 64 or 128")
        if self.tile_n != 128:
            raise ValueError(f"{self.tile_n=} must be 128: 64 keys per warpgroup")
        if self.head_dim not in (64, 128):
            raise ValueError(f"{self.head_dim=} must be 64 or 128")
        if self.stages != 2:
            raise ValueError(f"{self.stages=} must be 2: a warpgroup waits for a block before the other releases one")

    def first_tile_stores(self, static: Static) -> bool:
        """Whether deterministic dQ of an m_block begins with a store by the first K/V tile; otherwise with zeros.

        In varlen batches and with block masks, the adder warps have no register for it.
        """
        return not (static.varlen or static.block_sparse)

    @property
    def dq_part(self) -> tuple[int, int]:
        """(rows, columns) of dQ that each warpgroup computes: half of the rows if there are 128, else half the columns.

        Half of the columns means narrower wgmma instructions, which read dS from shared memory more often.
        """
        rows = 2 * WARPGROUP_ROWS
        return (self.tile_m // 2, self.head_dim) if self.tile_m == rows else (self.tile_m, self.head_dim // 2)

    @property
    def cta_head_dim(self) -> int:
        """Columns of one CTA."""
        return self.head_dim

    @property
    def smem_bytes(self) -> int:
        rows = 2 * self.tile_n + 2 * self.stages * self.tile_m
        halves = rows * self.head_dim + 2 * self.tile_m * self.tile_n
        floats = self.tile_m * self.head_dim + 2 * self.stages * self.tile_m
        halves += self.bias_stages * self.tile_m * self.tile_n
        # Two slots of 16 bytes, in which the producer publishes tiles (longer slots of varlen batches are not counted),
        # and room for barriers of 8 bytes.
        return ELEMENT_BYTES * halves + 4 * floats + 32 + 8 * (16 + 4 * self.stages + 8 * self.bias_stages)

    @property
    def accumulator_registers(self) -> int:
        """Registers of a thread for dK, dV, S and dP in fp32."""
        return self.head_dim + self.tile_m

    @property
    def max_mod_ops(self) -> int:
        """The most operations per score of user mods for which there are enough registers."""
        return 24 if self.head_dim <= 64 else 10

    def allows(self, static: Static, deterministic: bool) -> bool:
        """Whether there are enough registers for the user mods of a call."""
        return static.mods is None or static.mods.bwd_ops_per_score <= self.max_mod_ops

    def prefetches_bias(self, mod_ops: int, maps_scores: bool) -> bool:
        """Whether threads load a block of the bias during the MMA of S; long user mods leave no registers for it."""
        return mod_ops <= 10 and not self.bias_stages


@dataclass(frozen=True)
class BwdTileSm90Wide(Tile):
    """`tile_n` keys, half of them for each of two consumer warpgroups, against blocks of `tile_m` queries.

    A CTA has 256 columns, or a cluster of two CTAs has half of the columns in each. Each warpgroup accumulates half of
    the CTA's columns of dK, dV and dQ.
    """

    q_stages: int = 2
    do_stages: int = 1
    # A half of a warpgroup's dQ is `half_pieces` pieces of 2 KB. This many pieces of a half go through shared memory.
    # With 256 columns in one CTA, the last piece may be added to global memory from registers.
    dq_pieces: int = 7
    dq_products: int = HALVES  # 1: a warpgroup computes both halves of dQ by one product; 2: one after the other
    sum_slots: int = 1  # messages with partial sums that a CTA of a cluster has room for (`device.mma.cluster_sum`)
    bias_stages: int = 0  # of a bias that TMA loads; 0: threads load the bias, or there is none

    needs_wgmma: ClassVar[bool] = True
    dalibi_warps: ClassVar[int] = 8  # of a CTA, with partial sums of the slopes' gradients
    num_threads: ClassVar[int] = 3 * 128
    max_mod_ops: ClassVar[int] = 24
    registers: ClassVar[tuple[int, int]] = 24, 240  # per thread of the producer, and of the consumer warpgroups
    # Without a mask, zeros are 3 to 6 % faster from 2048 queries on ("claims 4" of 2026-11-17-bwd-sm90-dq-ab.txt).
    max_queries_claimed: ClassVar[int] = 1024

    def first_tile_stores(self, static: Static) -> bool:
        return True

    def __post_init__(self) -> None:
        if self.tile_m != 64:
            raise ValueError(f"{self.tile_m=} must be 64")
        if self.head_dim % 64 or not MAX_CTA_HEAD_DIM <= self.head_dim <= 2 * MAX_CTA_HEAD_DIM:
            raise ValueError(f"{self.head_dim=} must be {MAX_CTA_HEAD_DIM}, or up to twice as much in steps of 64")
        if self.cluster == 1 and (self.dq_products, self.sum_slots) != (HALVES, 1):
            raise ValueError(f"{self.dq_products=} and {self.sum_slots=} must be {HALVES} and 1 without a cluster")
        if self.cluster > 1 and self.tile_n != WARPGROUP_ROWS:
            raise ValueError(f"{self.tile_n=} must be {WARPGROUP_ROWS} in a cluster: the rows of a wgmma are keys")
        if self.cluster > 1 and self.dq_pieces != self.half_pieces:
            raise ValueError(f"{self.dq_pieces=} must be {self.half_pieces} in a cluster")
        if self.dq_products not in (1, HALVES):
            raise ValueError(f"{self.dq_products=} must be 1 or {HALVES}")
        if self.dq_products == HALVES and self.dq_part[1] % (HALVES * self.atom_columns):
            raise ValueError(f"{self.dq_products=} must be 1: a half is not a whole number of atoms")
        if self.sum_slots not in (1, 2):
            raise ValueError(f"{self.sum_slots=} must be 1 or 2")
        if self.tile_n % 16 or not 16 <= self.tile_n <= 128:
            raise ValueError(f"{self.tile_n=} must be a multiple of 16 up to 128")
        if self.q_stages != 2:
            raise ValueError(f"{self.q_stages=} must be 2: S of a block is started before the previous Q is released")
        if self.do_stages not in (1, 2):
            raise ValueError(f"{self.do_stages=} must be 1 or 2")
        if self.cluster == 1 and self.dq_pieces not in (PIECES - 1, PIECES):
            raise ValueError(f"{self.dq_pieces=} must be {PIECES - 1} or {PIECES}: at most one is added from registers")

    @property
    def cluster(self) -> int:
        """The CTAs that compute a tile together, each with a part of the columns (`kernels.sm90.bwd_cluster`)."""
        return 1 if self.head_dim <= MAX_CTA_HEAD_DIM else 2

    @property
    def cta_head_dim(self) -> int:
        """Columns of one CTA."""
        return self.head_dim // self.cluster

    @property
    def atom_columns(self) -> int:
        """Columns of an atom of Q, K, V and dO in shared memory. The columns of a warpgroup are whole atoms."""
        return math.gcd(self.dq_part[1], 64)

    @property
    def smem_variant(self) -> str:
        """The layout of Q, K, V and dO."""
        return _VARIANTS[self.atom_columns]

    @property
    def half_pieces(self) -> int:
        """The pieces of half of a warpgroup's dQ: four registers of each thread, 8 columns of 64 rows."""
        return self.dq_part[1] // HALVES // 8

    @property
    def accumulator_registers(self) -> int:
        """Registers of a thread for dK, dV, S, a product of dQ, and dP unless it has the registers of dQ."""
        scores, columns = self.tile_n // 4, self.dq_part[1]
        gradients = 2 * self.tile_n * columns // 128 + columns // 2 // self.dq_products
        return gradients + scores + (scores if self.separates_dp else 0)

    def allows(self, static: Static, deterministic: bool) -> bool:
        """Whether there are enough registers for the user mods of a call, and in a cluster for ordered gradients.

        Both CTAs of a cluster compute every score, so gradients of a bias and of captured tensors would be added twice.
        """
        if self.cluster > 1 and deterministic and "dropout" in static.features:
            return False
        if static.mods is None:
            return True
        has_registers = static.mods.bwd_ops_per_score <= self.max_mod_ops
        return has_registers and not (self.cluster > 1 and static.mods.adds_tensors)

    def prefetches_bias(self, mod_ops: int, maps_scores: bool) -> bool:
        """Whether a block of the bias is loaded before S is computed.

        Mods and formulas such as softcap leave no registers for it.
        """
        return mod_ops <= 4 and not maps_scores and not self.bias_stages

    @property
    def separates_dp(self) -> bool:
        """Whether dP and dQ have registers of their own, because few keys leave enough of them."""
        return self.tile_n <= 64

    @property
    def dq_part(self) -> tuple[int, int]:
        """(rows, columns) of dQ that each warpgroup computes."""
        return self.tile_m, self.cta_head_dim // 2

    @property
    def smem_bytes(self) -> int:
        stages = self.q_stages + self.do_stages
        rows = 2 * self.tile_n + stages * self.tile_m
        halves = rows * self.cta_head_dim + (2 + self.bias_stages) * self.tile_m * self.tile_n
        staged, barriers = 2 * 2048 * self.dq_pieces, 4 + 2 * stages + 4 + 8 * self.bias_stages
        if self.cluster > 1:
            # Partial sums of the other CTA, with two barriers for each warp and slot.
            staged += 4 * self.tile_m * self.tile_n * self.sum_slots
            barriers += 2 * 8 * self.sum_slots
        return ELEMENT_BYTES * halves + staged + 4 * stages * self.tile_m + 8 * barriers


# Versions are those of profiling/notes/bwd_sm90.md.
_GRADIENTS = "H200, bf16, 16384 tokens, hidden 2048, kernel version 2, 2026-11-15, TFLOP/s of S=512/2048/8192: "
_GRADIENTS_256 = "H200, bf16, 16384 tokens, hidden 2048, S=1024/8192: 387/505; causal 296/458 TFLOP/s"
_GRADIENTS_320 = "H200, bf16, B=1, H=32, 2026-11-20, TFLOP/s of S=4096/16384 full: 254/266; causal: 242/265"
_GRADIENTS_384 = "the same: 285/303; causal: 277/304"
_GRADIENTS_512 = "the same: 346/356; causal: 328/356"
_CHEAP_MOD = (
    "H200, bf16, B=4, S=4096, hidden 2048: ALiBi score_mod 2.52 ms, causal block mask 1.41; tile_m=64: 3.29, 1.73"
)

_BIAS_64 = "H200, bf16, B=4, S=4096, hidden 2048, bias (B, H, S, S): 2.92 ms, causal 1.60; loaded by threads 5.71, 2.86"
_BIAS_128 = "the same: 2.56 ms, causal 1.41; loaded by threads 3.76, 1.97"
_BIAS_256 = "the same with bias (1, H, S, S): causal 1.72 ms, D=192 2.12; loaded by threads 2.22, 2.71"

# Rules for rows that were not measured: many keys, two stages if they fit, no spills.
# Columns: head_dim, tile_m, tile_n.
# fmt: off
SM90_BWD = (
    BwdTileSm90( 64, 128, 128, early_lse=True, measured=_GRADIENTS + "311/469/542; causal 187/370/480"),
    BwdTileSm90(128,  64, 128, measured=_GRADIENTS + "329/502/572; causal 219/410/547"),
    # 80 is the largest number of keys that leaves registers for dQ, and shared memory for two stages of Q.
    BwdTileSm90Wide(256, 64, 80, measured=_GRADIENTS_256),
    # 64 is the largest number of keys that leaves shared memory for the partial sums of the other CTA. Narrower heads
    # leave registers for a whole dQ, and shared memory for two messages. 224 columns per CTA are slower than 256.
    BwdTileSm90Wide(
        320, 64, 64, do_stages=2, dq_pieces=5, dq_products=1, sum_slots=2, max_cost=COST_ALIBI + COST_DROPOUT,
        measured=_GRADIENTS_320,
    ),
    BwdTileSm90Wide(
        384, 64, 64, dq_pieces=6, dq_products=1, sum_slots=2, max_cost=COST_ALIBI + COST_DROPOUT,
        measured=_GRADIENTS_384,
    ),
    BwdTileSm90Wide(512, 64, 64, dq_pieces=8, max_cost=COST_ALIBI + COST_DROPOUT, measured=_GRADIENTS_512),
)
# Above head dim 128 with score features, in a varlen batch, or deterministic: fewer keys leave registers for features,
# and shared memory for all pieces of dQ. The warps that add dQ to global memory then add all of it, and a semaphore can
# fix their order.
SM90_BWD_FEWER_KEYS = (*SM90_BWD[:2], BwdTileSm90Wide(256, 64, 64, dq_pieces=8), *SM90_BWD[3:])
# With score features.
SM90_BWD_SCORE = (
    BwdTileSm90( 64, 128, 128, early_lse=True, max_cost=COST_SOFTCAP),
    BwdTileSm90( 64, 128, 128, early_lse=True, early_dropout=True, max_cost=COST_DROPOUT),
    BwdTileSm90( 64,  64, 128),
    *SM90_BWD_FEWER_KEYS[1:],
)
# With a bias that TMA loads.
SM90_BWD_BIAS = (
    BwdTileSm90( 64, 128, 128, bias_stages=1, max_cost=COST_USER_MOD, measured=_BIAS_64),
    BwdTileSm90( 64,  64, 128, bias_stages=2),
    BwdTileSm90(128,  64, 128, bias_stages=2, measured=_BIAS_128),
    BwdTileSm90Wide(256, 64, 64, dq_pieces=8, bias_stages=2, measured=_BIAS_256),
)
# With a cheap score_mod, or a block mask, whose mask_mod is evaluated in few blocks.
SM90_BWD_CHEAP_MOD = BwdTileSm90(64, 128, 128, early_lse=True, max_cost=COST_USER_MOD, measured=_CHEAP_MOD)
# fmt: on
