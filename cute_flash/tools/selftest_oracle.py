"""Attention of one sequence by its definition, in fp64: the oracle of `cute-flash selftest`.

It follows docs/semantics.md step by step, with all scores in memory. Autograd differentiates it. It shares no code with
the kernels, nor with `cute_flash.reference`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def attention(
    q: Tensor, k: Tensor, v: Tensor, b: int, a: dict[str, Any], rounded: torch.dtype | None = None
) -> tuple[Tensor, Tensor]:
    """(out, lse) of sequence `b`, in the dtype of q.

    Args:
        q: Queries, (H, Sq, D).
        k: Keys, (Hkv, Sk, D).
        v: Values, (Hkv, Sk, Dv).
        b: The index of the sequence in its batch.
        a: Keywords of `attn`; `block_mask` is its mask_mod, and `rng` is the pair (seed, offset) of dropout.
        rounded: Round to this dtype what the kernels round: P, dS and the output, from which the backward computes Δ.
    """
    (heads, sq, head_dim), sk = q.shape, k.shape[1]
    K, V = (x.repeat_interleave(heads // x.shape[0], dim=0) for x in (k, v))
    i, j = torch.arange(sq, device=q.device)[:, None], torch.arange(sk, device=q.device)
    indices = torch.tensor(b, device=q.device), torch.arange(heads, device=q.device)[:, None, None], i, j
    s = q @ K.mT
    if rounded is not None and s.requires_grad:
        s.register_hook(lambda grad: grad.to(rounded).to(grad.dtype))
    s = s * a.get("scale", head_dim**-0.5)
    if "softcap" in a:
        s = a["softcap"] * torch.tanh(s / a["softcap"])
    distance = j - (i + sk - sq)
    if "alibi" in a:
        s = s - a["alibi"].to(s.dtype)[:, None, None] * distance.abs()
    if "bias" in a:
        bias = a["bias"]
        s = s + bias[min(b, len(bias) - 1)].to(s.dtype)
    if "score_mod" in a:
        s = a["score_mod"](s, *indices)
    left, right = a.get("window", (None, None))
    right = 0 if a.get("causal") else right
    visible = torch.ones(heads, sq, sk, dtype=torch.bool, device=q.device)
    if left is not None:
        visible = visible & (distance >= -left)
    if right is not None:
        visible = visible & (distance <= right)
    if "attention_chunk" in a:
        visible = visible & ((i + sk - sq) // a["attention_chunk"] == j // a["attention_chunk"])
    for mask in ("mask_mod", "block_mask"):
        if mask in a:
            visible = visible & a[mask](*indices)
    s = s.masked_fill(~visible, -torch.inf)
    sinks = a["sinks"].to(s.dtype) if "sinks" in a else s.new_full((heads,), -torch.inf)
    lse = torch.cat([s, sinks[:, None, None].expand(heads, sq, 1)], dim=-1).logsumexp(dim=-1)
    p = torch.where(visible, torch.exp(s - lse.masked_fill(lse == -torch.inf, 0.0)[..., None]), 0.0)
    if "dropout" in a:
        p = p * _dropout_mask(a["dropout"], a["rng"], indices, heads) / (1 - a["dropout"])
    if rounded is None:
        return p @ V, lse
    out = (p + _rounding_error(p, rounded)) @ V
    error = _rounding_error(out, rounded)
    # An error of Δ = rowsum(dO ∘ O) has the effect of a gradient of the LSE: the last term is 0, its gradient is not.
    finite = lse.masked_fill(lse == -torch.inf, 0.0)
    return out + error - (finite - finite.detach())[..., None] * error, lse


def _rounding_error(x: Tensor, dtype: torch.dtype) -> Tensor:
    return (x.to(dtype).to(x.dtype) - x).detach()


def _dropout_mask(dropout: float, rng: tuple[int, int], indices: tuple[Tensor, ...], heads: int) -> Tensor:
    """The scores (h, i, j) that dropout keeps: Philox 4x32-7 with the counters of docs/semantics.md."""
    b, h, i, j = torch.broadcast_tensors(*indices)
    seed, offset = rng
    key = [seed % 2**32, seed >> 32]
    counter = [4 * (j // 16) + j % 8 // 2, 8 * (i // 32) + i % 8, b * heads + h, torch.full_like(i, offset % 2**32)]
    for _ in range(7):
        (high0, low0), (high1, low1) = _product(0xD2511F53, counter[0]), _product(0xCD9E8D57, counter[2])
        counter = [high1 ^ counter[1] ^ key[0], low1, high0 ^ counter[3] ^ key[1], low0]
        key = [(key[0] + 0x9E3779B9) % 2**32, (key[1] + 0xBB67AE85) % 2**32]
    word = torch.stack(counter).gather(0, (2 * (i // 8 % 2) + j // 8 % 2)[None])[0]
    word = torch.where(i % 32 >= 16, _product(0xC2B2AE35, word)[1], word)
    return torch.where(j % 2 == 0, word, word >> 16) % 2**15 >= round(dropout * 2**15)


def _product(a: int, x: Tensor) -> tuple[Tensor, Tensor]:
    """The high and the low 32 bits of a * x, for unsigned numbers of 32 bits in int64."""
    low, high = a * (x % 2**16), a * (x >> 16)
    middle = high + (low >> 16)
    return middle >> 16, middle % 2**16 * 2**16 + low % 2**16
