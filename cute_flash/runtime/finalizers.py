"""Finalizers: torch operations that follow the backward kernels and give the gradients of score features.

    dalibi     sum of the partial sums of K/V blocks
    dsinks     -Σ exp(sink - LSE) Δ over rows, Δ = rowsum(dO O) - dLSE, or -dLSE for a query that sees no key
    dbias      if deterministic, the sum over the dimensions in which the bias broadcasts; otherwise kernels sum
    dcaptures  if deterministic, the sum of one term per score; otherwise the kernel accumulates it

Sums in torch have a fixed order. The host does not read the offsets of a varlen batch.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from cute_flash.planning.varlen import padded_block
from cute_flash.runtime.operands import MAX_WINDOW
from cute_flash.score_mod.graph import COLUMN, ROW
from cute_flash.spec.args import AttentionArgs
from cute_flash.spec.problem import Problem
from cute_flash.spec.shapes import like


def alibi_gradient(
    args: AttentionArgs, problem: Problem, dalibi_partial: Tensor, tile_n: int, dalibi_warps: int
) -> Tensor:
    assert args.alibi is not None
    if problem.varlen:
        partial = dalibi_partial.unflatten(2, (-1, dalibi_warps))
        grad = _varlen_dalibi(partial, args, problem.seqlen_k, tile_n)
    elif args.alibi.dim() == 1:
        grad = dalibi_partial.sum(dim=(0, 2))
    else:
        grad = dalibi_partial.sum(dim=-1)
    return like(args.alibi, grad)


def _varlen_dalibi(partial: Tensor, args: AttentionArgs, total_k: int, tile_n: int) -> Tensor:
    """The gradient of the slopes, (B, H) or (H), of a varlen batch.

    `partial` is (1, H, K/V blocks, warps). The blocks of a sequence are contiguous; blocks that no query sees are 0.
    """
    assert args.alibi is not None and args.cu_seqlens_k is not None
    by_block = partial[0].sum(dim=-1)
    if args.alibi.dim() == 1:
        return by_block.sum(dim=1)
    offsets = args.cu_seqlens_k.clamp(0, total_k)
    sequence = torch.arange(len(offsets), dtype=offsets.dtype, device=offsets.device)
    # `cummax`, because segment_reduce fails on the GPU if a wrong cu_seqlens_k makes the offsets decrease.
    first = padded_block(offsets, sequence, tile_n).cummax(0).values
    return torch.segment_reduce(by_block.T.contiguous(), "sum", offsets=first, unsafe=True, initial=0)


def sinks_gradient(
    args: AttentionArgs, problem: Problem, lse: Tensor, delta: Tensor | None, dlse: Tensor | None, tile_m: int
) -> Tensor:
    """The gradient of the sinks, (H). `delta` is None if no kernel ran because there are no keys or no queries."""
    assert args.sinks is not None
    if problem.varlen:
        return like(args.sinks, _varlen_dsinks(lse, delta, dlse, args, tile_m))
    delta = None if delta is None else delta[:, :, : problem.seqlen_q]
    return like(args.sinks, _dense_dsinks(args.sinks, lse, delta, dlse, num_queries_without_keys(problem)))


def num_queries_without_keys(problem: Problem) -> int:
    """The number of queries that see no key: the first ones, which see no key at or before their reach."""
    reach, sq, sk = problem.band.reach_of_first_key, problem.seqlen_q, problem.seqlen_k
    if sk == 0:
        return sq
    return 0 if reach is None else min(sq, max(0, sq - sk - reach))


def _dense_dsinks(
    sinks: Tensor, lse: Tensor, delta: Tensor | None, dlse: Tensor | None, num_without_keys: int
) -> Tensor:
    # An LSE of -inf means no key and a sink of -inf; the sink's weight is then 0.
    weights = torch.exp(sinks.float()[:, None] - lse.masked_fill(lse == -torch.inf, torch.inf))
    if delta is None:
        total = sinks.new_zeros(sinks.shape, dtype=torch.float32)
    else:
        total = -(weights * delta)[:, :, num_without_keys:].sum(dim=(0, 2))
    if dlse is not None and num_without_keys:
        total += (weights * dlse)[:, :, :num_without_keys].sum(dim=(0, 2))
    return total


def _varlen_dsinks(lse: Tensor, delta: Tensor | None, dlse: Tensor | None, args: AttentionArgs, tile_m: int) -> Tensor:
    """The gradient of the sinks, (H), of a varlen batch.

    `lse` and `dlse` are (H, Tq). `delta` is (1, H, rows), where each sequence starts at a multiple of `tile_m`.
    """
    assert args.sinks is not None and args.cu_seqlens_q is not None
    offsets, total = args.cu_seqlens_q, lse.shape[1]
    batch = len(offsets) - 1
    if batch == 0:
        return lse.new_zeros(len(lse))
    row = torch.arange(total, device=lse.device)
    # Padding after the last sequence gets the index `batch`.
    sequence = torch.searchsorted(offsets[1:].contiguous(), row, right=True)
    row = row - offsets[sequence]
    # Δ of each row; -dLSE for a query that sees no key.
    row_delta = torch.zeros_like(lse) if dlse is None else -dlse
    if delta is not None:
        at = padded_block(offsets[sequence], sequence, tile_m) * tile_m + row
        kernel_delta = delta[0][:, at.clamp(0, delta.shape[2] - 1)]
        row_delta = torch.where(_sees_no_key(row, sequence.clamp(max=batch - 1), args), row_delta, kernel_delta)
    weights = torch.exp(args.sinks.float()[:, None] - lse)
    # Padding, and rows with an LSE of -inf, have a weight of 0.
    counts = (sequence < batch) & (lse != -torch.inf)
    return -torch.where(counts, weights * row_delta, 0.0).sum(dim=1)


def _sees_no_key(row: Tensor, sequence: Tensor, args: AttentionArgs) -> Tensor:
    """Which queries of a varlen batch see no key."""
    assert args.cu_seqlens_q is not None and args.cu_seqlens_k is not None
    sq = args.cu_seqlens_q.diff()[sequence]
    sk = (args.cu_seqlens_k.diff() if args.seqused_k is None else args.seqused_k)[sequence]
    sees_no_key = sk <= 0
    reach = args.band.reach_of_first_key
    if reach is not None:
        sees_no_key = sees_no_key | (row + (sk - sq) + min(reach, MAX_WINDOW) < 0)
    return sees_no_key


def bias_gradient(args: AttentionArgs, dbias: Tensor) -> Tensor:
    """The gradient of the bias from the kernel's `dbias`, which has the shape of the bias or (B, H, Sq, Sk)."""
    assert args.bias is not None
    broadcast = [i for i in range(4) if dbias.shape[i] != args.bias.shape[i]]
    return like(args.bias, dbias.sum(dim=broadcast, keepdim=True) if broadcast else dbias)


