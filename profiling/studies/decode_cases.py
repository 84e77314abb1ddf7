"""Calls of `profiling decode`: cute_flash, its peers and its variants on one set of tensors, with exact results.

q is (B, T, H, D). K and V are (B, S, Hkv, D) and full, so that all calls read the same keys. SDPA gets
(B, H, S, D) views. `Call.exact` computes the rows of one sequence and K/V head in fp64.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import cute_flash
from profiling.peers.flash_attention import fa3_ops
from profiling.peers.peer import missing

OURS, CUDNN, FLASH, FA3 = "cute_flash", "sdpa-cudnn", "sdpa-flash", "fa3"
PEERS = (CUDNN, FLASH, FA3)
TOKENS = 8  # of the variant with several queries
FP8 = torch.float8_e4m3fn
FP8_SCALE = 0.02
# Variant -> its description in tables.
VARIANTS = {
    "plain": "contiguous cache, one token",
    "page 16": "pages of 16 rows",
    "page 64": "pages of 64 rows",
    "page 1": "pages of one row",
    f"{TOKENS} tokens": f"{TOKENS} query tokens",
    "fp8": "FP8 cache",
    "append": "append and rotary embedding",
    "attn": "`attn` on the same tensors",
    "sm80": "kernels of the family sm80",
}
PLAIN, FP8_CACHE, APPEND = "plain", "fp8", "append"


@dataclass(frozen=True)
class Sizes:
    """The heads of all cells."""

    heads: int = 32
    heads_kv: int = 8
    head_dim: int = 128

    @property
    def group(self) -> int:
        return self.heads // self.heads_kv


@dataclass(frozen=True)
class Shape:
    batch: int
    length: int  # keys of each sequence

    @property
    def id(self) -> str:
        return f"B={self.batch} length {self.length}"

    def kv_bytes(self, sizes: Sizes, element_bytes: int = 2) -> int:
        return 2 * element_bytes * self.batch * self.length * sizes.heads_kv * sizes.head_dim


@dataclass(frozen=True)
class Call:
    """A function that is timed, and its exact result.

    `call` returns (B, T, H, D). `exact` returns the output of one sequence and K/V head, (T, group, D), in fp64.
    """

    call: Callable[[], Tensor]
    exact: Callable[[int, int], Tensor]
    context: Callable[[], AbstractContextManager[Any]] = nullcontext


def _generator(device: torch.device, seed: int) -> torch.Generator:
    return torch.Generator(device).manual_seed(seed)


def _normal(size: tuple[int, ...], generator: torch.Generator) -> Tensor:
    return torch.randn(size, generator=generator, device=generator.device, dtype=torch.bfloat16)


@dataclass(frozen=True)
class Inputs:
    q: Tensor  # (B, 1, H, D)
    k: Tensor  # (B, S, Hkv, D)
    v: Tensor
    lengths: Tensor = field(repr=False)  # (B), int32

    @staticmethod
    def random(shape: Shape, sizes: Sizes, device: torch.device, seed: int) -> Inputs:
        generator = _generator(device, seed)
        k, v = (_normal((shape.batch, shape.length, sizes.heads_kv, sizes.head_dim), generator) for _ in range(2))
        lengths = torch.full((shape.batch,), shape.length, dtype=torch.int32, device=device)
        return Inputs(_normal((shape.batch, 1, sizes.heads, sizes.head_dim), generator), k, v, lengths)


def exact_rows(q: Tensor, k: Tensor, v: Tensor, sequence: int, head_kv: int, scale: float | None = None) -> Tensor:
    """Attention of all query heads of one K/V head in fp64, causal, aligned at the last key."""
    tokens, num_keys, group = q.shape[1], k.shape[1], q.shape[2] // k.shape[2]
    rows = q[sequence, :, head_kv * group : (head_kv + 1) * group].double()
    keys, values = (x[sequence, :, head_kv].double() for x in (k, v))
    scores = rows @ keys.mT * (q.shape[-1] ** -0.5 if scale is None else scale)
    position = torch.arange(num_keys - tokens, num_keys, device=q.device)[:, None, None]
    masked = torch.arange(num_keys, device=q.device) > position
    return scores.masked_fill(masked, -torch.inf).softmax(-1) @ values


# ---- cute_flash and its peers
# -------------------------------------------------------------------------------------------------------


def unavailable() -> dict[str, str]:
    """Peer -> the reason why it cannot run here."""
    loads: dict[str, Callable[[], object]] = {CUDNN: lambda: None, FLASH: lambda: None, FA3: fa3_ops}
    reasons = {name: missing(load) for name, load in loads.items()}
    return {name: reason for name, reason in reasons.items() if reason is not None}


def _sdpa(inputs: Inputs) -> Tensor:
    q, k, v = (x.transpose(1, 2) for x in (inputs.q, inputs.k, inputs.v))
    attention = torch.nn.functional.scaled_dot_product_attention
    return attention(q, k, v, enable_gqa=True).transpose(1, 2)


def _fa3(inputs: Inputs) -> Tensor:
    """With automatic splits."""
    q, k, v = inputs.q, inputs.k, inputs.v
    return fa3_ops().fwd(q, k, v, softmax_scale=q.shape[-1] ** -0.5, is_causal=False, num_splits=0)[0]


def _decode(inputs: Inputs) -> Tensor:
    return cute_flash.attn_decode(inputs.q, inputs.k, inputs.v, cache_seqlens=inputs.lengths)


def library_calls(inputs: Inputs) -> dict[str, Call]:
    """cute_flash and its peers, by name."""
    exact = partial(exact_rows, inputs.q, inputs.k, inputs.v)
    return {
        OURS: Call(partial(_decode, inputs), exact),
        CUDNN: Call(partial(_sdpa, inputs), exact, partial(sdpa_kernel, SDPBackend.CUDNN_ATTENTION)),
        FLASH: Call(partial(_sdpa, inputs), exact, partial(sdpa_kernel, SDPBackend.FLASH_ATTENTION)),
        FA3: Call(partial(_fa3, inputs), exact),
    }


# ---- variants of cute_flash
# -------------------------------------------------------------------------------------------------------


def _paged(inputs: Inputs, page_size: int, seed: int) -> Callable[[], Tensor]:
    """The call with a paged cache whose pages are in random order."""
    batch, length = inputs.k.shape[:2]
    num_pages = length // page_size
    order = torch.randperm(batch * num_pages, generator=torch.Generator().manual_seed(seed))
    table = order.view(batch, num_pages).to(inputs.q.device)
    pages = [torch.empty_like(x).view(-1, page_size, *x.shape[2:]) for x in (inputs.k, inputs.v)]
    for x, cache in zip(pages, (inputs.k, inputs.v)):
        x[table] = cache.unflatten(1, (num_pages, page_size))
    options = {"cache_seqlens": inputs.lengths, "page_table": table.int()}
    return partial(cute_flash.attn_decode, inputs.q, *pages, **options)


def _several_tokens(inputs: Inputs, seed: int) -> Call:
    batch, _, heads, head_dim = inputs.q.shape
    q = _normal((batch, TOKENS, heads, head_dim), _generator(inputs.q.device, seed))
    call = partial(cute_flash.attn_decode, q, inputs.k, inputs.v, cache_seqlens=inputs.lengths)
    return Call(call, partial(exact_rows, q, inputs.k, inputs.v))


def _fp8(inputs: Inputs) -> Call:
    stored = [(x / FP8_SCALE).to(FP8) for x in (inputs.k, inputs.v)]
    scale = torch.tensor(FP8_SCALE, device=inputs.q.device)
    options = {"cache_seqlens": inputs.lengths, "k_scale": scale, "v_scale": scale}

    def exact(sequence: int, head_kv: int) -> Tensor:
        one = slice(sequence, sequence + 1)
        k, v = (x[one].float() * FP8_SCALE for x in stored)
        return exact_rows(inputs.q[one], k, v, 0, head_kv)

    return Call(partial(cute_flash.attn_decode, inputs.q, *stored, **options), exact)


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """NeoX rotation of the last dimension, in fp64, rounded to the dtype of x."""
    first, second = x.double().chunk(2, -1)
    cos, sin = cos.double(), sin.double()
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1).to(x.dtype)


def _appending(inputs: Inputs, seed: int) -> Call:
    """Append the last row of each sequence. All calls write the same row, so only the first changes the cache."""
    batch, length, heads_kv, head_dim = inputs.k.shape
    device, generator = inputs.q.device, _generator(inputs.q.device, seed)
    caches = [x.clone() for x in (inputs.k, inputs.v)]
    new = [_normal((batch, 1, heads_kv, head_dim), generator) for _ in range(2)]
    frequencies = 10000.0 ** (-torch.arange(head_dim // 2, device=device) * 2 / head_dim)
    angles = torch.outer(torch.arange(length, device=device), frequencies)
    cos, sin = angles.cos(), angles.sin()
    call = partial(
        cute_flash.attn_decode, inputs.q, *caches, cache_seqlens=inputs.lengths - 1, k_new=new[0], v_new=new[1],
        rotary_cos=cos, rotary_sin=sin,
    )  # fmt: skip

    def exact(sequence: int, head_kv: int) -> Tensor:
        one = slice(sequence, sequence + 1)
        rows = [rotated(new[0][one], cos[-1], sin[-1]), new[1][one]]
        k, v = (torch.cat([x[one, :-1], row], 1) for x, row in zip((inputs.k, inputs.v), rows))
        return exact_rows(rotated(inputs.q[one], cos[-1], sin[-1]), k, v, 0, head_kv)

    return Call(call, exact)


def variants(inputs: Inputs, seed: int) -> dict[str, Call]:
    """The calls of `VARIANTS` by name."""
    exact = partial(exact_rows, inputs.q, inputs.k, inputs.v)
    plain = partial(_decode, inputs)
    attention = partial(cute_flash.attn, inputs.q, inputs.k, inputs.v, layout="bshd")
    made = {
        PLAIN: Call(plain, exact),
        **{f"page {size}": Call(_paged(inputs, size, seed), exact) for size in (16, 64, 1)},
        f"{TOKENS} tokens": _several_tokens(inputs, seed),
        FP8_CACHE: _fp8(inputs),
        APPEND: _appending(inputs, seed),
        "attn": Call(attention, exact),
        "sm80": Call(plain, exact, partial(cute_flash.use_kernels, "sm80")),
    }
    return {name: made[name] for name in VARIANTS}
