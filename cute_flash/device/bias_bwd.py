"""A bias and its gradient in the backward, moved element by element between global memory and registers.

If rows of a block are keys, neighbouring elements of a thread are two queries of one key, which are not neighbours in
memory. Vector accesses are then impossible. One access of a warp covers eight neighbouring keys of four queries: half
of a 32-byte sector of 16-bit elements per query. The next access covers the other half.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from cute_flash.device.gradient_sums import GradientSums
from cute_flash.device.position import BwdBlockPosition
from cute_flash.device.ptx import add_if, store_if
from cute_flash.score_mod.graph import COLUMN, ROW


@dataclass(frozen=True)
class BwdBiasParams:
    """The bias of a launch, and its gradient."""

    mBias: cute.Tensor  # (B, H, Sq, Sk), with a stride of 0 where it broadcasts
    mdBias: cute.Tensor | None  # (B, H, Sq or 1, Sk or 1), in the gradient's dtype, or fp32 if it `accumulates`
    varies: cutlass.Constexpr  # bits of ROW (queries) and COLUMN (keys): dimensions in which it does not broadcast
    accumulates: cutlass.Constexpr  # several scores add to one entry of the gradient

    def block(self, position: BwdBlockPosition, size: tuple, lengths: tuple) -> "BwdBlockBias":
        """This thread's bias in the block at `position`.

        `size`: rows and columns of the thread. `lengths`: queries and keys of the sequence.
        """
        rows, columns = size
        of_rows, of_columns = (COLUMN, ROW) if position.is_transposed else (ROW, COLUMN)
        shape = rows if self.varies & of_rows else 1, columns if self.varies & of_columns else 1
        return BwdBlockBias(self, position, lengths, cute.make_rmem_tensor(shape, self.mBias.element_type))


@dataclass(frozen=True)
class BwdBlockBias:
    """This thread's bias elements of one block."""

    params: BwdBiasParams
    position: BwdBlockPosition
    lengths: tuple  # of the sequence: queries, keys
    rBias: cute.Tensor  # (rows, columns), of size 1 in a dimension in which the bias broadcasts

    def at(self, r: int, c: int) -> Float32:
        rows, columns = self.rBias.shape
        return Float32(self.rBias[r if rows > 1 else 0, c if columns > 1 else 0])

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
        return cutlass.min(self.position.query_at(r, c), self.lengths[0] - 1)

    def _key(self, r: int, c: int) -> Int32:
        return cutlass.min(self.position.key_at(r, c), self.lengths[1] - 1)

    def add_gradient(self, dS: Float32, r: int, c: int, sums: GradientSums) -> None:
        """Add dS to the gradient, if the bias has one."""
        params, position = self.params, self.position
        if params.mdBias is None:
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
        position, (num_queries, num_keys) = self.position, self.lengths
        query, key = position.query_at(r, c), position.key_at(r, c)
        exists = (query < num_queries) & (key < num_keys)
        target = gdBias.iterator + cute.crd2idx((query, key), gdBias.layout)
        if self.params.accumulates:
            add_if(Int32(exists), target.toint(), dS)
        else:
            store_if(Int32(exists), target.toint(), dS, gdBias.element_type)
