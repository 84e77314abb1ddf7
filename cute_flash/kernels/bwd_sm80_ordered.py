"""The backward with mma.sync whose tiles of keys add to a block of dQ in turn: the same bits every time."""

import cutlass.cute as cute
from cutlass import Int32

from cute_flash.device.ptx import rederived
from cute_flash.kernels.bwd_custom import BwdSm80Custom
from cute_flash.kernels.bwd_general import BwdSm80General
from cute_flash.kernels.bwd_sm80 import BwdSm80
from cute_flash.kernels.bwd_sm80_shared import Main, Params
from cute_flash.planning.tiles.bwd_sm80 import BwdTileSm80


class InTurn:
    """Of a kernel whose threads all add to a block: one waits and tells for all of them."""

    is_ordered = True
    tile: BwdTileSm80

    @cute.jit
    def wait_turn(self, p: Params, main: Main, m_block: Int32, head: Int32):
        """Until the tiles of keys before have added theirs."""
        if rederived(main.thread) == 0:
            p.turns.wait(*self.turn(p, main, m_block, head))
        cute.arch.sync_threads()

    @cute.jit
    def pass_turn(self, p: Params, main: Main, m_block: Int32, head: Int32):
        """All threads have added: what one of them tells after a barrier includes it."""
        cute.arch.sync_threads()
        if rederived(main.thread) == 0:
            p.turns.pass_on(*self.turn(p, main, m_block, head))

    def turn(self, p: Params, main: Main, m_block: Int32, head: Int32) -> tuple:
        """Where the counter is, and how many come before. No register is left to keep them meanwhile."""
        span, m_block = main.span, rederived(m_block)
        head = rederived(head)
        where = (head, 0 if span.is_packed else span.batch, span.q_block(m_block, self.tile.tile_m))
        n_block = rederived(main.first_row) // self.tile.tile_n
        return where, p.turns.turn(n_block, m_block, span if span.is_packed else None)


class BwdSm80Ordered(InTurn, BwdSm80):
    pass


class BwdSm80OrderedGeneral(InTurn, BwdSm80General):
    pass


class BwdSm80OrderedCustom(InTurn, BwdSm80Custom):
    pass
