"""Parameters, shared memory and accumulators of the decode kernel."""

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass.memory import SmemAllocator

from cute_flash.device.memory.copies import assume_aligned
from cute_flash.device.memory.kv_cache import CacheHead, CacheHeads, WarpLoader
from cute_flash.device.memory.rotary import Rotary
from cute_flash.device.memory.smem import allocate_stages, tile_at
from cute_flash.device.memory.tma import TmaTiles
from cute_flash.device.memory.views import as_mn
from cute_flash.device.scheduling.kv_splits import KvSplits, Lengths, Split, TileCtas, quotient
from cute_flash.device.scores.score import Score
from cute_flash.device.softmax.softmax import Softmax
from cute_flash.planning.decode import DecodeStatic
from cute_flash.planning.decode_tiles import ATOM_BYTES, EXCHANGE_ROWS, DecodeTile
from cute_flash.planning.tiles.common import SMEM_ALIGN, WARP_ROWS

# Fields of `Split` and of `TileCtas` that shared memory holds during the main loop, which does not need them.
SPLIT_FIELDS = ("batch", "head_kv", "row_tile", "query_tile", "unit_end", "is_first")
TILE_CTAS_FIELDS = ("first", "last", "num_final")


@dataclass(frozen=True)
class Config:
    """The compiled-in part of a decode kernel: its static and its tile."""

    static: DecodeStatic
    tile: DecodeTile
    dtype: type  # of the MMA operands

    @property
    def p_dtype(self) -> type:
        """The dtype of P."""
        return cutlass.BFloat16 if self.static.is_ds_mla else self.dtype


class QueryRow(NamedTuple):
    """A row of a query tile: its coordinates in q, and its token within the sequence."""

    batch: Int32
    token: Int32
    head: Int32
    token_in_sequence: Int32


