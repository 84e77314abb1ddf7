"""A bias and its gradient in the backward: element by element between global memory and registers.

A thread has pairs of queries of a key: neighbours there are no neighbours in memory. The lanes of a warp have
eight keys side by side, for four queries: half a sector of 16-bit elements, of which the other half is next.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from cute_flash.device.mask import column_offset
from cute_flash.device.place import Place
from cute_flash.device.ptx import add_if, store_if
from cute_flash.device.sums import Sums
from cute_flash.score_mod.graph import COLUMN, ROW


@dataclass(frozen=True)
class BiasTerms:
    """Of a launch."""

    mBias: cute.Tensor  # (B, H, Sq, Sk), with a stride of 0 where entries are shared
    mdBias: cute.Tensor | None  # (B, H, Sq or 1, Sk or 1), in the type it is wanted in, or fp32 sums
    bits: cutlass.Constexpr  # of ROW and COLUMN, what entries tell apart
    is_added: cutlass.Constexpr  # several blocks, or several elements of one, have an entry in common

    def block(self, place: Place, size: tuple, lengths: tuple) -> "BiasBlock":
        rows, columns = size
        kept = rows if self.bits & COLUMN else 1, columns if self.bits & ROW else 1
        return BiasBlock(self, place, size, lengths, cute.make_rmem_tensor(kept, self.mBias.element_type))


@dataclass(frozen=True)
class BiasBlock:
    terms: BiasTerms
    place: Place
    size: cutlass.Constexpr
    lengths: tuple  # queries, keys
    rBias: cute.Tensor  # (rows, columns), 1 of those that it does not tell apart

    def at(self, r: int, c: int) -> Float32:
        rows, columns = self.rBias.shape
        return Float32(self.rBias[r if rows > 1 else 0, c if columns > 1 else 0])

    def fetch(self) -> None:
        """Start the loads; past the end, of the last entry."""
        for c in range(self.rBias.shape[1]):
            self.fetch_column(c)

    def fetch_column(self, c: int) -> None:
        if c < self.rBias.shape[1]:
            gBias = self.terms.mBias[self.place.batch, self.place.head, None, None]
            of, width = gBias.element_type, gBias.element_type.width // 8
            # A row and the next are less than 2 GB apart (`custom_cuda.as_bias`): one product for an address.
            row, key = Int64(Int32(gBias.stride[0] * width)), gBias.stride[1] * width
            for r in range(self.rBias.shape[0]):
                first = gBias.iterator.toint() + Int64(self._key(r)) * key
                address = first + Int64(self._query(c)) * row
                pointer = cute.make_ptr(of, address, cutlass.AddressSpace.gmem, assumed_align=width)
                self.rBias[r, c] = pointer.load()

    def _query(self, c: int) -> Int32:
        return cutlass.min(self.place.query + column_offset(c), self.lengths[0] - 1)

    def _key(self, r: int) -> Int32:
        return cutlass.min(self.place.key + self.place.row_offset(r), self.lengths[1] - 1)

    def add(self, dS: Float32, r: int, c: int, sums: Sums) -> None:
        """To the gradient, where it is wanted."""
        terms, place = self.terms, self.place
        if terms.mdBias is None:
            return
        gdBias = terms.mdBias[place.batch, place.head, None, None]
        bits = terms.bits & (ROW | COLUMN)
        if terms.is_added and bits != ROW | COLUMN:
            # Entries that are shared have one place, whatever the element.
            where = self._query(c) if bits & ROW else 0, self._key(r) if bits & COLUMN else 0
            sums.add("bias", bits, r, dS, gdBias, where)
        else:
            self.store(gdBias, dS, r, c)

    def store(self, gdBias: cute.Tensor, dS: Float32, r: int, c: int) -> None:
        place, (num_queries, num_keys) = self.place, self.lengths
        query, key = place.query + column_offset(c), place.key + place.row_offset(r)
        exists = (query < num_queries) & (key < num_keys)
        target = gdBias.iterator + cute.crd2idx((query, key), gdBias.layout)
        if self.terms.is_added:
            add_if(Int32(exists), target.toint(), dS)
        else:
            store_if(Int32(exists), target.toint(), dS, gdBias.element_type)
