"""Attention of few queries over a K/V cache, with mma.sync and cp.async, for Ampere, Ada and Hopper.

The rows of a query tile are the tokens of all query heads that share a K/V head (pack_gqa). Decoding reads every key
once, so the kernel is memory-bound, and mma.sync suffices on Hopper too: a wgmma has 64 rows, and one token with 4
query heads per K/V head would use only 4 of them.

The grid has a fixed number of CTAs, which divide the keys of all sequences equally (`device/scheduling/kv_splits.py`).
A CTA computes its splits one after the other:

    begin      write the new keys (rotated) and values of the split to the cache, start to load Q and the first blocks
    stage      rotate Q, and write it as the operand of the MMA
    loop       each warp, over its own `tile_n` keys of every block, with its own pipeline and softmax statistics:
                   S = Q K^T;  m' = max(m, rowmax S);  P = exp(scale (S - m'))
                   l = l exp(scale (m - m')) + rowsum P;  O = O exp(scale (m - m')) + P V
    combine    combine the outputs of the warps through shared memory
    finish     write out and LSE if the split has all keys of its query tile; else write m, l and O to the workspace,
               and the last CTAs to arrive merge the splits of the query tile

The loop needs no CTA barrier, because a warp reads only keys that it has copied itself.
"""

from dataclasses import dataclass, replace
from types import SimpleNamespace

import cutlass
import cutlass.cute as cute
from cuda.bindings.driver import CUstream
from cutlass import Float32, Int32, Int64
from cutlass.memory import SmemAllocator

from cute_flash.device.memory import fp8
from cute_flash.device.memory.copies import assume_aligned
from cute_flash.device.memory.kv_cache import CacheHead, WarpLoader, copy_if_less
from cute_flash.device.memory.ldmatrix import MmaOperand
from cute_flash.device.memory.rotary import VECTOR, Rotary, load_floats
from cute_flash.device.memory.smem import allocate_stages
from cute_flash.device.memory.views import as_mn, as_operand_a
from cute_flash.device.mma.warp_grid import WarpGrid
from cute_flash.device.ptx import instruction
from cute_flash.device.scheduling.kv_splits import Division, KvSplits, Lengths, Split, TileCtas, quotient
from cute_flash.device.scores.mask import column_offset
from cute_flash.device.scores.score import Score
from cute_flash.device.softmax.softmax import LN_2, LOG2_E, THREADS_PER_ROW, Softmax
from cute_flash.kernels.common.kernel import Kernel
from cute_flash.kernels.sm80.fwd_storage import gemm, gemm_rs
from cute_flash.planning.decode import ATOM_BYTES, EXCHANGE_ROWS, UNIT_KEYS, DecodeTile
from cute_flash.planning.registry import KERNELS
from cute_flash.planning.tiles.common import SMEM_ALIGN

FLOATS = 4  # floats of O that a thread combines at once
# Fields of `Split` and of `TileCtas` that shared memory holds during the main loop, which does not need them.
SPLIT_FIELDS = ("batch", "head_kv", "row_tile", "query_tile", "unit_end", "is_first")
TILE_CTAS_FIELDS = ("first", "last", "num_final")
# The lowest bits of two fields of an arrival counter (`Decode.counter`).
FINAL_BIT, SHARE_BIT = 12, 24


@dataclass(frozen=True)
class Params:
    """The argument of the kernel. q and out are (B, T, H, D); with varlen queries B is 1, and T counts all tokens."""

    mQ: cute.Tensor
    mK: cute.Tensor  # (B, S, Hkv, D) or (num_pages, page_size, Hkv, D)
    mV: cute.Tensor
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
    tiled_mma: cute.TiledMma


@dataclass(frozen=True)
class SharedStorage:
    sQ: cute.Tensor  # (tile_m, tile_d, 1)
    raw_q: cute.Tensor  # (tile_m, tile_d): the queries of the next split, as in global memory
    sKV: cute.Tensor  # (tile_n, tile_d, stage): K and V alternate; all stages of warp 0, then of warp 1, ...
    exchange: cute.Tensor  # (tile_d, 8 rows, warp) fp32
    stats: cute.Tensor  # (2, 8 rows, warp) fp32: m and l
    merge_share: cute.Tensor  # (1): the index of this CTA's share of a merge (`Decode.arrive`); -1: none
    # SPLIT_FIELDS and TILE_CTAS_FIELDS of the split, which would occupy registers during the main loop.
    split_fields: cute.Tensor

    @staticmethod
    def allocate(tile: DecodeTile, dtype, q_dtype) -> "SharedStorage":
        smem = SmemAllocator()
        sQ = allocate_stages(smem, dtype, tile.q_smem, 1)
        raw_layout = cute.make_layout((tile.tile_m, tile.head_dim), stride=(tile.head_dim, 1))
        raw_q = smem.allocate_tensor(q_dtype, raw_layout, SMEM_ALIGN)
        cache_dtype = dtype if tile.element_bytes == 2 else cutlass.Uint8
        sKV = allocate_stages(smem, cache_dtype, tile.kv_smem, 2 * tile.num_warps * tile.stages)
        floats = cute.make_layout((tile.head_dim, EXCHANGE_ROWS, tile.num_warps))
        if tile.own_exchange:
            exchange = smem.allocate_tensor(Float32, floats, 16)
        else:
            address = Int32(sKV.iterator.toint())
            pointer = cute.make_ptr(Float32, address, cutlass.AddressSpace.smem, assumed_align=SMEM_ALIGN)
            exchange = cute.make_tensor(pointer, floats)
        stats = smem.allocate_tensor(Float32, cute.make_layout((2, EXCHANGE_ROWS, tile.num_warps)), 8)
        merge_share = smem.allocate_tensor(Int32, cute.make_layout(1), 4)
        num_fields = len(SPLIT_FIELDS) + len(TILE_CTAS_FIELDS)
        split_fields = smem.allocate_tensor(Int32, cute.make_layout(num_fields), 4)
        return SharedStorage(sQ, raw_q, sKV, exchange, stats, merge_share, split_fields)

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
    """The output and the softmax statistics of one warp."""

    acc_O: cute.Tensor
    softmax: Softmax

    def reset(self):
        self.acc_O.fill(0.0)
        self.softmax.restart()


