"""ALiBi as an additional k-step of Q K^T, in the Hopper forward.

Off the diagonal ALiBi is linear in the column. In a block with the middle column j0, where `slope` is that of the head
before the diagonal, and its negative after it,

    scale s + slope (j - i) = scale (s + (slope / scale) (j - j0)) + slope (j0 - i)

The tensor cores add (slope / scale) (j - j0) to S: it is the product of a row (a0 a1 a2 0 ...) and a column
(c c c 0 ...) of 16 elements, where c = j - j0 is an integer of at most half of the block's keys, and a0 + a1 + a2 is
slope / scale in three 16-bit numbers: in bf16 with the precision of fp32, in fp16 with an error of at most 2^-25. The
columns are constants in shared memory, and the rows are registers. The second term is the same for all columns, so the
FMA that subtracts the row max adds it: a score takes as many instructions as without ALiBi.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass.cute.nvgpu import warpgroup
from cutlass.memory import SmemAllocator

from cute_flash.device.memory.ldmatrix import STEP
from cute_flash.device.memory.smem import allocate_stages
from cute_flash.device.ptx import pack
from cute_flash.planning.tiles.common import WARPGROUP_ROWS
from cute_flash.smem.tile import SmemTile

PIECES = 3  # 16-bit numbers whose sum is slope / scale
# |slope| / scale must be below this: S includes the ratio times c, and is rounded to about 2^-23 of it. Slopes up to 1
# are usual.
MAX_RATIO = 16.0
SIGNS = 0x80008000 - (1 << 32)  # the sign bits of both elements of a register, as an int32


def columns_tile(tile_n: int) -> SmemTile:
    """The tile of the columns. Its second half is not used: a row of a tile has at least 64 bytes."""
    return SmemTile(tile_n, 2 * STEP, variant="swizzled32")


def allocate_columns(smem: SmemAllocator, dtype: type, tile_n: int) -> cute.Tensor:
    return allocate_stages(smem, dtype, columns_tile(tile_n), 1)[None, None, 0]


@cute.jit
def write_columns(sColumns: cute.Tensor, thread: Int32, num_threads: cutlass.Constexpr):
    """Write the columns. Called by all threads of the CTA, before a CTA barrier."""
    rows = cute.size(sColumns, mode=[0])
    for row in cutlass.range(thread, rows, num_threads, unroll=1):
        for k in cutlass.range_constexpr(STEP):
            value = Float32(row - rows // 2) if cutlass.const_expr(k < PIECES) else Float32(0.0)
            sColumns[row, k] = sColumns.element_type(value)
    cute.arch.fence_proxy("async.shared", space="cta")


def fits(slope_log2: Float32, scale_log2: Float32):
    """Whether |slope| / scale is below MAX_RATIO. The scale is positive, but may be tiny."""
    return cute.math.absf(slope_log2) < scale_log2 * MAX_RATIO


def row_word(slope_log2: Float32, scale_log2: Float32, thread: Int32, dtype: type) -> Int32:
    """The register of operand A with the elements 0 to 7 of a row: two elements of each of four threads.

    0 if the ratio does not fit.
    """
    rest, pieces = slope_log2 / scale_log2, []
    for _ in range(PIECES):
        pieces.append(Float32(dtype(rest)))
        rest = rest - pieces[-1]
    a0, a1, a2 = pieces
    lane, zero = thread & 3, Float32(0.0)
    first = cutlass.select_(lane == 0, a0, cutlass.select_(lane == 1, a2, zero))
    word = pack(first, cutlass.select_(lane == 0, a1, zero), dtype)
    return cutlass.select_(fits(slope_log2, scale_log2), word, Int32(0))


@dataclass(frozen=True)
class AlibiStep:
    """The k-step of a warpgroup."""

    mma: cute.TiledMma  # operand A in registers
    rColumns: cute.Tensor  # descriptors (MMA, MMA_N, MMA_K)

    @staticmethod
    def of(mma: cute.TiledMma, sColumns: cute.Tensor) -> "AlibiStep":
        part = mma.get_slice(0)
        sB = cute.local_tile(sColumns, (cute.size(sColumns, mode=[0]), STEP), (0, 0))
        return AlibiStep(mma, part.make_fragment_B(part.partition_B(sB)))

    @cute.jit
    def operand(self, word: Int32) -> cute.Tensor:
        """Operand A. All rows have the elements of `word`, a `row_word` with the sign of the block."""
        shape = self.mma.get_slice(0).partition_shape_A((WARPGROUP_ROWS, STEP))
        rA = cute.make_rmem_tensor(shape, self.mma.op.a_dtype)
        words = cute.recast_tensor(rA, Int32)
        for i in cutlass.range_constexpr(4):
            # Registers 0 and 1 are rows 8 apart, 2 and 3 the elements 8 to 15 of the same rows.
            words[i] = word if cutlass.const_expr(i < 2) else Int32(0)
        return rA

    @cute.jit
    def start(self, acc_S: cute.Tensor, rA: cute.Tensor):
        """Add the product to S in the current wgmma group. The operand was written before the fence of the group."""
        atom = cute.make_mma_atom(self.mma.op)
        atom.set(warpgroup.Field.ACCUMULATE, True)
        cute.gemm(atom, acc_S, rA[None, None, 0], self.rColumns[None, None, 0], acc_S)
