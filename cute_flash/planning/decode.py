"""Plans a call of `attn_decode`: the compiled-in part `DecodeStatic`, the tile, the grid and the workspace.

One launch computes everything. The grid has a fixed number of CTAs, and the kernel divides the keys of all sequences
among them (`device/scheduling/kv_splits.py`), because only the device knows the lengths.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from cute_flash.errors import UnsupportedError
from cute_flash.planning.plan import CompileKey
from cute_flash.planning.tiles.common import align_smem
from cute_flash.smem.tile import SmemTile
from cute_flash.spec.arch import ArchSpec
from cute_flash.spec.band import ceil_div
from cute_flash.spec.dtypes import DTYPE_BYTES
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
MAX_SPLITS = 1024
COUNTERS_STEP = 4096
# Keys of a unit without `num_splits`: a CTA computes whole units (`device/scheduling/kv_splits.py`).
UNIT_KEYS = 32
# Programmatic dependent launch saves 1 to 6 % of a call with few query tiles, and costs 1 to 2 % with many: it is used
# with fewer than this many query tiles per SM (profiling/notes/decode.md).
MAX_OVERLAP_TILES_PER_SM = 0.4
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
    features: tuple[str, ...] = ()  # of softcap, alibi, sinks
    page_lookup: str = ""  # "": no pages; "chunk": one page-table lookup for 16 keys; "row": one for every key
    has_seqlens: bool = True  # False: every sequence fills its cache
    ragged: bool = False  # q is (1, T, H, D), with cu_seqlens_q
    varlen_keys: bool = False  # all sequences share one cache (1, T, Hkv, D), with cu_seqlens_k
    has_leftpad: bool = False
    has_batch_idx: bool = False
    appends: bool = False
    rotary: str = ""  # "": none; "halves": NeoX; "pairs": interleaved
    rotary_dim: int = 0
    rotary_dtype: str = "float32"
    has_fp8_cvt: bool = False  # the architecture converts FP8 to fp16 in one instruction; only with FP8 caches
    overlaps_previous: bool = False  # the kernel starts early (programmatic dependent launch), on sm_90

    # Fields of `Static` that `CompileKey` and `kernels.common.fakes` read for every kernel.
    is_fp32 = varlen = out_fp32 = deterministic = False
    mods = None

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
        flags = ("ragged", "varlen_keys", "has_leftpad", "has_batch_idx", "appends")
        pages = (f"page_{self.page_lookup}",) if self.page_lookup else ()
        rotary = (f"rotary_{self.rotary}",) if self.rotary else ()
        fp8 = ("fp8",) if self.is_fp8 else ()
        return (*fp8, *pages, *(name for name in flags if getattr(self, name)), *rotary, *self.features)

    def takes(self, operand: str) -> bool:
        """Whether the kernel takes an operand."""
        conditions = {
            "window_left": self.has_left,
            "window_right": self.has_right,
            "cache_seqlens": self.has_seqlens,
            "page_table": bool(self.page_lookup),
            "cu_seqlens_q": self.ragged,
            "cu_seqlens_k": self.varlen_keys,
            "leftpad": self.has_leftpad,
            "cache_batch_idx": self.has_batch_idx,
            "k_new": self.appends,
            "v_new": self.appends,
            "rotary_cos": bool(self.rotary),
            "rotary_sin": bool(self.rotary),
            "softcap": "softcap" in self.features,
            "alibi_slopes": "alibi" in self.features,
            "sinks": "sinks" in self.features,
            "k_scale": self.is_fp8,
            "v_scale": self.is_fp8,
        }
        return conditions.get(operand, True)


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
    key: CompileKey
    tile: DecodeTile
    num_ctas: int
    # The number of K/V heads of a sequence that CTAs compute at the same time. It is all heads if this leaves few CTAs
    # idle: the heads of a key are adjacent in memory, so HBM is faster. Otherwise it is 1, which leaves no CTA idle.
    heads_at_once: int
    num_query_tiles: int  # an upper bound of the number of (sequence, K/V head, row tile)
    num_splits: int | None

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
    # registers for an append.
    has_registers = tile_m == 16 and not static.appends
    if has_registers and own.smem_bytes <= arch.smem_per_cta and own.ctas_per_sm(arch) == tile.ctas_per_sm(arch):
        tile = own
    if tile.smem_bytes > arch.smem_per_cta:
        raise UnsupportedError(f"attn_decode with head_dim={widest} on {arch.name}: not enough shared memory")
    return tile


def plan_decode(
    static: DecodeStatic,
    arch: ArchSpec,
    batch: int,
    tokens: int,
    heads: int,
    heads_kv: int,
    capacity: int,
    num_splits: int | None,
) -> DecodePlan:
    """Plan a call; raise `UnsupportedError` if it is too large.

    `tokens`: the queries of a sequence, or of all sequences if they are ragged. `capacity`: keys that fit into the
    cache of a sequence.
    """
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
        if num_splits > MAX_SPLITS:
            raise UnsupportedError(f"num_splits={num_splits} on cuda: use at most {MAX_SPLITS}, or None")
        # A unit is then one of the `num_splits` parts of a query tile's keys, and each CTA computes one unit.
        num_ctas = num_query_tiles * num_splits
    if num_query_tiles >= MAX_OVERLAP_TILES_PER_SM * arch.num_sms:
        static = replace(static, overlaps_previous=False)
    key = CompileKey.of("decode", static, tile, arch.name)
    plan = DecodePlan(
        key=key,
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
        fewer = ", or use a smaller num_splits" if num_splits else ""
        raise UnsupportedError(
            f"attn_decode with {num_query_tiles} query tiles and caches of {capacity} keys on cuda: too many for the "
            f"32-bit counts of the kernel; make several calls, each with fewer sequences{fewer}"
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
