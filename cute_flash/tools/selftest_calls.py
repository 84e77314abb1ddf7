"""The calls of `cute-flash selftest`, with their inputs.

A row of `CALLS` is a call. Lengths, heads, strides and window sizes are not compiled in, so rows with equal dtype, head
dims, mask bounds and features share a kernel.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar, NamedTuple, Protocol

import torch
from torch import Tensor

from cute_flash.api import attn, attn_varlen
from cute_flash.decode import attn_decode
from cute_flash.score_mod.block_mask import BlockMask

Tensors = dict[str, Tensor]
Qkv = tuple[Tensor, Tensor, Tensor]
PAGE_SIZE = 16
CACHE_ROWS = 512  # of each sequence of a K/V cache
FP8_SCALE = 0.5
MASK_STEP = 7  # every seventh index in the list of a query is -1


@dataclass(frozen=True)
class Call:
    """One call of the self-test: its function, shapes and keywords. Tensors and functions are given by name."""

    name: str
    form: Form
    queries: tuple[int, ...] = (257, 257)  # of each sequence
    keys: tuple[int, ...] = ()  # those in the cache for attn_decode; empty: as many as queries
    dtype: torch.dtype = torch.bfloat16
    head_dim: int = 64
    head_dim_v: int = 0  # 0: head_dim
    heads: tuple[int, int] = (4, 2)  # of q, and of k and v
    options: dict[str, Any] = field(default_factory=dict)
    features: tuple[str, ...] = ()  # of `FEATURES`, and "append", "pages", "fp8" of attn_decode
    page_size: int = PAGE_SIZE
    has_dlse: bool = False  # the loss has a gradient of the LSE
    is_core: bool = False  # also runs with the kernel families that are not the default of the GPU

    @property
    def widths(self) -> tuple[int, int]:
        return self.head_dim, self.head_dim_v or self.head_dim

    @cached_property
    def lengths(self) -> list[tuple[int, int]]:
        """The (queries, visible keys) of each sequence."""
        appended = self.queries if "append" in self.features else (0,) * len(self.queries)
        return [(n, k + new) for n, k, new in zip(self.queries, self.keys or self.queries, appended)]

    @property
    def longest(self) -> int:
        return max(map(max, self.lengths))

    def tensors(self, device: str) -> Tensors:
        """The inputs of the call. Their values do not depend on the device."""
        generator = torch.Generator().manual_seed(zlib.crc32(self.name.encode()))

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator)

        x = {name: normal(*shape) for name, shape in zip("qkv", self.form.shapes(self))}
        if "fp8" in self.features:
            x |= {name: FP8_SCALE * x[name].to(torch.float8_e4m3fn).float() for name in "kv" if name in x}
        for feature in [FEATURES[name] for name in self.features if name in FEATURES]:
            x |= {name: 0.3 * normal(*shape) for name, shape in feature.shapes(self).items()}
        in_fp32 = ("alibi", "sinks", "table")
        return {name: y.to(device, torch.float32 if name in in_fp32 else self.dtype) for name, y in x.items()}

    def keywords(self, x: Tensors) -> dict[str, Any]:
        """The keywords of the call. The value of `block_mask` is its mask_mod."""
        made = dict(self.options)
        for name in self.features:
            made |= FEATURES[name].keywords(self, x) if name in FEATURES else {}
        return made


class Form(Protocol):
    """How a function takes the sequences of a batch."""

    has_gradients: bool

    def shapes(self, call: Call) -> tuple[tuple[int, ...], ...]:
        """The shapes of q, k and v. For attn_decode, k and v are the rows of the caches after the call.

        Without v, its values are the first columns of k.
        """

    def attend(self, call: Call, x: Tensors) -> tuple[Tensor, Tensor]:
        """The result (out, lse) of the function."""

    def split(self, call: Call, x: Tensors) -> list[Qkv]:
        """(q, k, v) of each sequence, (H, S, D)."""

    def join(self, outs: list[Tensor], lses: list[Tensor]) -> tuple[Tensor, Tensor]:
        """The results of all sequences, as the function returns them."""


class Dense:
    has_gradients = True

    def shapes(self, call: Call) -> tuple[tuple[int, ...], ...]:
        (sq, sk), batch, (h, hkv), (d, dv) = call.lengths[0], len(call.queries), call.heads, call.widths
        return (batch, h, sq, d), (batch, hkv, sk, d), (batch, hkv, sk, dv)

    def attend(self, call: Call, x: Tensors) -> tuple[Tensor, Tensor]:
        a = call.keywords(x)
        if "block_mask" in a:
            a["block_mask"] = BlockMask.of(a["block_mask"], (1, 1, *call.lengths[0]), device=x["q"].device)
        if a.get("layout") != "bshd":
            return attn(x["q"], x["k"], x["v"], return_lse=True, **a)
        out, lse = attn(*(x[name].transpose(1, 2) for name in "qkv"), return_lse=True, **a)
        return out.transpose(1, 2), lse

    def split(self, call: Call, x: Tensors) -> list[Qkv]:
        return list(zip(x["q"].unbind(), x["k"].unbind(), x["v"].unbind()))

    def join(self, outs: list[Tensor], lses: list[Tensor]) -> tuple[Tensor, Tensor]:
        return torch.stack(outs), torch.stack(lses)


class Varlen:
    has_gradients = True

    def shapes(self, call: Call) -> tuple[tuple[int, ...], ...]:
        (tokens, keys), (h, hkv), (d, dv) = map(sum, zip(*call.lengths)), call.heads, call.widths
        return (tokens, h, d), (keys, hkv, d), (keys, hkv, dv)

    def attend(self, call: Call, x: Tensors) -> tuple[Tensor, Tensor]:
        offsets = [
            torch.tensor([0, *counts], device=x["q"].device).cumsum(0, dtype=torch.int32)
            for counts in zip(*call.lengths)
        ]
        return attn_varlen(x["q"], x["k"], x["v"], *offsets, return_lse=True, **call.keywords(x))

    def split(self, call: Call, x: Tensors) -> list[Qkv]:
        queries, keys = (list(counts) for counts in zip(*call.lengths))
        parts = (x["q"].split(queries), x["k"].split(keys), x["v"].split(keys))
        return [(q.transpose(0, 1), k.transpose(0, 1), v.transpose(0, 1)) for q, k, v in zip(*parts)]

    def join(self, outs: list[Tensor], lses: list[Tensor]) -> tuple[Tensor, Tensor]:
        return torch.cat(outs, dim=1).transpose(0, 1), torch.cat(lses, dim=1)


class Decode:
    has_gradients = False

    def shapes(self, call: Call) -> tuple[tuple[int, ...], ...]:
        batch, (h, hkv), (d, dv) = len(call.queries), call.heads, call.widths
        return (batch, call.queries[0], h, d), (batch, CACHE_ROWS, hkv, d), (batch, CACHE_ROWS, hkv, dv)

    def attend(self, call: Call, x: Tensors) -> tuple[Tensor, Tensor]:
        """The function attends, and the caches it wrote to must then be k and v of `x`."""
        a, (batch, tokens), size = call.keywords(x), x["q"].shape[:2], call.page_size
        names = [name for name in "kv" if name in x]
        before = torch.tensor(call.keys, dtype=torch.int32, device=x["q"].device)
        caches = [x[name].clone() for name in names]
        if "append" in call.features:
            rows = before[:, None].long() + torch.arange(tokens, device=before.device)
            sequences = torch.arange(batch, device=before.device)[:, None]
            a |= {f"{name}_new": cache[sequences, rows] for name, cache in zip(names, caches)}
            for cache in caches:
                cache[sequences, rows] = 0.0
        if "fp8" in call.features:
            caches = [(cache / FP8_SCALE).to(torch.float8_e4m3fn) for cache in caches]
            a |= {f"{name}_scale": FP8_SCALE for name in names}
        if "pages" in call.features:
            # Neighbouring rows of a sequence are in distant pages.
            order = torch.randperm(batch * CACHE_ROWS // size, generator=torch.Generator().manual_seed(0))
            order = order.to(before.device)
            caches = [cache.reshape(-1, size, *cache.shape[2:])[order] for cache in caches]
            a["page_table"] = order.argsort().to(torch.int32).view(batch, -1)
        out, lse = attn_decode(x["q"], *caches, cache_seqlens=before, return_lse=True, **a)
        if "append" in call.features:
            if "pages" in call.features:
                caches = [cache[a["page_table"].long()].reshape(x[name].shape) for name, cache in zip(names, caches)]
            if not all(torch.equal(x[name], cache) for name, cache in zip(names, caches)):
                out = torch.full_like(out, torch.nan)
        return out, lse

    def split(self, call: Call, x: Tensors) -> list[Qkv]:
        parts = []
        for b, (_, rows) in enumerate(call.lengths):
            q, k, v = (x[name][b].transpose(0, 1) for name in "qkv")
            parts.append((q, k[:, :rows], v[:, :rows]))
        return parts

    def join(self, outs: list[Tensor], lses: list[Tensor]) -> tuple[Tensor, Tensor]:
        return torch.stack(outs).transpose(1, 2), torch.stack(lses)


class Latent(Decode):
    """One cache, whose first columns are the values (MLA)."""

    def shapes(self, call: Call) -> tuple[tuple[int, ...], ...]:
        return super().shapes(call)[:2]

    def split(self, call: Call, x: Tensors) -> list[Qkv]:
        return super().split(call, x | {"v": x["k"][..., : call.head_dim_v]})


class QueryTables(Latent):
    """One cache, with a list of its rows for each of two queries of a sequence; indices of -1 have no row."""

    num_queries: ClassVar[int] = 2

    def attend(self, call: Call, x: Tensors) -> tuple[Tensor, Tensor]:
        device = x["q"].device
        lengths = torch.tensor(call.keys, dtype=torch.int32, device=device)[:, None].repeat(1, self.num_queries)
        pages, tables = x["k"].flatten(0, 1)[:, None], self.tables(call).to(device)
        return attn_decode(x["q"], pages, cache_seqlens=lengths, page_table=tables, return_lse=True, **call.keywords(x))

    def tables(self, call: Call) -> Tensor:
        """(sequences, queries, indices): rows of all sequences, some of them several times."""
        generator, batch = torch.Generator().manual_seed(0), len(call.queries)
        shape = (batch, self.num_queries, max(call.keys))
        tables = torch.randint(batch * CACHE_ROWS, shape, generator=generator, dtype=torch.int32)
        tables[..., ::MASK_STEP] = -1
        return tables

    def split(self, call: Call, x: Tensors) -> list[Qkv]:
        """(q, k, v) of each query."""
        rows, parts = x["k"].flatten(0, 1), []
        for queries, tables, length in zip(x["q"], self.tables(call), call.keys):
            for q, indices in zip(queries, tables[:, :length]):
                k = rows[indices[indices >= 0].long().to(rows.device)].transpose(0, 1)
                parts.append((q[:, None], k, k[..., : call.head_dim_v]))
        return parts

    def join(self, outs: list[Tensor], lses: list[Tensor]) -> tuple[Tensor, Tensor]:
        sizes = (-1, self.num_queries)
        out, lse = torch.cat(outs, dim=1).transpose(0, 1), torch.cat(lses, dim=1)
        return out.unflatten(0, sizes), lse.unflatten(1, sizes).transpose(0, 1)


class Feature(NamedTuple):
    """A keyword that is a tensor or a function."""

    shapes: Callable[[Call], dict[str, tuple[int, ...]]]  # of its tensors that have gradients
    keywords: Callable[[Call, Tensors], dict[str, Any]]


def _score_mod(call: Call, x: Tensors) -> dict[str, Any]:
    table, longest = x["table"], call.longest
    return {"score_mod": lambda s, b, h, i, j: s + table[h, i - j + longest] + 0.5 * torch.tanh(s)}


def _documents(call: Call, x: Tensors) -> Callable:
    """A mask of documents; some keys are visible to all of them."""
    ids = (torch.arange(len(call.queries) * call.longest) // 90).view(len(call.queries), -1).to(x["q"].device)
    return lambda b, h, i, j: (ids[b, i] == ids[b, j]) | ((i + j) % 7 == 0)


def _no_tensors(call: Call) -> dict[str, tuple[int, ...]]:
    return {}


def _itself(name: str) -> Callable[[Call, Tensors], dict[str, Any]]:
    return lambda call, x: {name: x[name]}


FEATURES = {
    "alibi": Feature(lambda c: {"alibi": c.heads[:1]}, _itself("alibi")),
    "sinks": Feature(lambda c: {"sinks": c.heads[:1]}, _itself("sinks")),
    "bias": Feature(lambda c: {"bias": (1, c.heads[0], *c.lengths[0])}, _itself("bias")),
    "key bias": Feature(lambda c: {"bias": (len(c.queries), 1, 1, c.lengths[0][1])}, _itself("bias")),
    "score_mod": Feature(lambda c: {"table": (c.heads[0], 2 * c.longest + 1)}, _score_mod),
    "mask_mod": Feature(_no_tensors, lambda c, x: {"mask_mod": _documents(c, x)}),
    "block_mask": Feature(_no_tensors, lambda c, x: {"block_mask": lambda b, h, i, j: (i >= j) & (i - j < 150)}),
}

FP16, FP32 = torch.float16, torch.float32
DENSE, VARLEN, DECODE, LATENT, TABLES = Dense(), Varlen(), Decode(), Latent(), QueryTables()
CAUSAL: dict[str, Any] = {"causal": True}
ALL: dict[str, Any] = {"causal": True, "softcap": 10.0, "dropout": 0.2}
GQA: dict[str, Any] = {"head_dim": 128, "heads": (8, 2)}
MLA: dict[str, Any] = {"head_dim": 576, "head_dim_v": 512}
LISTS: dict[str, Any] = {"value_dim": 512, "scale": 192**-0.5}
ONE_CACHE: dict[str, Any] = {**CAUSAL, **LISTS}
PAGED_APPEND = ("append", "pages")

CALLS = (
    # Head dim 128.
    Call("d128 full", DENSE, (256, 256), head_dim=128),
    Call("d128 full, more keys", DENSE, (65, 65), (700, 700), head_dim=128),
    Call("d128 full, one query", DENSE, (1, 1), (1500, 1500), head_dim=128, heads=(8, 2)),
    Call("d128 causal", DENSE, (512,), head_dim=128, options=CAUSAL, is_core=True),
    Call("d128 causal, odd length", DENSE, (333, 333), head_dim=128, options=CAUSAL, is_core=True),
    Call("d128 causal, rows without keys", DENSE, (300, 300), (101, 101), head_dim=128, options=CAUSAL),
    Call("d128 causal, MQA", DENSE, (200, 200), head_dim=128, heads=(8, 1), options=CAUSAL),
    Call("d128 causal, bshd", DENSE, (200, 200), head_dim=128, options={**CAUSAL, "layout": "bshd"}),
    Call("d128 causal, gradient of the LSE", DENSE, (200, 200), head_dim=128, options=CAUSAL, has_dlse=True),
    Call("d128 causal, deterministic", DENSE, head_dim=128, options={**CAUSAL, "deterministic": True}),
    Call("d128 causal, fp16", DENSE, head_dim=128, dtype=FP16, options=CAUSAL),
    Call("d128 causal, scale, fp16", DENSE, head_dim=128, dtype=FP16, options={**CAUSAL, "scale": 0.3}),
    Call("d128 window, both sides", DENSE, (500,), head_dim=128, options={"window": (64, 32)}, is_core=True),
    Call("d128 window, left", DENSE, (500,), head_dim=128, options={"window": (127, 0)}),
    Call("d128 chunks, causal", DENSE, (500,), head_dim=128, options={**CAUSAL, "attention_chunk": 100}),
    # Other head dims.
    Call("d64 full", DENSE, head_dim=64),
    Call("d64 causal", DENSE, head_dim=64, options=CAUSAL, is_core=True),
    Call("d64 causal, 17 tokens", DENSE, (17,) * 3, head_dim=64, options=CAUSAL),
    Call("d64 causal, 1000 tokens", DENSE, (1000,), head_dim=64, heads=(2, 2), options=CAUSAL),
    Call("d96 causal", DENSE, head_dim=96, options=CAUSAL),
    Call("d96 causal, more keys", DENSE, (129, 129), (300, 300), head_dim=96, options=CAUSAL),
    Call("d192/128 causal", DENSE, head_dim=192, head_dim_v=128, options=CAUSAL),
    Call("d256 causal", DENSE, head_dim=256, options=CAUSAL, is_core=True),
    Call("d256 causal, fewer keys", DENSE, (200, 200), (129, 129), head_dim=256, options=CAUSAL),
    Call("d320 causal, fewer keys", DENSE, (200, 200), (129, 129), head_dim=320, options=CAUSAL),
    Call("d512 causal", DENSE, head_dim=512, options=CAUSAL),
    Call("d512/256 full", DENSE, head_dim=512, head_dim_v=256),
    Call("d64 causal, fp32", DENSE, dtype=FP32, options=CAUSAL),
    Call("d64 causal, GQA, odd length, fp32", DENSE, (333,), dtype=FP32, heads=(8, 2), options=CAUSAL),
    Call("d128 full, fp32", DENSE, dtype=FP32, head_dim=128),
    # Score features.
    Call("softcap", DENSE, head_dim=128, options={**CAUSAL, "softcap": 10.0}, is_core=True),
    Call("softcap, strong", DENSE, (200, 200), head_dim=128, options={**CAUSAL, "softcap": 1.0}),
    Call("ALiBi", DENSE, options=CAUSAL, features=("alibi",)),
    Call("sinks, window", DENSE, (500,), options={"window": (127, 0)}, features=("sinks",), is_core=True),
    Call("dropout", DENSE, (200, 200), options={**CAUSAL, "dropout": 0.2}, is_core=True),
    Call("dropout, odd lengths", DENSE, (129, 129), (301, 301), options={**CAUSAL, "dropout": 0.5}),
    Call("softcap, ALiBi, sinks, dropout", DENSE, options=ALL, features=("alibi", "sinks"), is_core=True),
    Call("bias", DENSE, (256, 256), features=("bias",), is_core=True),
    Call("bias of each key", DENSE, features=("key bias",)),
    Call("score_mod", DENSE, features=("score_mod",), is_core=True),
    Call("score_mod, GQA", DENSE, (150, 150), (333, 333), heads=(8, 2), features=("score_mod",)),
    Call("mask_mod", DENSE, features=("mask_mod",), is_core=True),
    Call("mask_mod, odd lengths", DENSE, (150, 150), (333, 333), features=("mask_mod",)),
    Call("block_mask", DENSE, (512,), head_dim=128, features=("block_mask",), is_core=True),
    # Sequences of different lengths.
    Call("varlen causal", VARLEN, (200, 1, 64, 333), head_dim=128, options=CAUSAL, is_core=True),
    Call("varlen causal, empty sequences", VARLEN, (100, 0, 65), (100, 30, 0), head_dim=128, options=CAUSAL),
    Call("varlen causal, many sequences", VARLEN, tuple(range(1, 60, 3)), head_dim=128, options=CAUSAL),
    Call("varlen full, more keys", VARLEN, (50, 129), (300, 200)),
    Call("varlen full, one query each", VARLEN, (1, 1, 1), (300, 200, 77)),
    Call("varlen full, sinks", VARLEN, (100, 200), features=("sinks",)),
    # Decoding with a K/V cache.
    Call("decode", DECODE, (1,) * 3, (300, 77, 1), **GQA, options=CAUSAL),
    Call("decode, one long sequence", DECODE, (1,), (511,), **GQA, options=CAUSAL),
    Call("decode, fp8 pages", DECODE, (1,) * 2, (300, 77), **GQA, options=CAUSAL, features=("pages", "fp8")),
    Call("decode, pages, append", DECODE, (1,) * 3, (300, 77, 0), **GQA, options=CAUSAL, features=PAGED_APPEND),
    Call("decode, pages, append, 7", DECODE, (7,) * 3, (300, 77, 0), **GQA, options=CAUSAL, features=PAGED_APPEND),
    Call(
        "decode, sinks, window, fp16", DECODE, (1,) * 2, (300, 77), dtype=FP16, heads=(8, 1),
        options={"window": (100, 0)}, features=("sinks", "pages"),
    ),
    Call(
        "decode, d512, pages, append", DECODE, (1,) * 3, (300, 77, 0), head_dim=512, heads=(8, 2), options=CAUSAL,
        features=PAGED_APPEND,
    ),
    # Decoding with one latent cache.
    Call("decode, MLA, 16 heads", LATENT, (1,) * 3, (300, 77, 1), heads=(16, 1), **MLA, options=ONE_CACHE),
    Call(
        "decode, MLA, 64 heads, pages of 64", LATENT, (1,) * 3, (511, 77, 1), heads=(64, 1), **MLA, options=ONE_CACHE,
        features=("pages",), page_size=64, is_core=True,
    ),
    Call(
        "decode, MLA, pages of 1, append, 2", LATENT, (2,) * 3, (300, 77, 0), heads=(16, 1), **MLA, options=ONE_CACHE,
        features=PAGED_APPEND, page_size=1,
    ),
    Call(
        "decode, MLA, fp8 pages", LATENT, (1,) * 2, (300, 77), heads=(16, 1), **MLA, options=ONE_CACHE,
        features=("pages", "fp8"),
    ),
    Call("decode, MLA, a list for each query", TABLES, (2,) * 2, (300, 77), heads=(64, 1), **MLA, options=LISTS),
)  # fmt: skip
