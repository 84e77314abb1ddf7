"""Tiles of the kernels that split keys: `DecodeTile`, those of latent caches (MLA), and their choice."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

from cute_flash.errors import UnsupportedError
from cute_flash.planning.tiles.common import WARP_ROWS, align_smem
from cute_flash.smem.tile import SmemTile
from cute_flash.spec.arch import ArchSpec
from cute_flash.spec.band import ceil_div
from cute_flash.spec.ds_mla import LATENT_DIM, NUM_SCALES, ROTARY_BYTE, ROTARY_DIM, ROW_BYTES, SCALES_BYTE

if TYPE_CHECKING:
    from cute_flash.planning.decode import DecodeStatic

# The width of a swizzle atom. Rows of K and V in shared memory are padded to a multiple of it.
ATOM_BYTES = 128
NUM_WARPS = 4
# Head dims above the first are divided among warps that have the second many columns each. O of 16 rows and all columns
# would not fit the registers of a warp.
MAX_WHOLE_HEAD_DIM, WARP_COLUMNS = 256, 128
# Rows of the output that the warps of a CTA exchange at a time.
EXCHANGE_ROWS = 8


class RowSegment(NamedTuple):
    """Consecutive bytes of a cache row, and their place in a stage of shared memory.

    A segment of whole swizzle atoms is swizzled. A shorter one is not.
    """

    source: int  # its first byte in a row
    num_bytes: int
    target: int  # its first byte in a stage


@dataclass(frozen=True)
class DecodeTile:
    """`tile_m` query rows against blocks of `num_teams` x `tile_n` keys; each team has its own keys.

    A team is one warp, or `column_warps` warps that divide the columns of Q, K, V and O. Each warp has a pipeline.
    """

    head_dim: int  # width of the tile; smaller head dims are padded to it
    tile_m: int  # 16 or 32
    tile_n: int  # keys of one team in a block: 16 or 32
    num_warps: int
    stages: int
    element_bytes: int = 2  # of the caches
    least_keys: int = 128  # the fewest keys of a CTA, without `num_splits`
    # Whether warps exchange outputs through separate shared memory, so that the loads of the next split start before
    # the exchange. Else the exchange reuses the stages.
    own_exchange: bool = False
    column_warps: int = 1  # warps of a team

    @property
    def num_threads(self) -> int:
        return 32 * self.num_warps

    @property
    def num_teams(self) -> int:
        return self.num_warps // self.column_warps

    @property
    def warp_columns(self) -> int:
        """Columns of Q, K, V and O of one warp, with padding."""
        return self.head_dim // self.column_warps

    @property
    def block_keys(self) -> int:
        return self.num_teams * self.tile_n

    @property
    def width_v(self) -> int:
        """Columns of the output, with padding."""
        return self.head_dim

    @property
    def load_keys(self) -> int:
        """Keys of a block that one warp loads."""
        return self.tile_n

    @property
    def q_steps(self) -> int:
        """k-steps of Q that stay in registers during the main loop."""
        return self.warp_columns // 16 if self.tile_m * self.warp_columns <= 16 * 128 else 0

    @property
    def output_shape(self) -> tuple[int, int]:
        """Rows and columns of the output that one warp accumulates."""
        return self.tile_m, self.warp_columns

    @property
    def num_sums(self) -> int:
        """Teams whose outputs of a row are added up at the end."""
        return self.num_teams

    @property
    def num_stats(self) -> int:
        """Teams or warps whose softmax statistics of a row are combined at the end."""
        return self.num_teams

    @property
    def q_smem(self) -> SmemTile:
        return SmemTile(self.tile_m, self.head_dim)

    @property
    def kv_smem(self) -> SmemTile:
        """One warp's share of a block of K or V. Rows are a multiple of 128 bytes long."""
        row_bytes = ceil_div(self.warp_columns * self.element_bytes, ATOM_BYTES) * ATOM_BYTES
        return SmemTile(self.tile_n, row_bytes // self.element_bytes, self.element_bytes)

    @property
    def scores_bytes(self) -> int:
        """Scores of a warp in fp32."""
        return 4 * self.tile_m * self.tile_n

    @property
    def stage_bytes(self) -> int:
        """Bytes of a stage of a warp: of K and V."""
        return 2 * self.kv_smem.bytes

    @property
    def row_segments(self) -> tuple[RowSegment, ...]:
        """The parts of a warp's columns of a row, in the order of their copies."""
        return (RowSegment(source=0, num_bytes=self.kv_smem.cols * self.element_bytes, target=0),)

    @property
    def kv_bytes(self) -> int:
        """All stages of K and V of all warps."""
        return self.num_warps * self.stages * self.stage_bytes

    @property
    def exchange_bytes(self) -> int:
        """The outputs of all warps in fp32, eight rows at a time."""
        return self.num_sums * EXCHANGE_ROWS * self.width_v * 4

    @property
    def merged_rows(self) -> int:
        """Rows of the output that a CTA merges at once: a thread merges four columns."""
        return max(1, 4 * self.num_threads // self.width_v)

    @property
    def smem_bytes(self) -> int:
        statistics = 2 * 4 * self.num_warps * EXCHANGE_ROWS
        exchange = self.exchange_bytes if self.own_exchange else 0
        # The queries twice: as in global memory, and as the operand of the MMA.
        return 2 * align_smem(self.q_smem.bytes) + align_smem(self.kv_bytes) + exchange + statistics + 64

    def ctas_per_sm(self, arch: ArchSpec) -> int:
        return min(arch.smem_per_sm // (self.smem_bytes + 1024), arch.max_threads_per_sm // self.num_threads)


@dataclass(frozen=True)
class OneCacheTile(DecodeTile):
    """A tile of a latent cache (MLA), whose stages are blocks of `tile_n` keys for all warps."""

    values: int = 512  # columns of the output, with padding

    @property
    def width_v(self) -> int:
        return self.values

    @property
    def block_keys(self) -> int:
        return self.tile_n

    @property
    def stage_bytes(self) -> int:
        """Bytes of a stage: one block."""
        return self.kv_smem.bytes

    @property
    def kv_bytes(self) -> int:
        return self.stages * self.stage_bytes

    @property
    def p_smem(self) -> SmemTile:
        return SmemTile(self.tile_m, self.tile_n)


@dataclass(frozen=True)
class LatentTile(OneCacheTile):
    """`tile_m` query rows against blocks of `tile_n` keys of a latent cache, by mma.sync.

    `num_warps` / (`tile_m` / 16) warps share 16 rows. Each computes the scores of a part of the keys, and the output of
    a part of the value columns; P passes through shared memory.
    """

    @property
    def load_keys(self) -> int:
        return self.tile_n // self.num_warps

    @property
    def warps_per_row(self) -> int:
        """Warps that share 16 rows."""
        return self.num_warps // (self.tile_m // WARP_ROWS)

    @property
    def score_keys(self) -> int:
        """Keys of a block whose scores one warp computes."""
        return self.tile_n // self.warps_per_row

    @property
    def q_steps(self) -> int:
        # As many as leave registers for the score features, and for the conversion of FP8.
        steps = 20 if self.element_bytes == 1 else 32 if self.output_shape[1] <= 64 else 24
        return min(self.head_dim // 16, steps)

    @property
    def output_shape(self) -> tuple[int, int]:
        return WARP_ROWS, self.values // self.warps_per_row

    @property
    def num_sums(self) -> int:
        return 1

    @property
    def num_stats(self) -> int:
        return self.warps_per_row

    @property
    def num_p(self) -> int:
        """Tiles of P in shared memory."""
        return 1

    @property
    def q_tail_words(self) -> int:
        """32-bit words of the k-steps of Q that are not in registers: four of each thread of a warp, for 16 rows."""
        return (self.head_dim // 16 - self.q_steps) * self.tile_m // WARP_ROWS * 32 * 4

    @property
    def smem_bytes(self) -> int:
        # P, the rest of Q, the row maxima of warps that share rows, the words of existing keys, and the statistics.
        rows = self.tile_m * self.warps_per_row * 4 + self.stages * self.tile_n * 4
        statistics = 2 * 4 * self.num_stats * EXCHANGE_ROWS
        p_bytes = align_smem(self.num_p * self.p_smem.bytes)
        return align_smem(self.kv_bytes) + p_bytes + 4 * self.q_tail_words + rows + statistics + 64

    @property
    def holds_queries(self) -> bool:
        """Whether the last stage has room for the queries as in global memory, and as the operand of the MMA."""
        return 2 * self.q_smem.bytes <= self.stage_bytes


@dataclass(frozen=True)
class DsMlaTile(LatentTile):
    """The tile of a cache with rows of `fp8_ds_mla`.

    A stage has three tiles: the e4m3 numbers, the rotary columns, and the scales, four of each key. P is written four
    times, multiplied by each of the scales of its keys.
    """

    @property
    def q_steps(self) -> int:
        # Fewer would not fit the shared memory of sm_89.
        return 22

    @property
    def kv_smem(self) -> SmemTile:
        """The e4m3 numbers of a block."""
        return SmemTile(self.tile_n, LATENT_DIM, self.element_bytes)

    @property
    def rotary_smem(self) -> SmemTile:
        """The rotary columns of a block."""
        return SmemTile(self.tile_n, ROTARY_DIM)

    @property
    def rotary_offset(self) -> int:
        """The first byte of the rotary columns in a stage."""
        return self.kv_smem.bytes

    @property
    def scales_offset(self) -> int:
        """The first byte of the scales in a stage."""
        return self.rotary_offset + self.rotary_smem.bytes

    @property
    def stage_bytes(self) -> int:
        return self.tile_n * ROW_BYTES

    @property
    def row_segments(self) -> tuple[RowSegment, ...]:
        return (
            RowSegment(source=0, num_bytes=LATENT_DIM, target=0),
            RowSegment(source=ROTARY_BYTE, num_bytes=2 * ROTARY_DIM, target=self.rotary_offset),
            RowSegment(source=SCALES_BYTE, num_bytes=4 * NUM_SCALES, target=self.scales_offset),
        )

    @property
    def num_p(self) -> int:
        return NUM_SCALES


def decode_tile(static: DecodeStatic, rows: int, num_heads: int, arch: ArchSpec) -> DecodeTile:
    """The tile for `rows` query rows of a K/V head: tokens times query heads of a group.

    `num_heads`: K/V heads of all sequences.
    """
    widest = max(static.head_dim, static.width_v)
    if widest > MAX_WHOLE_HEAD_DIM:
        return wide_decode_tile(static, widest, arch)
    head_dim = ceil_div(widest, 64) * 64
    # With 32 rows, more queries share the loads of K and V. Above head dim 128 their accumulators would spill.
    tile_m = 32 if rows > 16 and head_dim <= 128 else 16
    # 32 keys for each warp if three stages fit. Else 16 keys: two CTAs on an SM with at least three stages, or one CTA
    # with as many stages as fit.
    wide = DecodeTile(head_dim, tile_m, 32, NUM_WARPS, 3, static.cache_bytes)
    tiles = [replace(wide, tile_n=16, stages=stages) for stages in range(2, 7)]
    pairs = [tile for tile in tiles[1:] if tile.ctas_per_sm(arch) >= 2]
    fitting = [tile for tile in tiles if tile.smem_bytes <= arch.smem_per_cta]
    # Half the warps if two stages do not fit.
    tile = (pairs or fitting or [replace(tiles[0], num_warps=NUM_WARPS // 2)])[-1]
    # Few query tiles of 32 rows: one CTA on an SM, because two would double the number of splits to merge.
    if tile_m == 32 and fitting and num_heads * ceil_div(rows, tile_m) <= arch.num_sms:
        tile = fitting[-1]
    # 32 rows with 32 keys per warp would spill.
    if wide.smem_bytes <= arch.smem_per_cta and tile_m == 16:
        tile = wide
    own = replace(tile, own_exchange=True)
    # With `own_exchange`, the output of a split stays in registers while the next split begins. This leaves no
    # registers for an append; nor for head dim 256, which has half the warps on GPUs with 99 KB, on sm_120.
    has_registers = tile_m == 16 and not static.appends and tile.num_warps == NUM_WARPS
    if has_registers and own.smem_bytes <= arch.smem_per_cta and own.ctas_per_sm(arch) == tile.ctas_per_sm(arch):
        tile = own
    if tile.smem_bytes > arch.smem_per_cta:
        raise no_room(widest, arch)
    return tile


def wide_decode_tile(static: DecodeStatic, head_dim: int, arch: ArchSpec) -> DecodeTile:
    """The tile of a head dim above 256: two teams if three stages fit, else one, with as many stages as fit."""
    column_warps = ceil_div(head_dim, WARP_COLUMNS)
    wide = DecodeTile(
        column_warps * WARP_COLUMNS, 16, 16, 2 * column_warps, 6, static.cache_bytes, column_warps=column_warps
    )
    two_teams = [replace(wide, stages=stages) for stages in (6, 5, 4, 3)]
    one_team = [replace(wide, stages=stages, num_warps=column_warps) for stages in (6, 5, 4, 3, 2)]
    for tile in (*two_teams, *one_team):
        if tile.smem_bytes <= arch.smem_per_cta:
            return tile
    raise no_room(head_dim, arch)


def no_room(head_dim: int, arch: ArchSpec) -> UnsupportedError:
    return UnsupportedError(f"attn_decode with head_dim={head_dim} on {arch.name}: not enough shared memory")


def latent_tile(static: DecodeStatic, rows: int, arch: ArchSpec) -> LatentTile:
    """The tile for `rows` query rows of a K/V head of a latent cache."""
    values = 256 if static.width_v <= 256 else 512
    head_dim = max(ceil_div(static.head_dim, 64) * 64, values)
    tile_m = 32 if rows > 16 else 16
    shapes = [(tile_m, 64, 8), (16, 64, 8), (16, 32, 4)]
    if static.is_fp8 and not static.has_query_tables and not static.is_ds_mla:
        # Half of the bytes leave half of the time for a key: more independent products hide their latency. Rows of
        # `fp8_ds_mla` would spill.
        shapes = [(16, 128, 8), *shapes]
    tile_class = DsMlaTile if static.is_ds_mla else LatentTile
    tiles = [
        tile_class(head_dim, m, n, num_warps, stages, static.cache_bytes, values=values)
        for m, n, num_warps in shapes
        for stages in (5, 4, 3, 2)
    ]
    fitting = [tile for tile in tiles if tile.holds_queries and tile.smem_bytes <= arch.smem_per_cta]
    if not fitting:
        raise UnsupportedError(f"attn_decode with value_dim on {arch.name}: not enough shared memory")
    return fitting[0]


def num_head_groups(group: int, tokens: int, tile_m: int) -> int:
    """The number of groups into which the query heads of a K/V head are divided.

    A group has as many heads as fit a tile with their tokens. If they would fill less than half of it, all heads are
    one group, with several tiles of rows.
    """
    heads = max((n for n in range(1, group + 1) if group % n == 0 and n * tokens <= tile_m), default=0)
    return group // heads if 2 * heads * tokens >= tile_m and heads < group else 1
