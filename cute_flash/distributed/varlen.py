"""Varlen batches: the tokens of all sequences are sharded in contiguous chunks, and sequences may cross ranks.

A rank with the tokens a to b - 1 gathers all keys. The kernels align a mask at the last query and the last key of each
sequence. A sequence may continue after token b - 1, so under a causal mask the rank leaves out all keys from b on. Then
its last query and its last key of the sequence are the same token, and the mask is exact:
cu_seqlens_q = clamp(cu_seqlens, a, b) - a and cu_seqlens_k = min(cu_seqlens, b). The host does not read the offsets.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from cute_flash import ops
from cute_flash.distributed.accumulate import Saved, Scores
from cute_flash.distributed.comm import Axis, all_gather, reduce_scatter
from cute_flash.errors import UnsupportedError
from cute_flash.spec.args import AttentionArgs
from cute_flash.spec.band import Band


@dataclass(frozen=True, eq=False)
class VarlenAllGather:
    """The method "allgather" for varlen batches, on one axis of ranks."""

    axis: Axis
    cu_seqlens: Tensor
    band: Band

    def check(self, alibi: Tensor | None) -> None:
        """Raise `UnsupportedError` for a window or ALiBi without `causal`: later keys make the alignment wrong."""
        is_causal = self.band.right == 0
        if not is_causal and (self.band != Band() or alibi is not None):
            what = "alibi" if self.band == Band() else f"window={self.band.bounds}"
            raise UnsupportedError(
                f"{what} without causal in a varlen batch of context parallelism: the kernels align the last query and "
                "the last key of a sequence, but if the sequence continues on the next rank, its last query is not on "
                "this rank; pass causal=True, or neither a window nor alibi"
            )

    def forward(self, q: Tensor, k: Tensor, v: Tensor, scores: Scores) -> tuple[Tensor, Tensor]:
        out, lse, _ = ops.attention(q, self._gather(k), self._gather(v), self._args(q, scores))
        return out, lse

    def backward(self, saved: Saved, k: Tensor, v: Tensor, scores: Scores) -> tuple[Tensor | None, ...]:
        args, dtype = self._args(saved.q, scores), saved.lse.dtype
        kv = self._gather(k), self._gather(v)
        dq, dk, dv, others = ops.gradients(saved.dout, saved.dlse, saved.q, *kv, saved.out, saved.lse, args)
        return dq, self._scatter(dk, dtype), self._scatter(dv, dtype), others[0], others[1]

    def _args(self, q: Tensor, scores: Scores) -> AttentionArgs:
        begin = self.axis.index * q.shape[0]
        end, cu_seqlens = begin + q.shape[0], self.cu_seqlens
        return scores.args._replace(
            window_left=self.band.left,
            window_right=self.band.right,
            alibi=scores.alibi,
            sinks=scores.sinks,
            cu_seqlens_q=cu_seqlens.clamp(begin, end) - begin,
            cu_seqlens_k=cu_seqlens if self.band == Band() else cu_seqlens.clamp(max=end),
        )

    def _gather(self, x: Tensor) -> Tensor:
        return all_gather(x, self.axis).flatten(0, 1)

    def _scatter(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        return reduce_scatter(x.unflatten(0, (self.axis.size, -1)), self.axis, dtype)
