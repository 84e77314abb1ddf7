"""Steps that rungs 6 to 8 share: tiles by TMA, pipelines of mbarriers, products by wgmma, the softmax of a block.

A Hopper rung reads as its plan: the waits, products and releases are in its file, and what they are made of is here.
"""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, warpgroup
from cutlass.memory import SmemAllocator

from cute_flash.device.memory.views import as_mn
from examples.ladder.tools import row_max_of, row_sum_of

WARPGROUP_ROWS, WARPGROUP_THREADS = 64, 128  # of one wgmma
LOG2_E = 1.4426950408889634


@cute.jit
def query_tile(seqlen: Int32, tile: cutlass.Constexpr, is_causal: cutlass.Constexpr):
    """(m_block, head, number of K/V blocks) of this CTA. A block of keys is as long as a tile of queries.

    If causal, the blocks above the diagonal are skipped, and the longest tiles of a head come first.
    """
    m_block, head, _ = cute.arch.block_idx()
    num_blocks = cute.ceil_div(seqlen, tile)
    if cutlass.const_expr(is_causal):
        m_block = num_blocks - 1 - m_block
        num_blocks = m_block + 1
    return m_block, head, num_blocks


def swizzled(rows: int, cols: int, stages: int) -> cute.ComposedLayout:
    """Tiles of bf16 rows, in the 128-byte swizzle: TMA writes it, wgmma reads it."""
    atom = warpgroup.make_smem_layout_atom(warpgroup.SmemLayoutAtomKind.K_SW128, BFloat16)
    return cute.tile_to_shape(atom, (rows, cols, stages), order=(0, 1, 2))


@dataclass(frozen=True)
class TmaTiles:
    """A TMA descriptor of a tensor (heads, S, D), and its tiles of `rows` x D."""

    atom: cute.CopyAtom
    coords: cute.Tensor  # (S, D, heads): an element is its coordinates, which TMA takes instead of an address
    rows: cutlass.Constexpr
    cols: cutlass.Constexpr

    @classmethod
    def of(cls, mX: cute.Tensor, rows: int) -> TmaTiles:
        """Build the descriptor on the host. It has the shape of the tensor, so rows past the end are read as zeros."""
        mX, cols = cute.make_tensor(mX.iterator, cute.select(mX.layout, mode=[1, 2, 0])), mX.shape[2]
        layout = cute.select(swizzled(rows, cols, 1), mode=[0, 1])
        info = cpasync.make_tiled_tma_atom(cpasync.CopyBulkTensorTileG2SOp(), mX, layout, (rows, cols))
        return cls(info.atom, info.tma_tensor, rows, cols)


