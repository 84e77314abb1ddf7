"""The shared-memory tiles of the kernels: one description for kernels, bank counter and pictures."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from cute_flash.smem.layout import AnyLayout, ComposedLayout, Layout, tile_to_shape
from cute_flash.smem.swizzle import Swizzle

# Layouts that a kernel can be built with; the first one is the default. The mma.sync kernels read rows with
# ldmatrix, which takes any 16 aligned bytes; TMA and wgmma take only these forms.
VARIANTS = ("swizzled", "padded", "plain")
HOPPER_VARIANTS = ("swizzled", "swizzled64", "swizzled32", "interleaved")

# The widest shared-memory access of one thread, and the unit that a swizzle moves.
CHUNK_BYTES = 16
# The bytes of one wavefront: 32 banks of 4 bytes.
WAVEFRONT_BYTES = 128

# Bytes of an atom's row where it is not as wide as it can be.
_ATOM_BYTES = {"swizzled64": 64, "swizzled32": 32, "interleaved": CHUNK_BYTES}

_ATOM_ROWS = 8
# The source bits of the swizzle start where the 8 chunks of a wavefront end, whatever the width of the atom.
_SWIZZLE_SHIFT = 3


@dataclass(frozen=True)
class SmemTile:
    """A tile of `rows` x `cols` elements in shared memory, rows contiguous.

    `swizzled`  atoms of 8 rows x 128 bytes (64 bytes where 128 do not divide a row), whose 16-byte chunks are
                permuted by the row; the atoms stand below each other first. These are also the 128-byte and
                64-byte swizzles of TMA and wgmma. No padding, no conflicts.
    `padded`    row-major, each row 16 bytes longer than its elements. Few conflicts, but larger, and nothing
                that TMA or wgmma can read.
    `plain`     row-major, the baseline with bank conflicts.
    `swizzled64`, `swizzled32`, `interleaved`
                atoms of 8 rows x 64, 32 and 16 bytes: the other forms that TMA and wgmma know. An atom of 16
                bytes is one 8x8 matrix in one piece, with nothing left to permute.

    All variants take the same sizes, so that one can replace another.
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
        half = WAVEFRONT_BYTES // 2 // self.element_bytes
        if self.cols < 1 or self.cols % half:
            raise ValueError(
                f"cols={self.cols}: must be a positive multiple of {half} ({WAVEFRONT_BYTES // 2} bytes of "
                f"{self.element_bytes}-byte elements)"
            )

    @property
    def copy_cols(self) -> int:
        """Columns that neighbouring threads copy: 128 bytes, or 64 where 128 do not divide a row."""
        wide = WAVEFRONT_BYTES // self.element_bytes
        return wide if self.cols % wide == 0 else wide // 2

    @property
    def atom_cols(self) -> int:
        """Columns of an atom."""
        if self.swizzle is None:
            return self.cols
        return self._swizzled_cols

    @property
    def _swizzled_cols(self) -> int:
        if self.variant in _ATOM_BYTES:
            return _ATOM_BYTES[self.variant] // self.element_bytes
        return self.copy_cols

    @property
    def row_stride(self) -> int:
        """Elements from a row to the next one of its atom, swizzle aside."""
        return self.atom_cols + (self.chunk_cols if self.variant == "padded" else 0)

    def column(self, col: int) -> tuple[int, int]:
        """What leads from the first chunk of a row to the one at `col`: index bits to flip, elements to add.

        Within an atom the swizzle only flips bits, whatever the row; without one, columns add up.
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
        if self.variant in ("padded", "plain"):
            return None
        chunks = self._swizzled_cols // self.chunk_cols
        return Swizzle(chunks.bit_length() - 1, self.chunk_cols.bit_length() - 1, _SWIZZLE_SHIFT)

    @cached_property
    def atom(self) -> AnyLayout:
        """The smallest layout that repeats; of the variants without a swizzle, the whole tile."""
        if self.swizzle:
            return ComposedLayout(self.swizzle, 0, Layout((_ATOM_ROWS, self.atom_cols), (self.atom_cols, 1)))
        return Layout((self.rows, self.cols), (self.row_stride, 1))

    @cached_property
    def layout(self) -> AnyLayout:
        """(row, col) -> element index."""
        return tile_to_shape(self.atom, (self.rows, self.cols)) if self.swizzle else self.atom

    @cached_property
    def transposed(self) -> AnyLayout:
        """(col, row) -> element index in the same memory: V as the (d, keys) that ldmatrix.trans reads."""
        return self.layout.select(1, 0)

    def staged(self, stages: int) -> AnyLayout:
        """(row, col, stage) -> element index: `stages` tiles one after the other, for a pipeline."""
        if stages < 1:
            raise ValueError(f"stages={stages}: must be 1 or more")
        return tile_to_shape(self.atom, (self.rows, self.cols, stages))

    def affine(self, stages: int) -> Layout:
        """`staged` without its swizzle, for a pointer that swizzles."""
        staged = self.staged(stages)
        return staged.layout if isinstance(staged, ComposedLayout) else staged

    @property
    def cosize(self) -> int:
        """Elements to reserve."""
        return self.layout.cosize

    @property
    def bytes(self) -> int:
        return self.cosize * self.element_bytes
