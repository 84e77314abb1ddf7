"""The mask as a band, on the run-time integers of a kernel. `spec.band` has the formulas.

`minimum`, `maximum`, `modulo` and `select` accept Python values too, so that constants fold at compile time.
"""

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


def modulo(a: Int32 | int, b: Int32 | int) -> Int32 | int:
    """The remainder of the division rounded down. `%` of run-time integers rounds the quotient towards 0.

    A `cute.FastDivmodDivisorV2` would take more registers: its multiplier and shifts stay in them.
    """
    remainder = a % b
    return select(remainder < 0, remainder + b, remainder)


@dataclass(frozen=True)
class Band(band.Band):
    """A band with run-time bounds. A bound of None is unbounded, which is known at compile time.

    In a kernel with a chunk, the band has both other bounds too; a bound that the call does not have masks nothing.
    """

    rows_are_keys: cutlass.Constexpr = False

    minimum = staticmethod(minimum)
    maximum = staticmethod(maximum)
    modulo = staticmethod(modulo)

    def diagonal_block(self, m_block: Int32, tile_m: int, tile_n: int, sq: Int32, sk: Int32) -> Int32:
        """The K/V block with the diagonal key of the tile's last row, or block 0 if that key is before key 0."""
        last = minimum((m_block + 1) * tile_m, sq) - 1
        return maximum(last + sk - sq, 0) // tile_n