@dataclass(frozen=True)
class WarpState:
    """The operands, accumulators and row parameters of one warp."""

    warp: Int32
    lane: Int32
    memory: Int32  # address of the stages of all warps
    q: MmaOperand
    k: MmaOperand | None  # None: FP8
    v: MmaOperand | None
    acc_O: cute.Tensor
    softmax: Softmax
    tScS: cute.Tensor
    bounds: cute.Tensor  # (2, rows of this thread): first and last key that a row sees
    visible: tuple  # the first and the last key that all rows see
    slopes: cute.Tensor | None  # (rows of this thread), in units of log2
    positions: cute.Tensor | None  # (rows of this thread), of the queries; None without slopes
    k_scale: Float32 | None  # of an FP8 cache


@dataclass(frozen=True)
class Loads:
    """The loads of one warp."""

    loader: WarpLoader
    key_offset: Int32  # of the warp's first key in a block
    memory: Int32  # address of the warp's stages

    def look_up(self, first_key: Int32) -> cute.Tensor | None:
        """Start to read the pages of the warp's keys in the block that begins at `first_key`."""
        return self.loader.look_up(first_key + self.key_offset)


class Decode(Kernel):
    """The decode kernel, and the kernel of `attn` with few queries, whose keys and values are the caches."""

    def read_operands(self, operands: dict) -> SimpleNamespace:
        """The operands of "decode" by name; those of "fwd_split_kv" as operands of "decode", (B, S, H, D)."""
        args = super().read_operands(operands)
        if not self.static.heads_first:
            args.cu_seqlens_k = None
            return args

        def rows_first(mX: cute.Tensor) -> cute.Tensor:
            return cute.make_tensor(mX.iterator, cute.select(mX.layout, mode=[0, 2, 1, 3]))

        views = {"k_cache": rows_first(args.k), "v_cache": rows_first(args.v), "cache_seqlens": args.seqused_k}
        views |= {"q": rows_first(args.q), "out": rows_first(args.out)}
        return SimpleNamespace(**(dict.fromkeys(KERNELS["decode"].names) | vars(args) | views))

    @cute.jit
    def __call__(self, stream: CUstream, **operands):
        tile, static, args = self.tile, self.static, self.read_operands(operands)
        heads, heads_kv = args.q.shape[2], args.k_cache.shape[2]
        capacity = args.k_cache.shape[1]
        if cutlass.const_expr(args.page_table is not None):
            capacity = capacity * args.page_table.shape[1]
        new_tokens = None
        if cutlass.const_expr(static.appends and not static.ragged):
            new_tokens = args.k_new.shape[1]
        splits = KvSplits(
            cache_seqlens=args.cache_seqlens,
            cu_seqlens_k=args.cu_seqlens_k,
            num_sequences=self.num_sequences(args),
            cu_seqlens_q=args.cu_seqlens_q,
            leftpad=args.leftpad,
            tokens=args.q.shape[1],
            new_tokens=new_tokens,
            appends=static.appends,
            window_left=args.window_left,
            capacity=capacity,
            group=cute.fast_divmod_create_divisor_v2(heads // heads_kv),
            heads_at_once=args.heads_at_once,
            head_groups=heads_kv // args.heads_at_once,
            num_splits=args.num_splits,
            num_intervals=cute.fast_divmod_create_divisor_v2(args.num_ctas // args.heads_at_once),
            max_query_tiles=args.arrivals.shape[0],
            tile_m=tile.tile_m,
            least_units=tile.least_keys // UNIT_KEYS,
        )
        rotary = None
        if cutlass.const_expr(static.rotary != ""):
            rotary = Rotary(args.rotary_cos, args.rotary_sin, static.rotary, static.rotary_dim)
        transforms = args.softcap is not None or args.alibi_slopes is not None
        params = Params(
            mQ=args.q,
            mK=args.k_cache,
            mV=args.v_cache,
            mO=args.out,
            mLSE=args.lse,
            splits=splits,
            page_table=args.page_table,
            page_size=None if args.page_table is None else cute.fast_divmod_create_divisor_v2(args.k_cache.shape[1]),
            batch_idx=args.cache_batch_idx,
            k_new=args.k_new,
            v_new=args.v_new,
            rotary=rotary,
            k_scale=args.k_scale,
            v_scale=args.v_scale,
            alibi_slopes=args.alibi_slopes,
            sinks=args.sinks,
            score=Score.of(args.scale, args.softcap) if transforms else None,
            scale_log2=Float32(1.0) if transforms else args.scale * LOG2_E,
            window_left=args.window_left,
            window_right=args.window_right,
            partial_out=args.partial_out,
            partial_stats=args.partial_stats,
            arrivals=args.arrivals,
            tiled_mma=WarpGrid(self.dtype, 1, 1).mma(),
        )
        grid, overlaps = (args.num_ctas, 1, 1), static.overlaps_previous
        self.launch(self.symbol("decode"), params, grid, tile.num_threads, stream, use_pdl=overlaps)

    def num_sequences(self, args) -> Int32:
        if args.cu_seqlens_q is not None:
            return args.cu_seqlens_q.shape[0] - 1
        return args.q.shape[0]

    def symbol(self, kernel: str) -> str:
        static, tile = self.static, self.tile
        mask = ("l" if static.has_left else "") + ("r" if static.has_right else "") or "full"
        tags = "".join(f"_{tag}" for tag in static.tags)
        size = f"{tile.tile_m}x{tile.tile_n}x{tile.num_warps}s{tile.stages}"
        return f"cute_flash_{kernel}_d{static.widths}_{static.dtype}_{mask}_{size}{tags}"

    @cute.kernel
    def kernel(self, p: Params):
        cta, _, _ = cute.arch.block_idx()
        storage = SharedStorage.allocate(self.tile, self.dtype, p.mQ.element_type)
        output = self.output(p)
        if cutlass.const_expr(self.static.overlaps_previous):
            # The kernel starts before the previous one ends (programmatic dependent launch).
            self.read_params(p, storage)
            cute.arch.griddepcontrol_wait()
            cute.arch.griddepcontrol_launch_dependents()
        division = p.splits.divide(cta)
        unit = division.interval * division.per_cta
        cta_unit_end = unit + division.per_cta
        # If the exchange has its own memory, `finish` of a split runs while the next split loads. `is_open`: there was
        # a previous split; if the exchange has its own memory, its `finish` has not run yet.
        is_open, is_first = cutlass.Boolean(False), cutlass.Boolean(True)
        while is_first or is_open:
            exists, split = self.begin(p, storage, unit, cta_unit_end, division)
            if cutlass.const_expr(self.tile.own_exchange):
                if is_open:
                    self.finish(p, storage, *storage.load_split(), output, cta)
            if exists:
                self.attend(p, storage, split, division, output)
                unit = storage.unit_end()
                if cutlass.const_expr(not self.tile.own_exchange):
                    self.finish(p, storage, *storage.load_split(), output, cta)
            is_open, is_first = exists, cutlass.Boolean(False)
        if cutlass.const_expr(self.static.ragged):
            self.zero_padding(p, cta)

    def read_params(self, p: Params, storage: SharedStorage):
        """Read kernel parameters, one of each 64 bytes, so that later reads hit the constant cache.

        The store keeps the compiler from removing the reads. The value is not used.
        """
        strides = (*p.mQ.stride[:3], *p.mK.stride[:3], *p.mV.stride[:3])
        word = Int32(p.splits.num_sequences)
        for value in (p.mQ.iterator.toint(), *strides, p.partial_out.iterator.toint()):
            word ^= Int32(value)
        storage.merge_share[0] = word

    @cute.jit
    def zero_padding(self, p: Params, cta: Int32):
        """Set the output of tokens after the last sequence to 0, and their LSE to -inf."""
        thread, _, _ = cute.arch.thread_idx()
        _, num_tokens, heads, _ = p.mO.shape
        first = p.splits.first_token(p.splits.num_sequences)
        num_ctas, _, _ = cute.arch.grid_dim()
        zeros = cute.make_rmem_tensor(VECTOR, p.mO.element_type)
        zeros.fill(0.0)
        vectors = self.static.width_v // VECTOR
        for token in cutlass.range(first + cta, num_tokens, num_ctas, unroll=1):
            for index in cutlass.range(thread, heads * vectors, self.tile.num_threads, unroll=1):
                head, vector = index // vectors, index % vectors
                row = p.mO[0, token, head, None]
                target = vector_at(row, vector * VECTOR, VECTOR)
                cute.autovec_copy(zeros, target)
                if vector == 0:
                    p.mLSE[0, head, token] = -Float32.inf

    def output(self, p: Params) -> "Output":
        """The registers for the output of a split."""
        thread, _, _ = cute.arch.thread_idx()
        shape = p.tiled_mma.get_slice(thread % 32).partition_shape_C((self.tile.tile_m, self.tile.head_dim))
        acc_O = cute.make_rmem_tensor(shape, Float32)
        output = Output(acc_O, Softmax.start(as_mn(acc_O), p.scale_log2))
        output.reset()
        return output

    @cute.jit
    def begin(self, p: Params, storage: SharedStorage, unit: Int32, cta_unit_end: Int32, division: Division):
        """Begin the split at `unit`, if the CTA has one there; return whether it has one, and the split."""
        exists, split, sequence = cutlass.Boolean(False), Split.none(), Lengths.none()
        if unit < cta_unit_end:
            exists, split, sequence = p.splits.split(unit, cta_unit_end, division)
        if exists:
            self.start_loads(p, storage, split, sequence)
        return exists, split

    @cute.jit
    def start_loads(self, p: Params, storage: SharedStorage, split: Split, sequence: Lengths):
        """Append new keys and values of a split, and start to load its queries and its first blocks."""
        thread, _, _ = cute.arch.thread_idx()
        # Load the queries first. Loaded after the blocks, they would arrive after them.
        self.load_q(p, storage, split, sequence, thread)
        if cutlass.const_expr(self.static.appends):
            self.append(p, split, sequence, thread)
        loads = self.loads(p, storage, split, sequence, thread)
        # Wait until all lanes have read the last blocks of the previous split.
        cute.arch.sync_warp()
        blocks = [split.begin + i * self.tile.block_keys for i in range(self.tile.stages - 1)]
        pages = [loads.look_up(key) for key in blocks]
        for i in cutlass.range_constexpr(self.tile.stages - 1):
            self.load_block(loads, split, blocks[i], Int32(i), pages[i])

    @cute.jit
    def attend(self, p: Params, storage: SharedStorage, split: Split, division: Division, output: "Output"):
        """Compute the output of each warp over its keys of the split."""
        thread, _, _ = cute.arch.thread_idx()
        sequence = p.splits.sequence(split.batch)
        if thread == 0:
            storage.store_split(split, p.splits.ctas(split, division))
        self.stage_q(p, storage, split, sequence, thread)
        state = self.warp_state(p, storage, split, sequence, output, thread)
        self.mainloop(p, split, state, self.loads(p, storage, split, sequence, thread))

    @cute.jit
    def finish(self, p: Params, storage: SharedStorage, split: Split, ctas: TileCtas, output: "Output", cta: Int32):
        """Combine the warps, and merge the splits of the query tile if this CTA is one of the last to arrive."""
        thread, _, _ = cute.arch.thread_idx()
        sequence = p.splits.sequence(split.batch)
        is_whole = ctas.first == ctas.last
        target = is_whole, self.slot(p, cta, split.is_first)
        if cutlass.const_expr(not self.tile.own_exchange):
            # The exchange overwrites the stages: wait until every warp has read its last stage.
            cute.arch.sync_threads()
        for i in cutlass.range_constexpr(self.tile.tile_m // EXCHANGE_ROWS):
            rows = cutlass.min(self.num_rows(p, split, sequence) - i * EXCHANGE_ROWS, EXCHANGE_ROWS)
            if rows > 0:
                self.exchange(p, storage, output, thread, i, rows)
                self.combine(p, storage, split, thread, (Int32(i * EXCHANGE_ROWS), rows), target)
                # The next rows, or the next split, reuse the memory.
                cute.arch.sync_threads()
        output.reset()
        if not is_whole:
            num_rows, at_once = self.num_rows(p, split, sequence), self.tile.merged_rows
            num_shares = cutlass.min(quotient(num_rows + at_once - 1, at_once), ctas.num_final)
            if p.splits.num_splits > 0:
                # The grid may have more CTAs than the GPU runs at once, so no CTA waits for another.
                num_shares = Int32(1)
            share = self.arrive(p, storage, split, ctas, thread, cta, num_shares)
            if share >= 0:
                self.merge(p, split, ctas, num_rows, thread, share, num_shares)
                self.leave(p, split, thread, num_shares)

    # ---- queries

    def coord(self, p: Params, split: Split, row: Int32) -> tuple:
        """(batch, token, head) in q of a row of the split's query tile, and its token within the sequence."""
        index = split.row_tile * self.tile.tile_m + row
        group = p.splits.group
        token, index_in_group = divmod(index, group)
        head = split.head_kv * group.divisor + index_in_group
        if p.splits.cu_seqlens_q is None:
            return split.batch, token, head, token
        return Int32(0), p.splits.first_token(split.batch) + token, head, token

    def num_rows(self, p: Params, split: Split, sequence: Lengths) -> Int32:
        """The number of rows of the split's query tile that exist."""
        return cutlass.min(
            sequence.tokens * p.splits.group.divisor - split.row_tile * self.tile.tile_m, self.tile.tile_m
        )

    @cute.jit
    def stage_q(self, p: Params, storage: SharedStorage, split: Split, sequence: Lengths, thread: Int32):
        """Wait for the queries that `load_q` copied, apply rotary, and write them as the operand of the MMA."""
        tile = self.tile
        vectors = tile.head_dim // VECTOR
        # The blocks that were requested after the queries may still be in flight.
        cute.arch.cp_async_wait_group(tile.stages - 1)
        cute.arch.sync_threads()
        x, rounded = cute.make_rmem_tensor(VECTOR, Float32), cute.make_rmem_tensor(VECTOR, self.dtype)
        for i in cutlass.range_constexpr(tile.tile_m * vectors // tile.num_threads):
            index = i * tile.num_threads + thread
            row, vector = index // vectors, index % vectors
            raw = storage.raw_q[row, None]
            load_floats(raw, vector, x)
            if cutlass.const_expr(p.rotary is not None):
                # Rows and columns past the end are zeros.
                if row < self.num_rows(p, split, sequence) and vector * VECTOR < self.static.head_dim:
                    position = sequence.key_len - sequence.tokens + self.coord(p, split, row)[3]
                    if cutlass.const_expr(p.window_left is None and p.window_right is None):
                        # Without a mask, all queries have the position after the old keys, as in flash-attn.
                        position = p.splits.old_len(split.batch)
                    p.rotary.load(raw, vector, position, x)
            # Round to the dtype of q first, as a separate rotary kernel would.
            rounded.store(x.load().to(p.mQ.element_type).to(self.dtype))
            if cutlass.const_expr(self.static.is_fp8):
                for j in cutlass.range_constexpr(VECTOR):
                    storage.sQ[row, fp8.query_column(vector * VECTOR + j), 0] = rounded[j]
            else:
                # The swizzle of the tile: the 16-byte chunk c of row r is at c ^ (r mod 8).
                columns, chunk = vector // 8, (vector % 8) ^ (row % 8)
                address = Int32(storage.sQ.iterator.toint()) + (columns * tile.tile_m + row) * ATOM_BYTES + chunk * 16
                target = cute.make_ptr(self.dtype, address, cutlass.AddressSpace.smem, assumed_align=16)
                cute.autovec_copy(rounded, cute.make_tensor(target, cute.make_layout(VECTOR)))
        cute.arch.sync_threads()

    @cute.jit
    def load_q(self, p: Params, storage: SharedStorage, split: Split, sequence: Lengths, thread: Int32):
        """Start to copy the tile's queries to shared memory; rows and columns past the end are zero-filled."""
        tile = self.tile
        vectors, num_rows = tile.head_dim // VECTOR, self.num_rows(p, split, sequence)
        memory = Int32(storage.raw_q.iterator.toint())
        for i in cutlass.range_constexpr(tile.tile_m * vectors // tile.num_threads):
            index = i * tile.num_threads + thread
            row, vector = index // vectors, index % vectors
            batch, token, head, _ = self.coord(p, split, cutlass.min(row, num_rows - 1))
            source = p.mQ[batch, token, head, None].iterator.toint() + vector * (2 * VECTOR)
            # As an unsigned number -1 exceeds `num_rows`, so `copy_if_less` writes zeros.
            row = cutlass.select_(vector * VECTOR < self.static.head_dim, row, Int32(-1))
            copy_if_less(memory + index * (2 * VECTOR), source, row, num_rows)
        cute.arch.cp_async_commit_group()

    # ---- new keys and values

    @cute.jit
    def append(self, p: Params, split: Split, sequence: Lengths, thread: Int32):
        """Write the new keys and values of the split's blocks to the cache.

        CTAs with other query rows of the same K/V head write the same values, so they need no synchronization.
        """
        tile, static = self.tile, self.static
        old_len = p.splits.old_len(split.batch)
        begin, end = cutlass.max(old_len, split.begin), cutlass.min(sequence.key_len, split.end)
        first_token = Int32(0)
        batch = split.batch
        if cutlass.const_expr(static.ragged):
            first_token, batch = p.splits.first_token(split.batch), Int32(0)
        keys, values = self.cache_heads(p, split)
        vectors = tile.head_dim // VECTOR
        x = cute.make_rmem_tensor(VECTOR, Float32)
        for index in cutlass.range(thread, cutlass.max(end - begin, 0) * vectors, tile.num_threads, unroll=1):
            key, vector = begin + index // vectors, index % vectors
            token = first_token + key - old_len
            if vector * VECTOR < static.head_dim:
                row = p.k_new[batch, token, split.head_kv, None]
                if cutlass.const_expr(p.rotary is None):
                    load_floats(row, vector, x)
                else:
                    p.rotary.load(row, vector, key, x)
                self.write_cache(keys.address(key), vector, x, p.k_scale, split.head_kv)
            if vector * VECTOR < static.width_v:
                load_floats(p.v_new[batch, token, split.head_kv, None], vector, x)
                self.write_cache(values.address(key), vector, x, p.v_scale, split.head_kv)
        cute.arch.sync_threads()

    @cute.jit
    def write_cache(self, address: Int64, vector: Int32, x: cute.Tensor, scale: cute.Tensor | None, head_kv: Int32):
        """Write eight columns of a row of the cache."""
        if cutlass.const_expr(self.static.is_fp8):
            words = cute.make_rmem_tensor(2, Int32)
            words.fill(0)
            for i in cutlass.range_constexpr(VECTOR):
                words[i // 4] = words[i // 4] | (fp8.rounded(x[i] / scale[head_kv]) << (8 * (i % 4)))
            target = cute.make_ptr(Int32, address + vector * VECTOR, cutlass.AddressSpace.gmem, assumed_align=8)
            cute.autovec_copy(words, cute.make_tensor(target, cute.make_layout(2)))
        else:
            rounded = cute.make_rmem_tensor(VECTOR, self.dtype)
            rounded.store(x.load().to(self.dtype))
            where = address + vector * (2 * VECTOR)
            target = cute.make_ptr(self.dtype, where, cutlass.AddressSpace.gmem, assumed_align=16)
            cute.autovec_copy(rounded, cute.make_tensor(target, cute.make_layout(VECTOR)))

    # ---- main loop

    @cute.jit
    def warp_state(
        self, p: Params, storage: SharedStorage, split: Split, sequence: Lengths, output: "Output", thread: Int32
    ):
        tile, is_fp8 = self.tile, self.static.is_fp8
        warp, lane = cute.arch.make_warp_uniform(thread // 32), thread % 32
        grid = WarpGrid(self.dtype, 1, 1)
        thr_mma = p.tiled_mma.get_slice(lane)
        tScS = thr_mma.partition_C(cute.make_identity_tensor((tile.tile_m, tile.tile_n)))
        rows = cute.size(output.softmax.row_max)
        bounds = cute.make_rmem_tensor((2, rows), Int32)
        slopes = positions = None
        if cutlass.const_expr(p.alibi_slopes is not None):
            slopes, positions = cute.make_rmem_tensor(rows, Float32), cute.make_rmem_tensor(rows, Int32)
        for r in cutlass.range_constexpr(rows):
            row = cutlass.min(as_mn(tScS)[r, 0][0], self.num_rows(p, split, sequence) - 1)
            _, _, head, token = self.coord(p, split, row)
            position = sequence.key_len - sequence.tokens + token
            low, high = sequence.first_key, cutlass.min(sequence.key_len, split.end) - 1
            if cutlass.const_expr(p.window_left is not None):
                low = cutlass.max(low, position - p.window_left)
            if cutlass.const_expr(p.window_right is not None):
                high = cutlass.min(high, position + p.window_right)
            bounds[0, r], bounds[1, r] = low, high
            if cutlass.const_expr(slopes is not None):
                slopes[r], positions[r] = p.alibi_slopes[split.batch, head] * LOG2_E, position
        return WarpState(
            warp=warp,
            lane=lane,
            memory=Int32(storage.sKV.iterator.toint()),
            q=grid.a(p.tiled_mma, lane, storage.sQ, tile.q_smem),
            k=None if is_fp8 else grid.b(p.tiled_mma, lane, storage.sKV, tile.kv_smem),
            v=None if is_fp8 else grid.b(p.tiled_mma, lane, storage.sKV, tile.kv_smem, is_transposed=True),
            acc_O=output.acc_O,
            softmax=output.softmax,
            tScS=tScS,
            bounds=bounds,
            visible=self.visible_keys(p, split, sequence),
            slopes=slopes,
            positions=positions,
            k_scale=p.k_scale[split.head_kv] if is_fp8 else None,
        )

    def cache_heads(self, p: Params, split: Split) -> tuple[CacheHead, CacheHead]:
        """The keys and the values of the split's sequence and K/V head."""
        static = self.static
        batch = split.batch
        if p.batch_idx is not None:
            # Clamp, so that an invalid index stays within the cache.
            batch = cutlass.min(cutlass.max(p.batch_idx[batch], 0), p.mK.shape[0] - 1)
        first_row = p.splits.first_row(split.batch) if static.varlen else None
        common = split.head_kv, batch, first_row, p.page_table, p.page_size, static.page_lookup
        widths = (p.mK, static.head_dim), (p.mV, static.width_v)
        return tuple(CacheHead(mX, *common, width, static.cache_bytes) for mX, width in widths)

    def loads(self, p: Params, storage: SharedStorage, split: Split, sequence: Lengths, thread: Int32) -> Loads:
        tile, warp = self.tile, cute.arch.make_warp_uniform(thread // 32)
        keys = sequence.first_key, cutlass.min(sequence.key_len, split.end) - 1
        loader = WarpLoader(self.cache_heads(p, split), tile, thread % 32, *keys)
        memory = Int32(storage.sKV.iterator.toint()) + warp * (tile.stages * 2 * tile.kv_smem.bytes)
        return Loads(loader, warp * tile.tile_n, memory)

    @cute.jit
    def mainloop(self, p: Params, split: Split, state: WarpState, loads: Loads):
        tile = self.tile
        q_steps = tile.head_dim // 16 if self.q_in_registers else 0
        for k in cutlass.range_constexpr(q_steps):
            state.q.load(k, 0)
        stage = Int32(0)
        ahead_keys = (tile.stages - 1) * tile.block_keys
        pages = loads.look_up(split.begin + ahead_keys)
        for key in cutlass.range(split.begin, split.end, tile.block_keys, unroll=1):
            cute.arch.cp_async_wait_group(tile.stages - 2)
            # Wait until the data of all lanes has landed, and all lanes have read the stage that is loaded next.
            cute.arch.sync_warp()
            ahead = stage - 1 if stage > 0 else Int32(tile.stages - 1)
            self.load_block(loads, split, key + ahead_keys, ahead, pages)
            if cutlass.const_expr(pages is not None):
                pages.store(loads.look_up(key + ahead_keys + tile.block_keys).load())
            self.process_block(p, state, key + loads.key_offset, key - split.begin, stage, q_steps)
            stage = stage + 1 if stage < tile.stages - 1 else Int32(0)
        cute.arch.cp_async_wait_group(0)

    @property
    def has_fp8_cvt(self) -> bool:
        """Whether the architecture converts FP8 to fp16 in one instruction."""
        return self.static.has_fp8_cvt

    @property
    def q_in_registers(self) -> bool:
        return self.tile.tile_m * self.tile.head_dim <= 16 * 128

    @cute.jit
    def load_block(self, loads: Loads, split: Split, first_key: Int32, stage: Int32, pages: cute.Tensor | None):
        """Start to load this warp's keys of a block, if the block begins before the end of the split."""
        if first_key < split.end:
            key = first_key + loads.key_offset
            memory = loads.memory + stage * (2 * self.tile.kv_smem.bytes)
            loads.loader.load(key, (memory, memory + self.tile.kv_smem.bytes), pages)
        cute.arch.cp_async_commit_group()

    @cute.jit
    def process_block(self, p: Params, state: WarpState, key: Int32, keys_seen: Int32, stage: Int32, q_steps):
        tile = self.tile
        acc_S = cute.make_rmem_tensor(p.tiled_mma.get_slice(0).partition_shape_C((tile.tile_m, tile.tile_n)), Float32)
        acc_S.fill(0.0)
        index = (state.warp * tile.stages + stage) * 2
        if cutlass.const_expr(self.static.is_fp8):
            where = state.memory + index * tile.kv_smem.bytes, state.lane, tile.tile_n
            fp8.add_scores(p.tiled_mma, acc_S, state.q, where, (tile.head_dim // 16, q_steps), self.has_fp8_cvt)
            acc_S.store(acc_S.load() * state.k_scale)
        else:
            gemm(p.tiled_mma, acc_S, (state.q, state.k), index, q_steps)
        self.transform(p, state, as_mn(acc_S), key)
        if key < state.visible[0] or key + tile.tile_n - 1 > state.visible[1]:
            self.mask(state, as_mn(acc_S), key)
        state.softmax.step(as_mn(acc_S), as_mn(state.acc_O), keys_seen)
        rP = cute.make_fragment_like(acc_S, self.dtype)
        rP.store(acc_S.load().to(self.dtype))
        if cutlass.const_expr(self.static.is_fp8):
            where = state.memory + (index + 1) * tile.kv_smem.bytes, state.lane, tile.tile_n
            fp8.add_output(p.tiled_mma, state.acc_O, as_operand_a(rP), where, self.has_fp8_cvt)
        else:
            gemm_rs(p.tiled_mma, state.acc_O, as_operand_a(rP), state.v, index + 1)

    @cute.jit
    def transform(self, p: Params, state: WarpState, acc_S_mn: cute.Tensor, key: Int32):
        """Apply softcap and ALiBi; the results are in units of log2."""
        if cutlass.const_expr(p.score is not None):
            if cutlass.const_expr(p.score.rate is not None):
                p.score.apply_cap(acc_S_mn, False)
            else:
                acc_S_mn.store(acc_S_mn.load() * p.score.scale_log2)
        if cutlass.const_expr(state.slopes is not None):
            first = key + as_mn(state.tScS)[0, 0][1]
            for r in cutlass.range_constexpr(cute.size(acc_S_mn, mode=[0])):
                distance = Float32(state.positions[r] - first)
                for c in cutlass.range_constexpr(cute.size(acc_S_mn, mode=[1])):
                    from_key = cute.math.absf(distance - Float32(column_offset(c)))
                    acc_S_mn[r, c] = acc_S_mn[r, c] - state.slopes[r] * from_key

    @cute.jit
    def visible_keys(self, p: Params, split: Split, sequence: Lengths) -> tuple:
        """The first and the last key that all queries of the sequence see."""
        first, last = sequence.first_key, cutlass.min(sequence.key_len, split.end) - 1
        if cutlass.const_expr(p.window_left is not None):
            first = cutlass.max(first, sequence.key_len - 1 - p.window_left)
        if cutlass.const_expr(p.window_right is not None):
            last = cutlass.min(last, sequence.key_len - sequence.tokens + p.window_right)
        return first, last

    @cute.jit
    def mask(self, state: WarpState, acc_S_mn: cute.Tensor, key: Int32):
        """Set the scores of keys that a row does not see to -inf."""
        first = key + as_mn(state.tScS)[0, 0][1]
        for r in cutlass.range_constexpr(cute.size(acc_S_mn, mode=[0])):
            low, high = state.bounds[0, r] - first, state.bounds[1, r] - first
            for c in cutlass.range_constexpr(cute.size(acc_S_mn, mode=[1])):
                offset = column_offset(c)
                is_masked = offset > high or offset < low
                acc_S_mn[r, c] = -Float32.inf if is_masked else acc_S_mn[r, c]

    # ---- combination of warps and splits

    @cute.jit
    def exchange(
        self, p: Params, storage: SharedStorage, output: "Output", thread: Int32, part: cutlass.Constexpr, rows: Int32
    ):
        """Write eight rows of every warp's output and statistics to shared memory: the `part`-th row of each thread."""
        warp, lane = thread // 32, thread % 32
        acc, row = as_mn(output.acc_O), lane // THREADS_PER_ROW
        first = self.coordinates(p, lane)[0, 0][1]
        total = output.softmax.row_sum[part]
        for offset in cutlass.range_constexpr(1, 3):
            total += cute.arch.shuffle_sync_bfly(total, offset=offset)
        if row < rows:
            for c in cutlass.range_constexpr(cute.size(acc, mode=[1])):
                storage.exchange[self.output_column(first, c), row, warp] = acc[part, c]
            if lane % THREADS_PER_ROW == 0:
                storage.stats[0, row, warp] = output.softmax.row_max[part]
                storage.stats[1, row, warp] = total
        cute.arch.sync_threads()

    def output_column(self, first: Int32, c: int) -> Int32:
        """The output column of this thread's c-th accumulator; `first`: the thread's first column in an n8 tile."""
        return fp8.output_column(c // 2, first + c % 2) if self.static.is_fp8 else first + column_offset(c)

    def coordinates(self, p: Params, lane: Int32) -> cute.Tensor:
        """(row, column) of every element of the output accumulator."""
        identity = cute.make_identity_tensor((self.tile.tile_m, self.tile.head_dim))
        return as_mn(p.tiled_mma.get_slice(lane).partition_C(identity))

    @cute.jit
    def combined(self, storage: SharedStorage, row: Int32, column: Int32, sums: cute.Tensor):
        """Write the sum over all warps of a row's `FLOATS` columns to `sums`, and return m and l of the row."""
        m = storage.stats[0, row, 0]
        for w in cutlass.range_constexpr(1, self.tile.num_warps):
            m = cute.arch.fmax(m, storage.stats[0, row, w])
        total, part = Float32(0.0), cute.make_rmem_tensor(FLOATS, Float32)
        sums.fill(0.0)
        for w in cutlass.range_constexpr(self.tile.num_warps):
            factor = cute.math.exp2(storage.stats[0, row, w] - or_zero(m), fastmath=True)
            total += storage.stats[1, row, w] * factor
            cute.autovec_copy(vector_at(storage.exchange[None, row, w], column, FLOATS), part)
            sums.store(sums.load() + part.load() * factor)
        return m, total

    @cute.jit
    def combine(self, p: Params, storage: SharedStorage, split: Split, thread: Int32, part: tuple, target: tuple):
        """Combine the warps. Write the output if the split has all keys of its query tile, else write to the workspace.

        Args:
            part: the first of the exchanged rows, and their number.
            target: whether the split has all keys of the query tile, and its workspace slot.
        """
        (first_row, num_rows), (is_whole, slot) = part, target
        vectors, sums = self.tile.head_dim // FLOATS, cute.make_rmem_tensor(FLOATS, Float32)
        for index in cutlass.range(thread, num_rows * vectors, self.tile.num_threads, unroll=1):
            row = quotient(index, vectors)
            column = (index - row * vectors) * FLOATS
            m, total = self.combined(storage, row, column, sums)
            row += first_row
            if is_whole:
                self.write_row(p, split, (row, column), sums, m, total)
            else:
                cute.autovec_copy(sums, vector_at(p.partial_out[slot, row, None], column, FLOATS))
                if column == 0:
                    p.partial_stats[slot, row, 0] = m
                    p.partial_stats[slot, row, 1] = total

    @cute.jit
    def write_row(self, p: Params, split: Split, where: tuple, sums: cute.Tensor, m: Float32, total: Float32):
        """Normalise and write `FLOATS` columns of a row of the output; the thread of column 0 writes the LSE."""
        row, column = where
        batch, token, head, _ = self.coord(p, split, row)
        lse = -Float32.inf if total == 0.0 else (m + cute.math.log2(total, fastmath=True)) * LN_2
        inverse = Float32(0.0) if total == 0.0 else cute.arch.rcp_approx(total)
        if cutlass.const_expr(p.sinks is not None):
            sink = p.sinks[head]
            log2_ratio = (sink - lse) * LOG2_E if total != 0.0 else Float32(0.0)
            smaller = cute.math.exp2(cute.arch.fmin(log2_ratio, -log2_ratio), fastmath=True)
            both = cute.arch.fmax(lse, sink) + cute.math.log2(1.0 + smaller, fastmath=True) * LN_2
            inverse = inverse * cute.arch.rcp_approx(1.0 + cute.math.exp2(log2_ratio, fastmath=True))
            lse = both if total != 0.0 else sink
        if cutlass.const_expr(p.v_scale is not None):
            inverse = inverse * p.v_scale[split.head_kv]
        if column < self.static.width_v:
            rounded = cute.make_rmem_tensor(FLOATS, p.mO.element_type)
            rounded.store((sums.load() * inverse).to(p.mO.element_type))
            cute.autovec_copy(rounded, vector_at(p.mO[batch, token, head, None], column, FLOATS))
        if column == 0:
            p.mLSE[batch, head, token] = lse

    def slot(self, p: Params, cta: Int32, is_first: cutlass.Boolean) -> Int32:
        """The workspace slot of a CTA's split.

        A CTA shares at most two query tiles with other CTAs: it has the end of one and the beginning of another. So it
        needs two slots. With a fixed number of splits it has one split.
        """
        own = 2 * cta + cutlass.select_(is_first, Int32(1), Int32(0))
        return cutlass.select_(p.splits.num_splits > 0, cta, own)

    @cute.jit
    def arrive(
        self,
        p: Params,
        storage: SharedStorage,
        split: Split,
        ctas: TileCtas,
        thread: Int32,
        cta: Int32,
        num_shares: Int32,
    ):
        """Count this CTA's split of the query tile as written; return the CTA's share of the merge, or -1 for none.

        The rows of the query tile are divided into `num_shares` shares, and each of the last CTAs to arrive merges one
        share. If there are several shares, these CTAs wait until all CTAs have arrived. `ctas.last` is not one of them
        if it has another split to compute. The CTAs of the grid run at the same time. If another process or a limit on
        SMs prevents that, waiting is still safe while more than `num_shares` CTAs run: CTAs start in the order of the
        grid, so only one query tile has both waiting CTAs and CTAs that have not started, and at most `num_shares` CTAs
        wait for it.

        The barriers order the memory accesses of all threads before and after the accesses of thread 0.
        """
        cute.arch.sync_threads()
        if thread == 0:
            total, share, address = ctas.last - ctas.first + 1, Int32(-1), self.counter(p, split)
            if num_shares == 1:
                before = cute.arch.atomic_add(address, Int32(1), sem="acq_rel", scope="gpu")
                if before == total - 1:
                    share = Int32(0)
                    p.arrivals[split.query_tile] = 0
            else:
                is_final = cta < ctas.last or ctas.num_final == total
                added = Int32(1 + (1 << FINAL_BIT)) if is_final else Int32(1)
                before = cute.arch.atomic_add(address, added, sem="acq_rel", scope="gpu")
                rank = ctas.num_final - 1 - (before >> FINAL_BIT)  # the last of these CTAs to arrive has rank 0
                if is_final and rank < num_shares:
                    share = rank
                    arrived = before + 1
                    while arrived & ((1 << FINAL_BIT) - 1) != total:
                        arrived = instruction("ld.acquire.gpu.global.s32 {$w0}, [{$r0}];", Int32, address.toint())
            storage.merge_share[0] = share
        cute.arch.sync_threads()
        return storage.merge_share[0]

    def counter(self, p: Params, split: Split):
        """The arrival counter of the split's query tile.

        Bits 0 to 11 count arrivals, 12 to 23 those of CTAs without another split, 24 to 30 merged shares.
        """
        return p.arrivals.iterator + split.query_tile

    @cute.jit
    def leave(self, p: Params, split: Split, thread: Int32, shares: Int32):
        """Count a share as merged. The last of several shares resets the counter."""
        if thread == 0 and shares > 1:
            before = cute.arch.atomic_add(self.counter(p, split), Int32(1 << SHARE_BIT), sem="relaxed", scope="gpu")
            if (before >> SHARE_BIT) == shares - 1:
                p.arrivals[split.query_tile] = 0

    @property
    def splits_at_once(self) -> int:
        """Splits of a query tile that a thread loads at once. More than 8 would spill with 32 rows."""
        return 16 if self.tile.tile_m == 16 else 8

    @cute.jit
    def merge(
        self, p: Params, split: Split, ctas: TileCtas, num_rows: Int32, thread: Int32, share: Int32, shares: Int32
    ):
        """Merge a share of the rows of a query tile, and write their output."""
        vectors, sums = self.tile.head_dim // FLOATS, cute.make_rmem_tensor(FLOATS, Float32)
        at_once = self.splits_at_once
        parts = [cute.make_rmem_tensor(FLOATS, Float32) for _ in range(at_once)]
        stats = [cute.make_rmem_tensor(2, Float32) for _ in range(at_once)]
        threads = self.tile.num_threads
        for index in cutlass.range(share * threads + thread, num_rows * vectors, shares * threads, unroll=1):
            row = quotient(index, vectors)
            column = (index - row * vectors) * FLOATS
            m, total = -Float32.inf, Float32(0.0)
            sums.fill(0.0)
            for first in cutlass.range(ctas.first, ctas.last + 1, at_once, unroll=1):
                # Issue all loads before the first use. Indices past the last split load the last split again.
                for i in cutlass.range_constexpr(at_once):
                    cta = cutlass.min(first + i, ctas.last)
                    slot = self.slot(p, cta, first == ctas.first if i == 0 else cutlass.Boolean(False))
                    load_from(p.partial_stats, slot, 2 * row, stats[i])
                    load_from(p.partial_out, slot, self.tile.head_dim * row + column, parts[i])
                largest = m
                for i in cutlass.range_constexpr(at_once):
                    # A statistic of -inf excludes a split that was loaded again.
                    stats[i][0] = cutlass.select_(first + i <= ctas.last, stats[i][0], -Float32.inf)
                    largest = cute.arch.fmax(largest, stats[i][0])
                factor = cute.math.exp2(m - or_zero(largest), fastmath=True)
                total = total * factor
                sums.store(sums.load() * factor)
                for i in cutlass.range_constexpr(at_once):
                    factor = cute.math.exp2(stats[i][0] - or_zero(largest), fastmath=True)
                    total += stats[i][1] * factor
                    sums.store(sums.load() + parts[i].load() * factor)
                m = largest
            self.write_row(p, split, (row, column), sums, m, total)


def vector_at(row: cute.Tensor, column: Int32, num: int) -> cute.Tensor:
    """`num` consecutive columns of a row, which one instruction loads or stores."""
    pointer = assume_aligned(row.iterator + column, num * row.element_type.width // 8)
    return cute.make_tensor(pointer, cute.make_layout(num))


def load_from(partial: cute.Tensor, slot: Int32, offset: Int32, target: cute.Tensor):
    """Load consecutive floats of a workspace slot, with one multiplication and one load."""
    num, slot_bytes = cute.size(target), partial.stride[0] * 4
    address = partial.iterator.toint() + Int64(offset) * 4 + Int64(slot) * slot_bytes
    pointer = cute.make_ptr(Float32, address, cutlass.AddressSpace.gmem, assumed_align=4 * num)
    cute.autovec_copy(cute.make_tensor(pointer, cute.make_layout(num)), target)


def or_zero(m: Float32) -> Float32:
    """m, or 0 if there are no keys (-inf), because -inf - -inf would be NaN."""
    return cutlass.select_(m == -Float32.inf, Float32(0.0), m)
