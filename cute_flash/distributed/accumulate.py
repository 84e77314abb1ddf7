"""Runs the calls of one rank, and sums their results in fp32 (fp64 for fp64).

Forward: outputs over disjoint keys are merged by their LSEs; on a GPU, one kernel merges up to `MAX_PARTIALS` of them.
Backward: the operator `attention_bwd` takes the output and the LSE over all keys. Then P = exp(S - LSE) is the
probability among all keys, and Δ = rowsum(dO ∘ O) - dLSE is that of the full row. So each call computes an exact part
of dq, dk and dv, called its *share*, and the gradients are the sums of the shares.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from cute_flash import ops
from cute_flash.distributed.calls import BandCall, Range
from cute_flash.distributed.comm import Pair
from cute_flash.planning.merge import MAX_PARTIALS
from cute_flash.runtime.merge import merge_partials
from cute_flash.score_mod.bound import mod_arguments
from cute_flash.spec.args import AttentionArgs
from cute_flash.spec.shapes import lse_dtype

# The keys of a call, and its shares of their dk and dv.
KeyShare = tuple[Range, Tensor, Tensor]


@dataclass(frozen=True)
class Saved:
    """The tensors that the backward of a rank needs: gradients of the results, queries, and results over all keys."""

    dout: Tensor
    dlse: Tensor | None
    q: Tensor
    out: Tensor
    lse: Tensor


@dataclass(frozen=True, eq=False)
class Scores:
    """The arguments that all calls of a rank share.

    `args` has neither a mask nor tensors. `positions` are those of the rank's queries in the sequence; only ALiBi needs
    them. `heads` is (first head of the rank, number of heads of the full call); only dropout needs it. With `sinks`,
    `Output` and `Gradients` add them to the sums of all calls; the one call of a varlen batch has them itself.
    """

    args: AttentionArgs
    alibi: Tensor | None = None
    alibi_needs_grad: bool = False
    positions: Tensor | None = None
    rng: Tensor | None = None
    heads: tuple[int, int] = (0, 0)
    sinks: Tensor | None = None

    def of_call(self, call: BandCall, key_positions: Tensor | None) -> AttentionArgs:
        """The arguments of one call. If it is not aligned (`BandCall.is_aligned`), a score_mod computes ALiBi."""
        args = self.args._replace(window_left=call.band.left, window_right=call.band.right)
        if args.dropout:
            args = args._replace(rng=self.rng, dropout_origin=(*call.first, *self.heads))
        if self.alibi is None:
            return args
        if call.is_aligned:
            return args._replace(alibi=self.alibi)
        assert self.positions is not None and key_positions is not None
        score_mod = _alibi_mod(self.alibi, self.positions[slice(*call.rows)], key_positions[slice(*call.keys)])
        text, captures, scalars = mod_arguments(score_mod, None, None, self.alibi.device)
        needs_grad = (False, *(x is self.alibi and self.alibi_needs_grad for x in captures))
        return args._replace(mod_graphs=text, captures=captures, scalars=scalars, needs_grad=needs_grad)

    def alibi_gradient(self, args: AttentionArgs, grads: Any) -> Tensor | None:
        """The gradient of the slopes among the gradients of `args.differentiable`."""
        for x, grad in zip(args.differentiable, grads):
            if x is self.alibi and grad is not None:
                return grad
        return None


def _alibi_mod(slopes: Tensor, q_positions: Tensor, k_positions: Tensor) -> Callable:
    if slopes.dim() == 1:
        return lambda score, b, h, i, j: score - slopes[h] * (q_positions[i] - k_positions[j]).abs()
    return lambda score, b, h, i, j: score - slopes[b, h] * (q_positions[i] - k_positions[j]).abs()


def rows_of(x: Tensor, rows: Range) -> Tensor:
    """The rows of a (B, H, S) or (B, H, S, D) tensor."""
    return x if rows == (0, x.shape[2]) else x[:, :, rows[0] : rows[1]]


@dataclass(frozen=True, eq=False)
class PartialOutput:
    """The result of a call: output and LSE of some rows over some keys."""

    rows: Range
    out: Tensor
    lse: Tensor


class Output:
    """The output and the LSE of a rank, from the calls over parts of its keys."""

    def __init__(self, q: Tensor, v: Tensor, num_parts: int) -> None:
        self.q, self.v = q, v
        # A single result is not merged, so it need not be in fp32.
        self.out_fp32 = num_parts > 1 and q.dtype in (torch.float16, torch.bfloat16)
        # Results that are not merged yet.
        self.parts: list[PartialOutput] = []

    def add(self, kv: Pair, call: BandCall, scores: Scores, key_positions: Tensor | None) -> None:
        """Run a call and keep its result. For each row, the keys of all calls are disjoint."""
        args = scores.of_call(call, key_positions)._replace(out_fp32=self.out_fp32)
        q, k, v = rows_of(self.q, call.rows), rows_of(kv[0], call.keys), rows_of(kv[1], call.keys)
        out, lse, _ = ops.attention(q, k, v, args)
        if len(self.parts) == MAX_PARTIALS:
            self.parts = [PartialOutput((0, self.q.shape[2]), *self._merged(out.dtype))]
        self.parts.append(PartialOutput(call.rows, out, lse))

    def result(self, sinks: Tensor | None, num_rows: int) -> tuple[Tensor, Tensor]:
        """The output in the dtype of q, and the LSE, both with `sinks`. Rows that see no key have output 0.

        A sink adds one key without a value to each of the first `num_rows` rows. The rows after them are padding.
        """
        if sinks is None:
            return self._merged(self.q.dtype)
        dtype = lse_dtype(self.q.dtype)
        out, all_lse = self._merged(dtype)
        lse = torch.logaddexp(all_lse, sinks.to(dtype)[:, None])
        lse[:, :, num_rows:] = -torch.inf
        return (out * _factor(all_lse, lse)).to(self.q.dtype), lse

    def _merged(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """The output over all keys so far, in `dtype`, and its LSE. Rows that see no key have output 0 and LSE -inf."""
        shape, parts = self.q.shape[:3], self.parts
        if len(parts) == 1 and parts[0].rows == (0, shape[2]):
            return parts[0].out.to(dtype), parts[0].lse
        out = self.q.new_empty((*shape, self.v.shape[3]), dtype=dtype)
        lse = self.q.new_empty(shape, dtype=lse_dtype(self.q.dtype))
        if parts and out.is_cuda:
            merge_partials(out, lse, [(part.rows[0], part.out.float(), part.lse) for part in parts])
            return out, lse
        total = out.new_zeros(out.shape, dtype=lse.dtype)
        lse.fill_(-torch.inf)
        for part in parts:
            merge_(rows_of(total, part.rows), rows_of(lse, part.rows), part.out.to(lse.dtype), part.lse)
        return total.to(dtype), lse


def merge_(out: Tensor, lse: Tensor, more_out: Tensor, more_lse: Tensor) -> None:
    """Merge `more_out` and `more_lse`, results over other keys, into `out` and `lse`, in place.

    The weight of `more_out` is w = exp(more_lse) / (exp(lse) + exp(more_lse)), and that of `out` is 1 - w. Rows that
    see no key keep the output 0. If an LSE is NaN, output and LSE become NaN.
    """
    weight = torch.sub(more_lse, lse).sigmoid_().masked_fill_(more_lse == -torch.inf, 0.0)
    out.lerp_(more_out, weight[..., None])
    torch.logaddexp(lse, more_lse, out=lse)


def _factor(lse: Tensor, total: Tensor) -> Tensor:
    """exp(lse - total), shaped for the output; 0 for rows that see no key."""
    return torch.exp(lse - total.masked_fill(total == -torch.inf, 0.0))[..., None]


class Gradients:
    """Gradients of a rank, summed call by call in fp32."""

    def __init__(self, saved: Saved, scores: Scores) -> None:
        self.saved, self.scores, self.dtype = saved, scores, saved.lse.dtype
        self._dq: Tensor | None = None
        self.dalibi: Tensor | None = None

    @property
    def dq(self) -> Tensor:
        return torch.zeros_like(self.saved.q, dtype=self.dtype) if self._dq is None else self._dq

    def add(self, kv: Pair, calls: tuple[BandCall, ...], key_positions: Tensor | None) -> list[KeyShare]:
        """Run calls over the same k and v, add their shares of dq, and return their shares of dk and dv."""
        saved, (k, v), shares = self.saved, kv, []
        for call in calls:
            args = self.scores.of_call(call, key_positions)
            dout, q, out = (rows_of(x, call.rows) for x in (saved.dout, saved.q, saved.out))
            lse = rows_of(saved.lse, call.rows).contiguous()
            dlse = None if saved.dlse is None else rows_of(saved.dlse, call.rows).contiguous()
            keys, values = rows_of(k, call.keys), rows_of(v, call.keys)
            dq, dk, dv, grads = ops.gradients(dout, dlse, q, keys, values, out, lse, args)
            self._dq = _added(self._dq, dq, call.rows, saved.q, self.dtype)
            shares.append((call.keys, dk, dv))
            dalibi = self.scores.alibi_gradient(args, grads)
            if dalibi is not None:
                self.dalibi = dalibi if self.dalibi is None else self.dalibi + dalibi
        return shares

    def sum_keys(self, kv: Pair, total: Pair | None, shares: list[KeyShare]) -> Pair:
        """Add shares of dk and dv to `total`, in place; None: there is no sum yet."""
        dk, dv = (None, None) if total is None else total
        for keys, dk_share, dv_share in shares:
            dk, dv = _added(dk, dk_share, keys, kv[0], self.dtype), _added(dv, dv_share, keys, kv[1], self.dtype)
        if dk is None or dv is None:
            return tuple(x.new_zeros(x.shape, dtype=self.dtype) for x in kv)  # type: ignore[return-value]
        return dk, dv

    def shares_of(self, kv: Pair, shares: list[KeyShare], keys: Range, dtype: torch.dtype) -> Pair:
        """The sum of shares of dk and dv for some keys, in `dtype`."""
        parts = tuple(rows_of(x, keys) for x in kv)
        total: Pair | None = None
        for (begin, end), dk, dv in shares:
            low, high = max(begin, keys[0]), min(end, keys[1])
            if low >= high:
                continue
            share = rows_of(dk, (low - begin, high - begin)), rows_of(dv, (low - begin, high - begin))
            at = low - keys[0], high - keys[0]
            if dtype != self.dtype and at == (0, keys[1] - keys[0]):
                return share  # one call computed all of it, so there is no sum and no second rounding
            total = self.sum_keys((parts[0], parts[1]), total, [(at, *share)])
        if total is None:
            total = self.sum_keys((parts[0], parts[1]), None, [])
        return total[0].to(dtype), total[1].to(dtype)

    @property
    def dsinks(self) -> Tensor | None:
        """-Σ exp(sink - LSE) Δ over batch and rows; None without sinks."""
        saved, sinks = self.saved, self.scores.sinks
        if sinks is None:
            return None
        delta = (saved.dout.to(saved.lse.dtype) * saved.out).sum(dim=-1)
        if saved.dlse is not None:
            delta -= saved.dlse
        lse = saved.lse.masked_fill(saved.lse == -torch.inf, torch.inf)
        probability = torch.exp(sinks.to(lse.dtype)[:, None] - lse)
        return -(probability * delta).sum(dim=(0, 2)).to(sinks.dtype)


def _added(total: Tensor | None, share: Tensor, at: Range, x: Tensor, dtype: torch.dtype) -> Tensor:
    """Add `share`, which has the rows `at` of x, to `total`, which has all rows; None: make a contiguous total."""
    if total is None and at == (0, x.shape[2]):
        return share.to(dtype).contiguous()
    total = x.new_zeros(x.shape, dtype=dtype) if total is None else total
    rows_of(total, at).add_(share)
    return total
