"""Random calls of `attn_decode`, for the CPU and the GPU.

`random_cases(seed, num)` draws descriptions. `DecodeCase.build(device, dtype)` makes the same tensors for every device
and, up to rounding, in every dtype. Rows beyond a sequence's length and pages that no sequence uses hold NaN, and
unused entries of page tables are invalid indices.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from tests.decode.ds_mla import ROW_BYTES, packed

FP8 = torch.float8_e4m3fn
LARGEST = torch.finfo(FP8).max
PAGE_SIZES = (None, 1, 8, 16, 24, 32, 64, 128, 256, 528)
GROUPS = (1, 2, 3, 4, 5, 7, 8, 16)
# Few pairs of head dims, because a GPU compiles a kernel for each.
HEAD_DIMS = ((128, 128), (64, 64), (128, 128), (64, 64), (256, 256), (96, 96), (40, 40), (8, 8), (192, 128), (64, 128))
# Head dims above 256, which are divided among warps.
WIDE_DIMS = ((512, 512), (384, 384), (320, 320), (264, 264), (512, 256), (64, 272), (512, 512), (448, 448))
# Head dims of latent caches. Those of DeepSeek's models are (576, 512).
LATENT_DIMS = ((48, 32), (24, 24), (72, 64), (40, 8), (576, 512))
# Ways in which K and V are parts of a larger tensor.
STORAGES = ("apart", "joined", "stacked", "padded")
# Entries of a page table past the end of a sequence.
NO_PAGES = (-1, 2**31 - 1)


@dataclass
class DecodeCall:
    """The arguments of one call: `attn_decode(call.q, call.k_cache, call.v_cache, **call.options)`."""

    q: Tensor
    k_cache: Tensor
    v_cache: Any  # a tensor, or None with value_dim
    options: dict[str, Any]

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Any]:
        return self.q, self.k_cache, self.v_cache


@dataclass(frozen=True)
class DecodeCase:
    seed: int
    seqlens: tuple[int, ...]  # before the append
    tokens: tuple[int, ...]  # queries of each sequence
    new: tuple[int, ...]  # appended rows of each sequence
    is_ragged: bool = False
    padding: int = 0  # tokens after the last sequence of a ragged batch
    heads_kv: int = 2
    group: int = 4
    head_dim: int = 64
    head_dim_v: int = 64
    page_size: int | None = None
    spare_pages: int = 0  # columns of the page table, or rows of a contiguous cache, beyond the longest sequence
    kv_layout: str = "nhd"
    storage: str = "apart"
    rotary_dim: int = 0
    rotary_interleaved: bool = False
    rotary_fp32: bool = False
    causal: bool = True
    window: tuple[int | None, int | None] = (None, None)
    chunk: int | None = None
    leftpad: tuple[int, ...] | None = None
    softcap: float | None = None
    alibi: str = ""  # slopes (H): "heads"; (B, H): "batch"
    has_sinks: bool = False
    scale: float | None = None
    # FP8 caches, by their scales: none ("plain"), floats ("number"), 0-d tensors ("scalar"), by "heads"; or "ds_mla":
    # rows of `fp8_ds_mla`, with is_latent and the head dims (576, 512)
    fp8: str = ""
    has_batch_idx: bool = False
    has_out: bool = False
    strided_q: bool = False
    num_splits: int | None = None
    is_latent: bool = False  # the values are the first head_dim_v columns of the keys

    @property
    def id(self) -> str:
        parts = [
            f"b{len(self.seqlens)}", f"{self.group * self.heads_kv}/{self.heads_kv}",
            f"d{self.head_dim}" + ("" if self.head_dim == self.head_dim_v else f"v{self.head_dim_v}"),
            f"t{max(self.tokens, default=0)}" + "ragged" * self.is_ragged, f"len{max(self.seqlens, default=0)}",
            "" if self.page_size is None else f"page{self.page_size}", self.kv_layout, self.storage,
            "new" * any(self.new), f"rot{self.rotary_dim}" if self.rotary_dim else "",
            "" if self.leftpad is None else "leftpad", "" if self.window == (None, None) else f"w{self.window}",
            f"c{self.chunk}" if self.chunk else "",
            "softcap" if self.softcap else "", self.alibi and f"alibi-{self.alibi}", "sinks" * self.has_sinks,
            self.fp8 and f"fp8-{self.fp8}", "idx" * self.has_batch_idx, "out" * self.has_out,
            "latent" * self.is_latent,
        ]  # fmt: skip
        return f"{self.seed}-" + "-".join(part.replace(" ", "") for part in parts if part)

    @property
    def batch(self) -> int:
        return len(self.seqlens)

    @property
    def lengths(self) -> tuple[int, ...]:
        """Rows of each sequence after the append."""
        return tuple(before + new for before, new in zip(self.seqlens, self.new, strict=True))

    def first_visible(self, b: int) -> int:
        """The first row of sequence b that a query sees."""
        left, skipped = self.window[0], 0 if self.leftpad is None else self.leftpad[b]
        position = self.lengths[b] - self.tokens[b]
        first = skipped if left is None else max(skipped, position - left)
        return first if self.chunk is None else max(first, position - (position - skipped) % self.chunk)

    def build(
        self, device: str | torch.device = "cpu", dtype: torch.dtype = torch.float32, poison_skipped: bool = False
    ) -> DecodeCall:
        """Make the tensors. With `poison_skipped`, rows before the first visible one hold NaN too."""
        generator = torch.Generator().manual_seed(self.seed)

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator, dtype=torch.float64)

        def on_device(x: Tensor) -> Tensor:
            return x.to(device, dtype if x.is_floating_point() else torch.int32)

        heads = self.group * self.heads_kv
        leading = (sum(self.tokens) + self.padding,) if self.is_ragged else (self.batch, max(self.tokens, default=1))
        q = on_device(normal(*leading, heads + 2 * self.strided_q, self.head_dim))[..., :heads, :]
        options: dict[str, Any] = {"causal": self.causal, "window": self.window, "kv_layout": self.kv_layout}
        options["attention_chunk"] = self.chunk
        options |= {"softcap": self.softcap, "scale": self.scale, "num_splits": self.num_splits}
        options["cache_seqlens"] = on_device(torch.tensor(self.seqlens))
        if self.is_ragged:
            options["cu_seqlens_q"] = on_device(torch.tensor([0, *self.tokens]).cumsum(0))
        scales: list[Any] = [None, None]
        if self.fp8 in ("scalar", "number"):
            scales = [0.02, 0.0625]
        elif self.fp8 == "heads":
            # The smallest ones saturate.
            scales = [torch.linspace(0.004, 0.05, self.heads_kv), torch.linspace(0.1, 0.003, self.heads_kv)]
        if self.fp8 == "scalar":
            scales = [torch.tensor(x) for x in scales]
        options |= {"k_scale": scales[0], "v_scale": scales[1]}
        for name in ("k_scale", "v_scale"):
            if isinstance(options[name], Tensor):
                options[name] = options[name].float().to(device)
        if any(self.new):
            new = leading if self.is_ragged else (self.batch, max(self.new))
            options["k_new"] = on_device(normal(*new, self.heads_kv, self.head_dim))
            options["v_new"] = on_device(normal(*new, self.heads_kv, self.head_dim_v))
        if self.rotary_dim:
            options |= self._rotary_tables(device, dtype)
        if self.leftpad is not None:
            options["leftpad"] = on_device(torch.tensor(self.leftpad))
        if self.alibi:
            shape = (self.batch, heads) if self.alibi == "batch" else (heads,)
            options["alibi"] = (torch.rand(shape, generator=generator) * 0.1).to(device)
        if self.has_sinks:
            options["sinks"] = normal(heads).to(device, torch.float32)
        if self.has_out:
            wide = torch.full((*q.shape[:-1], self.head_dim_v + 8), torch.nan, device=device, dtype=dtype)
            options["out"] = wide[..., : self.head_dim_v]
        k_cache, v_cache = self._caches(normal, generator, options, device, dtype, poison_skipped)
        if self.is_latent:
            v_cache = None
            options |= {"value_dim": self.head_dim_v, "v_new": None, "v_scale": None}
            options["scale"] = 0.2 if self.scale is None else self.scale
        return DecodeCall(q, k_cache, v_cache, {name: x for name, x in options.items() if x is not None})

    def _rotary_tables(self, device: Any, dtype: torch.dtype) -> dict[str, Any]:
        positions = torch.arange(max(self.lengths) + 1, dtype=torch.float64)[:, None]
        angles = positions * 10000.0 ** (-torch.arange(self.rotary_dim // 2, dtype=torch.float64) * 2 / self.rotary_dim)
        table = torch.float32 if self.rotary_fp32 else dtype
        return {
            "rotary_cos": angles.cos().to(device, table),
            "rotary_sin": angles.sin().to(device, table),
            "rotary_interleaved": self.rotary_interleaved,
        }

    def _caches(
        self, normal: Any, generator: Any, options: dict[str, Any], device: Any, dtype: torch.dtype, skipped: bool
    ) -> tuple[Tensor, Tensor]:
        """Caches of NaN with the rows of each sequence, and the tables that lead to them."""
        longest = max(self.lengths, default=0)
        if self.page_size is None:
            places = torch.randperm(self.batch + 2, generator=generator)[: self.batch]
            places = places if self.has_batch_idx else torch.arange(self.batch)
            num, rows = self.batch + 2, max(longest + self.spare_pages, 1)
            if self.has_batch_idx:
                options["cache_batch_idx"] = places.to(device, torch.int32)
        else:
            used = [-(-length // self.page_size) for length in self.lengths]
            num, rows = sum(used) + 3, self.page_size
            table = torch.full((self.batch, max(used, default=0) + self.spare_pages), NO_PAGES[self.seed % 2])
            pages = torch.randperm(num, generator=generator).tolist()
            for b in range(self.batch):
                table[b, : used[b]] = torch.tensor([pages.pop() for _ in range(used[b])])
            options["page_table"] = table.to(device, torch.int32)
            if self.has_batch_idx:
                rows_of = torch.randperm(self.batch + 2, generator=generator)[: self.batch]
                wider = torch.full((self.batch + 2, table.shape[1]), NO_PAGES[self.seed % 2])
                wider[rows_of] = table
                options["page_table"], options["cache_batch_idx"] = (
                    x.to(device, torch.int32) for x in (wider, rows_of)
                )
        k, v = self._storage(num, rows, device, FP8 if self.fp8 else dtype)
        if self.fp8 == "ds_mla":
            k = self._ds_mla_storage(num, rows, device)
        for x, name in ((k, "k_scale"), (v, "v_scale")):
            scale = options[name]
            divisor = scale.cpu().double().reshape(-1, 1) if isinstance(scale, Tensor) else scale or 1.0
            for b, before in enumerate(self.seqlens):
                is_packed = x.dtype == torch.uint8
                values = normal(before, self.heads_kv, self.head_dim if is_packed else x.shape[-1])
                values = values * _spread(values) if is_packed else (values / divisor).clamp(-LARGEST, LARGEST)
                if skipped:
                    values[: self.first_visible(b)] = torch.nan
                values = packed(values) if is_packed else values
                j = torch.arange(before)
                index = (places[b].expand(before) if self.page_size is None else table[b, j // rows]), j % rows
                # As bytes: torch 2.9 does not index FP8 tensors by tensors.
                kind = torch.uint8 if self.fp8 else x.dtype
                x.view(kind)[tuple(i.to(device) for i in index)] = values.to(x.dtype).to(device).view(kind)
        if self.kv_layout == "hnd":
            k, v = k.transpose(1, 2), v.transpose(1, 2)
        return k, v

    def _ds_mla_storage(self, num: int, rows: int, device: Any) -> Tensor:
        """A cache of `fp8_ds_mla`, (num, rows, Hkv, 656), full of bytes that make every number NaN."""
        is_hnd, wide = self.kv_layout == "hnd", ROW_BYTES + 16 * (self.storage == "padded")
        middle = (self.heads_kv, rows) if is_hnd else (rows, self.heads_kv)
        cache = torch.full((num, *middle, wide), 0xFF, dtype=torch.uint8, device=device)[..., :ROW_BYTES]
        return cache.transpose(1, 2) if is_hnd else cache

    def _storage(self, num: int, rows: int, device: Any, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """K and V, (num, rows, Hkv, D), full of NaN, as views of the tensors that `storage` and `kv_layout` name."""
        is_hnd = self.kv_layout == "hnd"
        middle = (self.heads_kv, rows) if is_hnd else (rows, self.heads_kv)

        def empty(*shape: int) -> Tensor:
            return torch.full(shape, torch.nan, device=device).to(dtype)

        widths = self.head_dim, self.head_dim_v
        if self.storage == "joined":  # as in vLLM
            k, v = empty(num, *middle, sum(widths)).split(widths, dim=-1)
        elif self.storage == "stacked" and widths[0] == widths[1]:
            k, v = empty(num, 2, *middle, widths[0]).unbind(1)
        elif self.storage == "padded":
            k, v = (empty(num, *middle, width + 16)[..., :width] for width in widths)
        else:
            k, v = (empty(num, *middle, width) for width in widths)
        if self.heads_kv == 1:
            # The stride of a dimension of size 1 is never used, so it may be any number.
            dim = 1 if is_hnd else 2
            k, v = (x.as_strided(x.shape, [7 if i == dim else x.stride(i) for i in range(4)]) for x in (k, v))
        return (k.transpose(1, 2), v.transpose(1, 2)) if is_hnd else (k, v)


def _spread(rows: Tensor) -> Tensor:
    """Factors of rows (rows, heads, 576) of `fp8_ds_mla`: the scales of a row differ, and one in 16 is small or 0."""
    factors = torch.ones(len(rows), 1, rows.shape[-1], dtype=rows.dtype)
    for row in range(len(rows)):
        factors[row, :, 128 * (row % 4) : 128 * (row % 4) + 128] = (3.0, 0.2, 1.0, 1e-3 * (row % 32 < 16))[row // 4 % 4]
    return factors


def random_cases(seed: int, num: int, longest: int = 200, kind: int | None = None) -> Iterator[DecodeCase]:
    """Draw `num` cases. `longest`: a bound of most lengths before the append.

    All cases of a `kind` have the same compiled-in properties.
    """
    for i in range(num):
        own = seed * 100_003 + i
        yield _drawn(own, longest, own if kind is None else kind)


def _drawn(seed: int, longest: int, kind: int) -> DecodeCase:
    # `fixed` draws what is compiled in.
    rng, fixed = random.Random(seed), random.Random(-1 - kind)

    def sometimes(probability: float, of: random.Random = rng) -> bool:
        return of.random() < probability

    page_size = None if sometimes(0.2, fixed) else fixed.choice(PAGE_SIZES)
    if page_size is not None:
        page_size = rng.choice([x for x in PAGE_SIZES if x and (x % 16 == 0) == (page_size % 16 == 0)])
    edges = [0, 1, 2, *([] if page_size is None else [page_size - 1, page_size, page_size + 1])]
    batch = rng.randint(1, 4)
    seqlens = tuple(rng.choice(edges) if sometimes(0.4) else rng.randint(1, longest) | 1 for _ in range(batch))
    head_dim, head_dim_v = fixed.choice(HEAD_DIMS)
    is_ragged = sometimes(0.3, fixed)
    num_tokens = 1 if sometimes(0.4) else rng.randint(1, 16)
    tokens = tuple(rng.randint(0, num_tokens) for _ in range(batch)) if is_ragged else (num_tokens,) * batch
    appends = sometimes(0.6, fixed)
    new = tokens
    if not appends:
        new = (0,) * batch
    elif not is_ragged and sometimes(0.2):
        new = (rng.randint(1, 9),) * batch
    rotary_dim = fixed.choice([head_dim // 16 * 16, fixed.randrange(16, max(head_dim, 16) + 1, 16)])
    if not any(new) or head_dim < 16 or sometimes(0.4, fixed):
        rotary_dim = 0
    if rotary_dim:
        # Queries before row 0 have no position in the tables.
        seqlens = tuple(max(rows, t - added) for rows, t, added in zip(seqlens, tokens, new))
    causal = sometimes(0.7, fixed)
    window: tuple[int | None, int | None] = (None, None)
    if sometimes(0.3, fixed):
        left, right = (
            rng.choice(bounds) if sometimes(0.75, fixed) else None for bounds in ((0, 3, 17, 100), (0, 2, 5))
        )
        window = left, right
    case = DecodeCase(
        seed=seed,
        seqlens=seqlens,
        tokens=tokens,
        new=new,
        is_ragged=is_ragged,
        padding=rng.choice([0, 3]) if is_ragged else 0,
        heads_kv=rng.choice((1, 2, 3, 4)),
        group=rng.choice(GROUPS),
        head_dim=head_dim,
        head_dim_v=head_dim_v,
        page_size=page_size,
        spare_pages=rng.randint(0, 3),
        kv_layout=rng.choice(["nhd", "hnd"]),
        storage=rng.choice(STORAGES),
        rotary_dim=rotary_dim,
        rotary_interleaved=sometimes(0.5, fixed),
        rotary_fp32=sometimes(0.5, fixed),
        causal=causal,
        window=window,
        leftpad=tuple(rng.choice([0, 1, 5, n, n + 2]) for n in seqlens) if sometimes(0.25, fixed) else None,
        softcap=rng.choice([2.0, 30.0]) if sometimes(0.25, fixed) else None,
        alibi=rng.choice(["heads", "batch"]) if sometimes(0.25, fixed) else "",
        has_sinks=sometimes(0.25, fixed),
        scale=rng.choice([0.3, -0.1]) if sometimes(0.2) else None,
        fp8=rng.choice(["plain", "number", "scalar", "heads"]) if sometimes(0.3, fixed) else "",
        has_batch_idx=sometimes(0.5, fixed),
        has_out=sometimes(0.2),
        strided_q=sometimes(0.3),
        num_splits=rng.choice([1, 2, 3, 7, 32]) if sometimes(0.4) else None,
    )
    # Short ones, so that the tokens of a call cross the border of a chunk.
    return replace(case, chunk=rng.choice([1, 4, 7, 33, 1000]) if sometimes(0.2, fixed) else None)


def wide_case(case: DecodeCase, head_dim: int, head_dim_v: int) -> DecodeCase:
    """The case with other head dims, which are wider, and with as much of the heads rotated."""
    if case.fp8:  # whose head dims are multiples of 16 on GPUs
        head_dim, head_dim_v = (-(-width // 16) * 16 for width in (head_dim, head_dim_v))
    rotary_dim = min(case.rotary_dim, head_dim)
    if case.rotary_dim == case.head_dim:
        rotary_dim = head_dim // 16 * 16
    return replace(case, head_dim=head_dim, head_dim_v=head_dim_v, rotary_dim=rotary_dim)


def wide_cases(seed: int, num: int, longest: int = 200) -> Iterator[DecodeCase]:
    """Draw cases with head dims above 256."""
    for i, case in enumerate(random_cases(seed, num, longest)):
        yield wide_case(case, *WIDE_DIMS[i % len(WIDE_DIMS)])


def latent_cases(seed: int, num: int, longest: int = 200) -> Iterator[DecodeCase]:
    """Draw cases with one cache, whose first columns are the values."""
    for i, case in enumerate(random_cases(seed, num, longest)):
        head_dim, head_dim_v = LATENT_DIMS[i % len(LATENT_DIMS)]
        case = replace(case, is_latent=True, head_dim=head_dim, head_dim_v=head_dim_v, rotary_dim=0)
        # Every second case with the widths of `fp8_ds_mla` has that format.
        yield replace(case, fp8="ds_mla") if i % (2 * len(LATENT_DIMS)) == len(LATENT_DIMS) - 1 else case


def table_call(
    seed: int, dtype: torch.dtype, page_size: int = 1, heads_kv: int = 1, fp8: bool | str = False, **options: Any
) -> DecodeCall:
    """A call with a page table for each query. Tables have -1 and repeats, and invalid indices past their lengths.

    `fp8`: whether the cache is FP8, or "ds_mla" for the format `fp8_ds_mla`.
    """
    head_dim, value_dim = (576, 512) if fp8 == "ds_mla" else (48, 32)
    generator = torch.Generator().manual_seed(seed)

    def draw(high: int, *shape: int) -> Tensor:
        return torch.randint(high, shape, generator=generator)

    batch, tokens, num_pages, entries = 3, 2, 9, 14
    q = torch.randn(batch, tokens, 4 * heads_kv, head_dim, generator=generator, dtype=torch.float64).to(dtype)
    cache = torch.randn(num_pages, page_size, heads_kv, head_dim, generator=generator, dtype=torch.float64)
    lengths = draw(entries * page_size + 1, batch, tokens)
    lengths[0, 0], lengths[0, 1] = 0, entries * page_size
    table = draw(num_pages + 1, batch, tokens, entries) - 1
    table[1, 0], table[1, 1, 0], table[2, 0, -1] = -1, -1, -1  # a table of nothing, the first and the last entry
    unused = torch.arange(entries) >= -(-lengths // page_size)[..., None]
    table = torch.where(unused, NO_PAGES[seed % 2], table)
    stored = packed(cache) if fp8 == "ds_mla" else cache.to(FP8 if fp8 else dtype)
    tables = {"page_table": table.int(), "cache_seqlens": lengths.int()}
    return DecodeCall(q, stored, None, {"value_dim": value_dim, "scale": 0.3, **tables, **options})


def small_case(**changes: Any) -> DecodeCase:
    """Two sequences of 21 and 5 rows, one query each; `changes` replace fields."""
    fields: dict[str, Any] = {"seed": 1, "seqlens": (21, 5), "tokens": (1, 1), "new": (0, 0), "head_dim": 16}
    fields |= {"head_dim_v": 16, "group": 2} | changes
    return DecodeCase(**fields)
