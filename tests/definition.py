"""Attention by its definition, with all scores in memory: the documented meaning of each keyword of `attn`.

It shares no code with the package: neither with the kernels, nor with `cute_flash.reference`. Autograd differentiates
it. docs/semantics.md defines each step.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor


def attention(
    q: Tensor, k: Tensor, v: Tensor, a: dict[str, Any], b: int | None = None, rounded: Rounding | None = None
) -> tuple[Tensor, Tensor]:
    """(out, lse) of the call with keywords `a`, in (B, H, S, D). A row that sees no key has out 0 and LSE -inf.

    Args:
        q: Queries. Their dtype is that of all steps.
        k: Keys.
        v: Values.
        a: Keywords of `attn`, and `rng`, the pair (seed, offset) of dropout.
        b: The index of the sequence, for one sequence of a varlen batch.
        rounded: How to round what FlashAttention rounds: P and dS in matrix products, and the output, from which the
            backward computes Δ.
    """
    (batch, h, sq, _), sk = q.shape, k.shape[2]
    K, V = (x.repeat_interleave(h // k.shape[1], dim=1) for x in (k, v))
    scale = a.get("scale")
    s = q @ K.mT
    if rounded is not None:
        s = RoundGradient.apply(s, rounded)
    s = s * float(q.shape[-1] ** -0.5 if scale is None else scale)
    if a.get("softcap"):
        s = float(a["softcap"]) * torch.tanh(s / float(a["softcap"]))
    i, j = torch.arange(sq, device=q.device)[:, None], torch.arange(sk, device=q.device)
    distance = j - i - (sk - sq)
    if a.get("alibi") is not None:
        slopes = a["alibi"] if a["alibi"].dim() == 2 else a["alibi"][None]
        slopes = slopes if b is None or len(slopes) == 1 else slopes[b : b + 1]
        s = s - slopes[..., None, None].to(s.dtype) * distance.abs()
    if a.get("bias") is not None:
        s = s + a["bias"].to(s.dtype)
    batches = torch.arange(batch, device=q.device) if b is None else torch.tensor([b], device=q.device)
    indices = batches[:, None, None, None], torch.arange(h, device=q.device)[:, None, None], i, j
    if a.get("score_mod") is not None:
        s = a["score_mod"](s, *indices)
    left, right = a.get("window") or (None, None)
    seen = torch.ones(sq, sk, dtype=torch.bool, device=q.device)
    for bound, side in ((left, -1), (0 if a.get("causal") else right, 1)):
        if bound is not None:
            seen = seen & (distance * side <= int(bound))
    if a.get("attention_chunk"):
        seen = seen & ((i + sk - sq) // int(a["attention_chunk"]) == j // int(a["attention_chunk"]))
    if a.get("attention_chunk"):
        seen = seen & ((i + sk - sq) // a["attention_chunk"] == j // a["attention_chunk"])
    if a.get("mask_mod") is not None:
        seen = seen & a["mask_mod"](*indices)
    if a.get("block_mask") is not None:
        seen = seen & (j <= i)
    s = s.masked_fill(~seen, -torch.inf)
    sink = torch.full((h,), -torch.inf, dtype=s.dtype, device=q.device) if a.get("sinks") is None else a["sinks"]
    lse = torch.cat([s, sink.to(s.dtype).view(1, h, 1, 1).expand(batch, h, sq, 1)], dim=-1).logsumexp(dim=-1)
    weights = torch.where(seen, torch.exp(s - lse.masked_fill(lse == -torch.inf, 0.0)[..., None]), 0.0)
    if a.get("dropout"):
        weights = weights * kept(a["dropout"], a["rng"], indices, h) / (1 - a["dropout"])
    if rounded is not None:
        weights = Round.apply(weights, rounded)
    out = weights @ V
    return out if rounded is None else RoundOutput.apply(out, lse, rounded.dtype), lse


def kept(dropout: float, rng: tuple[int, int], indices: tuple[Tensor, ...], heads: int) -> Tensor:
    """Which scores (b, h, i, j) dropout keeps: Philox 4x32-7 with the counters of docs/semantics.md."""
    b, h, i, j = torch.broadcast_tensors(*indices)
    seed, offset = rng
    key = [seed % 2**32, seed >> 32]
    counter = [4 * (j // 16) + j % 8 // 2, 8 * (i // 32) + i % 8, b * heads + h, torch.full_like(i, offset % 2**32)]
    for _ in range(7):
        (high0, low0), (high1, low1) = product(0xD2511F53, counter[0]), product(0xCD9E8D57, counter[2])
        counter = [high1 ^ counter[1] ^ key[0], low1, high0 ^ counter[3] ^ key[1], low0]
        key = [(key[0] + 0x9E3779B9) % 2**32, (key[1] + 0xBB67AE85) % 2**32]
    place = 2 * (i // 8 % 2) + j // 8 % 2
    word = torch.stack(counter).gather(0, place[None])[0]
    word = torch.where(i % 32 >= 16, product(0xC2B2AE35, word)[1], word)
    number = torch.where(j % 2 == 0, word, word >> 16) % 2**15
    return number >= round(dropout * 2**15)


def product(a: int, x: Tensor) -> tuple[Tensor, Tensor]:
    """The high and the low 32 bits of a * x, for unsigned numbers of 32 bits in int64."""
    low, high = a * (x % 2**16), a * (x >> 16)
    middle = high + (low >> 16)
    return middle >> 16, middle % 2**16 * 2**16 + low % 2**16


class Rounding(NamedTuple):
    """Rounding to a dtype. Another `grid`, from 1 to 2, makes errors of the same size, but other ones."""

    dtype: torch.dtype
    grid: float = 1.0

    def of(self, x: Tensor) -> Tensor:
        return (x * self.grid).to(self.dtype).to(x.dtype) / self.grid


class Round(torch.autograd.Function):
    """Rounds a tensor; the gradient passes unchanged."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, rounding: Rounding) -> Tensor:
        return rounding.of(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


class RoundGradient(torch.autograd.Function):
    """The identity; rounds the gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, rounding: Rounding) -> Tensor:
        ctx.rounding = rounding
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return ctx.rounding.of(grad), None


class RoundOutput(torch.autograd.Function):
    """Rounds the output to a dtype. Its gradient is that of a backward that computes Δ = rowsum(dO ∘ O) from it.

    An error of Δ has the effect of a gradient of the LSE.
    """

    @staticmethod
    def forward(ctx: Any, out: Tensor, lse: Tensor, dtype: torch.dtype) -> Tensor:
        result = out.to(dtype).to(out.dtype)
        ctx.save_for_backward(result - out)
        return result

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        (error,) = ctx.saved_tensors
        return grad, -(grad * error).sum(dim=-1), None
