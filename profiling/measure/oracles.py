"""Exact results on a sample of one problem, in fp64 on the same device, and the error of unfused PyTorch.

Forward: the last batch, the first and the last head, up to 1024 rows in blocks at the beginning, the middle and the
end, with all their keys. Backward: the last batch, the first and the last K/V head with all their query heads, the
whole length, because the gradient of a key needs every row that sees it. One block of rows is in memory at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from cute_flash import reference
from cute_flash.spec.band import Band, ceil_div
from cute_flash.spec.shapes import lse_dtype
from profiling.measure.accuracy import Oracle

BLOCK_ROWS, MAX_BLOCKS = 256, 4
GRADIENTS = ("dq", "dk", "dv")

# reference.dense or reference.dense_low_precision
Attend = Callable[[Tensor, Tensor, Tensor, Band], tuple[Tensor, Tensor]]


def _band(causal: bool) -> Band:
    return Band.of(causal, (None, None))


def _blocks(seqlen: int) -> list[slice]:
    rows = min(BLOCK_ROWS, seqlen)
    count = min(MAX_BLOCKS, ceil_div(seqlen, rows))
    starts = [round(i * (seqlen - rows) / max(count - 1, 1)) for i in range(count)]
    return [slice(start, start + rows) for start in starts]


def _ends(count: int) -> list[int]:
    """The first and the last, which reveal a wrong stride or a missing tail."""
    return [0, count - 1] if count > 1 else [0]


def _keys_of(rows: slice, causal: bool) -> slice:
    """The keys of a block of rows: with a causal mask, rows up to r see keys up to r."""
    return slice(0, rows.stop if causal else None)


def forward_oracle(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Oracle:
    heads, group = _ends(q.shape[1]), q.shape[1] // k.shape[1]
    blocks = _blocks(q.shape[2])

    def pick(out: Tensor) -> Tensor:
        return torch.stack([out[-1:][:, heads, rows] for rows in blocks])

    K, V = (x[-1:][:, [head // group for head in heads]] for x in (k, v))
    exact, rough = [], []
    for rows, Q in zip(blocks, pick(q), strict=True):
        keys = _keys_of(rows, causal)
        problem = (Q, K[:, :, keys], V[:, :, keys], _band(causal))
        exact.append(reference.dense(*problem)[0])
        rough.append(reference.dense_low_precision(*problem)[0])
    return Oracle.of(pick, torch.stack(exact), torch.stack(rough))


def backward_oracles(q: Tensor, k: Tensor, v: Tensor, dout: Tensor, causal: bool) -> dict[str, Oracle]:
    """One for each of dq, dk and dv."""
    kv_heads, group = _ends(k.shape[1]), q.shape[1] // k.shape[1]
    heads = [kv_head * group + i for kv_head in kv_heads for i in range(group)]

    def pick_rows(x: Tensor) -> Tensor:
        return x[-1:][:, heads]

    def pick_keys(x: Tensor) -> Tensor:
        return x[-1:][:, kv_heads]

    sample = [pick_rows(q), pick_keys(k), pick_keys(v), pick_rows(dout)]
    # One K/V head at a time: with many query heads, a block of rows is large.
    parts = [[x.chunk(len(kv_heads), dim=1)[i] for x in sample] for i in range(len(kv_heads))]
    exact = [_gradients(reference.dense, [x.double() for x in part], causal) for part in parts]
    rough = [_gradients(reference.dense_low_precision, part, causal) for part in parts]
    picks = (pick_rows, pick_keys, pick_keys)
    return {
        name: Oracle.of(
            pick, torch.cat([grads[i] for grads in exact], dim=1), torch.cat([grads[i] for grads in rough], dim=1)
        )
        for i, (name, pick) in enumerate(zip(GRADIENTS, picks, strict=True))
    }


def _gradients(attend: Attend, tensors: Sequence[Tensor], causal: bool) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk and dv in the dtype of the inputs, by autograd of blocks of rows; dk and dv are summed over them."""
    q, k, v, dout = tensors
    # In low precision the part of each block is rounded, and then the sum: the errors of dk and dv are about 5 %
    # larger than without blocks.
    wide = lse_dtype(q.dtype)
    dq, (dk, dv) = [], (torch.zeros_like(x, dtype=wide) for x in (k, v))
    for start in range(0, q.shape[2], BLOCK_ROWS):
        rows = slice(start, min(start + BLOCK_ROWS, q.shape[2]))
        keys = _keys_of(rows, causal)
        parts = (q[:, :, rows], k[:, :, keys], v[:, :, keys])
        Q, K, V = leaves = [x.detach().requires_grad_() for x in parts]
        # The benchmark runs under no_grad.
        with torch.enable_grad():
            out, _ = attend(Q, K, V, _band(causal))
        grads = torch.autograd.grad(out, leaves, dout[:, :, rows])
        dq.append(grads[0])
        dk[:, :, keys] += grads[1]
        dv[:, :, keys] += grads[2]
    return torch.cat(dq, dim=2), dk.to(k.dtype), dv.to(v.dtype)
