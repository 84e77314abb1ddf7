"""A bias and its gradient in the backward.

| class          | load and store                                                                         |
|----------------|----------------------------------------------------------------------------------------|
| `BwdBlockBias` | every thread moves its own elements between global memory and registers                |
| `BwdSmemBias`  | TMA moves tiles between global and shared memory; threads read and write them          |
|                | with ldmatrix and stmatrix. If rows of the accumulators are keys, reads are transposed |
|                | and the kernel stores its own dS tiles as the gradient                                 |

`BwdBlockBias`: if rows of a block are keys, neighbouring elements of a thread are two queries of one key, which are not
neighbours in memory. Vector accesses are then impossible. One access of a warp covers eight neighbouring keys of four
queries: half of a 32-byte sector of 16-bit elements per query. The next access covers the other half.
"""

from dataclasses import dataclass, replace
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64
from cutlass.memory import SmemAllocator

from cute_flash.device.gradients.gradient_sums import GradientSums
from cute_flash.device.memory.stmatrix import lane_offset, load_step, load_two_tiles, store_steps
from cute_flash.device.memory.tma import TmaTiles
from cute_flash.device.ptx import add_if, rederived, store_if
from cute_flash.device.scheduling.pipeline import WARPGROUP_THREADS, Pipeline
from cute_flash.device.scores.bias_stages import BiasStages
from cute_flash.device.scores.position import BwdBlockPosition, ScoreBlock
from cute_flash.score_mod.graph import COLUMN, ROW
from cute_flash.smem.tile import SmemTile


class ThreadSize(NamedTuple):
    """The rows and the columns of a thread in a block."""

    rows: int
    columns: int


class Lengths(NamedTuple):
    """The lengths of a sequence."""

    queries: Int32
    keys: Int32


@dataclass(frozen=True)
class BwdBiasParams:
    """The bias of a launch, and its gradient."""

    mBias: cute.Tensor  # (B, H, Sq, Sk), with a stride of 0 where it broadcasts
    mdBias: cute.Tensor | None  # (B, H, Sq or 1, Sk or 1), in the gradient's dtype, or fp32 if it `accumulates`
    varies: cutlass.Constexpr  # bits of ROW (queries) and COLUMN (keys): dimensions in which it does not broadcast
    accumulates: cutlass.Constexpr  # several scores add to one entry of the gradient
    tma_stores_gradient: cutlass.Constexpr  # TMA stores dS as the gradient; otherwise threads store or add it

    def block(self, position: BwdBlockPosition, size: ThreadSize, lengths: Lengths) -> "BwdBlockBias":
        """This thread's bias in the block at `position`."""
        rows, columns = size
        of_rows, of_columns = (COLUMN, ROW) if position.is_transposed else (ROW, COLUMN)
        shape = rows if self.varies & of_rows else 1, columns if self.varies & of_columns else 1
        rBias = cute.make_rmem_tensor(shape, self.mBias.element_type)
        return BwdBlockBias(self, position, lengths, rBias, size)


