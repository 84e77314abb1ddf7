"""Before and after the Hopper backward: the statistics of rows and a zeroed dQ; dQ in the inputs' type."""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cuda.bindings.driver import CUstream
from cutlass import Float32, Int32, Int64
from cutlass.cute.nvgpu import OperandMajorMode
from cutlass.cute.runtime import make_fake_compact_tensor, make_fake_stream, make_fake_tensor

from cute_flash.device.copies import row_tile
from cute_flash.device.epilogue import store_rows
from cute_flash.device.ptx import pack
from cute_flash.device.softmax import LOG2_E
from cute_flash.device.views import as_mn
from cute_flash.device.wgmma import make_mma
from cute_flash.kernels.arguments import DTYPES
from cute_flash.problem import Static
from cute_flash.tiles import BwdTileSm90

VECTOR = 8  # elements in 16 bytes
THREADS = 128


@dataclass(frozen=True)
class BeforeParams:
    mO: cute.Tensor  # (B, H, Sq, Dv)
    mdO: cute.Tensor
    mLSE: cute.Tensor  # (B, H, Sq)
    mLSE_log2: cute.Tensor  # (B, H, Sq padded)
    mD: cute.Tensor
    mdQ: cute.Tensor  # (B, H, m_block, elements of a tile) fp32
    mdLSE: cute.Tensor | None


