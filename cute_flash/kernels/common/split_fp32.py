"""Splits fp32 tensors into the fp16 pieces that the kernels of fp32 calls read. See `device.mma.split_fp32`."""

from dataclasses import dataclass
from types import SimpleNamespace

import cutlass
import cutlass.cute as cute
from cuda.bindings.driver import CUstream
from cutlass import Float32, Int32

from cute_flash.device.memory.copies import row_vector
from cute_flash.device.memory.epilogue import warp_max
from cute_flash.device.mma.split_fp32 import inverse_factor, split
from cute_flash.kernels.common.kernel import Kernel

THREADS = 128
ROWS = 128  # of a CTA
READ, WRITTEN = 4, 8  # elements of a 16-byte vector: fp32 in `norms`, fp16 in `pieces`


@dataclass(frozen=True)
class Sequences:
    """The offsets of a varlen batch; both None: a dense batch."""

    mCuSeqlens: cute.Tensor | None = None  # (B + 1)
    mSeqUsed: cute.Tensor | None = None  # (B), of keys

    @cute.jit
    def of_row(self, row: Int32) -> Int32:
        """The sequence that a row belongs to; -1: padding, or a key that is not used."""
        first, last = Int32(0), Int32(self.mCuSeqlens.shape[0] - 1)
        size = last
        while first < last:
            middle = (first + last) // 2
            is_before = self.mCuSeqlens[middle + 1] <= row
            first = middle + 1 if is_before else first
            last = last if is_before else middle
        sequence = Int32(-1)
        if first < size:
            sequence = first
            if cutlass.const_expr(self.mSeqUsed is not None):
                is_used = row - self.mCuSeqlens[first] < self.mSeqUsed[first]
                sequence = first if is_used else Int32(-1)
        return sequence


class SplitFp32(Kernel):
    """For each operand x that has an operand `x_pieces`, computes the largest row norm of each head, then the pieces.

    `norms[i]` holds the norms of the i-th x, and is 0 before the launch. In a varlen batch each sequence has its own
    norms. Padding and unused keys, which may be uninitialized, have neither norms nor pieces.
    """

    @cute.jit
    def __call__(self, stream: CUstream, **operands):
        args = self.read_operands(operands)
        names = [name for name in operands if f"{name}_pieces" in operands]
        for i, name in enumerate(names):
            mX, mPieces, mNorm = getattr(args, name), getattr(args, f"{name}_pieces"), args.norms[i, None, None]
            batch, heads, seqlen, _ = mX.shape
            grid, block = (cute.ceil_div(seqlen, ROWS), heads, batch), (THREADS, 1, 1)
            sequences = self.sequences(args, of_keys=name in ("k", "v"))
            for kernel, what in ((self.norms, "norms"), (self.pieces, "pieces")):
                symbol = f"cute_flash_fp32_{what}_{name}_d{self.static.widths}"
                kernel.set_name_prefix(symbol, remove_cutlass_symbol=True, keep_mangled_name=False)
            self.norms(mX, mNorm, sequences).launch(grid=grid, block=block, stream=stream)
            self.pieces(mX, mPieces, mNorm, sequences).launch(grid=grid, block=block, stream=stream)

    def sequences(self, args: SimpleNamespace, of_keys: bool) -> Sequences:
        if not self.static.varlen:
            return Sequences()
        return Sequences(args.cu_seqlens_k, args.seqused_k) if of_keys else Sequences(args.cu_seqlens_q)

    @cute.kernel
    def norms(self, mX: cute.Tensor, mNorm: cute.Tensor, sequences: Sequences):
        """Raise mNorm (B, H) to the largest norm of this CTA's rows. NaN and infinity are ignored."""
        thread, _, _ = cute.arch.thread_idx()
        block, head, batch = cute.arch.block_idx()
        width = mX.shape[3]
        lanes = 1 << (-(-width // READ) - 1).bit_length()  # lanes that read a row
        column, largest, sequence = thread % lanes * READ, Float32(0.0), Int32(-1)
        for i in cutlass.range_constexpr(ROWS * lanes // THREADS):
            row = block * ROWS + (i * THREADS + thread) // lanes
            most, squares = Float32(0.0), Float32(0.0)
            if row < mX.shape[2] and column < width:
                values = row_vector(mX[batch, head, None, None], row, column, READ).load()
                for j in cutlass.range_constexpr(READ):
                    size = cute.arch.fmax(values[j], -values[j])
                    most = cute.arch.fmax(most, size if size < Float32.inf else Float32(0.0))
                    squares = squares + values[j] * values[j]
            offset = lanes // 2
            while cutlass.const_expr(offset > 0):
                most = cute.arch.fmax(most, cute.arch.shuffle_sync_bfly(most, offset=offset))
                squares = squares + cute.arch.shuffle_sync_bfly(squares, offset=offset)
                offset //= 2
            # Use an upper bound of the norm if its square leaves the range of fp32.
            is_in_range = squares > 1e-30 and squares < 1e38
            norm = cute.math.sqrt(squares) if is_in_range else most * Float32(width**0.5)
            if cutlass.const_expr(self.static.varlen):
                # Rows ascend, so a sequence is complete when the thread reaches the next one.
                row_sequence = sequences.of_row(row)
                if row_sequence != sequence:
                    if sequence >= 0 and column == 0:
                        _raise(mNorm, sequence, head, largest)
                    largest = Float32(0.0)
                sequence = row_sequence
            largest = cute.arch.fmax(largest, norm)
        if cutlass.const_expr(self.static.varlen):
            if sequence >= 0 and column == 0:
                _raise(mNorm, sequence, head, largest)
        else:
            largest = warp_max(largest)
            if cute.arch.lane_idx() == 0:
                _raise(mNorm, batch, head, largest)

    @cute.kernel
    def pieces(self, mX: cute.Tensor, mPieces: cute.Tensor, mNorm: cute.Tensor, sequences: Sequences):
        """Write mPieces (B, H, S, 2 tile_d): high pieces, then low ones, with zeros past the width of mX."""
        thread, _, _ = cute.arch.thread_idx()
        block, head, batch = cute.arch.block_idx()
        width, padded = mX.shape[3], mPieces.shape[3] // 2
        lanes = padded // WRITTEN
        column = thread % lanes * WRITTEN
        for i in cutlass.range_constexpr(ROWS * lanes // THREADS):
            row = block * ROWS + (i * THREADS + thread) // lanes
            sequence = sequences.of_row(row) if cutlass.const_expr(self.static.varlen) else batch
            if row < mX.shape[2] and sequence >= 0:
                scale = inverse_factor(mNorm[sequence, head])
                values = cute.make_rmem_tensor(WRITTEN, Float32)
                values.fill(0.0)
                if column < width:
                    cute.autovec_copy(row_vector(mX[batch, head, None, None], row, column, WRITTEN), values)
                for j, piece in enumerate(split(values, scale)):
                    target = row_vector(mPieces[batch, head, None, None], row, column + j * padded, WRITTEN)
                    cute.autovec_copy(piece, target)


def _raise(mNorm: cute.Tensor, sequence: Int32, head: Int32, norm: Float32) -> None:
    """Raise mNorm[sequence, head] to `norm`, atomically."""
    cute.arch.atomic_fmax(mNorm[sequence, None].iterator + head, norm, sem="relaxed", scope="gpu")
