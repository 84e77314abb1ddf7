"""The position and the length of a sequence, in dense (B, H, S, D) and in varlen (1, H, T, D) tensors."""

from dataclasses import dataclass
from typing import NamedTuple

import cutlass.cute as cute
from cutlass import Int32, Int64

from cute_flash.device.memory.tma import VarlenRows
from cute_flash.planning.varlen import padded_block

SeqlenValues = tuple[Int32, ...]  # `SeqlenInfo.values`
NUM_VALUES = 5  # in a varlen batch


class HeadBlock(NamedTuple):
    """A block of the rows of one head: an m_block, an n_block, or a block of a block mask."""

    batch: Int32
    head: Int32
    block: Int32


@dataclass(frozen=True)
class SeqlenInfo:
    """A sequence: an entry of a dense batch, or a range of rows of varlen tensors."""

    batch: Int32  # index of the sequence
    q_len: Int32
    k_len: Int32
    q_begin: Int32 | None = None  # first row in varlen tensors; None: a dense batch
    k_begin: Int32 | None = None

    @property
    def is_varlen(self) -> bool:
        return self.q_begin is not None

    def slice_head(self, mX: cute.Tensor, head: Int32) -> cute.Tensor:
        """(S, D) of a head, or (S) of statistics. Rows are indexed by `q_row` and `k_row`."""
        rest = (None,) * (cute.rank(mX) - 2)
        return mX[(0 if self.is_varlen else self.batch, head, *rest)]

    def slice_keys(self, mX: cute.Tensor, head: Int32) -> cute.Tensor:
        """(S, D) of a head, beginning with the first key of the sequence."""
        gX = self.slice_head(mX, head)
        if not self.is_varlen:
            return gX
        return cute.make_tensor(gX.iterator + Int64(self.k_begin) * gX.stride[0], gX.layout)

    def q_row(self, row: Int32) -> Int32:
        """The row of the tensor that holds the sequence's query `row`."""
        return self.q_begin + row if self.is_varlen else row

    def k_row(self, row: Int32) -> Int32:
        """The row of the tensor that holds the sequence's key `row`."""
        return self.k_begin + row if self.is_varlen else row

    def padded_q_block(self, m_block: Int32, tile_m: int) -> Int32:
        """The index of an m_block in a workspace that pads every sequence to full blocks of queries."""
        return padded_block(self.q_begin, self.batch, tile_m) + m_block if self.is_varlen else m_block

    def padded_k_block(self, n_block: Int32, tile_n: int) -> Int32:
        """The index of an n_block in a workspace that pads every sequence to full blocks of keys."""
        return padded_block(self.k_begin, self.batch, tile_n) + n_block if self.is_varlen else n_block

    def padded_q_row(self, row: Int32, tile_m: int) -> Int32:
        """The row that holds the sequence's query `row` in the workspace of `padded_q_block`."""
        return self.padded_q_block(0, tile_m) * tile_m + row if self.is_varlen else row

    @property
    def q_tma_coord(self) -> Int32 | VarlenRows:
        """The `batch` argument of `TmaTiles` and `VarlenTmaTiles` for queries."""
        return VarlenRows(self.q_begin, self.q_len) if self.is_varlen else self.batch

    @property
    def k_tma_coord(self) -> Int32 | VarlenRows:
        """The `batch` argument of `TmaTiles` and `VarlenTmaTiles` for keys."""
        return VarlenRows(self.k_begin, self.k_len) if self.is_varlen else self.batch

    @property
    def values(self) -> SeqlenValues:
        """The integers that a producer warp publishes, from which `of_values` makes the sequence again.

        In a varlen batch their order is that of a row of the tile list (`planning.varlen`).
        """
        if not self.is_varlen:
            return (self.batch,)
        return self.batch, self.q_begin, self.q_len, self.k_begin, self.k_len

    @staticmethod
    def of_values(values: SeqlenValues, q_len: Int32 | None = None, k_len: Int32 | None = None) -> "SeqlenInfo":
        """The sequence with these `values`. `q_len`, `k_len`: the lengths of all sequences of a dense batch."""
        if len(values) == 1:
            return SeqlenInfo(values[0], q_len, k_len)
        batch, q_begin, q_len, k_begin, k_len = values
        return SeqlenInfo(batch, q_len, k_len, q_begin, k_begin)


def with_batch_mode(mX: cute.Tensor) -> cute.Tensor:
    """View a varlen tensor (T, H, D) as (1, H, T, D), or varlen statistics (H, T) as (1, H, T)."""
    by_head = mX.layout if cute.rank(mX) == 2 else cute.select(mX.layout, mode=[1, 0, 2])
    return cute.make_tensor(mX.iterator, cute.prepend(by_head, cute.make_layout(1, stride=0)))
