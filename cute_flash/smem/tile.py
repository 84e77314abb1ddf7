"""The shared-memory tiles of the kernels. `layouts/` counts their bank conflicts and draws them."""

from __future__ import annotations

import math
from dataclasses import dataclass

from cute_flash.smem.swizzle import Swizzle

# The shape or the stride of a layout, whose modes are (position in an atom, atom).
Modes = tuple[tuple[int, int], ...]

# Layouts that kernels can be built with; the first is the default. The mma.sync kernels use ldmatrix, which reads rows
# at any aligned 16 bytes. TMA and wgmma support only HOPPER_VARIANTS.
VARIANTS = ("swizzled", "padded", "plain")
HOPPER_VARIANTS = ("swizzled", "swizzled64", "swizzled32", "interleaved")

# The widest shared-memory access of one thread, and the unit that a swizzle moves.
CHUNK_BYTES = 16
# Bytes that shared memory delivers in one wavefront: 32 banks of 4 bytes.
WAVEFRONT_BYTES = 128
# Bytes of the narrowest row of a tile: two chunks, which the narrowest swizzle permutes.
MIN_ROW_BYTES = 32

# Bytes of an atom's row, in variants with a fixed atom width.
_ATOM_BYTES = {"swizzled64": 64, "swizzled32": 32, "interleaved": CHUNK_BYTES}

_ATOM_ROWS = 8
# The swizzle reads the index bits above the 3 bits that number the 16-byte chunks of 128 bytes, for any atom width.
_SWIZZLE_SHIFT = 3


@dataclass(frozen=True)
class SmemTile:
    """A tile of `rows` x `cols` elements in shared memory, rows contiguous.

    `swizzled`  atoms of 8 rows x 128 bytes (64 or 32 if a row is not a multiple of that), in which the row permutes the
                16-byte chunks. Atoms are ordered down the rows first. These are the 128-byte, 64-byte and 32-byte
                swizzles of TMA and wgmma. No padding, no conflicts.
    `padded`    row-major, each row 16 bytes longer than its elements. Few conflicts, but larger, and TMA and wgmma
                cannot read it.
    `plain`     row-major, the baseline with bank conflicts.
    `swizzled64`, `swizzled32`, `interleaved`
                atoms of 8 rows x 64, 32 and 16 bytes: the other layouts that TMA and wgmma support. An atom of 16
                bytes is one contiguous 8x8 matrix, without a permutation.

    A row is a multiple of an atom's row, and of 32 bytes.
    """

    rows: int
    cols: int
    element_bytes: int = 2
    variant: str = "swizzled"

    def __post_init__(self) -> None:
        variants = dict.fromkeys(VARIANTS + HOPPER_VARIANTS)
        if self.variant not in variants:
            raise ValueError(f"variant={self.variant!r}: choose one of {', '.join(variants)}")
        if self.element_bytes not in (1, 2, 4):
            raise ValueError(f"element_bytes={self.element_bytes}: choose 1, 2 or 4")
        if self.rows < 1 or self.rows % _ATOM_ROWS:
            raise ValueError(f"rows={self.rows}: must be a positive multiple of {_ATOM_ROWS}")
        row_bytes = max(MIN_ROW_BYTES, _ATOM_BYTES.get(self.variant, 0))
        least = row_bytes // self.element_bytes
        if self.cols < 1 or self.cols % least:
            raise ValueError(
                f"cols={self.cols}: must be a positive multiple of {least} ({row_bytes} bytes of "
                f"{self.element_bytes}-byte elements)"
            )

    @property
    def copy_cols(self) -> int:
        """Columns of a row that neighbouring threads copy: 128 bytes, or 64 or 32 that divide a row."""
        return math.gcd(self.cols, WAVEFRONT_BYTES // self.element_bytes)

    @property
    def atom_cols(self) -> int:
        """Columns of an atom; without a swizzle, the full row."""
        if self.variant in ("padded", "plain"):
            return self.cols
        atom_bytes = _ATOM_BYTES.get(self.variant)
        return self.copy_cols if atom_bytes is None else atom_bytes // self.element_bytes

    @property
    def padding(self) -> int:
        """Elements between two rows."""
        return self.chunk_cols if self.variant == "padded" else 0

    @property
    def row_stride(self) -> int:
        """Elements from a row to the next row of its atom, before the swizzle."""
        return self.atom_cols + self.padding

    def column(self, col: int) -> tuple[int, int]:
        """How to get from the index of a row's first chunk to the chunk at `col`: (bits to XOR, elements to add).

        In an atom of a swizzled tile, a column step flips the same bits in every row. Without a swizzle, and from atom
        to atom, it is an addition.
        """
        if self.swizzle is None:
            return 0, col
        atom, inside = divmod(col, self.atom_cols)
        return inside, atom * self.rows * self.atom_cols

    @property
    def chunk_cols(self) -> int:
        """Elements in 16 bytes."""
        return CHUNK_BYTES // self.element_bytes

    @property
    def swizzle(self) -> Swizzle | None:
        """The swizzle of element indices; None: no swizzle."""
        if self.variant in ("padded", "plain"):
            return None
        chunks = self.atom_cols // self.chunk_cols
        return Swizzle(chunks.bit_length() - 1, self.chunk_cols.bit_length() - 1, _SWIZZLE_SHIFT)

    @property
    def cosize(self) -> int:
        """Elements to allocate. The last row is not padded."""
        return self.rows * self.cols + (self.rows - 1) * self.padding

    @property
    def bytes(self) -> int:
        return self.cosize * self.element_bytes

    @property
    def affine(self) -> tuple[Modes, Modes]:
        """Shape and stride of (row, col) -> element index, before the swizzle. The stride of a mode of size 1 is 0."""
        atom_rows = self.rows if self.swizzle is None else _ATOM_ROWS
        atoms_m, atoms_n = self.rows // atom_rows, self.cols // self.atom_cols
        shape = (atom_rows, atoms_m), (self.atom_cols, atoms_n)
        step_m = atom_rows * self.atom_cols if atoms_m > 1 else 0
        step_n = self.rows * self.atom_cols if atoms_n > 1 else 0
        return shape, ((self.row_stride, step_m), (1, step_n))

    def staged(self, stages: int) -> tuple[Modes, Modes]:
        """Shape and stride of (row, col, stage): `stages` tiles one after the other, for a pipeline."""
        if stages < 1:
            raise ValueError(f"stages={stages}: must be 1 or more")
        shape, stride = self.affine
        return (*shape, (1, stages)), (*stride, (0, self.cosize if stages > 1 else 0))
