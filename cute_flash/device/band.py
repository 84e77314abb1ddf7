"""The band of a mask on traced integers; `spec.band` has the formulas."""

from dataclasses import dataclass

import cutlass
from cutlass import Int32

from cute_flash.spec import band


def minimum(a: Int32 | int, b: Int32 | int) -> Int32 | int:
    return min(a, b) if isinstance(a, int) and isinstance(b, int) else cutlass.min(a, b)


def maximum(a: Int32 | int, b: Int32 | int) -> Int32 | int:
    return max(a, b) if isinstance(a, int) and isinstance(b, int) else cutlass.max(a, b)


def select(condition: cutlass.Boolean | bool, a: Int32 | int, b: Int32 | int) -> Int32 | int:
    if isinstance(condition, bool):
        return a if condition else b
    return cutlass.select_(condition, a, b)


@dataclass(frozen=True)
class Band(band.Band):
    """A bound that is None is compiled in."""

    minimum = staticmethod(minimum)
    maximum = staticmethod(maximum)

    def diagonal_block(self, m_block: Int32, tile_m: int, tile_n: int, sq: Int32, sk: Int32) -> Int32:
        """The key block at the position of the last row of a tile; the first one, if that is before all keys."""
        last = minimum((m_block + 1) * tile_m, sq) - 1
        return maximum(last + sk - sq, 0) // tile_n
