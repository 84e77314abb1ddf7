"""Constants, feature costs and the base class that the tiles of all kernels share."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from cute_flash.errors import UnsupportedError
from cute_flash.score_mod.limits import BLOCK_MASK_MULTIPLE
from cute_flash.spec.arch import ARCHS, KIB, ArchSpec
from cute_flash.spec.features import FEATURE
from cute_flash.spec.problem import Static

SMEM_ALIGN = 1024  # bytes: alignment of every tile in shared memory, so that its swizzle starts at a period
WARP_ROWS = 16  # rows of one mma.sync m16n8k16
WARPGROUP_ROWS = 64  # rows of one wgmma
WARP_KEYS = 16  # keys of one ldmatrix.x4 of K or V
ELEMENT_BYTES = 2  # of Q, K, V, O and their gradients: fp16 or bf16
# Architectures with 99 KB of shared memory for a CTA. They have the same tiles, except for rows that
# would spill on consumer Blackwell.
WITH_99_KB = tuple(name for name, arch in ARCHS.items() if arch.smem_per_cta == 99 * KIB)
CONSUMER_BLACKWELL = ("sm_120", "sm_121")

# Feature cost: additional registers of a thread over plain attention (`spec.features.feature_cost`). The unit is the
# cost of an attention sink, the cheapest feature. Costs are estimates and add up. A table row supports calls that cost
# at most its `max_cost`; beyond it the kernel would spill.
COST_SINKS = FEATURE["sinks"].cost
COST_ALIBI = FEATURE["alibi"].cost
COST_SOFTCAP = FEATURE["softcap"].cost
COST_DROPOUT = FEATURE["dropout"].cost
COST_USER_MOD = FEATURE["score_mod"].cost  # one of a bias, a score_mod and a mask_mod
# The features that the rows were measured with. A new feature is not added here: it would change the tiles of others.
COST_ALL_SCORE_FEATURES = sum(
    FEATURE[name].cost for name in ("softcap", "alibi", "sinks", "dropout", "return_max_logit")
)
COST_ANY = 99


@dataclass(frozen=True)
class Tile:
    """The sizes and limits of every tile.

    Fields with `compare=False` decide which row of a table is chosen; they do not change the kernel.
    """

    head_dim: int  # width of the tile; smaller head dims are padded to it
    tile_m: int
    tile_n: int
    # The row is only for problems with at most this many `Problem.usual_keys`.
    max_keys: int | None = field(default=None, compare=False, kw_only=True)
    # True: the row is only for masks with a bound; False: only for masks without one; None: for both.
    is_bounded: bool | None = field(default=None, compare=False, kw_only=True)
    max_cost: int = field(default=COST_ANY, compare=False, kw_only=True)
    # How the row was measured: GPU, dtype, shape, TFLOP/s.
    measured: str = field(default="not measured: chosen by the rules above the table", compare=False, kw_only=True)

    needs_wgmma: ClassVar[bool] = False
    # Whether the K/V tiles of a backward begin at different m_blocks of a block mask (`score_mod.block_sparse`).
    begins_apart: ClassVar[bool] = False

    @property
    def smem_bytes(self) -> int:
        raise NotImplementedError

    def fits(self, arch: ArchSpec) -> bool:
        return self.smem_bytes <= arch.smem_per_cta and (arch.has_wgmma or not self.needs_wgmma)

    def is_for(self, static: Static) -> bool:
        """Whether the row is for the problem's mask.

        With batch_invariant, rows with `max_keys` are left out: the choice must not depend on the lengths of other
        sequences, nor on varlen.
        """
        is_for_any_length = self.max_keys is None or not static.batch_invariant
        return is_for_any_length and self.is_bounded in (None, static.is_bounded)

    def divides_block_mask(self, static: Static) -> bool:
        """Whether the tile divides the blocks of a block mask; true without a block mask."""
        is_divisor = BLOCK_MASK_MULTIPLE % self.tile_m == BLOCK_MASK_MULTIPLE % self.tile_n == 0
        return is_divisor or not static.block_sparse


def copy_rows(head_dim: int, num_threads: int) -> int:
    """Rows that all threads copy at once: 16 bytes per thread, 8 or 4 threads per 128 or 64 bytes of a row."""
    return num_threads * 16 // (128 if head_dim % 64 == 0 else 64)


def align_smem(num_bytes: int) -> int:
    """`num_bytes` rounded up to a multiple of `SMEM_ALIGN`."""
    return -(-num_bytes // SMEM_ALIGN) * SMEM_ALIGN


def check_layout(layout: str, possible: tuple[str, ...], why: str) -> None:
    """Raise `UnsupportedError` for a shared-memory layout that a kernel cannot be built with."""
    if layout not in possible:
        raise UnsupportedError(f"{layout=}: {why}; choose one of {', '.join(possible)}")
