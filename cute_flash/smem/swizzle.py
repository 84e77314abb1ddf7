"""The XOR swizzle of CuTe."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Swizzle:
    """XOR a field of an index with a higher field of the same index: CuTe's `Swizzle<bits, base, shift>`.

    Swizzle(3, 3, 3) on 2-byte elements, in an atom of 8 rows of 64 elements (128 bytes):

        bit of the index   8   7   6   5   4   3   2   1   0
                         [ y   y   y ][ x   x   x ][ e   e   e ]
                           row mod 8     16-byte     element
                                         chunk       in the chunk

                                  x := x XOR y

    The low `base` = 3 bits stay, so a 16-byte chunk moves as a unit. The `bits` = 3 bits above them are XORed with the
    bits that are `shift` = 3 higher. Those do not change, so the swizzle is its own inverse.
    """

    bits: int
    base: int
    shift: int

    def __post_init__(self) -> None:
        if self.bits < 0 or self.base < 0:
            raise ValueError(f"{self}: bits and base must be 0 or more")
        if self.shift < self.bits:
            raise ValueError(f"{self}: shift must be bits or more, else the two fields overlap")

    @property
    def mask(self) -> int:
        """The bits that are read: `[base + shift, base + shift + bits)`."""
        return ((1 << self.bits) - 1) << (self.base + self.shift)

    @property
    def period(self) -> int:
        """The number of indices in an aligned block that the swizzle maps onto itself."""
        return 1 << (self.base + self.bits)

    def __call__(self, index: int) -> int:
        return index ^ ((index & self.mask) >> self.shift)

    def __str__(self) -> str:
        return f"S<{self.bits},{self.base},{self.shift}>"