@dataclass(frozen=True)
class BwdBlockBias:
    """This thread's bias elements of one block."""

    params: BwdBiasParams
    position: BwdBlockPosition
    lengths: Lengths
    rBias: cute.Tensor  # (rows, columns), of size 1 in a dimension in which the bias broadcasts
    size: cutlass.Constexpr  # ThreadSize

    def at(self, r: int, c: int) -> Float32:
        rows, columns = self.rBias.shape
        return Float32(self.rBias[r if rows > 1 else 0, c if columns > 1 else 0])

    def moved(self, position: BwdBlockPosition) -> "BwdBlockBias":
        """The same bias at an equal position, to load it again."""
        return self.params.block(position, self.size, self.lengths)

    def load(self) -> None:
        """Start the loads; positions past the end load the last entry."""
        for c in range(self.rBias.shape[1]):
            self.load_column(c)

    def load_column(self, c: int) -> None:
        if c < self.rBias.shape[1]:
            gBias = self.params.mBias[self.position.batch, self.position.head, None, None]
            dtype, width = gBias.element_type, gBias.element_type.width // 8
            # The row stride fits in 32 bits (`spec.features.MAX_BIAS_ROW_BYTES`), so an address takes one product.
            row, key = Int64(Int32(gBias.stride[0] * width)), gBias.stride[1] * width
            for r in range(self.rBias.shape[0]):
                first = gBias.iterator.toint() + Int64(self._key(r, c)) * key
                address = first + Int64(self._query(r, c)) * row
                pointer = cute.make_ptr(dtype, address, cutlass.AddressSpace.gmem, assumed_align=width)
                self.rBias[r, c] = pointer.load()

    def _query(self, r: int, c: int) -> Int32:
        return cutlass.min(self.position.query_at(r, c), self.lengths.queries - 1)

    def _key(self, r: int, c: int) -> Int32:
        return cutlass.min(self.position.key_at(r, c), self.lengths.keys - 1)

    def add_gradient(self, dS: Float32, r: int, c: int, sums: GradientSums) -> None:
        """Add dS to the gradient, if the bias has one and TMA does not store it."""
        params, position = self.params, self.position
        if params.mdBias is None or params.tma_stores_gradient:
            return
        gdBias = params.mdBias[position.batch, position.head, None, None]
        varies = params.varies & (ROW | COLUMN)
        if params.accumulates and varies != ROW | COLUMN:
            # Scores that share an entry use the same coordinate: 0 in a dimension in which the bias broadcasts.
            coord = self._query(r, c) if varies & ROW else 0, self._key(r, c) if varies & COLUMN else 0
            sums.add("bias", varies, r, dS, gdBias, coord)
        else:
            self._store(gdBias, dS, r, c)

    def _store(self, gdBias: cute.Tensor, dS: Float32, r: int, c: int) -> None:
        query, key = self.position.query_at(r, c), self.position.key_at(r, c)
        exists = (query < self.lengths.queries) & (key < self.lengths.keys)
        target = gdBias.iterator + cute.crd2idx((query, key), gdBias.layout)
        if self.params.accumulates:
            add_if(Int32(exists), target.toint(), dS)
        else:
            store_if(Int32(exists), target.toint(), dS, gdBias.element_type)