@dataclass(frozen=True)
class Pipeline:
    """Stages of a tile in shared memory, which TMA fills, and two mbarriers for each.

    Iteration i uses stage i % stages. Both barriers flip their phase each time they complete: `full` when all bytes of
    a tile have landed, `empty` when the consumers have released it. A wait names the phase whose end it waits for.
    """

    tma: TmaTiles
    tiles: cute.Tensor  # (rows, D, stage)
    full: cute.Pointer  # a barrier for each stage
    empty: cute.Pointer
    stages: cutlass.Constexpr
    releases: cutlass.Constexpr  # calls of `release` that empty a stage

    @staticmethod
    def allocate(smem: SmemAllocator, tma: TmaTiles, stages: int, releases: int = 1) -> Pipeline:
        layout = swizzled(tma.rows, tma.cols, stages)
        tiles = smem.allocate_tensor(BFloat16, layout.outer, byte_alignment=1024, swizzle=layout.inner)
        barriers = smem.allocate_array(cutlass.Int64, 2 * stages, byte_alignment=8)
        return Pipeline(tma, tiles, barriers, barriers + stages, stages, releases)

    @staticmethod
    def smem_bytes(rows: int, cols: int, stages: int) -> int:
        """Bytes of `allocate`, with the barriers and the padding before the next tile."""
        return 2 * rows * cols * stages + 1024

    @cute.jit
    def load(self, iteration: Int32 | int, head: Int32, block: Int32 | int):
        """Start to load a tile. One warp calls it: one thread arrives at the barrier, and one thread issues the TMA."""
        stage = iteration % self.stages
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(self.full + stage, 2 * self.tma.rows * self.tma.cols)
        gX = cute.local_tile(self.tma.coords[None, None, head], (self.tma.rows, self.tma.cols), (block, 0))
        sX, gX = (cute.group_modes(x, 0, 2) for x in (self.tiles[None, None, stage], gX))
        source, target = reversed(cpasync.tma_partition(self.tma.atom, 0, cute.make_layout(1), sX, gX))
        cute.copy(self.tma.atom, source, target, tma_bar_ptr=self.full + stage)

    @cute.jit
    def wait_full(self, iteration: Int32 | int):
        """Wait until the tile of an iteration has landed."""
        cute.arch.mbarrier_wait(self.full + iteration % self.stages, iteration // self.stages % 2)

    @cute.jit
    def wait_empty(self, iteration: Int32):
        """Wait until the stage of an iteration may be written. The first use of a stage does not wait.

        A new barrier counts as past its phase of parity 1.
        """
        cute.arch.mbarrier_wait(self.empty + iteration % self.stages, (iteration // self.stages % 2) ^ 1)

    @cute.jit
    def release(self, iteration: Int32):
        """Arrive at the `empty` barrier. Called by each warp after the products that read the tile."""
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive(self.empty + iteration % self.stages)


@cute.jit
def init_barriers(*pipelines: Pipeline):
    """One thread sets up the mbarriers. The fence shows them to the TMA unit, and the barrier to the other threads."""
    if cute.arch.make_warp_uniform(cute.arch.thread_idx()[0] // 32) == 0:
        with cute.arch.elect_one():
            for x in pipelines:
                for stage in cutlass.range_constexpr(x.stages):
                    cute.arch.mbarrier_init(x.full + stage, 1)
                    cute.arch.mbarrier_init(x.empty + stage, x.releases)
    cute.arch.mbarrier_init_fence()
    cute.arch.sync_threads()


def wgmma(columns: int, a_in_registers: bool = False, b_is_transposed: bool = False) -> cute.TiledMma:
    """wgmma of a warpgroup: 64 rows x `columns` x 16. Operand B, columns x k, is the tile or the transposed tile."""
    source = warpgroup.OperandSource.RMEM if a_in_registers else warpgroup.OperandSource.SMEM
    majors = OperandMajorMode.K, OperandMajorMode.MN if b_is_transposed else OperandMajorMode.K
    shape = (WARPGROUP_ROWS, columns, 16)
    return cute.make_tiled_mma(warpgroup.MmaF16BF16Op(BFloat16, Float32, shape, source, *majors))


def operand_a(mma: cute.TiledMma, tiles: cute.Tensor) -> cute.Tensor:
    """Descriptors of operand A in shared memory, (1, tiles, k, stage): rows of the product are rows of a tile."""
    return mma.get_slice(0).make_fragment_A(mma.get_slice(0).partition_A(tiles))


def operand_b(mma: cute.TiledMma, tiles: cute.Tensor, is_transposed: bool = False) -> cute.Tensor:
    """Descriptors of operand B: columns of the product are rows of a tile, or its columns if `is_transposed`."""
    if is_transposed:
        tiles = cute.make_tensor(tiles.iterator, cute.select(tiles.layout, mode=[1, 0, 2]))
    return mma.get_slice(0).make_fragment_B(mma.get_slice(0).partition_B(tiles))


def accumulator(mma: cute.TiledMma, columns: int) -> cute.Tensor:
    """Registers of this thread for a product of 64 rows x `columns`: ((2, 2, columns / 8), 1, 1)."""
    return cute.make_rmem_tensor(mma.get_slice(0).partition_shape_C((WARPGROUP_ROWS, columns)), Float32)


def positions(mma: cute.TiledMma, thread: Int32, columns: int) -> cute.Tensor:
    """(row, column) of each element of an accumulator, as (rows, columns) of this thread."""
    return as_mn(mma.get_slice(thread).partition_C(cute.make_identity_tensor((WARPGROUP_ROWS, columns))))


@cute.jit
def start_gemm(mma: cute.TiledMma, acc: cute.Tensor, a: cute.Tensor, b: cute.Tensor, accumulate: cutlass.Constexpr):
    """Start acc = A B, or acc += A B if `accumulate`, as one wgmma group.

    wgmma runs beside the threads. Until they wait for the group, they must not touch `acc`, or A in registers.
    """
    warpgroup.fence()  # earlier writes of these registers come before the products
    atom = cute.make_mma_atom(mma.op)
    for k in cutlass.range_constexpr(cute.size(b, mode=[2])):
        atom.set(warpgroup.Field.ACCUMULATE, accumulate or k > 0)
        cute.gemm(atom, acc, a[None, None, k], b[None, None, k], acc)
    warpgroup.commit_group()


@cute.jit
def mask(S: cute.Tensor, cS: cute.Tensor, first_row: Int32, first_key: Int32, seqlen: Int32, causal: cutlass.Constexpr):
    """S = -inf for keys that a row does not see. If causal, a row that exists sees no key past the end."""
    for r in cutlass.range_constexpr(cute.size(S, mode=[0])):
        for c in cutlass.range_constexpr(cute.size(S, mode=[1])):
            row, key = first_row + cS[r, c][0], first_key + cS[r, c][1]
            is_hidden = key > row if cutlass.const_expr(causal) else key >= seqlen
            S[r, c] = cutlass.select_(is_hidden, -Float32.inf, S[r, c])


@dataclass(frozen=True)
class Rows:
    """The softmax statistics of the two rows of a thread, in registers."""

    max: cute.Tensor
    sum: cute.Tensor  # over this thread's columns
    alpha: cute.Tensor  # the last factor of O

    @staticmethod
    def start() -> Rows:
        rows = Rows(*(cute.make_rmem_tensor(2, Float32) for _ in range(3)))
        rows.max.fill(-Float32.inf)
        rows.sum.fill(0.0)
        return rows

    @cute.jit
    def softmax(self, S: cute.Tensor, scale_log2: Float32):
        """P in place of S, with m, l and alpha. exp(scale x) is exp2(scale_log2 x): one FMA and one MUFU."""
        for r in cutlass.range_constexpr(2):
            scores = S[r, None].load()
            # The first block has a visible key for each row, so m is finite from then on.
            m = cute.arch.fmax(self.max[r], row_max_of(scores.reduce(cute.ReductionOp.MAX, -Float32.inf, 0)))
            probs = cute.math.exp2(scores * scale_log2 - m * scale_log2, fastmath=True)
            self.alpha[r] = cute.math.exp2((self.max[r] - m) * scale_log2, fastmath=True)
            self.sum[r] = self.alpha[r] * self.sum[r] + probs.reduce(cute.ReductionOp.ADD, Float32(0.0), 0)
            self.max[r] = m
            S[r, None].store(probs)

    @cute.jit
    def rescale(self, O: cute.Tensor):
        """O = alpha O"""
        for r in cutlass.range_constexpr(2):
            O[r, None].store(O[r, None].load() * self.alpha[r])

    @cute.jit
    def normalise(self, O: cute.Tensor):
        """O = O / l"""
        for r in cutlass.range_constexpr(2):
            O[r, None].store(O[r, None].load() * cute.arch.rcp_approx(row_sum_of(self.sum[r])))


@cute.jit
def store_rows(mma: cute.TiledMma, thread: Int32, acc: cute.Tensor, gX: cute.Tensor, tile: Int32):
    """Store an accumulator of one warpgroup as bf16 to a tile of 64 rows of gX (S, D), but no rows past the end."""
    rX = cute.make_fragment_like(acc, BFloat16)
    rX.store(acc.load().to(BFloat16))
    shape, thr_mma = (WARPGROUP_ROWS, gX.shape[1]), mma.get_slice(thread)
    mine, target = as_mn(rX), as_mn(thr_mma.partition_C(cute.local_tile(gX, shape, (tile, 0))))
    position = positions(mma, thread, gX.shape[1])
    for r in cutlass.range_constexpr(2):
        if tile * WARPGROUP_ROWS + position[r, 0][0] < gX.shape[0]:
            cute.autovec_copy(mine[r, None], target[r, None])
