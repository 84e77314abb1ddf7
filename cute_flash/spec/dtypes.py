"""Sizes of element types, and the alignment of rows."""

from __future__ import annotations

# Kernels load and store 16 bytes at once, so rows start at multiples of 16 bytes.
ROW_ALIGN_BYTES = 16
# Bytes of an element, by the name of its torch dtype.
DTYPE_BYTES = {"float16": 2, "bfloat16": 2, "float32": 4, "float64": 8, "uint8": 1, "int32": 4}
