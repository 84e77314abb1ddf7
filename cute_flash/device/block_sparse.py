"""The index lists of a block mask, as kernels read them; `score_mod.block_mask` makes them.

The forward reads, for a tile of queries, the key blocks that it visits. The backward reads, for a K/V tile, the query
blocks of all heads that share it; `score_mod.block_sparse` packs each of them into one integer.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32

from cute_flash.device.block_iterator import BlockIterator, OutwardBlockIterator
from cute_flash.score_mod.block_sparse import HEAD_SHIFT, IS_LAST, IS_PARTIAL, M_BLOCK_SHIFT
from cute_flash.spec.band import BlockRange

M_BLOCK_MASK = (1 << (HEAD_SHIFT - M_BLOCK_SHIFT)) - 1


@dataclass(frozen=True)
class BlockIndices:
    """The index lists of a block mask: for every block of rows, the blocks of keys, full ones and partial ones."""

    num_full: cute.Tensor  # (B, H, blocks)
    full: cute.Tensor  # (B, H, blocks, others)
    num_partial: cute.Tensor
    partial: cute.Tensor

    @cute.jit
    def counts(self, batch: Int32, head: Int32, block: Int32) -> tuple[Int32, Int32]:
        """How many blocks are full, and how many partial."""
        uniform = cute.arch.make_warp_uniform
        return uniform(self.num_full[batch, head, block]), uniform(self.num_partial[batch, head, block])

    @cute.jit
    def read(self, where: tuple, i: Int32, num_full: Int32) -> Int32:
        """The i-th block of the list at (batch, head, block)."""
        full, partial = self.full[(*where, None)].iterator, self.partial[(*where, None)].iterator
        at = full + i if i < num_full else partial + (i - num_full)
        return cute.make_tensor(at, cute.make_layout(1))[0]


@dataclass(frozen=True)
class BlockSparseIterator:
    """The key blocks that the index lists of a block mask name: full ones, then partial ones.

    A block of the mask is `parts` blocks of the kernel.
    """

    indices: BlockIndices
    where: tuple  # (batch, head, block of the mask)
    counts: tuple  # of blocks of the mask: full and partial
    parts: cutlass.Constexpr
    blocks: BlockRange | None = None  # of a band, which may mask full blocks too

    @property
    def num_full(self) -> Int32:
        return self.counts[0]

    @property
    def num(self) -> Int32:
        return (self.counts[0] + self.counts[1]) * self.parts

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
            return self.indices.read(self.where, i, self.num_full)
        return self.indices.read(self.where, i // self.parts, self.num_full) * self.parts + i % self.parts

    def is_masked(self, i: Int32):
        """Whether the i-th block is partial."""
        return i >= self.full_end

    def starts_masked(self):
        return self.num_full == 0


AnyBlockIterator = BlockIterator | OutwardBlockIterator | BlockSparseIterator


@dataclass(frozen=True)
class BwdBlockIndices:
    """For every K/V tile, the query blocks of the heads of its group."""

    mCount: cute.Tensor  # (B, Hkv, n_blocks)
    mIndices: cute.Tensor  # (B, Hkv, n_blocks, query blocks)
    mRanks: cute.Tensor | None = None  # (B, H, m_blocks, n_blocks), of deterministic gradients

    def rank(self, batch: Int32, head: Int32, m_block: Int32, n_block: Int32) -> Int32:
        """How many K/V tiles add to dQ of the m_block before this one: the later tiles that list it."""
        return self.mRanks[batch, head, m_block, n_block]

    @cute.jit
    def count(self, batch: Int32, head_kv: Int32, n_block: Int32) -> Int32:
        return cute.arch.make_warp_uniform(self.mCount[batch, head_kv, n_block])

    @cute.jit
    def read(self, batch: Int32, head_kv: Int32, n_block: Int32, i: Int32) -> Int32:
        """The bits of a `BwdBlockIndex`."""
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
        """Among the heads that share the K/V head."""
        return self.bits >> HEAD_SHIFT

    @property
    def is_partial(self) -> Boolean:
        return (self.bits & IS_PARTIAL) != 0

    @property
    def is_last(self) -> Boolean:
        """Whether it is the last of its head."""
        return (self.bits & IS_LAST) != 0
