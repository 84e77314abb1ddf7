"""Attention of few queries over a K/V cache, with mma.sync and cp.async, for Ampere, Ada and Hopper.

The rows of a query tile are the tokens of all query heads that share a K/V head (pack_gqa). Decoding reads every key
once, so the kernel is memory-bound, and mma.sync suffices on Hopper too: a wgmma has 64 rows, and one token with 4
query heads per K/V head would use only 4 of them.

The grid has a fixed number of CTAs, which divide the keys of all sequences equally (`device/scheduling/kv_splits.py`).
A CTA computes its splits one after the other:

    begin      start to load Q, append the new keys and values of the split to the cache, start to load the first blocks
    attend     rotate Q, and write it as the operand of the MMA; then each warp, over its own keys of every block:
                   S = Q K^T;  m' = max(m, rowmax S);  P = exp(scale (S - m'))
                   l = l exp(scale (m - m')) + rowsum P;  O = O exp(scale (m - m')) + P V
    finish     combine the warps; write out and LSE if the split has all keys of its query tile; else write m, l and O
               to the workspace, and the last CTAs to arrive merge the splits of the query tile

| file             | part                                        |
|------------------|---------------------------------------------|
| storage.py       | parameters, shared memory, accumulators     |
| queries.py       | load Q, rotate it, write the MMA operand    |
| append.py        | new keys and values to the cache            |
| attend.py        | the main loop of a warp                     |
| column_scores.py | S of head dims above 256                    |
| latent.py        | the main loop of a latent cache (MLA)       |
| latent_sm90*.py  | the same by wgmma, with roles of warpgroups |
| score_rows.py    | mask and score features                     |
| merge_splits.py  | combine warps, merge splits, write out, LSE |
"""

from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

import cutlass
import cutlass.cute as cute
from cuda.bindings.driver import CUstream
from cutlass import Float32, Int32

from cute_flash.device.memory.rotary import VECTOR, Rotary
from cute_flash.device.memory.tma import TmaTiles
from cute_flash.device.mma.warp_grid import WarpGrid
from cute_flash.device.scheduling.kv_splits import Division, KvSplits, Lengths, Split
from cute_flash.device.scores.score import Score
from cute_flash.device.softmax.softmax import LOG2_E
from cute_flash.kernels.common.kernel import Grid, Kernel
from cute_flash.kernels.decode import attend, latent, queries
from cute_flash.kernels.decode.append import append
from cute_flash.kernels.decode.merge_splits import finish
from cute_flash.kernels.decode.storage import Config, Output, Params, SharedStorage, Team, vector_at
from cute_flash.planning.decode import UNIT_KEYS
from cute_flash.planning.registry import KERNELS


