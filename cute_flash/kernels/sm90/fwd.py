"""Forward attention with TMA, wgmma and specialised warps: Hopper.

For each tile of query rows, over blocks j of keys, those that a right bound cuts last:

    S  = Q Kj^T                          wgmma, both operands in shared memory; fp32 accumulators
    S  = -inf outside the band           only in blocks that the band cuts
    m' = max(m, rowmax S);  P = exp(scale (S - m'))
    l  = l exp(scale (m - m')) + rowsum P
    O  = O exp(scale (m - m')) + P Vj    P stays in registers: its accumulator layout is the operand layout
    out = O / l,  LSE = scale m + log l

Where they are asked for, softcap, ALiBi, a bias and a user's functions change S before the mask or hide more
of it, dropout changes P after its sums were taken, and a sink l and the LSE at the end (`extras`). A block
map names the blocks of keys, the full ones first.

Within a warpgroup, Q Kj^T of a block and P Vj+1 of the block before run while the softmax of neither waits.

| warpgroup | warps | role                                                                                  |
|-----------|-------|---------------------------------------------------------------------------------------|
| 0         | 0, 1  | load: TMA of Q and K, and of V, as far ahead as the rings allow, across tiles         |
| 0         | 2, 3  | store: TMA of the output tiles; load: TMA of a bias                                   |
| 1 ...     | all   | mma: 64 rows of the tile each                                                         |
| the last  | all   | draw: where there is dropout, masks of P for the block after (`fwd_sm90_draws`)       |

| shared memory | elements                     | life                                                        |
|---------------|------------------------------|-------------------------------------------------------------|
| sQ            | q_stages x tile_m x tile_d   | one tile; O leaves through it at the end                    |
| sK, sV        | stages x tile_n x tile_d     | one block each                                              |
| drawn, bias   | their stages x tile_m x tile_n | one block; with dropout, with a bias only                 |
"""

import cutlass
import cutlass.cute as cute
from cuda.bindings.driver import CUstream
from cutlass import Float32, Int32, Int64
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, warp, warpgroup

from cute_flash.device.band import Band
from cute_flash.device.barriers import WARPGROUP_THREADS, Turns
from cute_flash.device.block_iterator import OutwardBlockIterator
from cute_flash.device.copies import row_tile
from cute_flash.device.drawn import Drawn, NotDrawn
from cute_flash.device.epilogue import raise_max_logit, store_floats, store_lse, store_rounded
from cute_flash.device.mask import Mask
from cute_flash.device.ptx import rederived
from cute_flash.device.ragged import RaggedTiles
from cute_flash.device.scheduler import TileOrder, TileQueue
from cute_flash.device.sequence import Sequence, WorkList, unpacked
from cute_flash.device.softmax import EXACT_KEYS, Softmax
from cute_flash.device.tma import TmaTiles
from cute_flash.device.views import as_mn, as_operand_a
from cute_flash.device.wgmma import convert, make_mma, start_gemm
from cute_flash.kernels.common.params import ScoreParams
from cute_flash.kernels.sm90 import fwd_producer as producer
from cute_flash.kernels.sm90 import fwd_scores as scores
from cute_flash.kernels.sm90.fwd_scores import Main, Tile
from cute_flash.kernels.sm90.fwd_storage import NO_TILE, Params, Shapes, Shared
from cute_flash.planning.tiles.common import WARPGROUP_ROWS
from cute_flash.planning.tiles.fwd_sm90 import FwdTileSm90
from cute_flash.spec.problem import Static

LOAD_QK_WARP, LOAD_V_WARP, STORE_WARP, LOAD_BIAS_WARP = range(4)
# Named barrier 0 is the one of all threads.
FIRST_TURN = 1
# Whether a block is cut is asked of every one.
MAYBE = "maybe"


