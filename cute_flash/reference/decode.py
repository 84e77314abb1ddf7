"""Decoding with a K/V cache in plain PyTorch: the definition, the CPU path, and the fp64 oracle of the GPU tests.

Sequence b has cache_seqlens[b] rows in the cache. The call first appends the rows of k_new and v_new, then attends:

    len = cache_seqlens[b] + appended rows
    query i of T is at position len - T + i, and its keys are the rows leftpad[b] <= j < len inside the window

With `value_dim`, the values are the first columns of the keys. With a page table for each query, the rows of a query
are those of its own table without the pages -1, and each query is a sequence of its own.

This is `attn` over these rows, with the mask aligned bottom right; chunks begin at row leftpad[b]. Rotary embedding
rotates an appended key by the position of its row, and a query by its own position if there is a window, a chunk or a
causal mask, else by cache_seqlens[b]. Rotations are computed in fp32 (fp64 for fp64 inputs) and rounded once: keys to
the dtype of the cache, queries to `query_dtype`. An FP8 cache stores x / scale, rounded and saturated; a value is
multiplied by the scale when it is read. `reference/ds_mla.py` has the rows of `fp8_ds_mla`. Kernels do the same
operations, so they write the same bits to the caches.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from cute_flash.reference import ds_mla, tiled
from cute_flash.reference.varlen import read_offsets
from cute_flash.spec.args import AttentionArgs
from cute_flash.spec.band import Band, ceil_div
from cute_flash.spec.decode import FP8, DecodeArgs, decode_outputs, query_dtype
from cute_flash.spec.ds_mla import is_ds_mla
from cute_flash.spec.latent import has_query_tables
from cute_flash.spec.shapes import lse_dtype


@dataclass(frozen=True)
class CachedSequence:
    """One sequence of a call: its place in the tensors, and its lengths."""

    index: int  # b
    queries: slice | None  # its tokens in a ragged batch; None: row b of a dense batch
    num_queries: int
    seqlen_before: int  # rows before the append
    seqlen: int  # rows after the append
    first: int  # the first row that a query may see
    rows_of_chunk: int  # rows before `first` that complete a chunk
    cache_row: int  # the index of its cache, or of its row of the page table
    pages: Tensor | None  # its row of the page table
    query: int | None = None  # with a page table for each query: the one that this is

    def of_tokens(self, x: Tensor) -> Tensor:
        """The sequence's part of q, k_new, v_new or out: (T, heads, D)."""
        if self.query is not None:
            return x[self.index, self.query : self.query + 1]
        return x[self.index if self.queries is None else self.queries]

    def of_rows(self, lse: Tensor) -> Tensor:
        """The sequence's part of the LSE: (H, T)."""
        if self.query is not None:
            return lse[self.index, :, self.query : self.query + 1]
        return lse[self.index] if self.queries is None else lse[:, self.queries]

    def read(self, cache: Tensor, begin: int, end: int) -> Tensor:
        """The sequence's rows `begin` to `end` of a cache, without those on pages -1 of a query's table."""
        row, j = self._index(cache, begin, end)
        if self.query is not None:
            row, j = row[row >= 0], j[row >= 0]
        return _indexable(cache)[row, j].view(cache.dtype)

    def write(self, cache: Tensor, begin: int, end: int, rows: Tensor) -> None:
        _indexable(cache)[self._index(cache, begin, end)] = _indexable(rows)

    def _index(self, cache: Tensor, begin: int, end: int) -> tuple[Any, Any]:
        if self.pages is None:
            return self.cache_row, slice(begin, end)
        j, page_size = torch.arange(begin, end, device=cache.device), cache.shape[1]
        return self.pages[j // page_size].long(), j % page_size


def _indexable(x: Tensor) -> Tensor:
    """x, as bytes if it is FP8: torch 2.9 does not index FP8 tensors by tensors."""
    return x.view(torch.uint8) if x.dtype == FP8 else x


def forward(
    q: Tensor, k_cache: Tensor, v_cache: Tensor | None, args: DecodeArgs, dtype: torch.dtype | None = None
) -> tuple[Tensor, Tensor]:
    """Append to the caches in place and compute attention.

    Args:
        q: (B, T, H, D), or (T, H, D) with `args.cu_seqlens_q`.
        k_cache: (B or more, S, Hkv, D), or (num_pages, page_size, Hkv, D) with `args.page_table`.
        v_cache: The same, with Dv; None with `args.value_dim`.
        args: All other arguments, checked by `describe_decode`.
        dtype: The dtype of scores, sums, out and lse; `args.out` is then not used. None: fp32 (fp64 for fp64 inputs),
            and out in the dtype of q.

    Returns:
        out: (B, T, H, Dv) or (T, H, Dv).
        lse: (B, H, T) or (H, T).

    Raises:
        ValueError: A length, an offset or an index is wrong.
    """
    sequences = read_sequences(q, k_cache, args)
    append(k_cache, v_cache, args, sequences)
    return attend(q, k_cache, v_cache, args, sequences, dtype)


def append(k_cache: Tensor, v_cache: Tensor | None, args: DecodeArgs, sequences: list[CachedSequence]) -> None:
    """Write k_new, rotated, and v_new after the rows of each sequence."""
    if args.k_new is None:
        return
    wide = lse_dtype(args.k_new.dtype)
    for s in sequences:
        k, rows = s.of_tokens(args.k_new).to(wide), (s.seqlen_before, s.seqlen)
        k = _rotated(k, torch.arange(*rows, device=k.device), args)
        s.write(k_cache, *rows, _stored(k, args.k_scale, k_cache.dtype))
        if args.v_new is not None and v_cache is not None:
            s.write(v_cache, *rows, _stored(s.of_tokens(args.v_new).to(wide), args.v_scale, v_cache.dtype))


def attend(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor | None,
    args: DecodeArgs,
    sequences: list[CachedSequence],
    dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute attention over caches that hold the appended rows. The arguments are those of `forward`."""
    out, lse = decode_outputs(q, v_cache, args if dtype is None else args._replace(out=None))
    if dtype is not None:
        out, lse = out.to(dtype), lse.to(dtype)
    # Padding after the last sequence of a ragged batch.
    if args.cu_seqlens_q is not None:
        out.zero_()
        lse.fill_(-torch.inf)
    wide = lse_dtype(q.dtype) if dtype is None else dtype
    attention_args = AttentionArgs(
        scale=args.scale,
        window_left=args.window_left,
        window_right=args.window_right,
        attention_chunk=args.attention_chunk,
        softcap=args.softcap or 0.0,
        alibi=args.alibi,
        sinks=args.sinks,
    )
    for s in sequences:
        Q = _rotated(s.of_tokens(q).to(lse_dtype(q.dtype)), _positions(s, args, q.device), args)
        Q = Q.to(query_dtype(q.dtype, k_cache.dtype))
        if is_ds_mla(k_cache) and q.dtype.itemsize == 2:
            Q = ds_mla.rounded_queries(Q.to(wide))
        K = _loaded(s.read(k_cache, s.first, s.seqlen), args.k_scale, wide)
        V = K[..., : args.value_dim]
        if v_cache is not None:
            V = _loaded(s.read(v_cache, s.first, s.seqlen), args.v_scale, wide)
        # `attn` counts chunks from the first row, so zeros replace the rows that no query sees.
        K, V = (pad(x, (0, 0, 0, 0, s.rows_of_chunk, 0)) if s.rows_of_chunk else x for x in (K, V))
        O, L = (x[None].to(wide) for x in (s.of_tokens(out).transpose(0, 1), s.of_rows(lse)))
        Q, K, V = (x.to(wide).transpose(0, 1)[None] for x in (Q, K, V))
        tiled.forward(Q, K, V, attention_args, O, L, sequence=s.index)
        s.of_tokens(out).copy_(O[0].transpose(0, 1))
        s.of_rows(lse).copy_(L[0])
    return out, lse


# ---- rotary embedding and FP8 storage
# ----------------------------------------------------------------------------------------------------------


def _positions(s: CachedSequence, args: DecodeArgs, device: torch.device) -> Tensor:
    """The positions by which the queries of a sequence are rotated."""
    if args.band == Band():
        return torch.full((s.num_queries,), s.seqlen_before, device=device)
    return torch.arange(s.seqlen - s.num_queries, s.seqlen, device=device)


def rotated(x: Tensor, positions: Tensor, cos: Tensor, sin: Tensor, is_interleaved: bool) -> Tensor:
    """Rotary embedding of x (..., tokens, heads, D) at the positions (..., tokens), computed in the dtype of x."""
    cos, sin = (table[positions].to(x.dtype).unsqueeze(-2) for table in (cos, sin))
    rotary_dim = 2 * cos.shape[-1]
    turned, rest = x[..., :rotary_dim], x[..., rotary_dim:]
    if is_interleaved:
        a, b = turned[..., 0::2], turned[..., 1::2]
    else:
        a, b = turned.chunk(2, dim=-1)
    pair = _fused(a, cos, -b * sin), _fused(b, cos, a * sin)
    turned = torch.stack(pair, dim=-1).flatten(-2) if is_interleaved else torch.cat(pair, dim=-1)
    return torch.cat((turned, rest), dim=-1)


def _fused(x: Tensor, cos: Tensor, product: Tensor) -> Tensor:
    """x · cos + product, rounded once, as by a fused multiply-add."""
    return (x.double() * cos.double() + product.double()).to(x.dtype)


def _rotated(x: Tensor, positions: Tensor, args: DecodeArgs) -> Tensor:
    """Rotary embedding of x (tokens, heads, D); x itself without rotary_cos."""
    if args.rotary_cos is None or args.rotary_sin is None:
        return x
    return rotated(x, positions, args.rotary_cos, args.rotary_sin, args.rotary_interleaved)


def _stored(x: Tensor, scale: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Rows (tokens, Hkv, D) in the dtype of a cache; FP8 is divided by the scale first. Bytes are `fp8_ds_mla`."""
    if dtype == torch.uint8:
        return ds_mla.stored(x)
    if dtype != FP8:
        return x.to(dtype)
    largest = torch.finfo(FP8).max
    return (x if scale is None else x / _by_head(scale, x.dtype)).clamp(-largest, largest).to(FP8)


def _loaded(rows: Tensor, scale: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Rows (keys, Hkv, D) of a cache in `dtype`, times the scale."""
    if is_ds_mla(rows):
        return ds_mla.loaded(rows, dtype)
    return rows.to(dtype) if scale is None else rows.to(dtype) * _by_head(scale, dtype)


def _by_head(scale: Tensor, dtype: torch.dtype) -> Tensor:
    """A scale of shape () or (Hkv) that broadcasts with (rows, Hkv, D)."""
    return scale.to(dtype).reshape(-1, 1)


# ---- lengths and indices
# ----------------------------------------------------------------------------------------------------------


def read_sequences(q: Tensor, k_cache: Tensor, args: DecodeArgs) -> list[CachedSequence]:
    """Read the lengths, offsets and indices of a call; raise `ValueError` if one is wrong."""
    if has_query_tables(args):
        return _read_tables(args.cache_seqlens, args.page_table, k_cache)  # type: ignore[arg-type]
    batch, paged = args.cache_seqlens.shape[0], args.page_table is not None
    seqlens, leftpads = args.cache_seqlens.tolist(), [0] * batch if args.leftpad is None else args.leftpad.tolist()
    offsets = None if args.cu_seqlens_q is None else read_offsets("q", args.cu_seqlens_q, len(q))
    cache_rows = range(batch) if args.cache_batch_idx is None else args.cache_batch_idx.tolist()
    capacity = args.page_table.shape[1] * k_cache.shape[1] if paged else k_cache.shape[1]  # type: ignore[union-attr]
    sequences = []
    for b in range(batch):
        queries = None if offsets is None else slice(offsets[b], offsets[b + 1])
        num_queries = q.shape[1] if queries is None else queries.stop - queries.start
        num_new = 0 if args.k_new is None else args.k_new.shape[1] if queries is None else num_queries
        if seqlens[b] < 0:
            raise ValueError(f"cache_seqlens[{b}]={seqlens[b]} is negative: give the number of rows in the cache")
        seqlen = seqlens[b] + num_new
        if seqlen > capacity:
            appended = f" and {num_new} new rows" if num_new else ""
            raise ValueError(f"cache_seqlens[{b}]={seqlens[b]}{appended}: the cache holds {capacity} rows per sequence")
        if leftpads[b] < 0:
            raise ValueError(f"leftpad[{b}]={leftpads[b]} is negative: give the number of rows to skip")
        num_rows = args.page_table.shape[0] if paged else len(k_cache)  # type: ignore[union-attr]
        if not 0 <= cache_rows[b] < num_rows:
            where = "page_table" if paged else "the cache"
            raise ValueError(f"cache_batch_idx[{b}]={cache_rows[b]}: {where} has {num_rows} sequences, numbered from 0")
        begin, first = _first_rows(args, num_queries, seqlen, leftpads[b])
        sequences.append(
            CachedSequence(
                index=b,
                queries=queries,
                num_queries=num_queries,
                seqlen_before=seqlens[b],
                seqlen=seqlen,
                first=first,
                rows_of_chunk=first - begin,
                cache_row=cache_rows[b],
                pages=None if args.page_table is None else args.page_table[cache_rows[b]],
            )
        )
        _check_pages(sequences[-1], k_cache)
        _check_positions(sequences[-1], args)
    _check_places(sequences, k_cache)
    return sequences


def _read_tables(seqlens: Tensor, page_table: Tensor, k_cache: Tensor) -> list[CachedSequence]:
    """One sequence for each query of a call with a page table for each query."""
    sequences, (num_pages, page_size) = [], k_cache.shape[:2]
    capacity = page_table.shape[2] * page_size
    for b, lengths in enumerate(seqlens.tolist()):
        for t, seqlen in enumerate(lengths):
            if not 0 <= seqlen <= capacity:
                raise ValueError(f"cache_seqlens[{b}, {t}]={seqlen}: the page table of a query has {capacity} rows")
            pages = page_table[b, t]
            for i, page in enumerate(pages[: ceil_div(seqlen, page_size)].tolist()):
                if not -1 <= page < num_pages:
                    raise ValueError(f"page_table[{b}, {t}, {i}]={page}: there are {num_pages} pages; -1 is no page")
            sequences.append(
                CachedSequence(
                    index=b,
                    queries=None,
                    num_queries=1,
                    seqlen_before=seqlen,
                    seqlen=seqlen,
                    first=0,
                    rows_of_chunk=0,
                    cache_row=b,
                    pages=pages,
                    query=t,
                )
            )
    return sequences


def _first_rows(args: DecodeArgs, num_queries: int, seqlen: int, leftpad: int) -> tuple[int, int]:
    """The first row of the first query's chunk, and the first row that a query may see; the same without chunks."""
    if not num_queries or leftpad >= seqlen:
        return seqlen, seqlen
    sizes = 0, num_queries, seqlen - leftpad
    first = leftpad + args.band.lo(*sizes)
    return (first if args.attention_chunk is None else leftpad + max(args.band.chunk_begin(*sizes), 0)), first


def _check_pages(s: CachedSequence, k_cache: Tensor) -> None:
    """Raise `ValueError` if the sequence reads or writes a page that does not exist."""
    if s.pages is None:
        return
    num_pages, page_size = k_cache.shape[:2]
    begin, end = min(s.first, s.seqlen_before) // page_size, ceil_div(s.seqlen, page_size)
    for i, page in enumerate(s.pages[begin:end].tolist(), begin):
        if not 0 <= page < num_pages:
            raise ValueError(f"page_table[{s.cache_row}, {i}]={page}: there are {num_pages} pages")


def _check_places(sequences: list[CachedSequence], k_cache: Tensor) -> None:
    """Raise `ValueError` if two sequences append to the same row of a page, or to the same contiguous cache."""
    owners: dict[Any, int] = {}
    for s in sequences:
        rows = range(s.seqlen_before, s.seqlen)
        if s.pages is None:
            places: list[Any] = [s.cache_row] if rows else []
        else:
            pages, page_size = s.pages.tolist(), k_cache.shape[1]
            places = [(pages[j // page_size], j % page_size) for j in rows]
        for place in places:
            if place in owners:
                where = f"batch index {place}" if s.pages is None else f"page {place[0]}"
                remedy = "cache_batch_idx must differ" if s.pages is None else "give each its own pages for new rows"
                raise ValueError(f"sequences {owners[place]} and {s.index} both append to {where}: {remedy}")
            owners[place] = s.index


def _check_positions(s: CachedSequence, args: DecodeArgs) -> None:
    if args.rotary_cos is None:
        return
    positions = [s.seqlen - 1] if s.seqlen > s.seqlen_before else []
    if s.num_queries:
        positions += _positions(s, args, torch.device("cpu"))[[0, -1]].tolist()
    for position in positions:
        if not 0 <= position < len(args.rotary_cos):
            raise ValueError(
                f"position {position} of sequence {s.index}: rotary_cos has {len(args.rotary_cos)} rows, one for each "
                "position from 0"
            )
