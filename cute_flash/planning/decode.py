"""Plans calls that split their keys, `attn_decode` and `attn` with few queries: `DecodeStatic`, tile, grid, workspace.

One launch computes everything. The grid has a fixed number of CTAs, and the kernel divides the keys of all sequences
among them (`device/scheduling/kv_splits.py`), because only the device knows the lengths.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from cute_flash.errors import UnsupportedError
from cute_flash.planning.launch import CompileKey
from cute_flash.planning.tiles.common import align_smem
from cute_flash.smem.tile import SmemTile
from cute_flash.spec.arch import ArchSpec
from cute_flash.spec.band import ceil_div
from cute_flash.spec.decode import DecodeProblem
from cute_flash.spec.dtypes import DTYPE_BYTES
from cute_flash.spec.family import AMPERE
from cute_flash.spec.features import Buffer
from cute_flash.spec.problem import Problem

# Rows of a page that are loaded after one lookup in the page table.
CHUNK = 16
# The width of a swizzle atom. Rows of K and V in shared memory are padded to a multiple of it.
ATOM_BYTES = 128
NUM_WARPS = 4
# Rows of the output that the warps of a CTA exchange at a time.
EXCHANGE_ROWS = 8
SCORE_FEATURES = {"softcap", "alibi", "sinks"}
# `attn` with at most this many query rows of a K/V head, and at least this many keys, may use the decode kernel.
MAX_SPLIT_ROWS = 64
MIN_SPLIT_KEYS = 512
# The most queries per sequence, on average, with which `attn_varlen` may use the decode kernel.
MAX_VARLEN_TOKENS = 4
# The most parts of the keys of a query tile; a larger `num_splits` is reduced.
MAX_SPLITS = 1024
COUNTERS_STEP = 4096
# Keys of a unit without `num_splits`: a CTA computes whole units (`device/scheduling/kv_splits.py`).
UNIT_KEYS = 32
# Programmatic dependent launch saves 1 to 6 % of a call with few query tiles, and costs 1 to 2 % with many: it is used
# with fewer than this many query tiles per SM (profiling/notes/decode.md).
MAX_OVERLAP_TILES_PER_SM = 0.4
# The lowest compute capability with an instruction that converts FP8 to fp16, and with programmatic dependent launch.
FP8_CVT, DEPENDENT_LAUNCH = (8, 9), (9, 0)
# The limit of counts that the kernel keeps in 32 bits: half of the range, because the kernel may round them up.
MAX_COUNT = 1 << 30


@dataclass(frozen=True)
class DecodeStatic:
    """The part of a decode call that is compiled into its kernel."""

    dtype: str  # of q and of the output
    head_dim: int
    cache_dtype: str = ""  # of the caches; "": that of q
    head_dim_v: int | None = None  # None: equal to head_dim
    has_left: bool = False
    has_right: bool = False
    has_chunk: bool = False  # has_left and has_right are then set too; a window bound may be one that masks nothing
    features: tuple[str, ...] = ()  # of softcap, alibi, sinks
    page_lookup: str = ""  # "": no pages; "chunk": one page-table lookup for 16 keys; "row": one for every key
    # Of `attn` with few queries: q, k, v and the output are (B, H, S, D), or (T, H, D) with `varlen`.
    heads_first: bool = False
    has_seqlens: bool = True  # False: every sequence fills its cache
    ragged: bool = False  # q is (1, T, H, D), with cu_seqlens_q
    varlen: bool = False  # of `attn_varlen`: all sequences share k and v, with cu_seqlens_k
    has_leftpad: bool = False
    has_batch_idx: bool = False
    appends: bool = False
    rotary: str = ""  # "": none; "halves": NeoX; "pairs": interleaved
    rotary_dim: int = 0
    rotary_dtype: str = "float32"
    has_fp8_cvt: bool = False  # the architecture converts FP8 to fp16 in one instruction; only with FP8 caches
    overlaps_previous: bool = False  # the kernel starts early (programmatic dependent launch), on sm_90

    @property
    def width_v(self) -> int:
        return self.head_dim_v or self.head_dim

    @property
    def widths(self) -> str:
        return f"{self.head_dim}" if self.head_dim_v is None else f"{self.head_dim}v{self.head_dim_v}"

    @property
    def is_fp8(self) -> bool:
        return self.cache_dtype == "float8_e4m3fn"

    @property
    def mma_dtype(self) -> str:
        """The dtype of MMAs. FP8 is converted to fp16, for which there is an instruction; q is then converted too."""
        return "float16" if self.is_fp8 else self.dtype

    @property
    def cache_bytes(self) -> int:
        return 1 if self.is_fp8 else DTYPE_BYTES[self.dtype]

    @property
    def tags(self) -> tuple[str, ...]:
        """The features that differ from plain decode, for kernel names."""
        flags = ("ragged", "varlen", "has_leftpad", "has_batch_idx", "appends")
        pages = (f"page_{self.page_lookup}",) if self.page_lookup else ()
        rotary = (f"rotary_{self.rotary}",) if self.rotary else ()
        fp8 = ("fp8",) if self.is_fp8 else ()
        return (*fp8, *pages, *(name for name in flags if getattr(self, name)), *rotary, *self.features)

    @property
    def seqused_k(self) -> bool:
        return self.has_seqlens

    def element_dtype(self, element: str) -> str:
        """The dtype of an operand's element type. FP8 caches are passed as bytes."""
        return "uint8" if element == "cache" and self.is_fp8 else self.dtype


