"""Element types: their sizes and the alignment of rows."""

from __future__ import annotations

from dataclasses import dataclass

# Kernels load and store 16 bytes at once, so rows start at multiples of 16 bytes.
ROW_ALIGN_BYTES = 16


@dataclass(frozen=True)
class DtypeSpec:
    name: str  # as torch spells it
    bytes: int

    @property
    def row_align(self) -> int:
        """Elements in 16 bytes; row strides are multiples of this."""
        return ROW_ALIGN_BYTES // self.bytes


DTYPES = {
    spec.name: spec
    for spec in (DtypeSpec("float16", 2), DtypeSpec("bfloat16", 2), DtypeSpec("float32", 4), DtypeSpec("float64", 8))
}
