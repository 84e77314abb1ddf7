"""The CUDA implementation of `attn_decode`: plans a call once per signature, then launches one kernel.

The host does not read lengths: the kernel divides the keys of all sequences among its CTAs. Pieces of a sequence that
several CTAs compute meet in a workspace, which all launches on a stream share.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from cute_flash.errors import UnsupportedError
from cute_flash.planning.decode import CHUNK, DecodePlan, DecodeStatic, plan_decode
from cute_flash.runtime.counters import arrivals, shared
from cute_flash.runtime.gpu import bound, current_gpu, remember
from cute_flash.runtime.operands import MAX_WINDOW, ensure_aligned, positive_scale
from cute_flash.spec.arch import ArchSpec
from cute_flash.spec.args import AttentionArgs
from cute_flash.spec.decode import DecodeArgs, DecodeProblem, describe_decode
from cute_flash.spec.dtypes import ROW_ALIGN_BYTES
from cute_flash.spec.family import current_family
from cute_flash.spec.features import MIN_SOFTCAP
from cute_flash.spec.problem import Problem
from cute_flash.spec.shapes import outputs

Outputs = tuple[Tensor, Tensor]
# Architectures with an instruction from FP8 to fp16.
FP8_CVT = (8, 9)
# Architectures with programmatic dependent launch.
DEPENDENT_LAUNCH = (9, 0)


def run(q: Tensor, k_cache: Tensor, v_cache: Tensor, args: DecodeArgs) -> Outputs:
    """Compute out and lse, and append new keys and values to the caches."""
    signature = (
        "decode", q.shape, q.stride(), q.dtype, k_cache.shape, k_cache.stride(), k_cache.dtype, v_cache.shape,
        v_cache.stride(), v_cache.dtype, q.get_device(), current_family(), *[_facts(x) if isinstance(x, Tensor) else x for x in args],
    )  # fmt: skip
    launch = bound.get(signature)
    if launch is None:
        launch = remember(signature, _bind(q, k_cache, v_cache, args))
    return launch(q, k_cache, v_cache, args)


def _facts(x: Tensor) -> tuple:
    return x.shape, x.stride(), x.dtype


def _bind(q: Tensor, k_cache: Tensor, v_cache: Tensor, args: DecodeArgs) -> Callable[..., Outputs]:
    problem = describe_decode(q, k_cache, v_cache, args, "cuda")
    _check_caches(k_cache, v_cache)
    if 0 in (problem.batch, problem.total_tokens, problem.heads, problem.capacity, k_cache.shape[0]):
        if problem.has_new and 0 not in (problem.batch, problem.heads_kv, problem.capacity, k_cache.shape[0]):
            raise UnsupportedError("k_new without queries on cuda: write the rows into the caches by index")
        return _empty
    gpu = current_gpu().arch(q.device.index)
    # The family sm80 leaves out what Ampere does not have.
    capability = min(gpu.capability, (8, 0)) if current_family() == "sm80" else gpu.capability
    features = (("softcap", args.softcap), ("alibi", args.alibi), ("sinks", args.sinks))
    page = problem.page_size
    rotary = ("pairs" if args.rotary_interleaved else "halves") if problem.rotary_dim else ""
    static = DecodeStatic(
        dtype=problem.dtype,
        head_dim=problem.head_dim,
        cache_dtype=problem.cache_dtype if problem.is_fp8 else "",
        head_dim_v=None if problem.head_dim_v == problem.head_dim else problem.head_dim_v,
        has_left=args.window_left is not None,
        has_right=args.window_right is not None,
        features=tuple(name for name, value in features if value is not None and value is not False),
        page_lookup="" if page is None else "row" if page % CHUNK else "chunk",
        ragged=problem.is_ragged,
        has_leftpad=args.leftpad is not None,
        has_batch_idx=args.cache_batch_idx is not None,
        appends=problem.has_new,
        rotary=rotary,
        rotary_dim=problem.rotary_dim,
        rotary_dtype=_rotary_dtype(args.rotary_cos) if rotary else "float32",
        has_fp8_cvt=problem.is_fp8 and capability >= FP8_CVT,
        overlaps_previous=capability >= DEPENDENT_LAUNCH,
    )
    tokens = problem.total_tokens if problem.is_ragged else problem.tokens
    assert tokens is not None
    plan = plan_decode(
        static, gpu, problem.batch, tokens, problem.heads, problem.heads_kv, problem.capacity, args.num_splits
    )
    kernel = current_gpu().kernel(plan.key)
    return _Launch(kernel, plan, static, problem)


def _rotary_dtype(cos: Tensor | None) -> str:
    name = str(cos.dtype).removeprefix("torch.") if cos is not None else "float32"
    return name if name in ("float16", "bfloat16") else "float32"


def _check_caches(*caches: Tensor) -> None:
    """Raise `UnsupportedError` for caches that the kernel cannot address. They are never copied."""
    for name, cache in zip(("k_cache", "v_cache"), caches):
        step = ROW_ALIGN_BYTES // cache.element_size()
        if cache.shape[-1] % step:
            raise UnsupportedError(f"{name} in FP8 with head dim {cache.shape[-1]} on cuda: use a multiple of {step}")
        strides = [stride for stride, size in zip(cache.stride()[:-1], cache.shape[:-1]) if size > 1]
        if cache.stride(-1) != 1 or any(x % step for x in strides) or cache.data_ptr() % ROW_ALIGN_BYTES:
            raise UnsupportedError(
                f"{name} with strides {tuple(cache.stride())} of {cache.element_size()}-byte elements on cuda: rows "
                f"must be contiguous and start at multiples of {ROW_ALIGN_BYTES} bytes"
            )


@dataclass(frozen=True)
class _Launch:
    """The launch of one signature of `attn_decode`."""

    kernel: Callable[..., None]
    plan: DecodePlan
    static: DecodeStatic
    problem: DecodeProblem

    def __call__(self, q: Tensor, k_cache: Tensor, v_cache: Tensor, args: DecodeArgs) -> Outputs:
        static, problem, device = self.static, self.problem, q.device
        if current_gpu().current_device() != device.index:
            with torch.cuda.device(device):
                return self(q, k_cache, v_cache, args)
        q, scale = positive_scale(q, args.scale)
        shape = (*q.shape[:-1], problem.head_dim_v)
        out = args.out if args.out is not None else torch.empty(shape, dtype=q.dtype, device=device)
        is_aligned = _is_aligned(out)
        result = out if is_aligned else torch.empty(shape, dtype=q.dtype, device=device)
        lse_shape = (q.shape[1], q.shape[0]) if static.ragged else (q.shape[0], q.shape[2], q.shape[1])
        lse = torch.empty(lse_shape, dtype=torch.float32, device=device)
        operands: dict[str, Any] = {
            "q": _rows(q, static.ragged),
            "k_cache": _cache(k_cache),
            "v_cache": _cache(v_cache),
            "out": result[None] if static.ragged else result,
            "lse": lse[None] if static.ragged else lse,
            "cache_seqlens": args.cache_seqlens.contiguous(),
            "cu_seqlens_q": args.cu_seqlens_q,
            "page_table": args.page_table,
            "cache_batch_idx": args.cache_batch_idx,
            "leftpad": args.leftpad,
            "scale": scale,
            "window_left": args.window_left,
            "window_right": args.window_right,
            "num_splits": args.num_splits or 0,
        }
        for name in ("cu_seqlens_q", "cache_batch_idx", "leftpad"):
            if operands[name] is not None:
                operands[name] = operands[name].contiguous()
        if static.appends:
            operands |= {name: _rows(getattr(args, name), static.ragged) for name in ("k_new", "v_new")}
        if static.rotary:
            operands |= {name: _rotary(getattr(args, name), static) for name in ("rotary_cos", "rotary_sin")}
        if static.is_fp8:
            operands |= {n: _scale(getattr(args, n), problem.heads_kv, device) for n in ("k_scale", "v_scale")}
        operands |= _features(static, args, scale, problem.batch, problem.heads)
        launch(self.kernel, self.plan, device, operands)
        if not is_aligned:
            out.copy_(result)
        return out, lse


def launch(kernel: Callable[..., None], plan: DecodePlan, device: torch.device, operands: dict[str, Any]) -> None:
    """Launch the decode kernel; operands that are not given are None."""
    operands["partial_out"], operands["partial_stats"], operands["arrivals"] = _workspace(device, plan)
    operands["num_ctas"] = plan.num_ctas
    for name in ("window_left", "window_right"):
        if (bound := operands.get(name)) is not None:
            operands[name] = min(bound, MAX_WINDOW)
    kernel(*[operands.get(name) for name in plan.key.operands])


def _features(static: DecodeStatic, args: Any, scale: float, batch: int, heads: int) -> dict[str, Any]:
    """The operands of softcap, ALiBi and sinks."""
    operands: dict[str, Any] = {}
    if "softcap" in static.features:
        operands["softcap"] = max(args.softcap, MIN_SOFTCAP, MIN_SOFTCAP * scale)
    if "alibi" in static.features:
        operands["alibi_slopes"] = args.alibi.float().expand(batch, heads)
    if "sinks" in static.features:
        operands["sinks"] = args.sinks.float()
    return operands


# ---- attn with few queries
# ----------------------------------------------------------------------------------------------------------


def bind_attention(problem: Problem, gpu: ArchSpec) -> Callable[..., tuple[Tensor, Tensor, None]]:
    """The function that computes `attn` or `attn_varlen` with the decode kernel: k and v are the caches."""
    static = DecodeStatic(
        dtype=problem.dtype,
        head_dim=problem.head_dim,
        head_dim_v=problem.static.head_dim_v,
        has_left=problem.static.has_left,
        has_right=problem.static.has_right,
        features=problem.features,
        has_seqlens=problem.seqused_k,
        ragged=problem.varlen,
        packed_keys=problem.varlen,
        overlaps_previous=gpu.capability >= DEPENDENT_LAUNCH,
    )
    plan = plan_decode(
        static, gpu, problem.batch, problem.seqlen_q, problem.heads, problem.heads_kv, problem.seqlen_k, None
    )
    kernel = current_gpu().kernel(plan.key)

    def as_cache(x: Tensor) -> Tensor:
        """(B, H, S, D) as (B, S, H, D), and (T, H, D) as (1, T, H, D)."""
        return x[None] if problem.varlen else x.transpose(1, 2)

    def forward(q: Tensor, k: Tensor, v: Tensor, args: AttentionArgs) -> tuple[Tensor, Tensor, None]:
        if current_gpu().current_device() != q.device.index:
            with torch.cuda.device(q.device):
                return forward(q, k, v, args)
        out, lse, _ = outputs(q, v, args)
        q, scale = positive_scale(q, args.scale)
        k, v = (x if _is_aligned(x) else ensure_aligned(x) for x in (k, v))
        rows = as_cache(out)
        result = rows if _is_aligned(rows) else torch.empty_like(rows, memory_format=torch.contiguous_format)
        operands: dict[str, Any] = {
            "q": _rows(as_cache(q), False),
            "k_cache": _cache(as_cache(k)),
            "v_cache": _cache(as_cache(v)),
            "out": result,
            "lse": lse[None] if problem.varlen else lse,
            "scale": scale,
            "window_left": problem.band.left,
            "window_right": problem.band.right,
            "num_splits": 0,
            **_features(static, args, scale, problem.batch, problem.heads),
        }
        if problem.varlen:
            operands |= {name: getattr(args, name).contiguous() for name in ("cu_seqlens_q", "cu_seqlens_k")}
            operands["cache_seqlens"] = None if args.seqused_k is None else args.seqused_k.contiguous()
        launch(kernel, plan, q.device, operands)
        if result is not rows:
            rows.copy_(result)
        return out, lse, None

    return forward


def _is_aligned(x: Tensor) -> bool:
    step = ROW_ALIGN_BYTES // x.element_size()
    return x.stride(-1) == 1 and not any(s % step for s in x.stride()[:-1]) and x.data_ptr() % ROW_ALIGN_BYTES == 0


def _rows(x: Tensor, is_ragged: bool) -> Tensor:
    """(B, T, H, D) with aligned rows; ragged tensors get a batch of 1."""
    x = x if _is_aligned(x) else ensure_aligned(x.contiguous())
    return x[None] if is_ragged else x


def _cache(x: Tensor) -> Tensor:
    """The cache with aligned strides of dimensions of size 1, and FP8 as bytes."""
    x = x.view(torch.uint8) if x.element_size() == 1 else x
    step = ROW_ALIGN_BYTES // x.element_size()
    strides = x.stride()
    if any(s % step for s in strides[:-1]):
        x = x.as_strided(x.shape, (*(s if s % step == 0 else step for s in strides[:-1]), 1))
    return x


def _rotary(x: Tensor, static: DecodeStatic) -> Tensor:
    return x.to(getattr(torch, static.rotary_dtype)).contiguous()


def _scale(x: Tensor | None, heads_kv: int, device: torch.device) -> Tensor:
    """The scale of each K/V head."""
    if x is None:
        x = torch.ones((), dtype=torch.float32, device=device)
    return x.float().expand(heads_kv)


def _workspace(device: torch.device, plan: DecodePlan) -> tuple[Tensor, Tensor, Tensor]:
    """Outputs and statistics of pieces, and arrival counters."""
    tile, slots = plan.tile, plan.num_slots

    def make() -> tuple[Tensor, Tensor]:
        return (
            torch.empty((slots, tile.tile_m, tile.head_dim), dtype=torch.float32, device=device),
            torch.empty((slots, tile.tile_m, 2), dtype=torch.float32, device=device),
        )

    # A fixed number of splits needs workspace by the size of the batch, which is not kept.
    key = (slots, tile.tile_m, tile.head_dim)
    partials = make() if plan.num_splits else shared(key, device.index, make)
    return *partials, arrivals(plan.num_items, device.index)


def _empty(q: Tensor, k_cache: Tensor, v_cache: Tensor, args: DecodeArgs) -> Outputs:
    """A call without queries, or whose caches have no rows: out is 0, and the LSE of a row is its sink or -inf."""
    shape = (*q.shape[:-1], v_cache.shape[-1])
    out = torch.zeros(shape, dtype=q.dtype, device=q.device) if args.out is None else args.out.zero_()
    lse_shape = (q.shape[1], q.shape[0]) if args.cu_seqlens_q is not None else (q.shape[0], q.shape[2], q.shape[1])
    lse = torch.full(lse_shape, -math.inf, dtype=torch.float32, device=q.device)
    if args.sinks is not None:
        sinks = args.sinks.float()[:, None].expand_as(lse)
        if args.cu_seqlens_q is not None:
            # Tokens after the last sequence are padding.
            sinks = sinks.where(torch.arange(q.shape[0], device=q.device) < args.cu_seqlens_q[-1], -math.inf)
        lse.copy_(sinks)
    return out, lse
