"""The lists of a block map, as kernels read them: first the full blocks of a tile, then the partial ones."""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from cute_flash.spec.band import BlockRange


@dataclass(frozen=True)
class BlockLists:
    """Of a launch: of every block of the map on one side, blocks on the other."""

    num_full: cute.Tensor  # (B, H, blocks)
    full: cute.Tensor  # (B, H, blocks, others)
    num_partial: cute.Tensor
    partial: cute.Tensor

    @cute.jit
    def numbers(self, batch: Int32, head: Int32, block: Int32) -> tuple[Int32, Int32]:
        """How many blocks are full, and how many partial."""
        uniform = cute.arch.make_warp_uniform
        return uniform(self.num_full[batch, head, block]), uniform(self.num_partial[batch, head, block])

    @cute.jit
    def read(self, place: tuple, i: Int32, num_full: Int32) -> Int32:
        """The i-th block of those at (batch, head, block)."""
        full, partial = self.full[(*place, None)].iterator, self.partial[(*place, None)].iterator
        at = full + i if i < num_full else partial + (i - num_full)
        return cute.make_tensor(at, cute.make_layout(1))[0]


@dataclass(frozen=True)
class ListWalk:
    """The way through the key blocks of a tile that its lists name: `band.Walk`'s, but for the order.

    A block of the map is `parts` of the kernel's.
    """

    lists: BlockLists
    place: tuple  # (batch, head, block of the map)
    numbers: tuple  # of blocks of the map: full and partial
    parts: cutlass.Constexpr
    blocks: BlockRange | None = None  # of a band, which may cut full blocks too

    @property
    def num_full(self) -> Int32:
        return self.numbers[0]

    @property
    def num(self) -> Int32:
        return (self.numbers[0] + self.numbers[1]) * self.parts

    @property
    def whole_begin(self) -> Int32:
        return Int32(0)

    @property
    def whole_end(self) -> Int32:
        """Of those on the way, up to which they are full."""
        return self.num_full * self.parts

    @property
    def first(self) -> Int32:
        return self.block(Int32(0))

    def block(self, i: Int32) -> Int32:
        """The key block that is the i-th on the way, of those that there are."""
        if self.parts == 1:
            return self.lists.read(self.place, i, self.num_full)
        return self.lists.read(self.place, i // self.parts, self.num_full) * self.parts + i % self.parts

    def is_cut(self, i: Int32):
        """Whether the i-th block is partial."""
        return i >= self.whole_end

    def begins_cut(self):
        return self.num_full == 0