@dataclass(frozen=True)
class Params:
    """The argument of the kernel. q and out are (B, T, H, D); with varlen queries B is 1, and T counts all tokens."""

    config: cutlass.Constexpr  # Config
    mQ: cute.Tensor
    mK: cute.Tensor  # (B, S, Hkv, D) or (num_pages, page_size, Hkv, D)
    mV: cute.Tensor | None  # None: the keys hold the values (a latent cache)
    mO: cute.Tensor
    mLSE: cute.Tensor  # (B, H, T)
    splits: KvSplits
    page_table: cute.Tensor | None
    page_size: cute.FastDivmodDivisorV2 | None
    batch_idx: cute.Tensor | None
    k_new: cute.Tensor | None  # (B, Tn, Hkv, D)
    v_new: cute.Tensor | None
    rotary: Rotary | None
    k_scale: cute.Tensor | None  # (Hkv), of FP8 caches
    v_scale: cute.Tensor | None
    alibi_slopes: cute.Tensor | None  # (B, H)
    sinks: cute.Tensor | None  # (H)
    score: Score | None  # softcap
    scale_log2: Float32
    window_left: Int32 | None
    window_right: Int32 | None
    partial_out: cute.Tensor  # (slot, tile_m, tile_d) fp32
    partial_stats: cute.Tensor  # (slot, tile_m, 2) fp32: m in units of log2, and l
    arrivals: cute.Tensor  # (query tiles), 0 before and after the launch
    tiled_mma: Any  # cute.TiledMma; of a kernel with roles its several products
    head_groups: Int32 | None = None  # of a latent cache (`DecodePlan.head_groups`); None: 1
    k_tma: TmaTiles | None = None  # parts of rows of k_cache; None: the kernel copies keys without TMA

    def query_row(self, split: Split, row: Int32) -> QueryRow:
        """A row of the split's query tile."""
        index = split.row_tile * self.config.tile.tile_m + row
        group = self.splits.group
        token, index_in_group = divmod(index, group)
        head = split.head_kv * group.divisor + index_in_group
        if self.config.static.has_query_tables:
            # Each query is a sequence.
            tokens = Int32(self.mQ.shape[1])
            batch = quotient(split.batch, tokens)
            return QueryRow(batch, split.batch - batch * tokens, head, Int32(0))
        if self.splits.cu_seqlens_q is None:
            return QueryRow(split.batch, token, head, token)
        return QueryRow(Int32(0), self.splits.first_token(split.batch) + token, head, token)

    def num_rows(self, split: Split, sequence: Lengths) -> Int32:
        """The number of rows of the split's query tile that exist."""
        tile_m = self.config.tile.tile_m
        return cutlass.min(sequence.tokens * self.splits.group.divisor - split.row_tile * tile_m, tile_m)

    def cache_head(self, split: Split) -> Int32:
        """The K/V head of the cache that a split reads."""
        return split.head_kv if self.head_groups is None else quotient(split.head_kv, self.head_groups)

    def cache_heads(self, split: Split) -> CacheHeads:
        """The keys and the values of the split's sequence and K/V head."""
        static, batch = self.config.static, split.batch
        if self.batch_idx is not None:
            # Clamp, so that an invalid index stays within the cache.
            batch = cutlass.min(cutlass.max(self.batch_idx[batch], 0), self.mK.shape[0] - 1)
        first_row = self.splits.first_row(split.batch) if static.varlen else None
        head = self.cache_head(split)
        common = head, batch, first_row, self.page_table, self.page_size, static.page_lookup
        keys = CacheHead(self.mK, *common, static.cache_width, static.cache_bytes)
        values = None if self.mV is None else CacheHead(self.mV, *common, static.width_v, static.cache_bytes)
        return CacheHeads(keys, values)

    def block_loader(
        self, split: Split, sequence: Lengths, stages: cute.Tensor, sExists: cute.Tensor | None, thread: Int32
    ) -> WarpLoader:
        """The loader of a warp's rows of blocks of a latent cache. `stages`: the memory of all blocks."""
        tile = self.config.tile
        first = cute.arch.make_warp_uniform(thread // 32) * tile.load_keys
        return WarpLoader(
            caches=self.cache_heads(split),
            tile=tile,
            lane=thread % 32,
            first_key=sequence.first_key,
            last_key=cutlass.min(sequence.key_len, split.end) - 1,
            key_offset=first,
            stages=Int32(stages.iterator.toint()) + first * ATOM_BYTES,
            sExists=sExists,
        )


@dataclass(frozen=True)
class Team:
    """Threads of a CTA that do a part of the kernel together."""

    num_threads: cutlass.Constexpr
    named_barrier: cutlass.Constexpr = 0  # 0: all threads of the CTA

    @cute.jit
    def sync(self):
        """The barrier of these threads."""
        if cutlass.const_expr(self.named_barrier == 0):
            cute.arch.sync_threads()
        else:
            cute.arch.barrier(barrier_id=self.named_barrier, number_of_threads=self.num_threads)


@dataclass(frozen=True)
class LatentStorage:
    """Shared memory of a latent cache's kernel. The warps that share 16 rows are numbered within them."""

    sP: cute.Tensor  # (tile_m, tile_n, tile of P)
    row_max: cute.Tensor  # (warp, row) fp32: the maxima of a block
    q_tail: cute.Tensor  # (word of a fragment, lane, k-step, 16 rows): the k-steps of Q that are not in registers
    sExists: cute.Tensor | None  # (stage, key): whether a key has a page, if a page can be -1

    @staticmethod
    def allocate(smem: SmemAllocator, config: Config) -> "LatentStorage":
        tile, row_tiles = config.tile, config.tile.tile_m // WARP_ROWS
        tail = cute.make_layout((4, 32, max(tile.head_dim // 16 - tile.q_steps, 1), row_tiles))
        exists = None
        if config.static.has_query_tables:
            layout = cute.make_layout((tile.stages, tile.tile_n), stride=(tile.tile_n, 1))
            exists = smem.allocate_tensor(Int32, layout, 16)
        return LatentStorage(
            sP=allocate_stages(smem, config.p_dtype, tile.p_smem, tile.num_p),
            row_max=smem.allocate_tensor(Float32, cute.make_layout((tile.warps_per_row, tile.tile_m)), 16),
            q_tail=smem.allocate_tensor(Int32, tail, 16),
            sExists=exists,
        )


@dataclass(frozen=True)
class SharedStorage:
    sQ: cute.Tensor  # (tile_m, tile_d, 1)
    # (tile_m, tile_d): the queries of the next split, as in global memory. With head dims above 256 it has the
    # `ColumnScores` during the main loop, so the next split is not loaded before `finish` (`own_exchange`).
    raw_q: cute.Tensor
    # (tile_n, tile_d, stage): K and V alternate; all stages of warp 0, then of warp 1, ... Of a latent cache, the
    # stages of all warps; of rows of `fp8_ds_mla`, their bytes.
    sKV: cute.Tensor
    exchange: cute.Tensor  # (tile_v, 8 rows, sum) fp32
    stats: cute.Tensor  # (2, 8 rows, warp) fp32: m and l
    merge_share: cute.Tensor  # (1): the index of this CTA's share of a merge (`merge_splits.arrive`); -1: none
    # SPLIT_FIELDS and TILE_CTAS_FIELDS of the split, which would occupy registers during the main loop.
    split_fields: cute.Tensor
    latent: LatentStorage | None

    @staticmethod
    def allocate(config: Config, q_dtype: type) -> "SharedStorage":
        smem, tile, is_latent = SmemAllocator(), config.tile, config.static.is_latent
        raw_layout = cute.make_layout((tile.tile_m, tile.head_dim), stride=(tile.head_dim, 1))
        cache_dtype = config.dtype if tile.element_bytes == 2 else cutlass.Uint8
        latent = None
        if is_latent:
            if config.static.is_ds_mla:
                sKV = smem.allocate_tensor(cache_dtype, cute.make_layout(tile.kv_bytes), SMEM_ALIGN)
            else:
                sKV = allocate_stages(smem, cache_dtype, tile.kv_smem, tile.stages)
            # The first loads leave the last stage free, so the queries pass through it to registers.
            last = Int32(sKV.iterator.toint()) + (tile.stages - 1) * tile.stage_bytes
            sQ, raw_q = tile_at(last, config.dtype, tile.q_smem), None
            pointer = cute.make_ptr(q_dtype, last + tile.q_smem.bytes, cutlass.AddressSpace.smem, assumed_align=16)
            raw_q = cute.make_tensor(pointer, raw_layout)
            latent = LatentStorage.allocate(smem, config)
        else:
            sQ = allocate_stages(smem, config.dtype, tile.q_smem, 1)
            raw_q = smem.allocate_tensor(q_dtype, raw_layout, SMEM_ALIGN)
            sKV = allocate_stages(smem, cache_dtype, tile.kv_smem, 2 * tile.num_warps * tile.stages)
        floats = cute.make_layout((tile.width_v, EXCHANGE_ROWS, tile.num_sums))
        if tile.own_exchange:
            exchange = smem.allocate_tensor(Float32, floats, 16)
        else:
            address = Int32(sKV.iterator.toint())
            pointer = cute.make_ptr(Float32, address, cutlass.AddressSpace.smem, assumed_align=SMEM_ALIGN)
            exchange = cute.make_tensor(pointer, floats)
        stats = smem.allocate_tensor(Float32, cute.make_layout((2, EXCHANGE_ROWS, tile.num_stats)), 8)
        merge_share = smem.allocate_tensor(Int32, cute.make_layout(1), 4)
        num_fields = len(SPLIT_FIELDS) + len(TILE_CTAS_FIELDS)
        split_fields = smem.allocate_tensor(Int32, cute.make_layout(num_fields), 4)
        return SharedStorage(sQ, raw_q, sKV, exchange, stats, merge_share, split_fields, latent)

    def store_split(self, split: Split, ctas: TileCtas):
        """Write `split_fields`. Called by one thread, before a barrier."""
        values = [getattr(split, name) for name in SPLIT_FIELDS]
        values += [getattr(ctas, name) for name in TILE_CTAS_FIELDS]
        for i, value in enumerate(values):
            self.split_fields[i] = Int32(value)

    def unit_end(self) -> Int32:
        return self.split_fields[SPLIT_FIELDS.index("unit_end")]

    def load_split(self) -> tuple[Split, TileCtas]:
        """The split of the last `store_split`, with only its SPLIT_FIELDS set, and the CTAs of its query tile."""
        fields = {name: self.split_fields[i] for i, name in enumerate(SPLIT_FIELDS)}
        ctas = TileCtas(*(self.split_fields[len(SPLIT_FIELDS) + i] for i in range(len(TILE_CTAS_FIELDS))))
        return replace(Split.none(), **(fields | {"is_first": fields["is_first"] == 1})), ctas


@dataclass(frozen=True)
class Output:
    """The output and the softmax statistics of one warp, in registers."""

    acc_O: cute.Tensor
    softmax: Softmax

    @staticmethod
    def allocate(p: Params) -> "Output":
        thread, _, _ = cute.arch.thread_idx()
        tile = p.config.tile
        shape = p.tiled_mma.get_slice(thread % 32).partition_shape_C(tile.output_shape)
        acc_O = cute.make_rmem_tensor(shape, Float32)
        output = Output(acc_O, Softmax.start(as_mn(acc_O), p.scale_log2))
        output.reset()
        return output

    def reset(self):
        self.acc_O.fill(0.0)
        self.softmax.restart()


def vector_at(row: cute.Tensor, column: Int32, num: int) -> cute.Tensor:
    """`num` consecutive columns of a row, which one instruction loads or stores."""
    pointer = assume_aligned(row.iterator + column, num * row.element_type.width // 8)
    return cute.make_tensor(pointer, cute.make_layout(num))
