"""Plans calls that split their keys, `attn_decode` and `attn` with few queries: `DecodeStatic`, tile, grid, workspace.

One launch computes everything. The grid has a fixed number of CTAs, and the kernel divides the keys of all sequences
among them (`device/scheduling/kv_splits.py`), because only the device knows the lengths.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from cute_flash.errors import UnsupportedError
from cute_flash.planning.decode_tiles import DecodeTile, decode_tile, latent_tile, num_head_groups
from cute_flash.planning.latent_sm90 import LATENT_SM90, latent_tile_sm90, loads_by_tma, uses_wgmma
from cute_flash.planning.launch import CompileKey
from cute_flash.spec.arch import ArchSpec
from cute_flash.spec.band import Band, ceil_div
from cute_flash.spec.decode import DecodeProblem
from cute_flash.spec.ds_mla import DS_MLA, ROW_BYTES
from cute_flash.spec.dtypes import DTYPE_BYTES
from cute_flash.spec.family import AMPERE
from cute_flash.spec.features import Buffer
from cute_flash.spec.problem import MAX_HEAD_DIM, Problem

# Rows of a page that are loaded after one lookup in the page table.
CHUNK = 16
SCORE_FEATURES = {"softcap", "alibi", "sinks"}
# `attn` with at most this many query rows of a K/V head, and at least this many keys, may use the decode kernel.
MAX_SPLIT_ROWS = 64
MIN_SPLIT_KEYS = 512
# The most queries per sequence, on average, with which `attn_varlen` may use the decode kernel.
MAX_VARLEN_TOKENS = 4
# The most parts of the keys of a query tile; a larger `num_splits` is reduced.
MAX_SPLITS = 1024
# Even, so that the CTAs of a cluster, with neighbouring query tiles, both have a counter or neither has one.
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
    cache_dtype: str = ""  # of the caches, or DS_MLA; "": that of q
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
    is_latent: bool = False  # one cache, whose first head_dim_v columns are the values (`spec/latent.py`)
    has_query_tables: bool = False  # a page table for each query, in which pages -1 have no rows
    multicasts: bool = False  # the CTAs of two head groups form a cluster, in which TMA loads each key once
    overlaps_previous: bool = False  # the kernel starts early (programmatic dependent launch), on sm_90

    @property
    def width_v(self) -> int:
        return self.head_dim_v or self.head_dim

    @property
    def widths(self) -> str:
        return f"{self.head_dim}" if self.head_dim_v is None else f"{self.head_dim}v{self.head_dim_v}"

    @property
    def is_fp8(self) -> bool:
        """Whether the caches have e4m3 numbers."""
        return self.cache_dtype in ("float8_e4m3fn", DS_MLA)

    @property
    def is_ds_mla(self) -> bool:
        """Whether the cache has rows of `fp8_ds_mla` (`spec/ds_mla.py`)."""
        return self.cache_dtype == DS_MLA

    @property
    def has_cache_scales(self) -> bool:
        """Whether the launch has scales of the caches."""
        return self.is_fp8 and not self.is_ds_mla

    @property
    def cache_width(self) -> int:
        """Elements of a row of the keys' cache."""
        return ROW_BYTES if self.is_ds_mla else self.head_dim

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
        flags = ("ragged", "varlen", "has_leftpad", "has_batch_idx", "appends", "has_query_tables", "multicasts")
        pages = (f"page_{self.page_lookup}",) if self.page_lookup else ()
        rotary = (f"rotary_{self.rotary}",) if self.rotary else ()
        fp8 = ("ds_mla" if self.is_ds_mla else "fp8",) if self.is_fp8 else ()
        return (*fp8, *pages, *(name for name in flags if getattr(self, name)), *rotary, *self.features)

    @property
    def seqused_k(self) -> bool:
        return self.has_seqlens

    def element_dtype(self, element: str) -> str:
        """The dtype of an operand's element type. FP8 caches are passed as bytes."""
        return "uint8" if element == "cache" and self.is_fp8 else self.dtype


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
    # Groups into which the query heads of a K/V head are divided. Each group counts as a K/V head in the division of
    # the keys, so that CTAs of all groups read the same keys at the same time.
    head_groups: int = 1
    problem: Any = None  # the DecodeProblem of `attn_decode`

    @property
    def launches(self) -> tuple[CompileKey, ...]:
        return (self.key,)

    @property
    def sizes(self) -> dict[str, int]:
        sizes = {"num_ctas": self.num_ctas, "heads_at_once": self.heads_at_once, "num_splits": self.num_splits or 0}
        return sizes | ({"head_groups": self.head_groups} if self.key.static.is_latent else {})

    @property
    def workspace(self) -> tuple[Buffer, ...]:
        """Outputs and statistics of splits, and arrival counters.

        Launches on one stream share them. With a fixed number of splits they grow with the batch, so each call has its
        own.
        """
        rows, is_shared = (self.num_slots, self.tile.tile_m), not self.num_splits
        return (
            Buffer("partial_out", (*rows, self.tile.width_v), is_shared=is_shared),
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
    page, band = problem.page_size, Band() if problem.has_query_tables else problem.band
    static = DecodeStatic(
        dtype=problem.dtype,
        head_dim=problem.head_dim,
        cache_dtype=problem.cache_dtype if problem.is_fp8 else "",
        head_dim_v=None if problem.head_dim_v == problem.head_dim else problem.head_dim_v,
        has_left=band.has_left,
        has_right=band.has_right,
        has_chunk=band.chunk is not None,
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
        is_latent=problem.is_latent,
        has_query_tables=problem.has_query_tables,
        overlaps_previous=capability >= DEPENDENT_LAUNCH,
    )
    batch, tokens = problem.batch, problem.total_tokens if problem.tokens is None else problem.tokens
    if problem.has_query_tables:
        # To the kernel, each query is a sequence with one token.
        batch, tokens = batch * tokens, 1
    sizes = SplitSizes(batch, tokens, problem.heads, problem.heads_kv, problem.capacity)
    kernel = "decode_latent" if problem.is_latent else "decode"
    return replace(plan_splits(kernel, static, sizes, arch, problem.num_splits, family), problem=problem)


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
    kernel: str,
    static: DecodeStatic,
    sizes: SplitSizes,
    arch: ArchSpec,
    num_splits: int | None = None,
    family: str = "",
) -> DecodePlan:
    """Choose the tile and the grid of a kernel that splits keys; raise `UnsupportedError` if the call is too large."""
    batch, tokens, heads, heads_kv, capacity = sizes
    group, head_groups = heads // heads_kv, 1
    tokens_of_sequence = tokens if not static.ragged else ceil_div(tokens, max(batch, 1))
    rows, target = group * tokens_of_sequence, arch.target
    if static.is_latent:
        tile: DecodeTile
        if uses_wgmma(static, rows, arch, family):
            kernel, tile, target = LATENT_SM90, latent_tile_sm90(static, arch), "sm_90a"
        else:
            tile = latent_tile(static, rows, arch)
        head_groups = num_head_groups(group, tokens_of_sequence, tile.tile_m)
        heads_kv, group = heads_kv * head_groups, group // head_groups
    else:
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
        elements_of_split = num_query_tiles * tile.tile_m * tile.width_v
        counted = (MAX_COUNT - 1) // max(elements_of_split, ceil_div(capacity, UNIT_KEYS), 1)
        num_splits = max(min(num_splits, MAX_SPLITS, counted), 1)
        # A unit is then one of the `num_splits` parts of a query tile's keys, and each CTA computes one unit.
        num_ctas = num_query_tiles * num_splits
    if num_query_tiles >= MAX_OVERLAP_TILES_PER_SM * arch.num_sms:
        static = replace(static, overlaps_previous=False)
    if kernel == LATENT_SM90 and heads_at_once % 2 == 0 and head_groups % 2 == 0:
        static = replace(static, multicasts=loads_by_tma(static))
    plan = DecodePlan(
        key=CompileKey.of(kernel, static, tile, target),
        tile=tile,
        num_ctas=num_ctas,
        heads_at_once=heads_at_once,
        num_query_tiles=num_query_tiles,
        num_splits=num_splits,
        head_groups=head_groups,
    )
    units = num_query_tiles * (num_splits or ceil_div(capacity, UNIT_KEYS))
    # The kernel counts keys, units and elements of the workspace in 32 bits.
    elements = plan.num_slots * tile.tile_m * tile.width_v
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
    if problem.static.widest > MAX_HEAD_DIM:
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
