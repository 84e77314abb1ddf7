"""The warpgroup of the Hopper forward that draws for dropout: masks for those that multiply, which only load
them. It follows the tiles as the warp of V does, as far ahead as there are stages.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from cute_flash.device.drawn import RECTANGLES
from cute_flash.kernels.fwd_sm90_shared import Params, Shared
from cute_flash.kernels.fwd_sm90_work import Told, follow


@cute.jit
def draw(p: Params, shared: Shared, warp: Int32, lane: Int32):
    tile, drawn = p.shapes.tile, shared.drawn
    cute.arch.setmaxregister_decrease(tile.dropout_producer_registers)
    dropout = p.extras.dropout()

    def draw_block(fill: Int32, told: Told, i: Int32):
        sequence = told.span.batch * p.order.heads + told.head
        for w in cutlass.range_constexpr(tile.num_warpgroups):
            rectangle = (told.m_block * tile.num_warpgroups + w) * RECTANGLES
            drawn.ring(w).wait_empty(fill)
            where = drawn.stage(fill), w, warp, lane
            drawn.draw(dropout, sequence, rectangle, told.walk.block(i) * tile.tile_n, where)
            drawn.tell(w, fill)

    follow(p, shared, draw_block)