class BwdPreprocess:
    """D = rowsum(dO O) - dLSE; LSE in units of log2, +inf for rows without keys and past the end; dQ = 0."""

    has_dlse = False

    def __init__(self, static: Static, tile: BwdTileSm90):
        self.static, self.tile_m, self.tile_d = static, tile.tile_m, tile.head_dim
        self.dtype = DTYPES[static.dtype]
        vectors = -(-static.width_v // VECTOR)
        self.per_row = 1 << (vectors - 1).bit_length()  # threads of a row

    def fake_arguments(self) -> tuple:
        batch, heads, seqlen, padded, blocks = (cute.sym_int() for _ in range(5))

        def strides():
            return (*(cute.sym_int64(divisibility=8) for _ in range(3)), 1)

        def rows(n):
            return make_fake_compact_tensor(
                Float32, (batch, heads, n), stride_order=(2, 1, 0), assumed_align=4
            )

        def x():
            return make_fake_tensor(
                self.dtype, (batch, heads, seqlen, self.static.width_v), strides(), assumed_align=16
            )

        size = self.tile_m * self.tile_d
        mdQ = make_fake_compact_tensor(
            Float32, (batch, heads, blocks, size), stride_order=(3, 2, 1, 0), assumed_align=16
        )
        dlse = rows(seqlen) if self.has_dlse else None
        return (
            x(),
            x(),
            rows(seqlen),
            rows(padded),
            rows(padded),
            mdQ,
            dlse,
            make_fake_stream(use_tvm_ffi_env_stream=True),
        )

    @cute.jit
    def __call__(
        self,
        mO: cute.Tensor,
        mdO: cute.Tensor,
        mLSE: cute.Tensor,
        mLSE_log2: cute.Tensor,
        mD: cute.Tensor,
        mdQ: cute.Tensor,
        mdLSE: cute.Tensor | None,
        stream: CUstream,
    ):
        batch, heads, blocks, _ = mdQ.shape
        self.kernel.set_name_prefix(
            f"cute_flash_bwd_preprocess_d{self.static.width_v}_{self.static.dtype}",
            remove_cutlass_symbol=True,
            keep_mangled_name=False,
        )
        self.kernel(BeforeParams(mO, mdO, mLSE, mLSE_log2, mD, mdQ, mdLSE)).launch(
            grid=(blocks, heads, batch), block=(THREADS, 1, 1), stream=stream
        )

    @cute.kernel
    def kernel(self, p: BeforeParams):
        thread, _, _ = cute.arch.thread_idx()
        m_block, head, batch = cute.arch.block_idx()
        gdQ = p.mdQ[batch, head, m_block, None]
        zeros = cute.make_rmem_tensor(4, Float32)
        zeros.fill(0.0)
        for i in cutlass.range(self.tile_m * self.tile_d // (4 * THREADS), unroll=4):
            cute.autovec_copy(
                zeros,
                cute.make_tensor((gdQ.iterator + 4 * (i * THREADS + thread)).align(16), cute.make_layout(4)),
            )

        rows_at_once = THREADS // self.per_row
        column = thread % self.per_row * VECTOR
        seqlen = p.mO.shape[2]
        gO, gdO = p.mO[batch, head, None, None], p.mdO[batch, head, None, None]
        for i in cutlass.range_constexpr(self.tile_m // rows_at_once):
            row = m_block * self.tile_m + i * rows_at_once + thread // self.per_row
            dot = Float32(0.0)
            if row < seqlen and column < self.static.width_v:
                products = self.vector(gO, row, column) * self.vector(gdO, row, column)
                dot = products.reduce(cute.ReductionOp.ADD, Float32(0.0), 0)
            offset = self.per_row // 2
            while cutlass.const_expr(offset > 0):
                dot = dot + cute.arch.shuffle_sync_bfly(dot, offset=offset)
                offset //= 2
            if column == 0:
                lse = Float32.inf
                if row < seqlen:
                    found = p.mLSE[batch, head, row]
                    lse = Float32.inf if found == -Float32.inf else found * LOG2_E
                    if cutlass.const_expr(self.has_dlse):
                        dot = dot - p.mdLSE[batch, head, row]
                p.mLSE_log2[batch, head, row] = lse
                p.mD[batch, head, row] = dot

    def vector(self, gX: cute.Tensor, row: Int32, column: Int32):
        pointer = (gX.iterator + (Int64(row) * gX.stride[0] + column)).align(16)
        loaded = cute.make_rmem_tensor(VECTOR, self.dtype)
        cute.autovec_copy(cute.make_tensor(pointer, cute.make_layout(VECTOR)), loaded)
        return loaded.load().to(Float32)


class BwdPreprocessWithDLSE(BwdPreprocess):
    """The same for an LSE that has a gradient of its own."""

    has_dlse = True


class BwdPostprocess:
    """dQ = scale times the fp32 sums, from the order of the accumulators to rows in the inputs' type."""

    def __init__(self, static: Static, tile: BwdTileSm90):
        self.static, self.tile_m, self.tile_d = static, tile.tile_m, tile.head_dim
        self.dtype = DTYPES[static.dtype]

    def fake_arguments(self) -> tuple:
        batch, heads, seqlen, blocks = (cute.sym_int() for _ in range(4))
        size = self.tile_m * self.tile_d
        mdQ = make_fake_compact_tensor(
            Float32, (batch, heads, blocks, size), stride_order=(3, 2, 1, 0), assumed_align=16
        )
        strides = (*(cute.sym_int64(divisibility=8) for _ in range(3)), 1)
        out = make_fake_tensor(
            self.dtype, (batch, heads, seqlen, self.static.head_dim), strides, assumed_align=16
        )
        return mdQ, out, Float32(1.0), make_fake_stream(use_tvm_ffi_env_stream=True)

    @cute.jit
    def __call__(self, mdQ: cute.Tensor, mOut: cute.Tensor, scale: Float32, stream: CUstream):
        batch, heads, blocks, _ = mdQ.shape
        MN = OperandMajorMode.MN
        tiled_mma = make_mma(self.dtype, self.tile_d // 2, False, MN, MN)
        self.kernel.set_name_prefix(
            f"cute_flash_bwd_postprocess_d{self.static.head_dim}_{self.static.dtype}",
            remove_cutlass_symbol=True,
            keep_mangled_name=False,
        )
        self.kernel(mdQ, mOut, scale, tiled_mma).launch(
            grid=(blocks, heads, batch), block=(2 * THREADS, 1, 1), stream=stream
        )

    @cute.kernel
    def kernel(self, mdQ: cute.Tensor, mOut: cute.Tensor, scale: Float32, tiled_mma: cute.TiledMma):
        thread, _, _ = cute.arch.thread_idx()
        m_block, head, batch = cute.arch.block_idx()
        wg, thread = thread // THREADS, thread % THREADS
        half, seqlen = self.tile_d // 2, mOut.shape[2]
        registers = self.tile_m * half // THREADS
        gdQ = mdQ[batch, head, m_block, None]
        acc = cute.make_rmem_tensor(registers, Float32)
        for i in cutlass.range_constexpr(registers // 4):
            offset = wg * (self.tile_m * half) + (i * THREADS + thread) * 4
            source = cute.make_tensor((gdQ.iterator + offset).align(16), cute.make_layout(4))
            cute.autovec_copy(source, cute.make_tensor(acc.iterator + 4 * i, cute.make_layout(4)))
        rdQ = cute.make_rmem_tensor(registers // 2, Int32)
        for i in cutlass.range_constexpr(registers // 2):
            rdQ[i] = pack(acc[2 * i] * scale, acc[2 * i + 1] * scale, self.dtype)
        # (2 rows of each m64 tile, n8 tiles)
        tiles = half // 8
        packed = cute.make_tensor(
            rdQ.iterator, cute.make_layout(((2, self.tile_m // 64), tiles), stride=((1, 2 * tiles), 2))
        )
        gOut = row_tile(mOut[batch, head, None, None], m_block * self.tile_m, self.tile_m, self.tile_d)
        gHalf = cute.make_tensor((gOut.iterator + wg * half).align(16), gOut.layout)
        coords = tiled_mma.get_slice(thread).partition_C(cute.make_identity_tensor((self.tile_m, half)))
        store_rows(
            packed, gHalf, as_mn(coords), self.static.head_dim - wg * half, seqlen - m_block * self.tile_m
        )