@dataclass(frozen=True)
class BwdBiasPipeline:
    """Bias tiles in shared memory, one with the keys of each warpgroup.

    Iterations count m_blocks of all tiles of the CTA.

    In the kernel for wide heads, if TMA also stores the gradient, the warpgroup overwrites the bias in its stage with
    the gradient and signals this (`gradient_ready`). A producer warp then stores the stage and releases it.
    """

    stages: BiasStages
    gradient_ready: Pipeline | None  # `full`: the gradient is in the stage; None: stages hold no gradient
    is_transposed: cutlass.Constexpr  # rows of the accumulators are keys, not queries

    @staticmethod
    def allocate(
        smem: SmemAllocator,
        dtype: type,
        tile: SmemTile,
        num_warpgroups: int,
        num: int,
        keeps_gradient: bool,
        is_transposed: bool,
    ) -> "BwdBiasPipeline":
        """Allocate stages and barriers.

        `num`: stages of a warpgroup. `keeps_gradient`: stages also hold the gradient. `is_transposed`: rows of
        accumulators are keys.
        """
        assert not (keeps_gradient and is_transposed), "`write_gradient` does not transpose"
        stages = BiasStages.allocate(smem, dtype, tile, num_warpgroups, num, splits_rows=False)
        gradient_ready = Pipeline.allocate(smem, num_warpgroups * num) if keeps_gradient else None
        return BwdBiasPipeline(stages, gradient_ready, is_transposed)

    @cute.jit
    def init_barriers(self):
        """Called by one thread, before a fence and a CTA barrier."""
        if cutlass.const_expr(self.gradient_ready is None):
            self.stages.barriers.init(1, WARPGROUP_THREADS)
        else:
            self.stages.barriers.init(1, 1)
            self.gradient_ready.init(WARPGROUP_THREADS, 1)

    def ready(self, warpgroup: Int32 | int) -> Pipeline:
        """The part of `gradient_ready` of one warpgroup."""
        return self.gradient_ready.part(warpgroup, self.stages.num)

    @cute.jit
    def store_gradient(self, tma: TmaTiles, iteration: Int32, block: ScoreBlock):
        """Store the gradient of a block, then release its stages. Called by one warp."""
        for w in cutlass.range_constexpr(self.stages.num_warpgroups):
            self.ready(w).wait_full(iteration)
            sX, (row, column) = self.stages.stage(w, iteration), self.stages.coord(block, w)
            with cute.arch.elect_one():
                tma.store(sX, row, block.head, block.batch, column)
                cute.arch.cp_async_bulk_commit_group()
                cute.arch.cp_async_bulk_wait_group(0, read=True)
            self.stages.pipeline(w).release(iteration)

    def block(self, plain: BwdBlockBias, warpgroup: Int32, thread: Int32, iteration: Int32) -> "BwdSmemBias":
        """A thread's bias of one iteration. Each load computes its address, which saves a register over the loop."""
        stage = self.stages.offset(warpgroup, iteration)
        tile = self.stages.tile
        words = cute.make_rmem_tensor((tile.rows if self.is_transposed else tile.cols) // 4, Int32)
        loaded = cute.make_rmem_tensor(1, Int32)
        loaded[0] = Int32(0)
        return BwdSmemBias(self, plain, warpgroup, iteration, stage, thread, words, loaded)


@dataclass(frozen=True)
class BwdSmemBias:
    """This thread's bias elements of one block, in a stage of shared memory."""

    owner: BwdBiasPipeline
    plain: BwdBlockBias  # stores the gradient element by element, unless TMA does
    warpgroup: Int32
    iteration: Int32
    stage: Int32  # bytes from the first stage of the first warpgroup
    thread: Int32
    words: cute.Tensor  # 16-bit pairs of two neighbouring columns: two words, one per row, for each n8 tile
    loaded: cute.Tensor  # (1): a word that depends on all loads; see `Pipeline.empty_barrier`

    def wait(self) -> None:
        self.owner.stages.pipeline(self.warpgroup).wait_full(self.iteration)

    def moved(self, position: BwdBlockPosition) -> "BwdSmemBias":
        words = cute.make_fragment_like(self.words)
        return replace(self, plain=self.plain.moved(position), thread=rederived(self.thread), words=words)

    def load_column(self, c: int) -> None:
        """Load columns c to c + 3 if c is a multiple of 4; otherwise do nothing."""
        if c % 4 == 0:
            first = Int32(self.owner.stages.sBias.iterator.toint()) + self.stage
            if self.owner.is_transposed:
                four = load_two_tiles(first + lane_offset(self.thread), c // 2)
            else:
                four = load_step(first, self.owner.stages.tile, self.thread, c // 4)
            for i in range(4):
                self.words[c + i] = four[i]
            self.loaded[0] = self.loaded[0] | four[0]

    def at(self, r: int, c: int) -> Float32:
        index, dtype = c // 2 * 2 + r, self.owner.stages.sBias.element_type
        if dtype is cutlass.BFloat16:
            # A bf16 is the upper half of an fp32, so one integer instruction converts it.
            bits = cute.make_rmem_tensor(1, Int32)
            bits[0] = self.words[index] & -(1 << 16) if c % 2 else self.words[index] << 16
            return cute.recast_tensor(bits, Float32)[0]
        return Float32(cute.recast_tensor(self.words, dtype)[2 * index + c % 2])

    def add_gradient(self, dS: Float32, r: int, c: int, sums: GradientSums) -> None:
        self.plain.add_gradient(dS, r, c, sums)

    @cute.jit
    def release(self):
        """Release the stage after the last read. If it will hold the gradient, the warp that stores it does this."""
        if cutlass.const_expr(self.owner.gradient_ready is None):
            self.owner.stages.pipeline(self.warpgroup).release_per_thread(self.iteration, self.loaded[0])

    @cute.jit
    def write_gradient(self, rdS: cute.Tensor):
        """Write the gradient to the stage, if stages hold it. `publish_gradient` follows after a fence."""
        if cutlass.const_expr(self.owner.gradient_ready is not None):
            first = Int32(self.owner.stages.sBias.iterator.toint()) + self.stage
            store_steps(rdS, first, self.owner.stages.tile, rederived(self.thread))


@cute.jit
def publish_gradient(bias: BwdBiasPipeline | None, warpgroup: Int32, iteration: Int32):
    """Signal that the gradient of an iteration is in its stage. Called after a fence."""
    if cutlass.const_expr(bias is not None):
        if cutlass.const_expr(bias.gradient_ready is not None):
            cute.arch.mbarrier_arrive(bias.ready(warpgroup).full_barrier(iteration))
