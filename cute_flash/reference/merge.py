"""`merge` and `attention_probs`: public helpers around the LSE, in plain torch for any device."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from cute_flash.reference.dense import plain_args
from cute_flash.reference.formulas import visible
from cute_flash.spec.band import Band
from cute_flash.spec.describe import describe
from cute_flash.spec.shapes import lse_dtype

# Orders of the dimensions of out. The LSE is (B, H, S) for the first two and (H, T) for "thd".
LAYOUTS = ("bhsd", "bshd", "thd")
# Scores that `attention_probs` computes at a time.
MAX_SCORES = 1 << 24


def merge(outs: Sequence[Tensor], lses: Sequence[Tensor], *, layout: str = "bhsd") -> tuple[Tensor, Tensor]:
    """Combine attention over disjoint parts of the keys into attention over all keys.

    lse = log Σᵢ exp(lseᵢ) and out = Σᵢ exp(lseᵢ - lse) outᵢ, summed in fp32 (fp64 for fp64). A row whose LSE is -inf in
    all parts has output 0 and LSE -inf. The function is plain torch, runs on any device, and is differentiable.

    Args:
        outs: The outputs of `attn(..., return_lse=True)` for the same queries and each part of the keys, as a sequence
            or as a tensor stacked along the first dimension. Pass `out_dtype=torch.float32` to `attn` to avoid rounding
            each part.
        lses: Their log-sum-exps, in the same order. As an LSE includes the sink, pass `sinks` for one part only.
        layout: The order of dimensions of each output: "bhsd", "bshd", or "thd" for `attn_varlen`.

    Returns:
        out: The output over all keys, in the dtype of the parts.
        lse: The log-sum-exp over all keys.

    Raises:
        ValueError: The numbers or shapes of `outs` and `lses` do not fit.

    Examples:
        >>> import torch, cute_flash
        >>> q, k, v = (torch.randn(1, 2, 8, 16) for _ in range(3))
        >>> parts = [cute_flash.attn(q, k[:, :, keys], v[:, :, keys], return_lse=True)
        ...          for keys in (slice(0, 3), slice(3, 8))]
        >>> out, lse = cute_flash.merge(*zip(*parts))
        >>> torch.testing.assert_close(out, cute_flash.attn(q, k, v))
    """
    if layout not in LAYOUTS:
        raise ValueError(f"layout={layout!r}: use one of {', '.join(LAYOUTS)}")
    if len(outs) == 0 or len(outs) != len(lses):
        raise ValueError(
            f"{len(outs)} outs and {len(lses)} lses: give one LSE for each output, and at least one output"
        )
    for i, (out, lse) in enumerate(zip(outs, lses, strict=True)):
        if out.shape != outs[0].shape or _lse_shape(out, layout) != tuple(lse.shape):
            raise ValueError(
                f"outs[{i}] has shape {tuple(out.shape)} and lses[{i}] has {tuple(lse.shape)}: expected "
                f"{tuple(outs[0].shape)} and {_lse_shape(outs[0], layout)} with layout={layout!r}"
            )
    stacked = torch.stack(tuple(lses))
    empty = (stacked == -torch.inf).all(dim=0)
    # Finite for rows without keys, because -inf - (-inf) would make gradients NaN.
    finite = stacked.masked_fill(empty, 0.0)
    lse = finite.logsumexp(dim=0)
    weights = torch.exp(finite - lse).masked_fill(empty, 0.0)
    wide = lse.dtype
    total = sum(
        (out.to(wide) * _like_out(w, layout)[..., None] for out, w in zip(outs, weights, strict=True)),
        start=torch.zeros((), dtype=wide, device=lse.device),
    )
    return total.to(outs[0].dtype), lse.masked_fill(empty, -torch.inf)


def _like_out(lse: Tensor, layout: str) -> Tensor:
    """The LSE in the order of the output's dimensions."""
    return lse if layout == "bhsd" else lse.transpose(-1, -2)


def _lse_shape(out: Tensor, layout: str) -> tuple[int, ...]:
    rank = 3 if layout == "thd" else 4
    if out.dim() != rank:
        raise ValueError(f"an out of shape {tuple(out.shape)} with layout={layout!r}: expected {rank} dimensions")
    *batch, a, b, _ = out.shape
    return (*batch, a, b) if layout == "bhsd" else (*batch, b, a)


