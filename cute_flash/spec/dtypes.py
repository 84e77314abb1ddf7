"""Element types: what kernels, tiles and copies need to know of each."""

from __future__ import annotations

from dataclasses import dataclass

# Copies and stores of kernels move 16 bytes at once; rows start at multiples of it.
ROW_ALIGN_BYTES = 16


@dataclass(frozen=True)
class DtypeSpec:
    name: str  # as torch spells it
    bytes: int

    @property
    def row_align(self) -> int:
        """Elements in 16 bytes: what the strides of rows are multiples of."""
        return ROW_ALIGN_BYTES // self.bytes


DTYPES = {
    spec.name: spec
    for spec in (
        DtypeSpec("float16", 2),
        DtypeSpec("bfloat16", 2),
        DtypeSpec("float32", 4),
        DtypeSpec("float64", 8),
    )
}
