"""The warpgroup of the Hopper forward that draws for dropout: masks for those that multiply, which only load
them. It follows the tiles as the warp of V does, as far ahead as there are stages.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from cute_flash.device.drawn import RECTANGLES
from cute_flash.kernels.fwd_sm90_shared import NO_TILE, Params, Shared


@cute.jit
def draw(p: Params, shared: Shared, warp: Int32, lane: Int32):
    tile, drawn = p.shapes.tile, shared.drawn
    cute.arch.setmaxregister_decrease(tile.registers_to_draw)
    dropout = p.extras.dropout()
    count, fill = Int32(0), Int32(0)  # of tiles; of blocks of keys
    shared.q.wait_full(count)
    m_block = shared.m_block(count)
    while m_block != NO_TILE:
        head, span, counts = shared.head(count), p.sequence(shared.sequence(count)), shared.counts(count)
        shared.release_q(count)
        sequence = span.batch * p.order.heads + head
        walk = p.walk(m_block, head, span, counts)
        for i in cutlass.range(walk.num, unroll=1):
            for w in cutlass.range_constexpr(tile.num_warpgroups):
                rectangle = (m_block * tile.num_warpgroups + w) * RECTANGLES
                drawn.ring(w).wait_empty(fill + i)
                where = drawn.stage(fill + i), w, warp, lane
                drawn.draw(dropout, sequence, rectangle, walk.block(i) * tile.tile_n, where)
                drawn.tell(w, fill + i)
        fill += walk.num
        count += 1
        shared.q.wait_full(count)
        m_block = shared.m_block(count)
