"""Tensors (2, heads, seqlen, D) of many strides: those that kernels read in place, and those that are copied."""

from __future__ import annotations

from tests.runtime.calls import D, normal

IN_PLACE = {
    "contiguous": lambda h, s: normal(2, h, s, D),
    "heads transposed": lambda h, s: normal(2, s, h, D).transpose(1, 2),
    "one of qkv": lambda h, s: normal(2, s, 3, h, D).permute(2, 0, 3, 1, 4)[1],
    "every third row": lambda h, s: normal(2, h, 3 * s, D)[:, :, ::3],
    "columns of a wider row": lambda h, s: normal(2, h, s, 3 * D)[..., 8 : 8 + D],
    "expanded heads": lambda h, s: normal(2, 1, s, D).expand(2, h, s, D),
    "expanded rows": lambda h, s: normal(2, h, 1, D).expand(2, h, s, D),
    "sequence outermost": lambda h, s: normal(s, 2, h, D).permute(1, 2, 0, 3),
    "offset of 16 bytes": lambda h, s: normal(2 * h * s * D + 8)[8:].view(2, h, s, D),
}
COPIED = {
    "row stride of 17": lambda h, s: normal(2, h, s, D + 1)[..., :D],
    "row stride of 20": lambda h, s: normal(2, h, s, D + 4)[..., :D],
    "columns not contiguous": lambda h, s: normal(2, h, D, s).mT,
    "every second column": lambda h, s: normal(2, h, s, 2 * D)[..., ::2],
    "expanded columns": lambda h, s: normal(2, h, s, 1).expand(2, h, s, D),
    "offset of 2 bytes": lambda h, s: normal(2 * h * s * D + 1)[1:].view(2, h, s, D),
    "offset of 8 bytes": lambda h, s: normal(2 * h * s * D + 4)[4:].view(2, h, s, D),
    "head stride of 4": lambda h, s: normal(2 * s * 64).as_strided((2, h, s, D), (s * 64, 4, 64, 1)),
}
ALL = {**IN_PLACE, **COPIED}