def captures_gradient(
    args: AttentionArgs, problem: Problem, dcaptures: list[Tensor], dcapture_terms: list[Tensor] | None
) -> list[Tensor | None]:
    """The gradients of all captured tensors from the kernel's sums, or, if deterministic, from `dcapture_terms`."""
    if dcapture_terms is not None:
        sum_capture_terms(problem, dcaptures, dcapture_terms)
    grads: list[Any] = [None] * len(args.captures)
    for i, grad in zip(problem.mods.captures_needing_grad, dcaptures, strict=True):
        grads[i] = like(args.captures[i], grad.view(args.captures[i].shape))
    return grads


def sum_capture_terms(problem: Problem, dcaptures: list[Tensor], dcapture_terms: list[Tensor]) -> None:
    """Add the terms of deterministic gradients of captured tensors to `dcaptures`.

    `dcapture_terms` is (terms, elements), both (loads, B, H, Sq, Sk): for each load of a captured tensor, the term of
    each score, and the index of the element that it is added to. Scores that no kernel visited have 0 in both.
    `index_put_` sorts by index, so its sums have a fixed order.
    """
    mods = problem.mods
    for (capture, depends), terms, elements in zip(mods.capture_loads, *dcapture_terms, strict=True):
        total = dcaptures[mods.captures_needing_grad.index(capture)].view(-1)
        shared = [dim for dim, bit in ((2, ROW), (3, COLUMN)) if not depends & bit]
        if shared:
            # Scores that differ only in these dimensions share an element. `amax` skips unvisited scores, which have 0.
            terms, elements = terms.sum(shared)[None], elements.amax(shared)[None]
        else:
            # One head at a time, because sorting takes several times the memory of its input.
            terms, elements = terms.flatten(0, 1), elements.flatten(0, 1)
        for values, places in zip(terms, elements, strict=True):
            total.index_put_((places.flatten().long(),), values.flatten(), accumulate=True)


def rows_of_sequences(args: AttentionArgs, q: Tensor) -> Tensor:
    """(Tq): whether a row of a varlen batch belongs to a sequence."""
    assert args.cu_seqlens_q is not None
    return torch.arange(q.shape[0], device=q.device) < args.cu_seqlens_q[-1]
