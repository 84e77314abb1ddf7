"""Attention by its definition, with all scores in memory: the documented meaning of each keyword of `attn`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def attention(q: Tensor, k: Tensor, v: Tensor, a: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """(out, lse) of the call with keywords `a`, in (B, H, S, D). A row that sees no key has out 0 and LSE -inf."""
    (b, h, sq, _), sk = q.shape, k.shape[2]
    K, V = (x.repeat_interleave(h // k.shape[1], dim=1) for x in (k, v))
    scale = a.get("scale")
    s = q @ K.mT * float(q.shape[-1] ** -0.5 if scale is None else scale)
    if a.get("softcap"):
        s = float(a["softcap"]) * torch.tanh(s / float(a["softcap"]))
    i, j = torch.arange(sq)[:, None], torch.arange(sk)
    distance = j - i - (sk - sq)
    if a.get("alibi") is not None:
        slopes = a["alibi"] if a["alibi"].dim() == 2 else a["alibi"][None]
        s = s - slopes[..., None, None] * distance.abs()
    if a.get("bias") is not None:
        s = s + a["bias"]
    if a.get("score_mod") is not None:
        heads = torch.arange(h)[:, None, None]
        s = a["score_mod"](s, torch.arange(b)[:, None, None, None], heads, i, j)
    left, right = a.get("window") or (None, None)
    seen = torch.ones(sq, sk, dtype=torch.bool)
    for bound, side in ((left, -1), (0 if a.get("causal") else right, 1)):
        if bound is not None:
            seen = seen & (distance * side <= int(bound))
    if a.get("attention_chunk"):
        seen = seen & ((i + sk - sq) // int(a["attention_chunk"]) == j // int(a["attention_chunk"]))
    if a.get("mask_mod") is not None:
        seen = seen & a["mask_mod"](0, 0, i, j)
    if a.get("block_mask") is not None:
        seen = seen & (j <= i)
    s = s.masked_fill(~seen, -torch.inf)
    sink = torch.full((h,), -torch.inf, dtype=s.dtype) if a.get("sinks") is None else a["sinks"]
    lse = torch.cat([s, sink.view(1, h, 1, 1).expand(b, h, sq, 1)], dim=-1).logsumexp(dim=-1)
    weights = torch.where(seen, torch.exp(s - lse.masked_fill(lse == -torch.inf, 0.0)[..., None]), 0.0)
    return weights @ V, lse
