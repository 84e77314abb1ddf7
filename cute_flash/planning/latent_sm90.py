"""The tile of decode with one latent cache (MLA) by wgmma, on Hopper."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from cute_flash.planning.decode_tiles import OneCacheTile
from cute_flash.planning.tiles.common import WARPGROUP_ROWS
from cute_flash.smem.tile import SmemTile
from cute_flash.spec.arch import ArchSpec
from cute_flash.spec.band import ceil_div

if TYPE_CHECKING:
    from cute_flash.planning.decode import DecodeStatic

LATENT_SM90 = "decode_latent_sm90"  # the name of the kernel
WARPGROUP_THREADS = 128
# Warpgroups: a producer, one that computes the scores, and two that compute half of the output's columns each.
WARPGROUPS, OUTPUT_WARPGROUPS = 4, 2
PRODUCER_WARPS = 4
# With at most this many query rows, mma.sync is used.
MAX_ROWS_MMA_SYNC = 16
# Columns of one wgmma of P V. With 256 columns a thread would need more registers than it has at launch.
COLUMNS_PV = 128
# Columns of Q that are kept in registers or left in shared memory together.
Q_COLUMNS = 64
# Keys that are loaded together, whose P is handed over, and that are released after P V: half of a block.
LOAD_KEYS = 32
# What one TMA instruction loads of a half: all its rows, in one atom of columns.
TMA_BOX = SmemTile(LOAD_KEYS, 64)
# Integers of a published split, padded to 16 bytes, and the number of splits that are published at a time.
SPLIT_INTEGERS, SPLIT_SLOTS = 12, 2


@dataclass(frozen=True, kw_only=True)
class LatentTileSm90(OneCacheTile):
    """64 query rows against blocks of 64 keys, whose first columns are the values. A stage is one block.

    wgmma with 32 keys would read Q from shared memory twice as often. Halves of a stage are loaded and released by
    themselves, so that two stages suffice.
    """

    tile_m: int = WARPGROUP_ROWS
    tile_n: int = 64
    num_warps: int = 4 * WARPGROUPS
    stages: int = 2
    has_query_tables: bool = False  # there is a word of shared memory for each key: whether it has a page
    q_in_registers: int = 4  # tiles of `Q_COLUMNS` columns of Q that stay in registers during a split
    # Registers of a thread of the producer, the scores warpgroup and the output warpgroups.
    registers: tuple[int, int, int] = (40, 152, 160)

    @property
    def load_keys(self) -> int:
        return LOAD_KEYS // PRODUCER_WARPS

    @property
    def loads(self) -> int:
        """Loads of a block."""
        return self.tile_n // LOAD_KEYS

    @property
    def q_steps(self) -> int:
        """k-steps of Q that stay in registers."""
        return self.q_in_registers * Q_COLUMNS // 16

    @property
    def columns(self) -> int:
        """Columns of O of an output warpgroup."""
        return self.width_v // OUTPUT_WARPGROUPS

    @property
    def merging_threads(self) -> int:
        return OUTPUT_WARPGROUPS * WARPGROUP_THREADS

    @property
    def merged_rows(self) -> int:
        return max(1, 4 * self.merging_threads // self.width_v)

    @property
    def smem_bytes(self) -> int:
        tiles = self.q_smem.bytes + self.kv_bytes + self.p_smem.bytes
        # Factors of rows, sums of rows, flags of warps; the share of a merge; barriers.
        small = 2 * 4 * self.tile_m + 16 + 8 + 16 * (SPLIT_SLOTS + 1 + self.loads * self.stages + self.loads)
        small += 4 * self.stages * self.tile_n * self.has_query_tables
        return tiles + ceil_div(small, 16) * 16 + 4 * SPLIT_INTEGERS * SPLIT_SLOTS

    def __str__(self) -> str:
        roles = f"{WARPGROUPS} warpgroups, {self.q_in_registers} tiles of Q in registers"
        return f"{self.tile_m}x{self.tile_n}x{self.head_dim}/{self.width_v}, {roles}, {self.stages} stages"


def latent_tile_sm90(static: DecodeStatic, arch: ArchSpec) -> LatentTileSm90:
    """The tile of a latent cache."""
    values = 256 if static.width_v <= 256 else 512
    head_dim = max(ceil_div(static.head_dim, Q_COLUMNS) * Q_COLUMNS, values)
    tile = LatentTileSm90(
        head_dim=head_dim,
        values=values,
        has_query_tables=static.has_query_tables,
        q_in_registers=min(LatentTileSm90.q_in_registers, head_dim // Q_COLUMNS - 1),
    )
    deeper = replace(tile, stages=2 * tile.stages)
    return deeper if deeper.smem_bytes <= arch.smem_per_cta else tile


def loads_by_tma(static: DecodeStatic) -> bool:
    """Whether TMA loads halves of blocks whose keys all exist, if they are in one page.

    TMA does not see rows that this call has written, and cannot gather rows.
    """
    return not (static.appends or static.has_query_tables or static.page_lookup == "row")


def uses_wgmma(static: DecodeStatic, rows: int, arch: ArchSpec, family: str) -> bool:
    """Whether a call with a latent cache and `rows` query rows of a K/V head uses wgmma."""
    return arch.has_wgmma and family != "sm80" and static.cache_bytes == 2 and rows > MAX_ROWS_MMA_SYNC
