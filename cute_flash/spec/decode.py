"""Decoding with a K/V cache: `DecodeArgs`, the checks of a call, its `DecodeProblem`, and the shapes of its results.

The shapes, after `cute_flash.decode` has applied `kv_layout`:

    q                 (B, T, H, D), or (T, H, D) with cu_seqlens_q
    k_cache, v_cache  (B or more, S, Hkv, D) and (…, Dv), or pages (num_pages, page_size, Hkv, D) with page_table

With value_dim, there is no v_cache: the values are the first value_dim columns of k_cache (`spec/latent.py`). Such a
cache may consist of bytes (`spec/ds_mla.py`).
Caches may have any strides, except that the last dimension is contiguous and, on CUDA, rows start at multiples of 16
bytes, which `runtime.launcher` checks.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from cute_flash.errors import UnsupportedError
from cute_flash.spec.band import Band
from cute_flash.spec.describe import check_device, check_float, check_int32, check_per_head
from cute_flash.spec.ds_mla import DS_MLA, check_ds_mla, head_dim_of, is_ds_mla
from cute_flash.spec.latent import check_latent, has_query_tables
from cute_flash.spec.problem import CPU_DTYPES, check_chunk, check_head_dim, check_heads, check_softcap, check_window
from cute_flash.spec.shapes import lse_dtype
from cute_flash.spec.values import check_range

# Dtypes of q on CUDA. Caches have the dtype of q or are FP8.
GPU_DTYPES = ("float16", "bfloat16")
FP8 = torch.float8_e4m3fn
# The score features of `attn_decode`, by the names of their fields in `DecodeArgs`.
DECODE_FEATURES = ("softcap", "alibi", "sinks")
# On CUDA, rotary_dim is a multiple of this.
ROTARY_DIM_STEP = 16


class DecodeArgs(NamedTuple):
    """All arguments of a call besides q, k_cache and v_cache; the trailing arguments of the operator, in its order."""

    cache_seqlens: Tensor  # (B), int32: rows of the cache before the append; (B, T) with a table for each query
    scale: float
    page_table: Tensor | None = None  # (B, max_pages), int32; with value_dim also (B, T, max_pages)
    cache_batch_idx: Tensor | None = None  # (B), int32: the index of each sequence in the caches, or in page_table
    leftpad: Tensor | None = None  # (B), int32: rows that are skipped at the start of each sequence
    k_new: Tensor | None = None  # (B, Tn, Hkv, D), or (T, Hkv, D) with cu_seqlens_q
    v_new: Tensor | None = None  # (B, Tn, Hkv, Dv), or (T, Hkv, Dv)
    rotary_cos: Tensor | None = None  # (positions, rotary_dim / 2)
    rotary_sin: Tensor | None = None
    rotary_interleaved: bool = False  # pairs (0, 1), (2, 3), …; else pairs (i, i + rotary_dim / 2)
    cu_seqlens_q: Tensor | None = None  # (B + 1), int32
    window_left: int | None = None
    window_right: int | None = None  # 0: causal
    attention_chunk: int | None = None  # keys per chunk; a query sees only its chunk
    softcap: float | None = None
    alibi: Tensor | None = None  # slopes, (H) or (B, H)
    sinks: Tensor | None = None  # (H)
    k_scale: Tensor | None = None  # of FP8 caches, fp32, () or (Hkv)
    v_scale: Tensor | None = None
    num_splits: int | None = None  # None: chosen by the kernel
    value_dim: int | None = None  # columns of k_cache that are the values; None: v_cache has them
    out: Tensor | None = None  # receives the output

    @property
    def band(self) -> Band:
        return Band(self.window_left, self.window_right, self.attention_chunk)


TENSOR_FIELDS = tuple(name for name, kind in DecodeArgs.__annotations__.items() if "Tensor" in str(kind))


def tensors_of(args: DecodeArgs) -> tuple[Tensor | None, ...]:
    """The values of `TENSOR_FIELDS`; no property, because Dynamo of torch 2.9 does not trace them on named tuples."""
    return (
        args.cache_seqlens, args.page_table, args.cache_batch_idx, args.leftpad, args.k_new, args.v_new,
        args.rotary_cos, args.rotary_sin, args.cu_seqlens_q, args.alibi, args.sinks, args.k_scale, args.v_scale,
        args.out,
    )  # fmt: skip


SCHEMA = (
    "Tensor cache_seqlens, float scale, Tensor? page_table=None, Tensor? cache_batch_idx=None, Tensor? leftpad=None, "
    "Tensor? k_new=None, Tensor? v_new=None, Tensor? rotary_cos=None, Tensor? rotary_sin=None, "
    "bool rotary_interleaved=False, Tensor? cu_seqlens_q=None, SymInt? window_left=None, SymInt? window_right=None, "
    "SymInt? attention_chunk=None, float? softcap=None, Tensor? alibi=None, Tensor? sinks=None, "
    "Tensor? k_scale=None, Tensor? v_scale=None, SymInt? num_splits=None, SymInt? value_dim=None, "
    "Tensor(c!)? out=None"
)


class DecodeProblem(NamedTuple):
    """Shapes and dtypes of one call. It holds no tensor."""

    batch: int  # sequences
    tokens: int | None  # queries of each sequence; None: ragged, with cu_seqlens_q
    total_tokens: int  # queries of all sequences, with padding
    heads: int
    heads_kv: int
    head_dim: int
    head_dim_v: int
    dtype: str
    cache_dtype: str  # of torch, or DS_MLA
    page_size: int | None  # None: contiguous caches
    capacity: int  # rows that a sequence can have
    has_new: bool
    new_tokens: int | None  # appended rows of each sequence; None if ragged; 0 without k_new
    rotary_dim: int  # 0: no rotary embedding
    rotary: str  # "": none; "halves": NeoX; "pairs": interleaved
    rotary_dtype: str  # in which kernels read the tables
    has_leftpad: bool
    has_batch_idx: bool  # of contiguous caches; that of a page table selects its rows before the launch
    is_latent: bool  # one cache, whose first head_dim_v columns are the values
    has_query_tables: bool  # a page table for each query
    features: tuple[str, ...]  # of softcap, alibi and sinks
    num_splits: int | None
    band: Band

    @property
    def is_ragged(self) -> bool:
        return self.tokens is None

    @property
    def out_shape(self) -> tuple[int, ...]:
        leading = (self.total_tokens,) if self.tokens is None else (self.batch, self.tokens)
        return *leading, self.heads, self.head_dim_v

    @property
    def lse_shape(self) -> tuple[int, ...]:
        return (self.heads, self.total_tokens) if self.tokens is None else (self.batch, self.heads, self.tokens)

    @property
    def is_fp8(self) -> bool:
        """Whether the caches have e4m3 numbers."""
        return self.cache_dtype in (_name(FP8), DS_MLA)

    @property
    def group(self) -> int:
        """Query heads that share a K/V head."""
        return self.heads // self.heads_kv if self.heads_kv else 1


def describe_decode(
    q: Tensor, k_cache: Tensor, v_cache: Tensor | None, args: DecodeArgs, device: str = ""
) -> DecodeProblem:
    """Check a call and return its `DecodeProblem`. No element of a tensor is read.

    Args:
        q: (B, T, H, D), or (T, H, D) with `args.cu_seqlens_q`.
        k_cache: (B or more, S, Hkv, D), or (num_pages, page_size, Hkv, D) with `args.page_table`.
        v_cache: The same, with Dv; None with `args.value_dim`.
        args: All other arguments.
        device: "cuda" or "cpu", the implementation that will run; by default that of q's device.

    Raises:
        ValueError: Arguments are invalid.
        UnsupportedError: The device has no kernel for the arguments.
    """
    device = device or ("cpu" if q.device.type in ("cpu", "meta") else "cuda")
    check_ds_mla(q, k_cache, v_cache, args)
    check_latent(k_cache, v_cache, args, device)
    _check_shapes(q, k_cache, v_cache, args)
    _check_dtypes(q, k_cache, v_cache, device)
    heads, heads_kv, head_dim, head_dim_v = q.shape[-2], k_cache.shape[2], q.shape[-1], width_of_values(v_cache, args)
    check_heads(heads, heads_kv)
    if device == "cuda" and v_cache is not None:
        check_head_dim(head_dim)
        check_head_dim(head_dim_v)
    batch, tokens = _check_queries(q, args)
    page_size, capacity = _check_cache(k_cache, q, args, batch)
    new_tokens = _check_new(q, k_cache, v_cache, args, batch)
    rotary_dim = _check_rotary(q, args, device)
    check_per_head("alibi", args.alibi, q, [(heads,), (batch, heads)])
    check_per_head("sinks", args.sinks, q, [(heads,)])
    _check_scale("k_scale", args.k_scale, k_cache, q)
    if v_cache is not None:
        _check_scale("v_scale", args.v_scale, v_cache, q)
    _check_numbers(q, args, device)
    if args.out is not None:
        _check_out(args.out, q, head_dim_v)
    return DecodeProblem(
        batch=batch,
        tokens=tokens,
        total_tokens=q.shape[0] if tokens is None else batch * tokens,
        heads=heads,
        heads_kv=heads_kv,
        head_dim=head_dim,
        head_dim_v=head_dim_v,
        dtype=_name(q.dtype),
        cache_dtype=DS_MLA if is_ds_mla(k_cache) else _name(k_cache.dtype),
        page_size=page_size,
        capacity=capacity,
        has_new=args.k_new is not None,
        new_tokens=new_tokens,
        rotary_dim=rotary_dim,
        rotary=("pairs" if args.rotary_interleaved else "halves") if rotary_dim else "",
        rotary_dtype=_rotary_dtype(args.rotary_cos),
        has_leftpad=args.leftpad is not None,
        has_batch_idx=args.cache_batch_idx is not None and args.page_table is None,
        is_latent=args.value_dim is not None,
        has_query_tables=has_query_tables(args),
        features=tuple([name for name in DECODE_FEATURES if getattr(args, name) is not None]),
        num_splits=args.num_splits,
        band=args.band,
    )


def _rotary_dtype(cos: Tensor | None) -> str:
    name = "float32" if cos is None else _name(cos.dtype)
    return name if name in GPU_DTYPES else "float32"


def width_of_values(v_cache: Tensor | None, args: DecodeArgs) -> int:
    """The head dim of the values and of the output."""
    return args.value_dim if v_cache is None else v_cache.shape[3]  # type: ignore[return-value]


def decode_outputs(q: Tensor, v_cache: Tensor | None, args: DecodeArgs) -> tuple[Tensor, Tensor]:
    """Uninitialised out and lse; out is `args.out` if the caller provides it, else contiguous."""
    out = q.new_empty((*q.shape[:-1], width_of_values(v_cache, args))) if args.out is None else args.out
    shape = (q.shape[1], q.shape[0]) if q.dim() == 3 else (q.shape[0], q.shape[2], q.shape[1])
    return out, q.new_empty(shape, dtype=lse_dtype(q.dtype))


def query_dtype(q: torch.dtype, cache: torch.dtype) -> torch.dtype:
    """The dtype to which queries are rounded: kernels multiply FP8 keys, and then queries, as fp16."""
    return torch.float16 if cache == FP8 and _name(q) in GPU_DTYPES else q


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _caches(k_cache: Tensor, v_cache: Tensor | None) -> dict[str, Tensor]:
    return {"k_cache": k_cache} if v_cache is None else {"k_cache": k_cache, "v_cache": v_cache}


def _check_shapes(q: Tensor, k_cache: Tensor, v_cache: Tensor | None, args: DecodeArgs) -> None:
    if args.cu_seqlens_q is None and q.dim() != 4:
        raise ValueError(
            f"q has shape {tuple(q.shape)}: expected (B, T, H, D); for one token per sequence use q[:, None], "
            "for a ragged batch give cu_seqlens_q"
        )
    if args.cu_seqlens_q is not None and q.dim() != 3:
        raise ValueError(f"q has shape {tuple(q.shape)}: expected (T, H, D), because cu_seqlens_q is set")
    expected = "(B, S, Hkv, D)" if args.page_table is None else "(num_pages, page_size, Hkv, D)"
    for name, x in _caches(k_cache, v_cache).items():
        if x.dim() != 4:
            raise ValueError(f"{name} has shape {tuple(x.shape)}: expected {expected}")
        check_device(name, x, q)
        _check_last_stride(name, x)
    if v_cache is not None and k_cache.shape[:3] != v_cache.shape[:3]:
        raise ValueError(
            f"k_cache has shape {tuple(k_cache.shape)} and v_cache has {tuple(v_cache.shape)}: all dimensions but the "
            "last must agree"
        )
    if q.shape[-1] != head_dim_of(k_cache):
        raise ValueError(
            f"q has shape {tuple(q.shape)} and k_cache has {tuple(k_cache.shape)}: the head dims must agree"
        )


def _check_last_stride(name: str, x: Tensor) -> None:
    if x.shape[-1] > 1 and x.stride(-1) != 1:
        raise ValueError(f"{name} has stride {x.stride(-1)} in the last dimension: it must be contiguous there")


def _check_dtypes(q: Tensor, k_cache: Tensor, v_cache: Tensor | None, device: str) -> None:
    dtypes = GPU_DTYPES if device == "cuda" else CPU_DTYPES
    if _name(q.dtype) not in dtypes:
        raise UnsupportedError(f"q is {q.dtype} on {device}: use one of {', '.join(dtypes)}")
    for name, x in _caches(k_cache, v_cache).items():
        if x.dtype not in (q.dtype, FP8) and not is_ds_mla(x):
            raise ValueError(
                f"{name} is {x.dtype} and q is {q.dtype}: use {q.dtype} or {FP8}; autocast does not cast q, because it "
                "cannot cast the caches"
            )
    if v_cache is not None and k_cache.dtype != v_cache.dtype:
        raise ValueError(f"k_cache is {k_cache.dtype} and v_cache is {v_cache.dtype}: they must agree")


def _check_queries(q: Tensor, args: DecodeArgs) -> tuple[int, int | None]:
    """Check the lengths. Return the number of sequences, and the number of queries of each (None if it varies)."""
    tokens: int | None
    if args.cu_seqlens_q is None:
        batch, tokens = q.shape[0], q.shape[1]
    else:
        check_int32("cu_seqlens_q", args.cu_seqlens_q, q, "B + 1")
        batch, tokens = args.cu_seqlens_q.shape[0] - 1, None
    names = ["cache_seqlens", "cache_batch_idx", "leftpad"]
    if has_query_tables(args):
        _check_seqlens_of_queries(q, args)
        names.remove("cache_seqlens")
    for name in names:
        x = getattr(args, name)
        if x is not None:
            check_int32(name, x, q, "B")
            if x.shape[0] != batch:
                raise ValueError(f"{name} has {x.shape[0]} elements: expected {batch}, one for each sequence")
    return batch, tokens


def _check_seqlens_of_queries(q: Tensor, args: DecodeArgs) -> None:
    """Check the lengths of the page tables of all queries."""
    lengths = args.cache_seqlens
    if lengths.shape != q.shape[:2]:
        expected = tuple(q.shape[:2])
        raise ValueError(
            f"cache_seqlens has shape {tuple(lengths.shape)}: expected {expected}, the rows in the table of each query"
        )
    if lengths.dtype != torch.int32:
        raise ValueError(f"cache_seqlens is {lengths.dtype}: use torch.int32")
    check_device("cache_seqlens", lengths, q)


def _check_cache(k_cache: Tensor, q: Tensor, args: DecodeArgs, batch: int) -> tuple[int | None, int]:
    """Check how sequences map to the cache, and return the page size (None: contiguous) and the capacity."""
    table = args.page_table
    if table is None:
        if args.cache_batch_idx is None and k_cache.shape[0] < batch:
            raise ValueError(
                f"k_cache has batch size {k_cache.shape[0]} and there are {batch} sequences: give a larger cache, "
                "cache_batch_idx or page_table"
            )
        return None, k_cache.shape[1]
    is_indexed = args.cache_batch_idx is not None
    if has_query_tables(args):
        if table.shape[:2] != q.shape[:2]:
            raise ValueError(
                f"page_table has shape {tuple(table.shape)}: expected ({batch}, {q.shape[1]}, max_pages), a table for "
                "each query"
            )
    elif table.dim() != 2 or (table.shape[0] == 0 if is_indexed else table.shape[0] != batch):
        expected = "(1 or more" if is_indexed else f"({batch}"
        rows = "rows for cache_batch_idx" if is_indexed else "a row for each sequence"
        raise ValueError(f"page_table has shape {tuple(table.shape)}: expected {expected}, max_pages), {rows}")
    if table.dtype != torch.int32:
        raise ValueError(f"page_table is {table.dtype}: use torch.int32")
    check_device("page_table", table, q)
    page_size = k_cache.shape[1]
    if page_size == 0:
        raise ValueError(f"k_cache has shape {tuple(k_cache.shape)}: a page needs at least one row")
    return page_size, table.shape[-1] * page_size


def _check_new(q: Tensor, k_cache: Tensor, v_cache: Tensor | None, args: DecodeArgs, batch: int) -> int | None:
    """Check k_new and v_new. Return the number of rows that each sequence appends (None if it varies)."""
    k_new, v_new = args.k_new, args.v_new
    if k_new is None and v_new is None:
        return 0
    if k_new is None or (v_new is None and v_cache is not None):
        raise ValueError(f"{'v_new' if k_new is None else 'k_new'} alone: give both k_new and v_new")
    is_ragged = args.cu_seqlens_q is not None
    for name, x, cache in (("k_new", k_new, k_cache), ("v_new", v_new, v_cache)):
        if x is None or cache is None:
            continue
        leading = (q.shape[0],) if is_ragged else (batch, k_new.shape[1] if k_new.dim() == 4 else "Tn")
        expected = (*leading, cache.shape[2], head_dim_of(cache))
        if tuple(x.shape) != expected:
            text = ", ".join(map(str, expected))
            note = ", the tokens of q" if is_ragged else ""
            raise ValueError(f"{name} has shape {tuple(x.shape)}: expected ({text}){note}")
        if x.dtype != q.dtype:
            raise ValueError(f"{name} is {x.dtype} and q is {q.dtype}: they must agree")
        check_device(name, x, q)
    return None if is_ragged else k_new.shape[1]


def _check_rotary(q: Tensor, args: DecodeArgs, device: str) -> int:
    """Check the tables of the rotary embedding, and return rotary_dim, or 0 without tables."""
    cos, sin = args.rotary_cos, args.rotary_sin
    if cos is None and sin is None:
        return 0
    if cos is None or sin is None:
        raise ValueError(f"{'rotary_sin' if cos is None else 'rotary_cos'} alone: give both rotary_cos and rotary_sin")
    if args.k_new is None:
        raise ValueError("rotary_cos without k_new: rotate q before the call, or append with k_new and v_new")
    for name, x in (("rotary_cos", cos), ("rotary_sin", sin)):
        if x.dim() != 2 or x.shape != cos.shape:
            raise ValueError(f"{name} has shape {tuple(x.shape)}: expected (positions, rotary_dim / 2) for both tables")
        check_device(name, x, q)
        check_float(name, x)
    if cos.dtype != sin.dtype:
        raise ValueError(f"rotary_cos is {cos.dtype} and rotary_sin is {sin.dtype}: they must agree")
    rotary_dim = 2 * cos.shape[1]
    if rotary_dim > q.shape[-1]:
        raise ValueError(
            f"rotary_cos has {cos.shape[1]} columns, so rotary_dim={rotary_dim}: at most the head dim, {q.shape[-1]}"
        )
    if device == "cuda" and rotary_dim % ROTARY_DIM_STEP:
        raise UnsupportedError(
            f"rotary_dim={rotary_dim} on cuda: use a multiple of {ROTARY_DIM_STEP}, with cos=1 and sin=0 in new columns"
        )
    return rotary_dim


def _check_scale(name: str, x: Tensor | None, cache: Tensor, q: Tensor) -> None:
    if x is None:
        return
    if cache.dtype != FP8:
        raise ValueError(f"{name} with a cache of {cache.dtype}: leave it out, or store the cache in {FP8}")
    if tuple(x.shape) not in ((), (cache.shape[2],)):
        raise ValueError(
            f"{name} has shape {tuple(x.shape)}: expected () or ({cache.shape[2]},), one for each K/V head"
        )
    if x.dtype != torch.float32:
        raise ValueError(f"{name} is {x.dtype}: use torch.float32")
    check_device(name, x, q)


def _check_numbers(q: Tensor, args: DecodeArgs, device: str) -> None:
    check_window(args.band.bounds)
    check_chunk(args.attention_chunk)
    if not math.isfinite(args.scale):
        raise ValueError(f"scale={args.scale} is not finite: use a finite number")
    if args.softcap is not None and not 0 < args.softcap < math.inf:
        raise ValueError(f"softcap={args.softcap}: use a positive number, or None for no cap")
    for name in ("scale", "softcap"):
        check_range(name, getattr(args, name) or 0.0, lse_dtype(q.dtype))
    if args.softcap is not None and device == "cuda":
        check_softcap(args.softcap)
    if args.num_splits is not None and args.num_splits < 1:
        raise ValueError(f"num_splits={args.num_splits}: use 1 or more, or None to let the kernel choose")


def _check_out(out: Tensor, q: Tensor, head_dim_v: int) -> None:
    expected = (*q.shape[:-1], head_dim_v)
    if tuple(out.shape) != expected:
        raise ValueError(f"out has shape {tuple(out.shape)}: expected {expected}")
    if out.dtype != q.dtype:
        raise ValueError(f"out is {out.dtype} and q is {q.dtype}: they must agree")
    check_device("out", out, q)
    _check_last_stride("out", out)