class FwdSm90:
    def __init__(self, static: Static, tile: FwdTileSm90):
        self.static = static
        self.tile = tile
        self.shapes = Shapes(static, tile)

    @property
    def name(self) -> str:
        """The symbol a profiler shows."""
        t, s = self.tile, self.static
        mask = ("l" if s.has_left else "") + ("r" if s.has_right else "") or "full"
        study = "" if t.layout == "swizzled" else f"_{t.layout}"
        tags = "".join(f"_{name}" for name in s.tags)
        return f"cute_flash_fwd_sm90_d{s.widths}_{s.dtype}_{mask}_{t.tile_m}x{t.tile_n}{tags}{study}"

    @cute.jit
    def __call__(
        self,
        q: cute.Tensor,
        k: cute.Tensor,
        v: cute.Tensor,
        out: cute.Tensor,
        lse: cute.Tensor,
        scale: Float32,
        window_left: Int32,
        window_right: Int32,
        heads_per_l2_group: Int32,
        num_ctas: Int32,
        seqlen_q: Int32,
        tile_counter: Int64,
        softcap: Float32 | None,
        alibi_slopes: cute.Tensor | None,
        sinks: cute.Tensor | None,
        dropout_threshold: Int32 | None,
        dropout_scale: Float32 | None,
        rng: cute.Tensor | None,
        max_logit: cute.Tensor | None,
        bias: cute.Tensor | None,
        captures: list | None,
        scalars: list | None,
        block_indices: list | None,
        q_tile_list: cute.Tensor | None,
        stream: CUstream,
    ):
        """`seqlen_q`: rows of a head, where those of several heads are packed into the rows of q."""
        tile, static, shapes = self.tile, self.static, self.shapes
        score_params = ScoreParams.of(
            static, scale, softcap=softcap, alibi_slopes=alibi_slopes, sinks=sinks,
            dropout_threshold=dropout_threshold, dropout_scale=dropout_scale, rng=rng, max_logit=max_logit,
            bias=bias, captures=captures, scalars=scalars, block_indices=block_indices,
        )  # fmt: skip
        load, store = cpasync.CopyBulkTensorTileG2SOp(), cpasync.CopyBulkTensorTileS2GOp()
        tma, work = TmaTiles, None
        if cutlass.const_expr(static.varlen):
            q, k, v, out, lse = (unpacked(x) for x in (q, k, v, out, lse))
            tma, work = RaggedTiles, WorkList(q_tile_list, q.shape[1], heads_per_l2_group)
        batch, heads, rows, _ = q.shape
        num_m_blocks = cute.ceil_div(rows, tile.tile_m)
        shares_batch = score_params.shares_batch()
        params = Params(
            shapes=shapes,
            q=tma.of(load, q, shapes.q),
            k=tma.of(load, k, shapes.k),
            v=tma.of(load, v, shapes.v),
            o=None if static.out_fp32 else tma.of(store, out, shapes.o),
            bias=tma.of(load, bias, shapes.bias) if tile.bias_stages else None,
            mO=out,
            mLSE=lse,
            seqlen_q=rows,
            positions=seqlen_q,
            seqlen_k=k.shape[2],
            heads_per_kv=heads // k.shape[1],
            scale_log2=score_params.softmax_scale(scale),
            band=Band(window_left if static.has_left else None, window_right if static.has_right else None),
            order=TileOrder(num_m_blocks, heads, batch, heads_per_l2_group, static.has_right, shares_batch),
            queue=TileQueue(num_m_blocks * heads * batch, tile_counter, shapes.draws_tiles),
            work=work,
            mma_qk=make_mma(shapes.dtype, tile.tile_n, False, OperandMajorMode.K, OperandMajorMode.K),
            mma_pv=make_mma(shapes.dtype, tile.columns_pv, True, OperandMajorMode.K, OperandMajorMode.MN),
            score_params=score_params,
        )
        self.kernel.set_name_prefix(self.name, remove_cutlass_symbol=True, keep_mangled_name=False)
        self.kernel(params).launch(
            grid=(num_ctas, 1, 1),
            block=(tile.num_threads, 1, 1),
            stream=stream,
            min_blocks_per_mp=1,
            use_pdl=static.varlen,
        )

    @cute.kernel
    def kernel(self, p: Params):
        thread, _, _ = cute.arch.thread_idx()
        warp_index = cute.arch.make_warp_uniform(thread // 32)
        shared = Shared.allocate(self.shapes)
        if warp_index == 0:
            with cute.arch.elect_one():
                shared.init_barriers()
        cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()
        if cutlass.const_expr(self.static.varlen):
            # Until the list of tiles is complete.
            cute.arch.griddepcontrol_wait()

        if warp_index < 4:
            cute.arch.setmaxregister_decrease(self.tile.registers[0])
            if warp_index == LOAD_QK_WARP:
                producer.load_qk(p, shared)
            if warp_index == LOAD_V_WARP:
                producer.load_v(p, shared)
            if cutlass.const_expr(self.tile.q_stages > 1):
                if warp_index == STORE_WARP:
                    producer.store(p, shared)
            if cutlass.const_expr(self.tile.bias_stages > 0):
                if warp_index == LOAD_BIAS_WARP:
                    producer.load_bias(p, shared)
        else:
            if cutlass.const_expr(self.tile.dropout_producer):
                if warp_index >= 4 * (1 + self.tile.num_warpgroups):
                    producer.produce_dropout(p, shared, warp_index % 4, thread % 32)
                else:
                    self.mma(p, shared, warp_index, thread)
            else:
                self.mma(p, shared, warp_index, thread)

    @cute.jit
    def mma(self, p: Params, shared: Shared, warp_index: Int32, thread: Int32):
        cute.arch.setmaxregister_increase(self.tile.registers[1])
        warpgroup_index, thread = warp_index // 4 - 1, thread % WARPGROUP_THREADS
        main = self._main(p, shared, warpgroup_index, thread)
        main.turns.begin()
        count, fill = Int32(0), Int32(0)
        is_open = cutlass.Boolean(False)  # the first block of the tile has been done beside the tile before
        shared.q.wait_full(count)
        m_block = shared.m_block(count)
        while m_block != NO_TILE:
            tile = self._tile(p, main, m_block, count, fill)
            if not is_open:
                main.acc_O.fill(0.0)
                main.softmax.restart()
                if tile.has_blocks():
                    self.first_block(main, tile)
            self.further_blocks(main, tile)

            # With one stage the next Q comes only after this output has left.
            if cutlass.const_expr(self.tile.q_stages == 1):
                self.last_block(p, main, tile)
            fill += tile.block_iter.num
            count += 1
            shared.q.wait_full(count)
            m_block = shared.m_block(count)
            if cutlass.const_expr(self.tile.q_stages > 1 and not self.shapes.overlaps_tiles):
                self.last_block(p, main, tile)
            elif cutlass.const_expr(self.tile.q_stages > 1):
                following = self._tile(p, main, m_block, count, fill)
                is_open = m_block != NO_TILE and tile.has_blocks() and following.has_blocks()
                if is_open:
                    self.last_and_first_block(p, main, tile, following)
                else:
                    self.last_block(p, main, tile)
        # The storing warp waits for outputs: the last it hears is that there are no more.
        if cutlass.const_expr(self.tile.q_stages > 1):
            cute.arch.mbarrier_arrive(shared.output_barrier(warpgroup_index, count))

    def _tile(self, p: Params, main: Main, m_block: Int32, count: Int32, fill: Int32) -> Tile:
        first_row = m_block * self.tile.tile_m + main.warpgroup * WARPGROUP_ROWS
        head, span = main.shared.head(count), p.sequence(main.shared.sequence(count))
        lengths = p.positions_of(span), span.k_len
        mask = Mask(p.band, *lengths, first_row, main.tScS, self.static.pack_gqa)
        block_iter = p.block_iterator(m_block, head, span, main.shared.counts(count))
        return Tile(count, fill, head, span, mask, block_iter, p.score_params.of_head(head, span.batch))

    def _span(self, p: Params, main: Main, tile: Tile) -> Sequence:
        """At the end of a tile: that of a packed batch is read again, not kept in registers until then."""
        return tile.span if p.work is None else p.sequence(main.shared.sequence(tile.count))

    def _main(self, p: Params, shared: Shared, warpgroup_index: Int32, thread: Int32) -> Main:
        tile = self.tile
        qk, pv = p.mma_qk.get_slice(0), p.mma_pv.get_slice(0)
        sQ = shared.sQ[None, None, (warpgroup_index, None)]
        sVt = cute.make_tensor(shared.sV.iterator, cute.select(shared.sV.layout, mode=[1, 0, 2]))
        acc_O = cute.make_rmem_tensor(pv.partition_shape_C((WARPGROUP_ROWS, tile.width_v)), Float32)
        rQ = qk.make_fragment_A(qk.partition_A(sQ))
        coords = cute.make_identity_tensor((WARPGROUP_ROWS, tile.tile_n))
        wants_largest = p.score_params.max_logit is not None
        is_exact = self.static.batch_invariant
        softmax = Softmax.start(as_mn(acc_O), p.scale_log2, wants_largest, is_exact)
        return Main(
            warpgroup_index,
            thread,
            shared,
            p.mma_qk,
            p.mma_pv,
            rQ,
            qk.make_fragment_B(qk.partition_B(shared.sK)),
            pv.make_fragment_B(pv.partition_B(sVt)),
            cute.make_rmem_tensor(self._shape_S(p.mma_qk), self.shapes.dtype),
            acc_O,
            softmax,
            cute.make_fragment_like(softmax.row_max),
            cute.make_fragment_like(softmax.row_max),
            Turns(FIRST_TURN, tile.num_warpgroups if tile.ping_pong else 1, warpgroup_index),
            p.mma_qk.get_slice(thread).partition_C(coords),
            cute.make_rmem_tensor(1, Float32) if wants_largest else None,
        )

    def _shape_S(self, mma_qk: cute.TiledMma):
        return mma_qk.get_slice(0).partition_shape_C((WARPGROUP_ROWS, self.tile.tile_n))

    @cute.jit
    def first_block(self, main: Main, tile: Tile):
        """S = Q K^T;  m = rowmax S;  P = exp(scale (S - m));  l = rowsum P"""
        main.shared.k.wait_full(tile.fill)
        first = main.shared.first_block(tile.block_iter, tile.fill)
        bias = scores.load_bias(main, tile, tile.fill, first * self.tile.tile_n, False)
        main.turns.wait()
        acc_S = self.start_qk(main, tile.count, tile.fill)
        main.turns.pass_on()
        warpgroup.wait_group(0)
        main.shared.k.release(tile.fill)
        if tile.block_iter.num == 1:
            self.release_q(main, tile)
        self.first_softmax(main, tile, acc_S, (first, bias))
        self.first_round(main, tile, acc_S)

    @cute.jit
    def first_softmax(self, main: Main, tile: Tile, acc_S: cute.Tensor, at: tuple):
        """`at`: the block, and its bias."""
        softmax, (first, bias) = main.softmax, at
        looks_near = not (self.static.has_mods or self.static.batch_invariant)
        scores.transform(tile, acc_S, first * self.tile.tile_n, bias, looks_near)
        scores.hide(tile, acc_S, first, first * self.tile.tile_n, tile.block_iter.starts_masked())
        block_max = cute.make_fragment_like(softmax.row_max)
        softmax.block_max(as_mn(acc_S), block_max)
        softmax.raise_max(block_max)
        softmax.exponentiate(as_mn(acc_S))

    @cute.jit
    def first_round(self, main: Main, tile: Tile, acc_P: cute.Tensor):
        self.drawn(main).wait(main.warpgroup, tile.fill)
        self.round(main, acc_P, range(self.shapes.steps), tile.fill)
        self.drawn(main).release(main.warpgroup, tile.fill)

    @cute.jit
    def round(self, main: Main, acc_P: cute.Tensor, steps: cutlass.Constexpr, fill: Int32):
        """P in the inputs' type, and 0 where it is dropped; the sums are taken before."""
        convert(acc_P, main.rP, steps)
        packed = cute.recast_tensor(main.rP, Int32)
        self.drawn(main).apply(packed, steps, main.warpgroup, main.thread, fill)

    def drawn(self, main: Main) -> Drawn | NotDrawn:
        return main.shared.drawn if self.tile.dropout_producer else NotDrawn()

    @cute.jit
    def further_blocks(self, main: Main, tile: Tile):
        """Blocks from the second: cut, whole, cut."""
        block_iter, static = tile.block_iter, self.static
        # Where every maximum is asked for, sums say nothing more.
        may_check = self.shapes.may_check_sums
        speculative_max = self.tile.speculative_max and may_check
        # A cap has two ways, of which one copy is enough.
        is_capped = self.shapes.has_softcap and static.is_bounded
        if cutlass.const_expr((self.shapes.has_alibi and isinstance(block_iter, OutwardBlockIterator)) or is_capped):
            for fill in cutlass.range(tile.fill + 1, tile.fill + block_iter.num, unroll=1):
                self.one_block(main, tile, fill, MAYBE, speculative_max)
        else:
            full_begin = tile.fill + cutlass.max(block_iter.full_begin, 1)
            full_end = tile.fill + cutlass.max(block_iter.full_end, 1)
            begins_cut, ends_cut = self.shapes.cut_loops
            if cutlass.const_expr(begins_cut):
                for fill in cutlass.range(tile.fill + 1, full_begin, unroll=1):
                    self.one_block(main, tile, fill, True, False)
            for fill in cutlass.range(full_begin, full_end, unroll=1):
                self.one_block(main, tile, fill, False, speculative_max)
            if cutlass.const_expr(ends_cut):
                for fill in cutlass.range(full_end, tile.fill + block_iter.num, unroll=1):
                    self.one_block(main, tile, fill, True, self.tile.speculative_max_masked and may_check)

    @cute.jit
    def one_block(
        self, main: Main, tile: Tile, fill: Int32, masked: cutlass.Constexpr, speculative_max: cutlass.Constexpr
    ):
        shared, softmax = main.shared, main.softmax
        i = fill - tile.fill
        n_block = bias = None
        # S = Q K^T, and behind it O += P V of the block before
        shared.k.wait_full(fill)
        if cutlass.const_expr(tile.of_head.mods is not None):
            n_block = shared.block(tile.block_iter, fill, i)
            bias = scores.load_bias(main, tile, fill, n_block * self.tile.tile_n, masked is False)
        main.turns.wait()
        acc_S = self.start_qk(main, tile.count, fill)
        shared.v.wait_full(fill - 1)
        self.start_pv(main, fill - 1)
        main.turns.pass_on()
        if cutlass.const_expr(n_block is None):
            n_block = tile.block_iter.block(i)
        warpgroup.wait_group(1)
        shared.k.release(fill)
        reference, column = scores.reference_of(tile, softmax), n_block * self.tile.tile_n
        how = speculative_max, masked
        formula = scores.transform_from(self.shapes, softmax, tile, acc_S, (column, bias), how)
        is_relative = reference is not None and formula is None
        # A user's formula hides as well.
        if cutlass.const_expr(formula is None or tile.of_head.mods is None):
            scores.hide(tile, acc_S, n_block, column, tile.block_iter.is_masked(i) if masked == MAYBE else masked)

        # m' = max(m, rowmax S), before the exponentials or, where sums are checked, after them
        block_max, block_sum = (cute.make_fragment_like(softmax.row_max) for _ in range(2))
        block_sum.fill(0.0)
        grew = cutlass.Boolean(False)
        if cutlass.const_expr(not speculative_max):
            grew = softmax.is_outgrown(as_mn(acc_S), block_max, self.keys_seen(i), reference)
            if grew:
                softmax.raise_max(block_max)
                softmax.follow(as_mn(acc_S), reference)

        # P = exp(scale (S - m')): a few columns of it before O of the block before must be complete
        acc_P = cute.make_fragment_like(acc_S)
        views = as_operand_a(acc_S), as_operand_a(acc_P), block_sum
        early, late = range(self.shapes.early_steps), range(self.shapes.early_steps, self.shapes.steps)
        # A row may have seen no score but -inf yet; where sums are checked, that shows there.
        maybe_empty = not speculative_max
        scores.exponentiate(softmax, views, early, formula, (maybe_empty, is_relative))
        self.look_ahead(main, tile, fill + 1, block_sum)
        self.drawn(main).wait(main.warpgroup, fill)
        warpgroup.wait_group(0)
        shared.v.release(fill - 1)
        self.round(main, acc_P, early, fill)
        scores.exponentiate(softmax, views, late, formula, (maybe_empty, is_relative))
        self.round(main, acc_P, late, fill)

        if cutlass.const_expr(speculative_max):
            # P was made with m. Only if its sums hint that m was outgrown, and it was, is it made once more.
            if softmax.is_suspicious(block_sum, is_relative):
                scores.block_max(softmax, acc_S, block_max, formula, reference)
                if softmax.is_outweighed(block_max, block_sum):
                    softmax.raise_max(block_max, as_mn(main.acc_O))
                    if cutlass.const_expr(is_relative):
                        softmax.follow(as_mn(acc_S), reference)
                    block_sum.fill(0.0)
                    everything = range(self.shapes.steps)
                    scores.exponentiate(softmax, views, everything, formula, (True, is_relative))
                    self.round(main, acc_P, everything, fill)
        if cutlass.const_expr(formula is not None):
            formula.release()
        self.drawn(main).release(main.warpgroup, fill)
        # l = l alpha + rowsum P;  O = O alpha
        softmax.add_sums(block_sum)
        if grew:
            softmax.rescale(as_mn(main.acc_O))

    def keys_seen(self, blocks_seen: Int32) -> Int32:
        """With blocks so wide that only part of the second was to be exact, the first alone is."""
        tile_n = self.tile.tile_n
        return Int32(EXACT_KEYS) if 2 * tile_n > EXACT_KEYS else blocks_seen * tile_n

    @cute.jit
    def look_ahead(self, main: Main, tile: Tile, following: Int32, block_sum: cute.Tensor):
        """Wait for the next block's K, or give Q back after the last.

        The branch asks for the sums of the early exponentials, and so keeps ptxas from moving the wait for O,
        which follows, up before them. It is always taken but for NaN, where K is waited for later; with a
        constant to compare, ptxas would know that.
        """
        if cute.arch.vote_any_sync(block_sum[0] + block_sum[1] >= -main.softmax.scale_log2):
            if following < tile.fill + tile.block_iter.num:
                main.shared.k.wait_full(following)
        if cutlass.const_expr(self.tile.q_stages == 1):
            if following == tile.fill + tile.block_iter.num:
                self.release_q(main, tile)

    @cute.jit
    def last_block(self, p: Params, main: Main, tile: Tile):
        """O += P V of the last block; the output."""
        if tile.has_blocks():
            last = tile.fill + tile.block_iter.num - 1
            main.shared.v.wait_full(last)
            self.start_pv(main, last)
            warpgroup.wait_group(0)
            main.shared.v.release(last)
        else:
            self.release_q(main, tile)
        self.close(p, main, tile)
        self.write_lse(p, main, tile)
        if cutlass.const_expr(self.tile.q_stages > 1):
            self.hand_over(p, main, tile)
        else:
            self.store_directly(p, main, tile)

    @cute.jit
    def last_and_first_block(self, p: Params, main: Main, tile: Tile, following: Tile):
        """S = Q K^T of the following tile's first block beside O += P V of this one's last; the output."""
        shared = main.shared
        last = tile.fill + tile.block_iter.num - 1
        shared.k.wait_full(following.fill)
        first = shared.first_block(following.block_iter, following.fill)
        bias = scores.load_bias(main, following, following.fill, first * self.tile.tile_n, False)
        main.turns.wait()
        acc_S = self.start_qk(main, following.count, following.fill)
        shared.v.wait_full(last)
        self.start_pv(main, last)
        main.turns.pass_on()
        self.close(p, main, tile)
        main.softmax.restart()
        warpgroup.wait_group(1)
        shared.k.release(following.fill)
        self.first_softmax(main, following, acc_S, (first, bias))
        # Its branches keep ptxas from moving the wait up before the exponentials.
        self.write_lse(p, main, tile)
        warpgroup.wait_group(0)
        shared.v.release(last)
        self.hand_over(p, main, tile)
        main.acc_O.fill(0.0)
        self.first_round(main, following, acc_S)

    @cute.jit
    def close(self, p: Params, main: Main, tile: Tile):
        """What remains of the statistics of a tile when those of the next begin."""
        main.softmax.close(main.lse, main.inverse, tile.of_head.sink, tile.of_head.dropout_scale)
        if cutlass.const_expr(main.largest is not None):
            main.largest[0] = main.softmax.largest_of(main.tScS, tile.span.q_len - tile.mask.first_row)

    @cute.jit
    def write_lse(self, p: Params, main: Main, tile: Tile):
        first_row, span = tile.mask.first_row, self._span(p, main, tile)
        gLSE = cute.domain_offset((span.q_row(first_row),), span.of(p.mLSE, tile.head))
        store_lse(main.lse, gLSE, main.tScS, main.thread, span.q_len - first_row)
        if cutlass.const_expr(main.largest is not None):
            raise_max_logit(p.score_params.max_logit, tile.head, main.largest[0])

    @cute.jit
    def release_q(self, main: Main, tile: Tile):
        """Q has been used for the last time. With two stages the output still leaves through it."""
        if cutlass.const_expr(self.tile.q_stages == 1):
            main.shared.release_q(tile.count)

    @cute.jit
    def output(self, main: Main) -> cute.Tensor:
        """O / l in the output's type."""
        main.softmax.scale_rows(as_mn(main.acc_O), main.inverse)
        rO = cute.make_fragment_like(main.acc_O, self.shapes.dtype)
        convert(main.acc_O, rO, range(self.tile.width_v // 16))
        return rO

    def thread(self, main: Main) -> Int32:
        """At the end of a tile. Beside other work no register is left to keep addresses over its blocks."""
        return main.thread if self.static.base_cost == 0 else rederived(main.thread)

    @cute.jit
    def store_directly(self, p: Params, main: Main, tile: Tile):
        """O / l -> global memory; the stage of Q is being filled for the next tile."""
        first_row, span = tile.mask.first_row, self._span(p, main, tile)
        gO = span.of(p.mO, tile.head)
        gO = row_tile(gO, span.q_row(first_row), WARPGROUP_ROWS, self.tile.width_v)
        if cutlass.const_expr(self.static.out_fp32):
            main.softmax.scale_rows(as_mn(main.acc_O), main.inverse)
            where = (self.thread(main), span.q_len - first_row)
            store_floats(main.acc_O, gO, main.mma_pv, where, self.static.width_v)
        else:
            rO = self.output(main)
            where = (self.thread(main), span.q_len - first_row)
            store_rounded(rO, gO, main.mma_pv, where, self.static.width_v)

    @cute.jit
    def hand_over(self, p: Params, main: Main, tile: Tile):
        """O / l -> the stage of Q in the output's type, visible to the copy engine; in fp32 it has no room
        there, and only the stage is given back.
        """
        if cutlass.const_expr(self.static.out_fp32):
            self.store_directly(p, main, tile)
        else:
            self.stage_output(main, tile)
        cute.arch.mbarrier_arrive(main.shared.output_barrier(main.warpgroup, tile.count))

    @cute.jit
    def stage_output(self, main: Main, tile: Tile):
        rO = self.output(main)
        sO = main.shared.output_stage(main.warpgroup, tile.count)
        atom = cute.make_copy_atom(warp.StMatrix8x8x16bOp(transpose=False, num_matrices=4), self.shapes.dtype)
        copy = cute.make_tiled_copy_C(atom, main.mma_pv).get_slice(self.thread(main))
        cute.copy(atom, copy.retile(rO), copy.partition_D(sO))
        cute.arch.fence_proxy("async.shared", space="cta")

    @cute.jit
    def start_qk(self, main: Main, q_fill: Int32, fill: Int32):
        rQ = main.rQ[None, None, None, main.shared.q.stage(q_fill)]
        rK = main.rK[None, None, None, main.shared.k.stage(fill)]
        # New for every block: nothing of it lives on into the next.
        acc_S = cute.make_rmem_tensor(self._shape_S(main.mma_qk), Float32)
        start_gemm(main.mma_qk, acc_S, rQ, rK, False)
        return acc_S

    @cute.jit
    def start_pv(self, main: Main, fill: Int32):
        rV = main.rV[None, None, None, main.shared.v.stage(fill)]
        start_gemm(main.mma_pv, main.acc_O, as_operand_a(main.rP), rV, True)
