"""The index lists of a block mask in a kernel. `score_mod.block_mask` builds the lists.

In the forward a tile of queries has a list of K/V blocks. In the backward a K/V tile has a list of the query blocks of
all heads that share it. `score_mod.block_sparse` packs each query block with its head into one integer.
"""

from dataclasses import dataclass
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32

from cute_flash.device.memory.views import as_mn
from cute_flash.device.scheduling.block_iterator import BlockIterator, OutwardBlockIterator
from cute_flash.device.scheduling.seqlen import HeadBlock
from cute_flash.device.scores.mask import Mask
from cute_flash.score_mod.block_sparse import HEAD_SHIFT, IS_LAST, IS_PARTIAL, M_BLOCK_SHIFT
from cute_flash.spec.band import BlockRange

M_BLOCK_MASK = (1 << (HEAD_SHIFT - M_BLOCK_SHIFT)) - 1


class BlockCounts(NamedTuple):
    """How many blocks of keys a query block sees in full, and how many in part."""

    full: Int32
    partial: Int32


@dataclass(frozen=True)
class BlockIndices:
    """The blocks of keys that each query block of a block mask sees, in full or in part."""

    num_full: cute.Tensor  # (B, H, query blocks)
    full: cute.Tensor  # (B, H, query blocks, key blocks)
    num_partial: cute.Tensor
    partial: cute.Tensor

    @cute.jit
    def counts(self, queries: HeadBlock) -> BlockCounts:
        """The numbers of blocks of keys."""
        uniform = cute.arch.make_warp_uniform
        return BlockCounts(uniform(self.num_full[tuple(queries)]), uniform(self.num_partial[tuple(queries)]))

    @cute.jit
    def read(self, queries: HeadBlock, i: Int32, num_full: Int32) -> Int32:
        """The i-th block of keys, full ones first."""
        full, partial = self.full[(*queries, None)].iterator, self.partial[(*queries, None)].iterator
        at = full + i if i < num_full else partial + (i - num_full)
        return cute.make_tensor(at, cute.make_layout(1))[0]


@dataclass(frozen=True)
class BlockSparseIterator:
    """Visits the K/V blocks that a block mask lists: full ones, then partial ones.

    A block of the mask covers `parts` K/V blocks of the kernel.
    """

    indices: BlockIndices
    queries: HeadBlock  # the query block of the mask
    counts: BlockCounts  # in blocks of the mask
    parts: cutlass.Constexpr
    # The blocks of the band, which may mask blocks that are full in the block mask; None: no band.
    blocks: BlockRange | None = None

    @property
    def num_full(self) -> Int32:
        return self.counts.full

    @property
    def num(self) -> Int32:
        return (self.counts.full + self.counts.partial) * self.parts

    @property
    def full_begin(self) -> Int32:
        return Int32(0)

    @property
    def full_end(self) -> Int32:
        return self.num_full * self.parts

    @property
    def first(self) -> Int32:
        return self.block(Int32(0))

    def block(self, i: Int32) -> Int32:
        if self.parts == 1:
            return self.indices.read(self.queries, i, self.num_full)
        return self.indices.read(self.queries, i // self.parts, self.num_full) * self.parts + i % self.parts

    def is_masked(self, i: Int32):
        """Whether the i-th block is partial."""
        return i >= self.full_end

    @cute.jit
    def apply_band_to_full_block(self, acc_S: cute.Tensor, mask: Mask, n_block: Int32, first_column: Int32):
        """Apply the band to a block that the block mask lists as full."""
        if cutlass.const_expr(self.blocks is not None):
            if self.blocks.is_masked(n_block):
                mask.apply(as_mn(acc_S), first_column)

    def starts_masked(self):
        return self.num_full == 0


AnyBlockIterator = BlockIterator | OutwardBlockIterator | BlockSparseIterator


@dataclass(frozen=True)
class BwdBlockIndices:
    """For every K/V tile, the query blocks of all heads that share it."""

    mCount: cute.Tensor  # (B, Hkv, n_blocks)
    mIndices: cute.Tensor  # (B, Hkv, n_blocks, query blocks)
    mRanks: cute.Tensor | None = None  # (B, H, m_blocks, n_blocks), for deterministic gradients

    def rank(self, batch: Int32, head: Int32, m_block: Int32, n_block: Int32) -> Int32:
        """The number of K/V tiles that add to dQ of the m_block first: those with a larger n_block that list it."""
        return self.mRanks[batch, head, m_block, n_block]

    @cute.jit
    def count(self, batch: Int32, head_kv: Int32, n_block: Int32) -> Int32:
        return cute.arch.make_warp_uniform(self.mCount[batch, head_kv, n_block])

    @cute.jit
    def read(self, batch: Int32, head_kv: Int32, n_block: Int32, i: Int32) -> Int32:
        """The i-th query block of the list, as the bits of a `BwdBlockIndex`."""
        return cute.arch.make_warp_uniform(self.mIndices[batch, head_kv, n_block, i])


@dataclass(frozen=True)
class BwdBlockIndex:
    """A query block of one head, packed into an integer."""

    bits: Int32

    @property
    def m_block(self) -> Int32:
        return (self.bits >> M_BLOCK_SHIFT) & M_BLOCK_MASK

    @property
    def head(self) -> Int32:
        """Index among the query heads that share the K/V head."""
        return self.bits >> HEAD_SHIFT

    @property
    def is_partial(self) -> Boolean:
        return (self.bits & IS_PARTIAL) != 0

    @property
    def is_last(self) -> Boolean:
        """Whether it is the last block of its head in the list."""
        return (self.bits & IS_LAST) != 0
