"""The gradients of slopes and sinks of a packed batch: sums over the rows and keys of its sequences, of what
the kernels leave behind; by torch, in a fixed order, and without a look at the offsets from the host.

    dalibi = the parts of a sequence's key blocks, or of all
    dsinks = -Σ exp(sink - LSE) Δ, and for a query that sees no key Δ = -dLSE, whatever flows into it
"""

from __future__ import annotations

import torch
from torch import Tensor

from cute_flash.operands import MAX_WINDOW
from cute_flash.planning.varlen import padded_block
from cute_flash.spec.args import How


def dalibi(parts: Tensor, how: How, total_k: int, tile_n: int) -> Tensor:
    """(B, H), or (1, H) of slopes that sequences share; `parts` (1, H, key blocks, warps), each sequence's
    from a block of its own on, and 0 where no query sees a key.
    """
    assert how.alibi is not None and how.cu_seqlens_k is not None
    by_block = parts[0].sum(dim=-1)
    if how.alibi.dim() == 1:
        return by_block.sum(dim=1)[None]
    offsets = how.cu_seqlens_k.clamp(0, total_k)
    number = torch.arange(len(offsets), dtype=offsets.dtype, device=offsets.device)
    # What the caller says may be wrong, but offsets that fall would stop the GPU.
    first = padded_block(offsets, number, tile_n).cummax(0).values
    return torch.segment_reduce(by_block.T.contiguous(), "sum", offsets=first, unsafe=True, initial=0)


def dsinks(lse: Tensor, delta: Tensor | None, dlse: Tensor | None, how: How, tile_m: int) -> Tensor:
    """(H); `lse` and `dlse` (H, Tq). `delta` (1, H, rows), each sequence's from a block of its own on; None
    if no query sees a key.
    """
    assert how.sinks is not None and how.cu_seqlens_q is not None
    offsets, total = how.cu_seqlens_q, lse.shape[1]
    batch = len(offsets) - 1
    if batch == 0:
        return lse.new_zeros(len(lse))
    row = torch.arange(total, device=lse.device)
    # Rows after the last sequence are those of one more.
    sequence = torch.searchsorted(offsets[1:].contiguous(), row, right=True)
    row = row - offsets[sequence]
    flow = torch.zeros_like(lse) if dlse is None else -dlse
    if delta is not None:
        at = padded_block(offsets[sequence], sequence, tile_m) * tile_m + row
        found = delta[0][:, at.clamp(0, delta.shape[2] - 1)]
        flow = torch.where(_is_blind(row, sequence.clamp(max=batch - 1), how), flow, found)
    weights = torch.exp(how.sinks.float()[:, None] - lse)
    # A row of nobody, or one without keys and without a sink, has no weight, whatever flows into it.
    counts = (sequence < batch) & (lse != -torch.inf)
    return -torch.where(counts, weights * flow, 0.0).sum(dim=1)


def _is_blind(row: Tensor, sequence: Tensor, how: How) -> Tensor:
    """Which queries see no key: those that the right bound hides all keys from, or all."""
    assert how.cu_seqlens_q is not None and how.cu_seqlens_k is not None
    sq = how.cu_seqlens_q.diff()[sequence]
    sk = (how.cu_seqlens_k.diff() if how.seqused_k is None else how.seqused_k)[sequence]
    is_blind = sk <= 0
    if how.window_right is not None:
        is_blind = is_blind | (row + (sk - sq) + min(how.window_right, MAX_WINDOW) < 0)
    return is_blind
