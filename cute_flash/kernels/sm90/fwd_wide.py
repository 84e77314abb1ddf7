"""Warp-specialised forward attention with TMA and wgmma, for Hopper, for head dims above 256.

`fwd.py` computes most calls with head dims up to 320. Above, the output of 64 rows does not fit into the registers of
one warpgroup. It is divided between two, so a CTA has 64 query rows. Two CTAs form a cluster and
compute a tile of 128 rows. Each loads half of K and V for both, because L2 could not deliver all of K and V to every
CTA. For each tile, over K/V blocks j:

    S  = Q Kj^T                          a warpgroup computes S for half of the keys
    m' = max(m, rowmax S)                both warpgroups exchange the maxima of their halves
    P  = exp(scale (S - m'))             to shared memory, in the dtype of q
    l  = l exp(scale (m - m')) + rowsum P
    O  = O exp(scale (m - m')) + P Vj    all keys; a warpgroup computes half of the columns
    out = O / l,  LSE = scale m + log l

Score features and masks are those of `kernels/sm90/fwd.py`; a call with a block mask runs the mma.sync kernel. The MMA
warpgroups compute the dropout masks.

K and V come in pieces (`fwd_wide_storage.py`). The product of each piece is a wgmma group, and the piece is released
when the group has completed. A warpgroup issues Q K^T of block j and then P V of block j - 1, which runs while the
warpgroup computes the softmax of block j.

| warpgroup | warps | role                                                                      |
|-----------|-------|---------------------------------------------------------------------------|
| 0         | 0     | load Q, and K and V in pieces, as far ahead as the pipeline allows        |
| 1, 2      | all   | MMA and softmax                                                           |

| shared memory | elements                         | lifetime                         |
|---------------|----------------------------------|----------------------------------|
| sQ            | 64 x tile_d                      | one tile                         |
| pieces        | 8 x 128 x 64                     | one piece of K or V each         |
| sP            | 2 x 64 x tile_n (1 x if D > 512) | one block each                   |
| sMax, sSum    | 2 x 64 fp32                      | one exchange                     |

Clocks of a block of 128 keys at D = 512, of one SM: MMA 4096; shared memory 5500, of which TMA writes 2048, reads of Q
and K 2048, reads of P and V 1280, stores of P 128. So shared memory limits the kernel to 74 % of the MMA rate.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cuda.bindings.driver import CUstream
from cutlass import Float32, Int32
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, warp, warpgroup

from cute_flash.device.memory.copies import row_tile
from cute_flash.device.memory.epilogue import DirectStore, store_lse, update_max_logit
from cute_flash.device.memory.multicast import MulticastTiles, VarlenMulticastTiles
from cute_flash.device.memory.tma import TmaTiles, VarlenTmaTiles
from cute_flash.device.memory.views import as_mn, as_operand_a
from cute_flash.device.mma.wgmma import convert, make_mma
from cute_flash.device.ptx import rederived
from cute_flash.device.scheduling.block_sparse import AnyBlockIterator
from cute_flash.device.scheduling.pipeline import WARPGROUP_THREADS
from cute_flash.device.scheduling.published_tiles import NO_TILE
from cute_flash.device.scheduling.seqlen import SeqlenInfo
from cute_flash.device.scheduling.tile_scheduler import PersistentTileScheduler, StaticTileScheduler, VarlenTileList
from cute_flash.device.scores.mask import Mask
from cute_flash.device.scores.philox import Dropout, batch_head_index
from cute_flash.device.scores.position import TilePosition
from cute_flash.device.softmax.softmax import THREADS_PER_ROW, Softmax
from cute_flash.kernels.common.kernel import Grid, Kernel
from cute_flash.kernels.common.params import HeadScoreParams, ScoreParams
from cute_flash.kernels.sm90.fwd_storage import Config, Params
from cute_flash.kernels.sm90.fwd_wide_storage import WARPGROUPS, SharedStorage
from cute_flash.planning.tiles.common import WARPGROUP_ROWS
from cute_flash.planning.tiles.fwd_sm90 import FwdTileSm90Wide
from cute_flash.smem.tile import SmemTile
from cute_flash.spec.problem import Static

# Named barriers of both MMA warpgroups; 0 is the CTA barrier.
MAX_BARRIER, PROBS_BARRIER = 1, 2


@dataclass(frozen=True)
class MmaState:
    """The state that an MMA warpgroup keeps from tile to tile."""

    warpgroup: Int32
    thread: Int32
    storage: SharedStorage
    mma_qk: cute.TiledMma
    mma_pv: cute.TiledMma
    rQ: cute.Tensor  # descriptors (MMA, MMA_M, MMA_K)
    rK: cute.Tensor  # descriptors (MMA, MMA_N, k-step of a piece, stage)
    rP: cute.Tensor  # descriptors (MMA, MMA_M, MMA_K, buffer)
    rV: cute.Tensor  # descriptors (MMA, MMA_N, 1, (k-step of a piece, stage))
    acc_S: cute.Tensor
    acc_O: cute.Tensor
    softmax: Softmax
    tScS: cute.Tensor  # (row, column) of every element of S


@dataclass(frozen=True)
class MmaTile:
    """A tile, and where its pieces and blocks begin."""

    count: Int32  # tiles before this one
    first_block: Int32  # K/V blocks before this tile
    head: Int32
    seqlen: SeqlenInfo
    mask: Mask
    block_iter: AnyBlockIterator
    score_params: HeadScoreParams
    dropout: Dropout | None
    batch_head: Int32  # b H + h


class FwdSm90Wide(Kernel):
    """The forward kernel for wide heads. CTAs are persistent: each computes tiles one after the other."""

    def __init__(self, static: Static, tile: FwdTileSm90Wide):
        super().__init__(static, tile)
        self.config = Config(static, tile)

    @cute.jit
    def __call__(self, stream: CUstream, **operands):
        tile, static, config, args = self.tile, self.static, self.config, self.read_operands(operands)
        score_params = ScoreParams.of(static, args)
        load, load_for_both = cpasync.CopyBulkTensorTileG2SOp(), cpasync.CopyBulkTensorTileG2SMulticastOp()
        batch, heads, num_rows, _ = args.q.shape
        tma, multicast, tile_list = TmaTiles, MulticastTiles, None
        if cutlass.const_expr(static.varlen):
            tma, multicast = VarlenTmaTiles, VarlenMulticastTiles
            tile_list = VarlenTileList(args.q_tile_list, heads, args.heads_per_l2_group)
        num_m_blocks = cute.ceil_div(num_rows, tile.tile_m)
        batch_is_inner, K = score_params.batch_shares_bias(), OperandMajorMode.K
        params = Params(
            config=config,
            q=tma.of(load, args.q, tile.operand_smem("Q")),
            k=multicast.of(load_for_both, args.k, tile.operand_smem("K")),
            v=multicast.of(load_for_both, args.v, tile.operand_smem("V")),
            o=None,
            bias=None,
            mO=args.out,
            mLSE=args.lse,
            num_rows=num_rows,
            seqlen_q=args.seqlen_q,
            seqlen_k=args.k.shape[2],
            heads_per_kv=heads // args.k.shape[1],
            scale_log2=score_params.softmax_scale(args.scale),
            band=self.band(args),
            static_scheduler=StaticTileScheduler(
                num_m_blocks, heads, batch, args.heads_per_l2_group, static.has_right, batch_is_inner
            ),
            scheduler=PersistentTileScheduler(
                num_m_blocks * heads * batch, args.tile_counter, config.is_dynamic, tile.cluster
            ),
            tile_list=tile_list,
            mma_qk=make_mma(self.dtype, tile.tile_n // WARPGROUPS, False, K, K),
            mma_pv=make_mma(self.dtype, tile.columns_pv, False, K, OperandMajorMode.MN),
            mma_alibi=None,
            score_params=score_params,
        )
        options = {"min_blocks_per_mp": 1, "use_pdl": static.varlen, "cluster": (tile.cluster, 1, 1)}
        self.launch(self.symbol("fwd_sm90_wide"), params, Grid(args.num_ctas), tile.num_threads, stream, **options)

    @cute.kernel
    def kernel(self, p: Params):
        thread, _, _ = cute.arch.thread_idx()
        warp_index = cute.arch.make_warp_uniform(thread // 32)
        storage = SharedStorage.allocate(self.config)
        if warp_index == 0:
            with cute.arch.elect_one():
                storage.init_barriers()
        cute.arch.mbarrier_init_fence()
        self.cluster_barrier()
        if cutlass.const_expr(self.static.varlen):
            # Wait for the scheduler kernel, which writes the tile list.
            cute.arch.griddepcontrol_wait()

        if warp_index < 4:
            cute.arch.setmaxregister_decrease(self.tile.registers[0])
            if warp_index == 0:
                self.produce(p, storage)
        else:
            self.mma(p, storage, warp_index // 4 - 1, thread % WARPGROUP_THREADS)
        # The other CTA may still arrive at the barriers of this one.
        self.cluster_barrier()

    def cluster_barrier(self) -> None:
        cute.arch.cluster_arrive()
        cute.arch.cluster_wait()

    # ---- producer

    @cute.jit
    def produce(self, p: Params, storage: SharedStorage):
        """For every tile of this CTA: publish it, load its Q and the pieces of its blocks in the pipeline's order."""
        count, piece = Int32(0), Int32(0)  # tiles and pieces so far
        index = p.tile_scheduler().first_tile()
        while index < p.tile_scheduler().num_tiles:
            m_block, head, seqlen_values = p.tile_coord(index)
            seqlen = p.seqlen_info(seqlen_values)
            head_kv = head // p.heads_per_kv
            block_iter = p.block_iterator(m_block, head, seqlen, None)
            self.load_q(p, storage, count, m_block, head, seqlen)
            num = block_iter.num
            if num > 0:
                n_block = block_iter.first
                self.load_keys(p, storage, piece, n_block, head_kv, seqlen)
                piece += self.tile.k_pieces
                for i in cutlass.range(1, num, unroll=1):
                    following = block_iter.block(i)
                    self.load_keys(p, storage, piece, following, head_kv, seqlen)
                    self.load_values(p, storage, piece + self.tile.k_pieces, n_block, head_kv, seqlen)
                    piece += self.tile.block_pieces
                    n_block = following
                self.load_values(p, storage, piece, n_block, head_kv, seqlen)
                piece += self.tile.block_pieces - self.tile.k_pieces
            # Fetch the next tile as late as possible, so that a CTA with a long tile leaves it to other CTAs.
            index = storage.index.next_tile(p.tile_scheduler(), index, count, storage.rank)
            count += 1
        if storage.rank == 0:
            p.tile_scheduler().finish(index)
        storage.q.wait_empty(count)
        storage.tiles.write_end(count)
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive(storage.q.full_barrier(count))

    @cute.jit
    def load_q(self, p: Params, storage: SharedStorage, count: Int32, m_block: Int32, head: Int32, seqlen: SeqlenInfo):
        """Publish a tile and load its Q."""
        storage.q.wait_empty(count)
        storage.tiles.write(count, (m_block, head, *seqlen.values))
        storage.q.expect_bytes(count, self.tile.operand_smem("Q").bytes)
        row_block = m_block * self.tile.cluster + storage.rank
        p.q.load(storage.sQ[None, None, 0], row_block, head, seqlen.q_tma_coord, storage.q.full_barrier(count))

    @cute.jit
    def load_keys(
        self, p: Params, storage: SharedStorage, first: Int32, n_block: Int32, head_kv: Int32, seqlen: SeqlenInfo
    ):
        """Load K of a block, from the `first` piece on."""
        for i in cutlass.range(self.tile.k_pieces, unroll=1):
            self.load_part(p.k, storage, "K", first + i, n_block, i, head_kv, seqlen)

    @cute.jit
    def load_values(
        self, p: Params, storage: SharedStorage, first: Int32, n_block: Int32, head_kv: Int32, seqlen: SeqlenInfo
    ):
        """Load V of a block. Pieces of the two warpgroups alternate."""
        chunks = self.tile.v_chunks
        for i in cutlass.range(chunks * WARPGROUPS, unroll=1):
            row_block = n_block * chunks + i // WARPGROUPS
            self.load_part(p.v, storage, "V", first + i, row_block, i % WARPGROUPS, head_kv, seqlen)

    @cute.jit
    def load_part(
        self,
        tma: MulticastTiles,
        storage: SharedStorage,
        operand: cutlass.Constexpr,
        index: Int32,
        piece_row: Int32,
        column: Int32,
        head_kv: Int32,
        seqlen: SeqlenInfo,
    ):
        """Load this CTA's part of a piece for both CTAs. `piece_row`, `column`: the index of the piece in K or V."""
        pipeline, smem, parts = storage.pieces.barriers, self.tile.operand_smem(operand), self.tile.cluster
        pipeline.wait_empty(index)
        pipeline.expect_bytes(index, parts * smem.bytes)
        sX, row_block = storage.pieces.part(index, storage.rank, smem), piece_row * parts + storage.rank
        tma.load(sX, row_block, head_kv, seqlen.k_tma_coord, pipeline.full_barrier(index), column)

    # ---- MMA warpgroups

    @cute.jit
    def mma(self, p: Params, storage: SharedStorage, warpgroup_index: Int32, thread: Int32):
        """The role of an MMA warpgroup."""
        cute.arch.setmaxregister_increase(self.tile.registers[1])
        state = self._state(p, storage, warpgroup_index, thread)
        count, block, piece = Int32(0), Int32(0), Int32(0)  # tiles, K/V blocks and pieces so far
        storage.q.wait_full(count)
        m_block = storage.m_block(count)
        while m_block != NO_TILE:
            tile = self._tile(p, state, m_block, count, block)
            num = tile.block_iter.num
            state.acc_O.fill(0.0)
            state.softmax.restart()
            if num > 0:
                self.first_block(state, tile, piece)
                piece += self.tile.k_pieces
                for i in cutlass.range(1, num, unroll=1):
                    self.further_block(state, tile, i, piece)
                    piece += self.tile.block_pieces
                storage.release_q(count)
                self.last_pv(state, tile, piece)
                piece += self.tile.block_pieces - self.tile.k_pieces
            else:
                storage.release_q(count)
            self.finish(p, state, tile)
            block += num
            count += 1
            storage.q.wait_full(count)
            m_block = storage.m_block(count)

    def _state(self, p: Params, storage: SharedStorage, warpgroup_index: Int32, thread: Int32) -> MmaState:
        tile = self.tile
        qk, pv = p.mma_qk.get_slice(0), p.mma_pv.get_slice(0)
        keys = tile.tile_n // WARPGROUPS
        sK = storage.pieces.operand(tile.operand_smem("K"), tile.cluster)[None, None, (warpgroup_index, None)]
        sV = storage.pieces.operand(tile.operand_smem("V"), tile.cluster)
        sVt = cute.make_tensor(sV.iterator, cute.select(sV.layout, mode=[1, 0, 2]))
        # (64, tile_n, buffer): the halves of P are neighbouring atoms of columns.
        full, half = SmemTile(WARPGROUP_ROWS, tile.tile_n).affine, tile.smem_p_half.cosize
        shape, stride = (*full[0], tile.p_buffers), (*full[1], WARPGROUPS * half)
        sP = cute.make_tensor(storage.sP.iterator, cute.make_layout(shape, stride=stride))
        acc_O = cute.make_rmem_tensor(pv.partition_shape_C((WARPGROUP_ROWS, tile.columns_pv)), Float32)
        shape_S = qk.partition_shape_C((WARPGROUP_ROWS, keys))
        coords = cute.make_identity_tensor((WARPGROUP_ROWS, keys))
        tracks_max_score = p.score_params.max_logit is not None
        return MmaState(
            warpgroup=warpgroup_index,
            thread=thread,
            storage=storage,
            mma_qk=p.mma_qk,
            mma_pv=p.mma_pv,
            rQ=qk.make_fragment_A(qk.partition_A(storage.sQ[None, None, 0])),
            rK=qk.make_fragment_B(qk.partition_B(sK)),
            rP=pv.make_fragment_A(pv.partition_A(sP)),
            rV=pv.make_fragment_B(pv.partition_B(sVt)),
            acc_S=cute.make_rmem_tensor(shape_S, Float32),
            acc_O=acc_O,
            softmax=Softmax.start(as_mn(acc_O), p.scale_log2, tracks_max_score, self.static.batch_invariant),
            tScS=p.mma_qk.get_slice(thread).partition_C(coords),
        )

    def _tile(self, p: Params, state: MmaState, m_block: Int32, count: Int32, first_block: Int32) -> MmaTile:
        storage = state.storage
        first_row = m_block * self.tile.tile_m + storage.rank * WARPGROUP_ROWS
        head, seqlen = storage.head(count), p.seqlen_info(storage.seqlen_values(count))
        lengths = p.seqlen_q_of(seqlen), seqlen.k_len
        mask = Mask(p.band, *lengths, first_row, state.tScS, self.static.pack_gqa)
        block_iter = p.block_iterator(m_block, head, seqlen, None)
        score_params = p.score_params.for_head(head, seqlen.batch)
        batch_head = batch_head_index(p.score_params.dropout_origin, seqlen.batch, head, p.static_scheduler.heads)
        dropout = p.score_params.dropout()
        return MmaTile(count, first_block, head, seqlen, mask, block_iter, score_params, dropout, batch_head)

    @cute.jit
    def first_block(self, state: MmaState, tile: MmaTile, piece: Int32):
        """S and P of a tile's first block. `piece`: its first piece of K."""
        self.start_scores(state, piece)
        warpgroup.wait_group(0)
        self.release_k(state, piece, self.tile.k_pieces - 1)
        self.scores(state, tile, Int32(0))
        self.store_probs(state, tile, Int32(0), self.probs(state, tile, Int32(0)))
        self.wait_for_both()

    @cute.jit
    def further_block(self, state: MmaState, tile: MmaTile, i: Int32, piece: Int32):
        """S and P of the i-th block, and P V of the block before it. `piece`: the first piece of K of the i-th block.

        Before it waits for piece n, a warpgroup has released piece n - 2, whose stage is then loaded again while the
        product of piece n - 1 runs.
        """
        v, buffer = piece + self.tile.k_pieces, self.probs_buffer(tile, i - 1)
        # S = Q K^T;  O += P V of the previous block
        self.start_scores(state, piece)
        self.start_pv(state, v, 0, buffer)
        warpgroup.wait_group(1)
        self.release_k(state, piece, self.tile.k_pieces - 1)
        self.start_pv(state, v, 1, buffer)
        # S: scale, softcap, ALiBi, bias, score_mod, masks;  m' = max(m, rowmax S)
        grew = self.scores(state, tile, i)
        warpgroup.wait_group(1)
        self.release_v(state, v, 0)
        self.start_pv(state, v, 2, buffer)
        # P = exp(scale (S - m'))
        rP = self.probs(state, tile, i)
        warpgroup.wait_group(1)
        self.release_v(state, v, 1)
        self.start_pv(state, v, 3, buffer)
        if cutlass.const_expr(self.tile.p_buffers > 1):
            self.store_probs(state, tile, i, rP)
        warpgroup.wait_group(1)
        self.release_v(state, v, 2)
        warpgroup.wait_group(0)
        self.release_v(state, v, 3)
        if cutlass.const_expr(self.tile.p_buffers == 1):
            self.wait_for_both()
            self.store_probs(state, tile, i, rP)
        # O = O alpha
        if grew:
            state.softmax.scale_rows(as_mn(state.acc_O), state.softmax.alpha)
        self.wait_for_both()

    @cute.jit
    def last_pv(self, state: MmaState, tile: MmaTile, v: Int32):
        """P V of a tile's last block. `v`: its first piece of V."""
        chunks, buffer = self.tile.v_chunks, self.probs_buffer(tile, tile.block_iter.num - 1)
        for chunk in cutlass.range_constexpr(chunks):
            self.start_pv(state, v, chunk, buffer)
            if cutlass.const_expr(chunk > 0):
                warpgroup.wait_group(1)
                self.release_v(state, v, chunk - 1)
        warpgroup.wait_group(0)
        self.release_v(state, v, chunks - 1)

    def probs_buffer(self, tile: MmaTile, i: Int32) -> Int32:
        return (tile.first_block + i) & (self.tile.p_buffers - 1)

    @cute.jit
    def probs(self, state: MmaState, tile: MmaTile, i: Int32) -> cute.Tensor:
        """P = exp(scale (S - m)) of this warpgroup's keys of the i-th block, in the dtype of q, and dropout."""
        state.softmax.exponentiate(as_mn(state.acc_S))
        rP = cute.make_fragment_like(state.acc_S, self.dtype)
        convert(state.acc_S, rP)
        if cutlass.const_expr(tile.dropout is not None):
            position = TilePosition(tile.batch_head, tile.mask.first_row, self.first_key(state, tile, i), state.tScS)
            masks, packed = tile.dropout.masks_of(as_operand_a(rP), position), cute.recast_tensor(rP, Int32)
            for j in cutlass.range_constexpr(cute.size(packed)):
                packed[j] = packed[j] & masks[j]
        return rP

    def first_key(self, state: MmaState, tile: MmaTile, i: Int32) -> Int32:
        """The first of this warpgroup's keys of the i-th block."""
        return tile.block_iter.block(i) * self.tile.tile_n + state.warpgroup * (self.tile.tile_n // WARPGROUPS)

    @cute.jit
    def store_probs(self, state: MmaState, tile: MmaTile, i: Int32, rP: cute.Tensor):
        """Store P of the i-th block to shared memory, and make it visible to wgmma."""
        sP = state.storage.sP[None, None, (state.warpgroup, self.probs_buffer(tile, i))]
        atom = cute.make_copy_atom(warp.StMatrix8x8x16bOp(transpose=False, num_matrices=4), self.dtype)
        copy = cute.make_tiled_copy_C(atom, state.mma_qk).get_slice(state.thread)
        cute.copy(atom, copy.retile(rP), copy.partition_D(sP))
        cute.arch.fence_proxy("async.shared", space="cta")

    def wait_for_both(self) -> None:
        """Wait until both warpgroups have stored their P, or have read all of P."""
        cute.arch.barrier(barrier_id=PROBS_BARRIER, number_of_threads=WARPGROUPS * WARPGROUP_THREADS)

    @cute.jit
    def scores(self, state: MmaState, tile: MmaTile, i: Int32) -> cutlass.Boolean:
        """Transform and mask the scores of the i-th block, and raise the row max. Return whether it grew."""
        softmax, score_params, acc_S = state.softmax, tile.score_params, state.acc_S
        n_block = tile.block_iter.block(i)
        column = self.first_key(state, tile, i)
        bias = None
        if cutlass.const_expr(score_params.mods is not None):
            bias = score_params.mods.load_bias(tile.mask, column, False, warp_column=0)
        looks_near = not (self.static.has_mods or self.static.batch_invariant)
        score_params.transform(acc_S, tile.mask, column, bias, looks_near)
        is_masked = tile.block_iter.is_masked(i)
        score_params.apply_mask(acc_S, tile.mask, tile.block_iter, n_block, column, is_masked)
        block_max = cute.make_fragment_like(softmax.row_max)
        softmax.block_max(as_mn(acc_S), block_max)
        self.exchange(state, state.storage.sMax, block_max, cute.arch.fmax)
        grew = softmax.is_outgrown(block_max, softmax.threshold(i * self.tile.tile_n))
        if grew:
            softmax.raise_max(block_max)
        return grew

    @cute.jit
    def exchange(self, state: MmaState, sRows: cute.Tensor, values: cute.Tensor, combine: cutlass.Constexpr):
        """Combine a value of each row over the columns of both warpgroups; all four threads of a row get the result.

        `combine` must be commutative, so that both warpgroups get the same bits.
        """
        coords = as_mn(state.tScS)
        for r in cutlass.range_constexpr(cute.size(values)):
            for offset in cutlass.range_constexpr(2):
                values[r] = combine(values[r], cute.arch.shuffle_sync_bfly(values[r], offset=1 << offset))
            if state.thread % THREADS_PER_ROW == 0:
                sRows[coords[r, 0][0], state.warpgroup] = values[r]
        cute.arch.barrier(barrier_id=MAX_BARRIER, number_of_threads=WARPGROUPS * WARPGROUP_THREADS)
        for r in cutlass.range_constexpr(cute.size(values)):
            values[r] = combine(values[r], sRows[coords[r, 0][0], 1 - state.warpgroup])

    # ---- products

    @cute.jit
    def start_scores(self, state: MmaState, first: Int32):
        """Start S = Q K^T of all pieces of K. The caller releases the last piece. `first`: the first piece."""
        for i in cutlass.range_constexpr(self.tile.k_pieces):
            self.start_qk(state, first, i)
            if cutlass.const_expr(i > 0):
                warpgroup.wait_group(1)
                self.release_k(state, first, i - 1)

    @cute.jit
    def start_qk(self, state: MmaState, first: Int32, i: cutlass.Constexpr):
        """Start S += Q K^T of the i-th piece of K. `first`: the first piece."""
        atom, pieces = cute.make_mma_atom(state.mma_qk.op), state.storage.pieces
        steps = self.tile.k_columns // 16
        pieces.barriers.wait_full(first + i)
        warpgroup.fence()
        stage = pieces.barriers.stage(first + i)
        for k in cutlass.range_constexpr(steps):
            atom.set(warpgroup.Field.ACCUMULATE, i > 0 or k > 0)
            rQ, rK = state.rQ[None, None, i * steps + k], state.rK[None, None, k, stage]
            cute.gemm(atom, state.acc_S, rQ, rK, state.acc_S)
        warpgroup.commit_group()

    @cute.jit
    def release_k(self, state: MmaState, first: Int32, i: cutlass.Constexpr):
        """Release the i-th piece of K, whose product has completed."""
        state.storage.pieces.release(first + i, 1)

    @cute.jit
    def start_pv(self, state: MmaState, first: Int32, chunk: cutlass.Constexpr, buffer: Int32):
        """Start O += P V of a chunk of keys, which is one piece for each warpgroup. `first`: the first piece of V."""
        atom, pieces = cute.make_mma_atom(state.mma_pv.op), state.storage.pieces
        steps, index = self.tile.v_keys // 16, first + chunk * WARPGROUPS + state.warpgroup
        pieces.barriers.wait_full(index)
        warpgroup.fence()
        stage = pieces.barriers.stage(index)
        atom.set(warpgroup.Field.ACCUMULATE, True)
        for k in cutlass.range_constexpr(steps):
            rP, rV = state.rP[None, None, chunk * steps + k, buffer], state.rV[None, None, 0, (k, stage)]
            cute.gemm(atom, state.acc_O, rP, rV, state.acc_O)
        warpgroup.commit_group()

    @cute.jit
    def release_v(self, state: MmaState, first: Int32, chunk: cutlass.Constexpr):
        """Release the piece of a chunk, whose product has completed."""
        state.storage.pieces.release(first + chunk * WARPGROUPS + state.warpgroup, WARPGROUPS)

    # ---- end of a tile

    @cute.jit
    def finish(self, p: Params, state: MmaState, tile: MmaTile):
        """Store the output and the LSE, after P V of the last block."""
        softmax, score_params = state.softmax, tile.score_params
        if tile.block_iter.num > 0:
            self.exchange(state, state.storage.sSum, softmax.row_sum, lambda a, b: a + b)
        lse, inverse = (cute.make_fragment_like(softmax.row_max) for _ in range(2))
        # All four threads of a row have its sum; `compute_lse` adds them up.
        if state.thread % THREADS_PER_ROW != 0:
            softmax.row_sum.fill(0.0)
        softmax.compute_lse(lse, inverse, score_params.sink, score_params.dropout_scale)
        first_row, seqlen = tile.mask.first_row, tile.seqlen
        rows_left = seqlen.q_len - first_row
        if state.warpgroup == 0:
            gLSE = cute.domain_offset((seqlen.q_row(first_row),), seqlen.slice_head(p.mLSE, tile.head))
            store_lse(lse, gLSE, state.tScS, state.thread, rows_left)
        if cutlass.const_expr(p.score_params.max_logit is not None):
            update_max_logit(p.score_params.max_logit, tile.head, softmax.max_logit(state.tScS, rows_left))
        softmax.scale_rows(as_mn(state.acc_O), inverse)
        self.store_output(p, state, tile, rows_left)

    @cute.jit
    def store_output(self, p: Params, state: MmaState, tile: MmaTile, rows_left: Int32):
        """Store the output of this warpgroup's columns, directly from registers."""
        seqlen, columns = tile.seqlen, self.tile.columns_pv
        gO = row_tile(
            seqlen.slice_head(p.mO, tile.head), seqlen.q_row(tile.mask.first_row), WARPGROUP_ROWS, self.tile.width_v
        )
        for half in cutlass.range_constexpr(WARPGROUPS):
            width = min(columns, self.static.width_v - half * columns)
            if cutlass.const_expr(width > 0):
                if state.warpgroup == half:
                    gHalf = cute.local_tile(gO, (WARPGROUP_ROWS, columns), (0, half))
                    store = DirectStore(state.mma_pv, rederived(state.thread), rows_left, width)
                    if cutlass.const_expr(self.static.out_fp32):
                        store.floats(state.acc_O, gHalf)
                    else:
                        rO = cute.make_fragment_like(state.acc_O, self.dtype)
                        convert(state.acc_O, rO)
                        store.rounded(rO, gHalf)
