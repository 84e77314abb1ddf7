"""Tiles of the Hopper backward kernels, and their tables."""

from __future__ import annotations

from dataclasses import dataclass, field

from cute_flash.planning.tiles.common import COST_ANY, COST_DROPOUT, COST_SOFTCAP, COST_USER_MOD, WARPGROUP_ROWS
from cute_flash.spec.arch import ArchSpec


@dataclass(frozen=True)
class BwdTileSm90:
    """`tile_n` keys, 64 for each of two consumer warpgroups, against blocks of `tile_m` queries."""

    head_dim: int
    tile_m: int
    tile_n: int
    stages: int = 2  # of Q, and of dO
    early_lse: bool = False  # the LSE is read during the MMA of S^T; delta reuses its registers
    early_dropout: bool = False  # dropout masks are computed before S^T and dP^T take registers
    element_bytes: int = 2  # of Q, K, V, O and their gradients
    max_feature_cost: int = field(default=COST_ANY, compare=False)  # see `common`; more would spill
    measured: str = field(default="", compare=False)

    @property
    def num_threads(self) -> int:
        return 3 * 128

    @property
    def dq_part(self) -> tuple[int, int]:
        """Rows and columns of a block of dQ that each warpgroup computes: half of the rows if there are 128.

        Half of the columns would mean narrower instructions, which read dS from shared memory more often.
        """
        rows = 2 * WARPGROUP_ROWS
        return (self.tile_m // 2, self.head_dim) if self.tile_m == rows else (self.tile_m, self.head_dim // 2)

    @property
    def smem_bytes(self) -> int:
        rows = 2 * self.tile_n + 2 * self.stages * self.tile_m
        halves = rows * self.head_dim + 2 * self.tile_m * self.tile_n
        floats = self.tile_m * self.head_dim + 2 * self.stages * self.tile_m
        # Two slots of 16 bytes, in which the producer publishes tiles.
        return self.element_bytes * halves + 4 * floats + 32 + 8 * (16 + 4 * self.stages)

    def fits(self, arch: ArchSpec) -> bool:
        return arch.has_wgmma and self.smem_bytes <= arch.smem_per_block

    def prefetches_bias(self, mod_ops: int) -> bool:
        """Whether a block of the bias is loaded during the MMA of S; long user mods leave no registers for it."""
        return mod_ops <= 10


@dataclass(frozen=True)
class BwdTileSm90Wide:
    """`tile_n` keys, half of them for each of two consumer warpgroups, against blocks of `tile_m` queries.

    Each warpgroup accumulates half of the columns of dK, dV and dQ.
    """

    head_dim: int
    tile_m: int
    tile_n: int
    q_stages: int = 2
    do_stages: int = 1
    dq_pieces: int = 7  # pieces of a warpgroup's dQ, of 8, that are stored through shared memory; 2 KB each
    element_bytes: int = 2  # of Q, K, V, O and their gradients
    measured: str = field(default="", compare=False)

    @property
    def num_threads(self) -> int:
        return 3 * 128

    @property
    def registers(self) -> tuple[int, int]:
        """Registers of a thread of the producer warpgroup, and of the consumer warpgroups."""
        return 24, 240

    @property
    def dq_part(self) -> tuple[int, int]:
        """Rows and columns of a block of dQ that each warpgroup computes."""
        return self.tile_m, self.head_dim // 2

    @property
    def smem_bytes(self) -> int:
        stages = self.q_stages + self.do_stages
        rows = 2 * self.tile_n + stages * self.tile_m
        halves = rows * self.head_dim + 2 * self.tile_m * self.tile_n
        staged = 2 * 2048 * self.dq_pieces
        return self.element_bytes * halves + staged + 4 * stages * self.tile_m + 8 * (4 + 2 * stages + 4)

    def fits(self, arch: ArchSpec) -> bool:
        return arch.has_wgmma and self.smem_bytes <= arch.smem_per_block


_GRADIENTS = "H200, bf16, 16384 tokens, hidden 2048, S=512/2048/8192, sweep of 2026-11-15, version 2: "
_GRADIENTS_256 = "H200, bf16, 16384 tokens, hidden 2048, S=1024/8192: 387/505; causal 296/458 TFLOP/s"
_CHEAP_MOD = "H200, bf16, B=4, S=4096, hidden 2048: ALiBi 2.52 ms, causal 1.41; 64 queries: 3.29, 1.73"
_BY_RULE = "not measured: chosen by the rules above the table"

# Rules for rows that were not measured: many keys, two stages if they fit, no spills.
# fmt: off
SM90_BWD = (
    BwdTileSm90(head_dim=64, tile_m=128, tile_n=128,
                early_lse=True, measured=_GRADIENTS + "311/469/542; causal 187/370/480 TFLOP/s"),
    BwdTileSm90(head_dim=128, tile_m=64, tile_n=128,
                measured=_GRADIENTS + "329/502/572; causal 219/410/547 TFLOP/s"),
    # The most keys that leave registers for dQ beside dK and dV, and shared memory for two stages of Q.
    BwdTileSm90Wide(head_dim=256, tile_m=64, tile_n=80, measured=_GRADIENTS_256),
)
# With softcap, ALiBi or dropout. Head dims above 128 have no registers for them and run on mma.sync.
SM90_BWD_SCORE = (
    BwdTileSm90(head_dim=64, tile_m=128, tile_n=128,
                early_lse=True, max_feature_cost=COST_SOFTCAP, measured=_BY_RULE),
    BwdTileSm90(head_dim=64, tile_m=128, tile_n=128,
                early_lse=True, early_dropout=True, max_feature_cost=COST_DROPOUT, measured=_BY_RULE),
    BwdTileSm90(head_dim=64, tile_m=64, tile_n=128, measured=_BY_RULE),
    SM90_BWD[1],
)
# With a cheap score_mod, or a block mask, whose mask_mod is evaluated in few blocks.
SM90_BWD_CHEAP_MOD = BwdTileSm90(head_dim=64, tile_m=128, tile_n=128,
                                 early_lse=True, max_feature_cost=COST_USER_MOD, measured=_CHEAP_MOD)
# fmt: on