class Decode(Kernel):
    """The decode kernel, and the kernel of `attn` with few queries, whose keys and values are the caches."""

    launch_options: ClassVar[dict[str, Any]] = {}

    def read_operands(self, operands: dict) -> SimpleNamespace:
        """The operands of "decode" and "decode_latent" by name, those of "fwd_split_kv" as such, (B, S, H, D).

        Operands that the kernel does not have are None.
        """
        args, all_names = super().read_operands(operands), (*KERNELS["decode"].names, *KERNELS["decode_latent"].names)
        if not self.static.heads_first:
            return SimpleNamespace(**(dict.fromkeys((*all_names, "cu_seqlens_k")) | vars(args)))

        def rows_first(mX: cute.Tensor) -> cute.Tensor:
            return cute.make_tensor(mX.iterator, cute.select(mX.layout, mode=[0, 2, 1, 3]))

        views = {"k_cache": rows_first(args.k), "v_cache": rows_first(args.v), "cache_seqlens": args.seqused_k}
        views |= {"q": rows_first(args.q), "out": rows_first(args.out)}
        return SimpleNamespace(**(dict.fromkeys(all_names) | vars(args) | views))

    @cute.jit
    def __call__(self, stream: CUstream, **operands):
        tile, static, args = self.tile, self.static, self.read_operands(operands)
        heads, heads_kv = args.q.shape[2], args.k_cache.shape[2]
        if cutlass.const_expr(static.is_latent):
            heads_kv = heads_kv * args.head_groups
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
            tokens=Int32(1) if static.has_query_tables else args.q.shape[1],
            new_tokens=new_tokens,
            appends=static.appends,
            window_left=args.window_left,
            chunk=args.attention_chunk,
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
            config=Config(static, tile, self.dtype),
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
            tiled_mma=self.make_mma(),
            head_groups=args.head_groups,
            k_tma=self.make_tma(args.k_cache),
        )
        options, grid = {"use_pdl": static.overlaps_previous, **self.launch_options}, Grid(args.num_ctas)
        if cutlass.const_expr(static.multicasts):
            # The CTAs of a cluster have the same interval of keys, and neighbouring heads.
            options["cluster"], grid = (1, 2, 1), Grid(args.num_ctas // args.heads_at_once, args.heads_at_once)
        self.launch(self.symbol(self.name), params, grid, tile.num_threads, stream, **options)

    def num_sequences(self, args: SimpleNamespace) -> Int32:
        if args.cu_seqlens_q is not None:
            return args.cu_seqlens_q.shape[0] - 1
        if self.static.has_query_tables:
            return args.page_table.shape[0]
        return args.q.shape[0]

    def make_tma(self, k_cache: cute.Tensor) -> TmaTiles | None:
        """A TMA descriptor of the keys, if the kernel has one."""
        return None

    @property
    def name(self) -> str:
        return "decode_latent" if self.static.is_latent else "decode"

    def make_mma(self) -> Any:
        return WarpGrid(self.dtype, 1, 1).mma()

    @property
    def loop(self) -> ModuleType:
        """The module of the main loop, with the functions `start` and `attend`."""
        return latent if self.static.is_latent else attend

    @property
    def size_name(self) -> str:
        return f"{super().size_name}x{self.tile.num_warps}s{self.tile.stages}"

    @cute.kernel
    def kernel(self, p: Params):
        cta, _, _ = cute.arch.block_idx()
        storage = SharedStorage.allocate(p.config, p.mQ.element_type)
        output = Output.allocate(p)
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
                    finish(p, storage, *storage.load_split(), output, cta)
            if exists:
                self.attend(p, storage, split, division, output)
                unit = storage.unit_end()
                if cutlass.const_expr(not self.tile.own_exchange):
                    finish(p, storage, *storage.load_split(), output, cta)
            is_open, is_first = exists, cutlass.Boolean(False)
        if cutlass.const_expr(self.static.ragged):
            thread, _, _ = cute.arch.thread_idx()
            self.zero_padding(p, Team(self.tile.num_threads), thread, cta)

    def read_params(self, p: Params, storage: SharedStorage):
        """Read kernel parameters, one of each 64 bytes, so that later reads hit the constant cache.

        The store keeps the compiler from removing the reads. The value is not used.
        """
        strides = (*p.mQ.stride[:3], *p.mK.stride[:3], *(() if p.mV is None else p.mV.stride[:3]))
        word = Int32(p.splits.num_sequences)
        for value in (p.mQ.iterator.toint(), *strides, p.partial_out.iterator.toint()):
            word ^= Int32(value)
        storage.merge_share[0] = word

    @cute.jit
    def begin(self, p: Params, storage: SharedStorage, unit: Int32, cta_unit_end: Int32, division: Division):
        """Begin the split at `unit`, if the CTA has one there; return whether it has one, and the split."""
        exists, split, sequence = cutlass.Boolean(False), Split.none(), Lengths.none()
        if unit < cta_unit_end:
            exists, split, sequence = p.splits.split(unit, cta_unit_end, division)
        if exists:
            thread, _, _ = cute.arch.thread_idx()
            # Load the queries first. Loaded after the blocks, they would arrive after them.
            queries.load(p, storage, split, sequence, thread)
            if cutlass.const_expr(self.static.appends):
                append(p, Team(self.tile.num_threads), split, sequence, thread)
            self.loop.start(p, storage, split, sequence, thread)
        return exists, split

    @cute.jit
    def attend(self, p: Params, storage: SharedStorage, split: Split, division: Division, output: Output):
        """Compute the output of each warp over its keys of the split."""
        thread, _, _ = cute.arch.thread_idx()
        sequence = p.splits.sequence(split.batch)
        if thread == 0:
            storage.store_split(split, p.splits.ctas(split, division))
        queries.stage(p, storage, split, sequence, thread)
        self.loop.attend(p, storage, split, sequence, output, thread)

    @cute.jit
    def zero_padding(self, p: Params, team: Team, thread: Int32, cta: Int32):
        """Set the output of tokens after the last sequence to 0, and their LSE to -inf."""
        _, num_tokens, heads, _ = p.mO.shape
        first = p.splits.first_token(p.splits.num_sequences)
        ctas_x, ctas_y, _ = cute.arch.grid_dim()
        num_ctas = ctas_x * ctas_y if self.static.multicasts else ctas_x
        zeros = cute.make_rmem_tensor(VECTOR, p.mO.element_type)
        zeros.fill(0.0)
        vectors = self.static.width_v // VECTOR
        for token in cutlass.range(first + cta, num_tokens, num_ctas, unroll=1):
            for index in cutlass.range(thread, heads * vectors, team.num_threads, unroll=1):
                head, vector = index // vectors, index % vectors
                row = p.mO[0, token, head, None]
                target = vector_at(row, vector * VECTOR, VECTOR)
                cute.autovec_copy(zeros, target)
                if vector == 0:
                    p.mLSE[0, head, token] = -Float32.inf
