"""The query blocks of a group of heads that a tile of keys must visit: see `score_mod/block_sparse.py`."""

from dataclasses import dataclass

import cutlass.cute as cute
from cutlass import Boolean, Int32

from cute_flash.score_mod.block_sparse import HEAD_SHIFT, IS_LAST, IS_PARTIAL, M_BLOCK_SHIFT

ROW_MASK = (1 << (HEAD_SHIFT - M_BLOCK_SHIFT)) - 1


@dataclass(frozen=True)
class EntryLists:
    mNum: cute.Tensor  # (B, Hkv, tiles of keys)
    mEntries: cute.Tensor  # (B, Hkv, tiles of keys, entries)

    @cute.jit
    def num(self, batch: Int32, head_kv: Int32, n_block: Int32) -> Int32:
        return cute.arch.make_warp_uniform(self.mNum[batch, head_kv, n_block])

    @cute.jit
    def read(self, batch: Int32, head_kv: Int32, n_block: Int32, i: Int32) -> Int32:
        return cute.arch.make_warp_uniform(self.mEntries[batch, head_kv, n_block, i])


@dataclass(frozen=True)
class Entry:
    """One of a list, in one number."""

    bits: Int32

    @property
    def m_block(self) -> Int32:
        return (self.bits >> M_BLOCK_SHIFT) & ROW_MASK

    @property
    def head(self) -> Int32:
        """Of those that share the keys."""
        return self.bits >> HEAD_SHIFT

    @property
    def is_partial(self) -> Boolean:
        return (self.bits & IS_PARTIAL) != 0

    @property
    def is_last(self) -> Boolean:
        """Of its head."""
        return (self.bits & IS_LAST) != 0
