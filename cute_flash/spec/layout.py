"""Calls that pass tensors of shape (B, S, H, D) without `layout="bshd"`: a warning, and a remedy for errors.

A call with the dimensions S and H exchanged is valid if the number of queries is a multiple of the number of keys. It
is reported if it is not a usual call: few queries over fewer keys, or numbers of heads that models do not have.
Transposed views of (B, S, H, D) memory, which models pass and `layout="bshd"` makes, are never reported.
"""

from __future__ import annotations

import os
import sys
import warnings

import torch
from torch import Tensor

from cute_flash.errors import LayoutWarning

# The most heads of a usual model. More heads than this, and than queries, are the tokens of a sequence.
MAX_USUAL_HEADS = 128
# The most K/V heads of a usual model with GQA. More of them, and fewer than query heads, are tokens too.
MAX_USUAL_GQA_HEADS = 16
REMEDY = 'for tensors of shape (B, S, H, D), pass layout="bshd"'
# Folders whose frames lie between a call of `attn` and its CPU kernel.
_INTERNAL = tuple(os.path.dirname(path) + os.sep for path in (os.path.dirname(__file__), torch.__file__))


def warn_if_swapped(q: Tensor, k: Tensor) -> None:
    """Warn if q and k, (B, H, S, D), look like tensors (B, S, H, D). Lengths must be ints."""
    if not _looks_swapped(q, k):
        return
    message = (
        f"q {tuple(q.shape)} and k {tuple(k.shape)} are read as {q.shape[1]} heads, with {q.shape[2]} queries and "
        f"{k.shape[2]} keys each; {REMEDY}"
    )
    warnings.warn(message, LayoutWarning, stacklevel=_caller_level())


def layout_remedy(q: Tensor, k: Tensor) -> str:
    """The end of an error about the heads of q and k, (B, H, S, D): a remedy if they would be valid as (B, S, H, D)."""
    return f"; {REMEDY}" if _fits_bshd(q, k) else ""


def mixed_layouts(k: Tensor, v: Tensor) -> str:
    """The end of an error about the shapes of k and v: a remedy if they differ in the order of two dimensions."""
    if k.shape[0] != v.shape[0] or tuple(k.shape[1:3]) != (v.shape[2], v.shape[1]):
        return ""
    return f"; their layouts differ: transpose(1, 2) one of them; {REMEDY}"


def _fits_bshd(q: Tensor, k: Tensor) -> bool:
    """Whether q is stored in the order (B, H, S, D), and the call would be valid if both were (B, S, H, D)."""
    return q.stride(1) >= q.stride(2) and k.shape[2] > 0 and q.shape[2] % k.shape[2] == 0


def _looks_swapped(q: Tensor, k: Tensor) -> bool:
    """Whether q and k have more heads than rows, would be valid as (B, S, H, D), and are unusual as (B, H, S, D).

    Unusual are as many K/V heads as query heads with fewer keys than queries, and more heads than models have.
    """
    (heads, seqlen_q), (heads_kv, seqlen_k) = q.shape[1:3], k.shape[1:3]
    if not (0 < seqlen_k <= seqlen_q < heads and seqlen_k < heads_kv and _fits_bshd(q, k)):
        return False
    is_gqa = heads == heads_kv and seqlen_k < seqlen_q  # as (B, S, H, D)
    return is_gqa or heads > MAX_USUAL_HEADS or MAX_USUAL_GQA_HEADS < heads_kv < heads


def _caller_level() -> int:
    """The `stacklevel`, for the function that calls this one, of the frame that called `attn`."""
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_INTERNAL):
        level, frame = level + 1, frame.f_back
    return level
