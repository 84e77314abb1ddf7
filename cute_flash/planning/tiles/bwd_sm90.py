"""Tiles of the Hopper backward kernels, and the tables that choose one."""

from __future__ import annotations

from dataclasses import dataclass, field

from cute_flash.planning.tiles.common import (
    ANY_WEIGHT,
    HEAVY,
    MEDIUM,
    WARPGROUP_ROWS,
)
from cute_flash.spec.arch import ArchSpec


@dataclass(frozen=True)
class BwdTileSm90:
    """`tile_n` keys, 64 to each of two warpgroups, against blocks of `tile_m` queries."""

    head_dim: int
    tile_m: int
    tile_n: int
    stages: int = 2  # buffers of Q, and of dO
    early_lse: bool = False  # LSE is read while S^T is made; its registers are D's later
    early_draws: bool = False  # dropout's, before S^T and dP^T take registers
    max_weight: int = field(default=ANY_WEIGHT, compare=False)  # of features; with more it would spill
    measured: str = field(default="", compare=False)

    @property
    def num_threads(self) -> int:
        return 3 * 128

    @property
    def dq_part(self) -> tuple[int, int]:
        """Rows and columns of a block of dQ that each warpgroup multiplies: half of the rows, if there are
        enough; narrow instructions would read dS from shared memory more often than the tensor cores wait.
        """
        rows = 2 * WARPGROUP_ROWS
        return (self.tile_m // 2, self.head_dim) if self.tile_m == rows else (self.tile_m, self.head_dim // 2)

    @property
    def smem_bytes(self) -> int:
        rows = 2 * self.tile_n + 2 * self.stages * self.tile_m
        halves = rows * self.head_dim + 2 * self.tile_m * self.tile_n
        floats = self.tile_m * self.head_dim + 2 * self.stages * self.tile_m
        # Two tiles are written down, in 16 bytes each.
        return 2 * halves + 4 * floats + 32 + 8 * (16 + 4 * self.stages)

    def fits(self, arch: ArchSpec) -> bool:
        return arch.has_wgmma and self.smem_bytes <= arch.smem_per_block

    def fetches_bias_early(self, inner: int) -> bool:
        """Whether there are registers for a block of it while S is made, beside functions of that length."""
        return inner <= 10


@dataclass(frozen=True)
class BwdTileSm90Wide:
    """`tile_n` keys, half of them to each of two warpgroups, against blocks of `tile_m` queries; each has
    half of the columns of dK, dV and dQ.
    """

    head_dim: int
    tile_m: int
    tile_n: int
    q_stages: int = 2  # buffers of Q
    do_stages: int = 1  # buffers of dO
    dq_pieces: int = 7  # of 8 of a half of dQ that leave through shared memory; 2 KB a warpgroup each
    measured: str = field(default="", compare=False)

    @property
    def num_threads(self) -> int:
        return 3 * 128

    @property
    def registers(self) -> tuple[int, int]:
        """What a thread of the copying warps, and one of the others, may use."""
        return 24, 240

    @property
    def dq_part(self) -> tuple[int, int]:
        """Rows and columns of a block of dQ that each warpgroup multiplies."""
        return self.tile_m, self.head_dim // 2

    @property
    def smem_bytes(self) -> int:
        stages = self.q_stages + self.do_stages
        rows = 2 * self.tile_n + stages * self.tile_m
        halves = rows * self.head_dim + 2 * self.tile_m * self.tile_n
        staged = 2 * 2048 * self.dq_pieces
        return 2 * halves + staged + 4 * stages * self.tile_m + 8 * (4 + 2 * stages + 4)

    def fits(self, arch: ArchSpec) -> bool:
        return arch.has_wgmma and self.smem_bytes <= arch.smem_per_block


_BY_RULE = "not measured: chosen by the rules above the table"
_GRADIENTS = "H200, bf16, 16384 tokens, hidden 2048, S=512/2048/8192, sweep of 2026-11-15, version 2: "
_GRADIENTS_256 = "H200, bf16, 16384 tokens, hidden 2048, S=1024/8192: 387/505; causal 296/458 TFLOP/s"
SM90_BWD = (
    BwdTileSm90(
        64, 128, 128, early_lse=True, measured=_GRADIENTS + "311/469/542; causal 187/370/480 TFLOP/s"
    ),
    BwdTileSm90(128, 64, 128, measured=_GRADIENTS + "329/502/572; causal 219/410/547 TFLOP/s"),
    # The most keys for which dK and dV leave registers for dQ, and shared memory for two buffers of Q.
    BwdTileSm90Wide(256, 64, 80, measured=_GRADIENTS_256),
)
# With softcap, ALiBi or dropout. Wide heads have no registers for them: they are left to mma.sync.
SM90_BWD_SCORE = (
    BwdTileSm90(64, 128, 128, early_lse=True, max_weight=MEDIUM, measured=_BY_RULE),
    BwdTileSm90(64, 128, 128, early_lse=True, early_draws=True, max_weight=HEAVY, measured=_BY_RULE),
    BwdTileSm90(64, 64, 128, measured=_BY_RULE),
    SM90_BWD[1],
)
# With a block map, whose mask_mod is asked in few blocks, or with a score_mod: not both, and light ones.
_OF_FUNCTIONS = "H200, bf16, B=4, S=4096, hidden 2048: ALiBi 2.52 ms, causal 1.41; 64 queries: 3.29, 1.73"
SM90_BWD_LIGHT = BwdTileSm90(64, 128, 128, early_lse=True, max_weight=HEAVY, measured=_OF_FUNCTIONS)
