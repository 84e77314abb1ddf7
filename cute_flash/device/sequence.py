"""Which rows of (B, H, S, D) tensors are those of a sequence, and the list of a packed batch's tiles."""

from dataclasses import dataclass

import cutlass.cute as cute
from cutlass import Int32, Int64

from cute_flash.device.scheduler import TileOrder, TileQueue
from cute_flash.planning.varlen import TILE_LIST_HEADER, TILE_LIST_WIDTH, padded_block


@dataclass(frozen=True)
class Sequence:
    """An entry of the batch, or, in packed tensors (1, H, T, D), a run of rows."""

    batch: Int32  # its number
    q_len: Int32
    k_len: Int32
    q_begin: Int32 | None = None  # None: its rows are all of its entry
    k_begin: Int32 | None = None

    @property
    def is_packed(self) -> bool:
        return self.q_begin is not None

    def of(self, mX: cute.Tensor, head: Int32) -> cute.Tensor:
        """(S, D), or of statistics (S), of a head; rows are counted by `q_row` and `k_row`."""
        rest = (None,) * (cute.rank(mX) - 2)
        return mX[(0 if self.is_packed else self.batch, head, *rest)]

    def of_keys(self, mX: cute.Tensor, head: Int32) -> cute.Tensor:
        """(S, D) from the sequence's first key on."""
        gX = self.of(mX, head)
        if not self.is_packed:
            return gX
        return cute.make_tensor(gX.iterator + Int64(self.k_begin) * gX.stride[0], gX.layout)

    def q_row(self, row: Int32) -> Int32:
        return self.q_begin + row if self.is_packed else row

    def k_row(self, row: Int32) -> Int32:
        return self.k_begin + row if self.is_packed else row

    def q_block(self, m_block: Int32, tile_m: int) -> Int32:
        """Of a workspace in which every sequence is padded to whole blocks of queries."""
        return padded_block(self.q_begin, self.batch, tile_m) + m_block if self.is_packed else m_block

    def k_block(self, n_block: Int32, tile_n: int) -> Int32:
        """The same for keys."""
        return padded_block(self.k_begin, self.batch, tile_n) + n_block if self.is_packed else n_block

    def padded_row(self, row: Int32, tile_m: int) -> Int32:
        """Of the workspace of queries."""
        return self.q_block(0, tile_m) * tile_m + row if self.is_packed else row

    @property
    def queries(self):
        """Where the copy engine finds them: see `TmaTiles`, `RaggedTiles`."""
        return (self.q_begin, self.q_len) if self.is_packed else self.batch

    @property
    def keys(self):
        return (self.k_begin, self.k_len) if self.is_packed else self.batch

    @property
    def numbers(self) -> tuple:
        """To be written down, and read by `Sequence.told`."""
        if not self.is_packed:
            return (self.batch,)
        return self.batch, self.q_begin, self.q_len, self.k_begin, self.k_len

    @staticmethod
    def told(numbers: tuple) -> "Sequence":
        batch, q_begin, q_len, k_begin, k_len = numbers
        return Sequence(batch, q_len, k_len, q_begin, k_begin)


# How many numbers tell a packed sequence.
NUMBERS = 5


@dataclass(frozen=True)
class WorkList:
    """What `kernels/prepare.py` has written: see `cute_flash/work.py`."""

    mItems: cute.Tensor  # (TILE_LIST_HEADER + items, TILE_LIST_WIDTH)
    heads: Int32
    section: Int32  # heads that run side by side

    @cute.jit
    def num_tiles(self) -> Int32:
        return self.mItems[0, 0] * self.heads

    @cute.jit
    def read(self, index: Int32):
        """The tile with this index: block, head, and the numbers of the sequence."""
        order = TileOrder(self.mItems[0, 0], self.heads, Int32(1), self.section, False)
        item, head, _batch = order.decode(index)
        block, numbers = read_item(self.mItems, item)
        return block, head, numbers

    def queue(self, counter: Int64, is_shared: bool) -> TileQueue:
        return TileQueue(self.num_tiles(), counter, is_shared)


@cute.jit
def read_item(mItems: cute.Tensor, item: Int32):
    """A tile of the list: block, and the numbers of the sequence."""
    row = cute.make_rmem_tensor(TILE_LIST_WIDTH, Int32)
    source = (mItems.iterator + (item + TILE_LIST_HEADER) * TILE_LIST_WIDTH).align(16)
    cute.autovec_copy(cute.make_tensor(source, cute.make_layout(TILE_LIST_WIDTH)), row)
    uniform = cute.arch.make_warp_uniform
    block, *numbers = (uniform(row[i]) for i in range(1 + NUMBERS))
    return block, tuple(numbers)


def unpacked(mX: cute.Tensor) -> cute.Tensor:
    """A packed tensor (T, H, D) as (1, H, T, D); one of statistics, (H, T), as (1, H, T)."""
    if cute.rank(mX) == 2:
        return cute.make_tensor(mX.iterator, cute.prepend(mX.layout, cute.make_layout(1, stride=0)))
    by_head = cute.select(mX.layout, mode=[1, 0, 2])
    return cute.make_tensor(mX.iterator, cute.prepend(by_head, cute.make_layout(1, stride=0)))
