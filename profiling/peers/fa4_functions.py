"""The functions of `mods` for FlashAttention-4: in the CuTe DSL, on vectors of scores and positions.

    score_mod(score, b_idx, h_idx, q_idx, kv_idx, seqlen_info, aux_tensors)
    score_mod_bwd(grad, score, b_idx, h_idx, q_idx, kv_idx, seqlen_info, aux_tensors)
    mask_mod(b_idx, h_idx, q_idx, kv_idx, seqlen_info, aux_tensors)

With `aux_tensors` FlashAttention-4 passes one score at a time and takes every index modulo the sequence length. So the
slopes of ALiBi are computed from the head, as in its own tests. Only tables that cannot be computed are aux tensors.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
import torch
from torch import Tensor

# Entries appended to a table: the last query tile extends past the sequence, and FlashAttention-4 takes the indices
# modulo the sequence length only in the tile's first block.
PADDING = 256


@dataclass(frozen=True)
class Function:
    """A function of `mods`, and the tensors that it reads."""

    score_mod: Callable[..., Any] | None = None
    score_mod_bwd: Callable[..., Any] | None = None
    mask_mod: Callable[..., Any] | None = None
    tensors: tuple[Tensor, ...] = ()

    def options(self) -> dict[str, Any]:
        return {
            "score_mod": self.score_mod,
            "score_mod_bwd": self.score_mod_bwd,
            "mask_mod": self.mask_mod,
            "aux_tensors": list(self.tensors) or None,
        }


@cute.jit
def _same_gradient(grad, score, b_idx, h_idx, q_idx, kv_idx, seqlen_info, aux_tensors):
    return grad


def alibi(first: float, step: float) -> Function:
    """Slopes `first` + h * `step`."""

    @cute.jit
    def score_mod(score, b_idx, h_idx, q_idx, kv_idx, seqlen_info, aux_tensors):
        slope = h_idx.to(cutlass.Float32) * step + first
        return score - slope * abs((q_idx - kv_idx).to(cutlass.Float32))

    return Function(score_mod, _same_gradient)


def capped(cap: float) -> Function:
    @cute.jit
    def score_mod(score, b_idx, h_idx, q_idx, kv_idx, seqlen_info, aux_tensors):
        return cap * cute.math.tanh(score / cap, fastmath=True)

    @cute.jit
    def score_mod_bwd(grad, score, b_idx, h_idx, q_idx, kv_idx, seqlen_info, aux_tensors):
        bent = cute.math.tanh(score / cap, fastmath=True)
        return grad * (1.0 - bent * bent)

    return Function(score_mod, score_mod_bwd)


def relative(table: Tensor, near: int) -> Function:
    """A (H, N) table, indexed by the head and by q_idx - kv_idx + `near`, which is clamped to the table."""
    last = table.shape[1] - 1

    @cute.jit
    def score_mod(score, b_idx, h_idx, q_idx, kv_idx, seqlen_info, aux_tensors):
        added = cute.make_rmem_tensor(score.shape, cutlass.Float32)
        for i in cutlass.range_constexpr(cute.size(score.shape)):
            place = cutlass.min(cutlass.max(q_idx[i] - kv_idx[i] + near, 0), last)
            added[i] = aux_tensors[0][h_idx[i], place]
        return score + added.load()

    return Function(score_mod, _same_gradient, tensors=(table,))


def causal() -> Function:
    @cute.jit
    def mask_mod(b_idx, h_idx, q_idx, kv_idx, seqlen_info, aux_tensors):
        return kv_idx <= q_idx

    return Function(mask_mod=mask_mod)


def prefix(length: int) -> Function:
    @cute.jit
    def mask_mod(b_idx, h_idx, q_idx, kv_idx, seqlen_info, aux_tensors):
        return (kv_idx <= q_idx) | (kv_idx < length)

    return Function(mask_mod=mask_mod)


def window(length: int) -> Function:
    @cute.jit
    def mask_mod(b_idx, h_idx, q_idx, kv_idx, seqlen_info, aux_tensors):
        distance = q_idx - kv_idx
        return (distance >= 0) & (distance < length)

    return Function(mask_mod=mask_mod)


def document(ids: Tensor) -> Function:
    """`ids`: the document of each position, (S), int32."""

    @cute.jit
    def mask_mod(b_idx, h_idx, q_idx, kv_idx, seqlen_info, aux_tensors):
        ids = cute.make_rmem_tensor(2, cutlass.Int32)
        ids[0] = aux_tensors[0][q_idx[0]]
        ids[1] = aux_tensors[0][kv_idx[0]]
        same = cute.make_rmem_tensor(1, cutlass.Boolean)
        same[0] = ids[0] == ids[1]
        return same.load()

    return Function(mask_mod=mask_mod, tensors=(torch.nn.functional.pad(ids, (0, PADDING), value=-1),))