@dataclass(frozen=True)
class DecodeTile:
    """`tile_m` query rows against blocks of `num_warps` x `tile_n` keys; each warp has its own keys and pipeline."""

    head_dim: int  # width of the tile; smaller head dims are padded to it
    tile_m: int  # 16 or 32
    tile_n: int  # keys of one warp in a block: 16 or 32
    num_warps: int
    stages: int
    element_bytes: int = 2  # of the caches
    least_keys: int = 128  # the fewest keys of a CTA, without `num_splits`
    # Whether warps exchange outputs through separate shared memory, so that the loads of the next split start before
    # the exchange. Else the exchange reuses the stages.
    own_exchange: bool = False

    @property
    def num_threads(self) -> int:
        return 32 * self.num_warps

    @property
    def block_keys(self) -> int:
        return self.num_warps * self.tile_n

    @property
    def q_smem(self) -> SmemTile:
        return SmemTile(self.tile_m, self.head_dim)

    @property
    def kv_smem(self) -> SmemTile:
        """One warp's share of a block of K or V. Rows are a multiple of 128 bytes long."""
        row_bytes = ceil_div(self.head_dim * self.element_bytes, ATOM_BYTES) * ATOM_BYTES
        return SmemTile(self.tile_n, row_bytes // self.element_bytes, self.element_bytes)

    @property
    def kv_bytes(self) -> int:
        """All stages of K and V of all warps."""
        return 2 * self.num_warps * self.stages * self.kv_smem.bytes

    @property
    def exchange_bytes(self) -> int:
        """The outputs of all warps in fp32, eight rows at a time."""
        return self.num_warps * EXCHANGE_ROWS * self.head_dim * 4

    @property
    def merged_rows(self) -> int:
        """Rows of the output that a CTA merges at once: a thread merges four columns."""
        return max(1, 4 * self.num_threads // self.head_dim)

    @property
    def smem_bytes(self) -> int:
        statistics = 2 * 4 * self.num_warps * EXCHANGE_ROWS
        exchange = self.exchange_bytes if self.own_exchange else 0
        # The queries twice: as in global memory, and as the operand of the MMA.
        return 2 * align_smem(self.q_smem.bytes) + align_smem(self.kv_bytes) + exchange + statistics + 64

    def ctas_per_sm(self, arch: ArchSpec) -> int:
        return min(arch.smem_per_sm // (self.smem_bytes + 1024), arch.max_threads_per_sm // self.num_threads)


@dataclass(frozen=True)
class DecodePlan:
    """The launch of a call that splits its keys: `attn_decode`, or `attn` with few queries."""

    key: CompileKey
    tile: DecodeTile
    num_ctas: int
    # The number of K/V heads of a sequence that CTAs compute at the same time. It is all heads if this leaves few CTAs
    # idle: the heads of a key are adjacent in memory, so HBM is faster. Otherwise it is 1, which leaves no CTA idle.
    heads_at_once: int
    num_query_tiles: int  # an upper bound of the number of (sequence, K/V head, row tile)
    num_splits: int | None
    problem: Any = None  # the DecodeProblem of `attn_decode`

    @property
    def launches(self) -> tuple[CompileKey, ...]:
        return (self.key,)

    @property
    def sizes(self) -> dict[str, int]:
        return {"num_ctas": self.num_ctas, "heads_at_once": self.heads_at_once, "num_splits": self.num_splits or 0}

    @property
    def workspace(self) -> tuple[Buffer, ...]:
        """Outputs and statistics of splits, and arrival counters.

        Launches on one stream share them. With a fixed number of splits they grow with the batch, so each call has its
        own.
        """
        rows, is_shared = (self.num_slots, self.tile.tile_m), not self.num_splits
        return (
            Buffer("partial_out", (*rows, self.tile.head_dim), is_shared=is_shared),
            Buffer("partial_stats", (*rows, 2), is_shared=is_shared),
            Buffer("arrivals", (self.num_counters,), "int32", "zeros", is_shared=is_shared),
        )

    @property
    def num_counters(self) -> int:
        """Arrival counters: one for each query tile, rounded up so that batches of many sizes share a workspace."""
        return ceil_div(self.num_query_tiles, COUNTERS_STEP) * COUNTERS_STEP

    @property
    def num_slots(self) -> int:
        """Splits in the workspace: two per CTA; one per CTA with `num_splits`; one in all with `num_splits=1`."""
        if self.num_splits == 1:
            return 1
        return self.num_ctas if self.num_splits else 2 * self.num_ctas


def decode_tile(static: DecodeStatic, rows: int, num_heads: int, arch: ArchSpec) -> DecodeTile:
    """The tile for `rows` query rows of a K/V head: tokens times query heads of a group.

    `num_heads`: K/V heads of all sequences.
    """
    widest = max(static.head_dim, static.width_v)
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
        raise UnsupportedError(f"attn_decode with head_dim={widest} on {arch.name}: not enough shared memory")
    return tile


class SplitSizes(NamedTuple):
    """The sizes of a call that splits its keys."""

    batch: int
    tokens: int  # queries of a sequence, or of all sequences if they are ragged
    heads: int
    heads_kv: int
    capacity: int  # keys that fit into the cache of a sequence


def plan_decode(problem: DecodeProblem, arch: ArchSpec, family: str = "") -> DecodePlan:
    """Plan a call of `attn_decode`; raise `UnsupportedError` if it is too large."""
    # The family sm80 uses only instructions of Ampere.
    capability = min(arch.capability, AMPERE) if family == "sm80" else arch.capability
    page = problem.page_size
    static = DecodeStatic(
        dtype=problem.dtype,
        head_dim=problem.head_dim,
        cache_dtype=problem.cache_dtype if problem.is_fp8 else "",
        head_dim_v=None if problem.head_dim_v == problem.head_dim else problem.head_dim_v,
        has_left=problem.band.has_left,
        has_right=problem.band.has_right,
        has_chunk=problem.band.chunk is not None,
        features=problem.features,
        page_lookup="" if page is None else "row" if page % CHUNK else "chunk",
        ragged=problem.is_ragged,
        has_leftpad=problem.has_leftpad,
        has_batch_idx=problem.has_batch_idx,
        appends=problem.has_new,
        rotary=problem.rotary,
        rotary_dim=problem.rotary_dim,
        rotary_dtype=problem.rotary_dtype,
        has_fp8_cvt=problem.is_fp8 and capability >= FP8_CVT,
        overlaps_previous=capability >= DEPENDENT_LAUNCH,
    )
    tokens = problem.total_tokens if problem.tokens is None else problem.tokens
    sizes = SplitSizes(problem.batch, tokens, problem.heads, problem.heads_kv, problem.capacity)
    return replace(plan_splits("decode", static, sizes, arch, problem.num_splits), problem=problem)


def plan_split_kv(problem: Problem, arch: ArchSpec) -> DecodePlan:
    """Plan a call of `attn` or `attn_varlen` for which `splits_keys` holds."""
    static = DecodeStatic(
        dtype=problem.dtype,
        head_dim=problem.head_dim,
        head_dim_v=problem.static.head_dim_v,
        has_left=problem.static.has_left,
        has_right=problem.static.has_right,
        has_chunk=problem.static.has_chunk,
        features=problem.features,
        heads_first=True,
        has_seqlens=problem.seqused_k,
        ragged=problem.varlen,
        varlen=problem.varlen,
        overlaps_previous=arch.capability >= DEPENDENT_LAUNCH,
    )
    sizes = SplitSizes(problem.batch, problem.seqlen_q, problem.heads, problem.heads_kv, problem.seqlen_k)
    return plan_splits("fwd_split_kv", static, sizes, arch)


def plan_splits(
    kernel: str, static: DecodeStatic, sizes: SplitSizes, arch: ArchSpec, num_splits: int | None = None
) -> DecodePlan:
    """Choose the tile and the grid of a kernel that splits keys; raise `UnsupportedError` if the call is too large."""
    batch, tokens, heads, heads_kv, capacity = sizes
    group = heads // heads_kv
    rows = group * (tokens if not static.ragged else ceil_div(tokens, max(batch, 1)))
    tile = decode_tile(static, rows, batch * heads_kv, arch)
    if static.ragged:
        row_tiles = ceil_div(tokens * group, tile.tile_m) + batch
    else:
        row_tiles = batch * ceil_div(tokens * group, tile.tile_m)
    num_query_tiles = row_tiles * heads_kv
    num_ctas = arch.num_sms * max(1, min(tile.ctas_per_sm(arch), 4))
    heads_at_once = 1
    if num_splits is None and num_ctas % heads_kv <= num_ctas // 16:
        heads_at_once, num_ctas = heads_kv, num_ctas // heads_kv * heads_kv
    if num_splits is not None:
        # Fewer parts than asked for, if the kernel could not count their keys or elements in 32 bits.
        elements_of_split = num_query_tiles * tile.tile_m * tile.head_dim
        counted = (MAX_COUNT - 1) // max(elements_of_split, ceil_div(capacity, UNIT_KEYS), 1)
        num_splits = max(min(num_splits, MAX_SPLITS, counted), 1)
        # A unit is then one of the `num_splits` parts of a query tile's keys, and each CTA computes one unit.
        num_ctas = num_query_tiles * num_splits
    if num_query_tiles >= MAX_OVERLAP_TILES_PER_SM * arch.num_sms:
        static = replace(static, overlaps_previous=False)
    plan = DecodePlan(
        key=CompileKey.of(kernel, static, tile, arch.target),
        tile=tile,
        num_ctas=num_ctas,
        heads_at_once=heads_at_once,
        num_query_tiles=num_query_tiles,
        num_splits=num_splits,
    )
    units = num_query_tiles * (num_splits or ceil_div(capacity, UNIT_KEYS))
    # The kernel counts keys, units and elements of the workspace in 32 bits.
    elements = plan.num_slots * tile.tile_m * tile.head_dim
    products = ceil_div(capacity, UNIT_KEYS) * (num_splits or 1)
    if max(capacity, units, elements, products) >= MAX_COUNT:
        raise UnsupportedError(
            f"attn_decode with {num_query_tiles} query tiles and caches of {capacity} keys on cuda: too many for the "
            "32-bit counts of the kernel; make several calls, each with fewer sequences"
        )
    return plan


def splits_keys(problem: Problem, arch: ArchSpec) -> bool:
    """Whether `attn` and `attn_varlen` use the decode kernel, because the forward kernel would leave SMs idle.

    The host does not know the lengths of a varlen batch, so the average lengths decide. The total number of queries is
    limited, which bounds the longest sequence.
    """
    if problem.out_fp32 or problem.batch_invariant or problem.static.is_fp32 or problem.mods:
        return False
    if set(problem.features) - SCORE_FEATURES:
        return False
    rows, keys = problem.group * problem.seqlen_q, problem.seqlen_k
    if problem.varlen:
        if problem.seqlen_q > MAX_VARLEN_TOKENS * problem.batch:
            return False
        rows, keys = ceil_div(rows, problem.batch), keys // problem.batch
    num_tiles = problem.batch * problem.heads_kv * ceil_div(rows, MAX_SPLIT_ROWS)
    return rows <= MAX_SPLIT_ROWS and keys >= MIN_SPLIT_KEYS and num_tiles < arch.num_sms
