"""TypedDicts of the keywords of `attn` and `attn_varlen`, for their overloads.

`return_lse` and `return_max_logit` are missing: they decide the type of the result, so each overload names them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, TypedDict

import torch
from torch import Tensor

if TYPE_CHECKING:
    from cute_flash.score_mod.block_mask import BlockMask


class SharedKeywords(TypedDict, total=False):
    """Keywords of all public attention functions."""

    causal: bool
    window: tuple[int | None, int | None]
    scale: float | None
    deterministic: bool
    softcap: float | None
    alibi: Tensor | None
    sinks: Tensor | None
    dropout: float | None
    out_dtype: torch.dtype | None
    batch_invariant: bool
    bias: Tensor | None
    score_mod: Callable | None
    mask_mod: Callable | None
    score_mod_bwd: Callable | None


class AttnKeywords(SharedKeywords, total=False):
    """Keywords of `attn`."""

    layout: str
    block_mask: BlockMask | None
    block_map: BlockMask | None


class VarlenKeywords(SharedKeywords, total=False):
    """Keywords of `attn_varlen` and `attn_nested`."""

    max_seqlen_q: int | Tensor | None
    max_seqlen_k: int | Tensor | None
    seqused_k: Tensor | None