def attention_probs(
    q: Tensor,
    k: Tensor,
    lse: Tensor,
    *,
    rows: range | slice | Sequence[int] | Tensor | None = None,
    causal: bool = False,
    window: tuple[int | None, int | None] = (None, None),
    attention_chunk: int | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    alibi: Tensor | None = None,
) -> Tensor:
    """The attention probabilities exp(score - lse) of some rows, to inspect a call of `attn`.

    The function is plain torch, runs on any device, and is differentiable. Dropout is not applied. With sinks, rows sum
    to less than 1, because the LSE includes the sink. A bias and mods are not supported.

    Args:
        q: Queries of the call, (B, H, Sq, D).
        k: Keys of the call, (B, Hkv, Sk, D).
        lse: The log-sum-exp that the call returned, (B, H, Sq).
        rows: Indices of queries; negative ones count from the end; None: all rows.
        causal: As in the call.
        window: As in the call.
        attention_chunk: As in the call.
        scale: As in the call.
        softcap: As in the call.
        alibi: As in the call.

    Returns:
        The probabilities, (B, H, len(rows), Sk), fp32 (fp64 for fp64 inputs).

    Raises:
        ValueError: Shapes do not fit, or a row does not exist.

    Examples:
        >>> import torch, cute_flash
        >>> q, k, v = (torch.randn(1, 2, 8, 16) for _ in range(3))
        >>> out, lse = cute_flash.attn(q, k, v, causal=True, return_lse=True)
        >>> last = cute_flash.attention_probs(q, k, lse, rows=[-1], causal=True)
        >>> torch.testing.assert_close(last @ v, out[:, :, -1:])
    """
    band = Band.of(causal, window, attention_chunk or None)
    args = plain_args(q, band, scale)._replace(softcap=softcap or 0.0, alibi=alibi)
    describe(q, k, k, args, "cpu")
    (batch, heads, sq, _), (_, heads_kv, sk, _) = q.shape, k.shape
    if lse.shape != (batch, heads, sq):
        raise ValueError(f"lse has shape {tuple(lse.shape)}: expected {(batch, heads, sq)}")
    wide, indices = lse_dtype(q.dtype), _row_indices(rows, sq, q.device)
    K = k.to(wide).unsqueeze(2)
    slopes = None if alibi is None else alibi.to(wide).expand(batch, heads)[:, :, None, None]
    step = max(1, MAX_SCORES // max(1, batch * heads * sk))
    parts = []
    for i in indices.split(step):
        # S = scale Q Kᵀ. Query heads that share a K/V head have a dimension of their own, so that K broadcasts.
        Q = q[:, :, i].to(wide).unflatten(1, (heads_kv, heads // max(heads_kv, 1)))
        S = ((Q * args.scale) @ K.mT).flatten(1, 2)
        if args.softcap:
            S = torch.tanh(S / args.softcap) * args.softcap
        distance = torch.arange(sk, device=q.device) - (i[:, None] + (sk - sq))
        if slopes is not None:
            S = S - slopes * distance.abs().to(wide)
        L = lse[:, :, i, None].to(wide)
        # Masked before the exponential, because exp of a masked score may overflow and make the gradient NaN.
        S = (S - L.masked_fill(L == -torch.inf, 0.0)).masked_fill(~visible(band, distance), -torch.inf)
        parts.append(S.exp().masked_fill(L == -torch.inf, 0.0))
    return torch.cat(parts, dim=2) if parts else q.new_zeros(batch, heads, 0, sk, dtype=wide)


def _row_indices(rows: range | slice | Sequence[int] | Tensor | None, sq: int, device: torch.device) -> Tensor:
    all_rows = torch.arange(sq, device=device)
    if rows is None:
        return all_rows
    if isinstance(rows, slice):
        return all_rows[rows]
    if not isinstance(rows, Tensor):
        wrong = [i for i in rows if not -sq <= i < sq]
        if wrong:
            raise ValueError(f"rows has {wrong[0]}: there are {sq} queries, numbered from 0")
        rows = torch.tensor(list(rows), dtype=torch.int64)
    if rows.dim() != 1 or rows.is_floating_point() or rows.dtype == torch.bool:
        raise ValueError(f"rows is {rows.dtype} of shape {tuple(rows.shape)}: expected whole numbers, (N)")
    return all_rows[rows.to(device)]
