"""Decoding row by row in fp64, independent of `cute_flash.reference`: the oracle of the CPU tests.

Rotary embedding is a product of complex numbers, and keys are looked up one by one.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tests.decode.ds_mla import LATENT, packed, unpacked
from tests.integrations.plain import rotary

FP8 = torch.float8_e4m3fn


def oracle(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor | None,
    *,
    cache_seqlens: Tensor,
    value_dim: int | None = None,
    page_table: Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    leftpad: Tensor | None = None,
    k_new: Tensor | None = None,
    v_new: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    rotary_interleaved: bool = False,
    cu_seqlens_q: Tensor | None = None,
    causal: bool = True,
    window: tuple[int | None, int | None] = (None, None),
    attention_chunk: int | None = None,
    softcap: float | None = None,
    alibi: Tensor | None = None,
    sinks: Tensor | None = None,
    scale: float | None = None,
    k_scale: Any = None,
    v_scale: Any = None,
    kv_layout: str = "nhd",
    **_others: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """out and lse in fp64, and the caches after the call, in the layout of the arguments, which do not change.

    With `value_dim`, the second cache is the part of the first one that has the values.
    """
    k_cache = k_cache.clone()
    is_latent = v_cache is None
    is_ds_mla = k_cache.dtype == torch.uint8
    v_cache = k_cache[..., :value_dim] if v_cache is None else v_cache.clone()
    v_scale = k_scale if is_latent else v_scale
    has_tables = page_table is not None and page_table.dim() == 3
    keys, values = (x.transpose(1, 2) if kv_layout == "hnd" else x for x in (k_cache, v_cache))
    heads, heads_kv = q.shape[-2], keys.shape[2]
    batch, left = len(cache_seqlens), window[0]
    right = 0 if causal else window[1]
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    # Kernels multiply FP8 keys as fp16.
    rounded_to = torch.float16 if keys.dtype == FP8 and q.dtype == torch.bfloat16 else q.dtype

    def rounded(query: Tensor) -> Tensor:
        """A query as kernels multiply it."""
        if is_ds_mla and q.dtype in (torch.float16, torch.bfloat16):
            return torch.cat((query[..., :LATENT].half().double(), query[..., LATENT:].bfloat16().double()), dim=-1)
        return query.to(rounded_to).double()

    def tokens(x: Tensor, b: int) -> Tensor:
        if cu_seqlens_q is None:
            return x[b]
        return x[int(cu_seqlens_q[b]) : int(cu_seqlens_q[b + 1])]

    def place(b: int, j: int) -> tuple[int, int]:
        row = b if cache_batch_idx is None else int(cache_batch_idx[b])
        if page_table is not None:
            return int(page_table[row, j // keys.shape[1]]), j % keys.shape[1]
        return row, j

    def rotated(x: Tensor, position: int) -> Tensor:
        """The rotated heads of one token, (heads, D)."""
        if rotary_cos is None or rotary_sin is None:
            return x.double()
        return rotary(x[None], rotary_cos, rotary_sin, position, rotary_interleaved)[0]

    def factor(given: Any) -> Tensor:
        return torch.as_tensor(1.0 if given is None else given).double().reshape(-1, 1)

    def read(cache: Tensor, where: tuple[int, int], given: Any) -> Tensor:
        """A row of a cache, (Hkv, D)."""
        if is_ds_mla:
            return unpacked(keys[where])[..., : LATENT if cache is values else None]
        return cache[where].double() * factor(given)

    def stored(x: Tensor, given: Any, dtype: torch.dtype) -> Tensor:
        if is_ds_mla:
            return packed(x)
        return (x.double() / factor(given)).clamp(-448, 448).to(dtype) if dtype == FP8 else x.to(dtype)

    lengths = []
    for b in range(0 if has_tables else batch):
        before = int(cache_seqlens[b])
        new = 0 if k_new is None else len(tokens(k_new, b))
        for t in range(new):
            where = place(b, before + t)
            keys[where] = stored(rotated(tokens(k_new, b)[t], before + t), k_scale, keys.dtype)
            if not is_latent:
                values[where] = stored(tokens(v_new, b)[t], v_scale, values.dtype)
        lengths.append(before + new)

    out = torch.zeros(*q.shape[:-1], values.shape[-1], dtype=torch.float64)
    is_dense = cu_seqlens_q is None
    shape = (batch, heads, q.shape[1]) if is_dense else (heads, q.shape[0])
    lse = torch.full(shape, -torch.inf, dtype=torch.float64)

    def seen(b: int, i: int) -> tuple[Tensor, list[tuple[int, int]], list[int]]:
        """Query i of sequence b, rotated, and of each row that it sees the place and the distance."""
        queries = tokens(q, b)
        if page_table is not None and page_table.dim() == 3:
            rows = range(int(cache_seqlens[b, i]))
            places = [(int(page_table[b, i, j // keys.shape[1]]), j % keys.shape[1]) for j in rows]
            places = [where for where in places if where[0] != -1]
            return queries[i], places, [0] * len(places)
        length, skipped = lengths[b], 0 if leftpad is None else int(leftpad[b])
        position = length - len(queries) + i
        is_masked = causal or left is not None or right is not None or attention_chunk is not None
        visible = [
            j
            for j in range(skipped, length)
            if (left is None or j >= position - left) and (right is None or j <= position + right)
            if not attention_chunk or (position - skipped) // attention_chunk == (j - skipped) // attention_chunk
        ]
        query = rotated(queries[i], position if is_masked else int(cache_seqlens[b]))
        return query, [place(b, j) for j in visible], [abs(position - j) for j in visible]

    for b in range(batch):
        for i in range(len(tokens(q, b))):
            query, places, distances = seen(b, i)
            query = rounded(query)
            # (rows, Hkv, D); other rows may be NaN, and are never multiplied.
            K, V = (
                torch.stack([read(x, where, given) for where in places]) if places else None
                for x, given in ((keys, k_scale), (values, v_scale))
            )
            for h in range(heads):
                logits = torch.zeros(0, dtype=torch.float64)
                if K is not None:
                    logits = scale * (K[:, h // (heads // heads_kv)] @ query[h])
                if softcap:
                    logits = softcap * torch.tanh(logits / softcap)
                if alibi is not None:
                    slope = float(alibi[b, h] if alibi.dim() == 2 else alibi[h])
                    logits = logits - slope * torch.tensor(distances, dtype=torch.float64)
                if sinks is not None:
                    logits = torch.cat([logits, sinks[h : h + 1].double()])
                if not len(logits):
                    continue
                total = torch.logsumexp(logits, dim=0)
                if V is not None:
                    weights = torch.exp(logits[: len(places)] - total)
                    tokens(out, b)[i, h] = weights @ V[:, h // (heads // heads_kv)]
                (lse[b] if is_dense else lse[:, int(cu_seqlens_q[b]) :])[h, i] = total
    return out, lse, k_cache, v_cache
