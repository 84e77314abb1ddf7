"""TMA loads of tiles into the shared memory of two CTAs."""

import cutlass.cute as cute
from cutlass import Int16, Int32

from cute_flash.device.memory.tma import TmaTiles, VarlenRows, VarlenTmaTiles

CTAS = 2  # of a cluster


class MulticastTiles(TmaTiles):
    """Tiles that both CTAs of a cluster get, at the same addresses of their shared memory."""

    @cute.jit
    def load(
        self,
        sX: cute.Tensor,
        block: Int32,
        head: Int32,
        batch: Int32 | VarlenRows,
        barrier: cute.Pointer,
        column: Int32 | int = 0,
    ):
        """As in `TmaTiles`. Each CTA has a barrier at this address, which counts the bytes that it gets."""
        tXsX, tXgX = self._partition(sX, head, batch, column)
        ctas = Int16((1 << CTAS) - 1)
        cute.copy(self.atom, tXgX[None, block], tXsX, tma_bar_ptr=barrier, mcast_mask=ctas)


class VarlenMulticastTiles(MulticastTiles, VarlenTmaTiles):
    """Tiles of a varlen tensor that both CTAs of a cluster get."""
