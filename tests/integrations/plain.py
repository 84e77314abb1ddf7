"""Attention in plain torch, one sequence at a time, in fp64: the expected results of the adapters; their signatures."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def plain(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: bool = False,
    window: tuple[int, int] = (-1, -1),
    chunk: int = 0,
    softcap: float = 0.0,
    slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    scale: float | None = None,
    leftpad: int = 0,
) -> tuple[Tensor, Tensor]:
    """out (Sq, H, Dv) and lse (H, Sq) of one sequence: q (Sq, H, D), k (Sk, Hkv, D), v (Sk, Hkv, Dv)."""
    q, k, v = (x.double() for x in (q, k, v))
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scores = torch.einsum("qhd,khd->hqk", q, k) * (q.shape[-1] ** -0.5 if scale is None else scale)
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    row = torch.arange(q.shape[0])[:, None] + k.shape[0] - q.shape[0]
    column = torch.arange(k.shape[0])[None]
    if slopes is not None:
        scores = scores - slopes.double()[:, None, None] * (row - column).abs()
    left, right = window
    right = 0 if causal else right
    visible = (column >= leftpad) & (column >= row - left if left >= 0 else True)
    visible = visible & (column <= row + right if right >= 0 else True)
    if chunk:
        visible = visible & ((row - leftpad) // chunk == (column - leftpad) // chunk)
    scores = scores.masked_fill(~visible, -torch.inf)
    if sinks is not None:
        scores = torch.cat([scores, sinks.double()[:, None, None].expand(-1, q.shape[0], 1)], -1)
    lse = scores.logsumexp(-1)
    weights = torch.exp(scores - lse.masked_fill(lse.isinf(), 0.0)[..., None])[..., : k.shape[0]]
    return torch.einsum("hqk,khd->qhd", weights, v), lse


def plain_batch(q: Tensor, k: Tensor, v: Tensor, **keywords) -> tuple[Tensor, Tensor]:
    """`plain` on (B, S, H, D); slopes are (B, H) or (H)."""
    slopes = keywords.pop("slopes", None)
    rows = [
        plain(*x, **keywords, slopes=None if slopes is None else slopes.expand(len(q), -1)[b])
        for b, x in enumerate(zip(q, k, v))
    ]
    return torch.stack([out for out, _ in rows]), torch.stack([lse for _, lse in rows])


def rotary(x: Tensor, cos: Tensor, sin: Tensor, start: int, interleaved: bool, moves: bool = True) -> Tensor:
    """x (T, H, D) rotated as complex numbers, in fp64, from position `start` on; all at `start` unless `moves`."""
    x, half = x.double(), cos.shape[1]
    result = x.clone()
    for t in range(x.shape[0]):
        position = start + t * moves
        turn = torch.complex(cos[position].double(), sin[position].double())
        for d in range(half):
            a, b = (2 * d, 2 * d + 1) if interleaved else (d, d + half)
            z = torch.complex(x[t, :, a], x[t, :, b]) * turn[d]
            result[t, :, a], result[t, :, b] = z.real, z.imag
    return result


def assert_signature(function: Callable[..., Any], required: list[str], defaults: dict[str, Any]) -> None:
    """The positional parameters, those without a default first."""
    positional = [x for x in inspect.signature(function).parameters.values() if x.kind is x.POSITIONAL_OR_KEYWORD]
    assert [x.name for x in positional if x.default is x.empty] == required
    assert [(x.name, x.default) for x in positional if x.default is not x.empty] == list(defaults.items())
