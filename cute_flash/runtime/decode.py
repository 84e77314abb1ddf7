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
from cute_flash.planning.decode import CHUNK, MAX_SPLITS, DecodePlan, DecodeStatic, plan_decode
from cute_flash.runtime.counters import shared
from cute_flash.runtime.gpu import bound, current_gpu
from cute_flash.runtime.operands import MAX_WINDOW, ensure_aligned, positive_scale
from cute_flash.spec.decode import DecodeArgs, describe_decode
from cute_flash.spec.dtypes import ROW_ALIGN_BYTES
from cute_flash.spec.features import MIN_SOFTCAP

Outputs = tuple[Tensor, Tensor]
# Architectures with an instruction from FP8 to fp16.
FP8_CVT = (8, 9)


def run(q: Tensor, k_cache: Tensor, v_cache: Tensor, args: DecodeArgs) -> Outputs:
    """Compute out and lse, and append new keys and values to the caches."""
    signature = (
        "decode", q.shape, q.stride(), q.dtype, k_cache.shape, k_cache.stride(), k_cache.dtype, v_cache.shape,
        v_cache.stride(), q.get_device(), *[x if x is None or not isinstance(x, Tensor) else _facts(x) for x in args],
    )  # fmt: skip
    launch = bound.get(signature)
    if launch is None:
        launch = bound[signature] = _bind(q, k_cache, v_cache, args)
    return launch(q, k_cache, v_cache, args)


def _facts(x: Tensor) -> tuple:
    return x.shape, x.stride(), x.dtype


def _bind(q: Tensor, k_cache: Tensor, v_cache: Tensor, args: DecodeArgs) -> Callable[..., Outputs]:
    problem = describe_decode(q, k_cache, v_cache, args, "cuda")
    _check_caches(k_cache, v_cache)
    if 0 in (problem.batch, problem.total_tokens, problem.heads, problem.capacity, k_cache.shape[0]):
        return _empty
    if args.num_splits is not None and args.num_splits > MAX_SPLITS:
        raise UnsupportedError(f"num_splits={args.num_splits} on cuda: at most {MAX_SPLITS}")
    gpu = current_gpu().arch(q.device.index)
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
        has_fp8_cvt=problem.is_fp8 and gpu.capability >= FP8_CVT,
    )
    tokens = problem.total_tokens if problem.is_ragged else problem.tokens
    assert tokens is not None
    plan = plan_decode(static, gpu, problem.batch, tokens, problem.heads, problem.heads_kv, args.num_splits)
    kernel = current_gpu().kernel(plan.key)
    return _Launch(kernel, plan, static, problem)


def _rotary_dtype(cos: Tensor | None) -> str:
    name = str(cos.dtype).removeprefix("torch.") if cos is not None else "float32"
    return name if name in ("float16", "bfloat16") else "float32"


def _check_caches(*caches: Tensor) -> None:
    """Raise `UnsupportedError` for caches that the kernel cannot address. They are never copied."""
    for name, cache in zip(("k_cache", "v_cache"), caches):
        step = ROW_ALIGN_BYTES // cache.element_size()
        strides = [stride for stride, size in zip(cache.stride()[:-1], cache.shape[:-1]) if size > 1]
        if cache.stride(-1) != 1 or any(x % step for x in strides) or cache.data_ptr() % ROW_ALIGN_BYTES:
            raise UnsupportedError(
                f"{name} with strides {tuple(cache.stride())} of {cache.element_size()}-byte elements on cuda: rows "
                f"must be contiguous and start at multiples of {ROW_ALIGN_BYTES} bytes"
            )


@dataclass(frozen=True)
class _Launch:
    """The launch of one signature."""

    kernel: Callable[..., None]
    plan: DecodePlan
    static: DecodeStatic
    problem: Any

    def __call__(self, q: Tensor, k_cache: Tensor, v_cache: Tensor, args: DecodeArgs) -> Outputs:
        static, problem, plan = self.static, self.problem, self.plan
        device = q.device
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
        workspace = _workspace(device, plan)
        ragged = static.ragged
        self.kernel(
            _rows(q, ragged),
            _cache(k_cache),
            _cache(v_cache),
            result[None] if ragged else result,
            lse[None] if ragged else lse,
            args.cache_seqlens.contiguous(),
            args.cu_seqlens_q.contiguous() if ragged else None,
            args.page_table,
            None if args.cache_batch_idx is None else args.cache_batch_idx.contiguous(),
            None if args.leftpad is None else args.leftpad.contiguous(),
            _rows(args.k_new, ragged) if static.appends else None,
            _rows(args.v_new, ragged) if static.appends else None,
            _rotary(args.rotary_cos, static) if static.rotary else None,
            _rotary(args.rotary_sin, static) if static.rotary else None,
            _per_head(args.alibi, problem.batch, problem.heads) if "alibi" in static.features else None,
            args.sinks.float() if "sinks" in static.features else None,
            _scale(args.k_scale, problem.heads_kv, device) if static.is_fp8 else None,
            _scale(args.v_scale, problem.heads_kv, device) if static.is_fp8 else None,
            *workspace,
            scale,
            max(args.softcap, MIN_SOFTCAP, MIN_SOFTCAP * scale) if "softcap" in static.features else None,
            min(args.window_left, MAX_WINDOW) if static.has_left else None,
            min(args.window_right, MAX_WINDOW) if static.has_right else None,
            args.num_splits or 0,
            plan.num_ctas,
        )
        if not is_aligned:
            out.copy_(result)
        return out, lse


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
        x = x.as_strided(x.shape, tuple(s if s % step == 0 else step for s in strides[:-1]) + (1,))
    return x


def _rotary(x: Tensor, static: DecodeStatic) -> Tensor:
    return x.to(getattr(torch, static.rotary_dtype)).contiguous()


def _per_head(x: Tensor, batch: int, heads: int) -> Tensor:
    return x.float().expand(batch, heads)


def _scale(x: Tensor | None, heads_kv: int, device: torch.device) -> Tensor:
    """The scale of each K/V head."""
    if x is None:
        x = torch.ones((), dtype=torch.float32, device=device)
    return x.float().expand(heads_kv)


def _workspace(device: torch.device, plan: DecodePlan) -> tuple[Tensor, Tensor, Tensor]:
    """Outputs and statistics of pieces, and zeroed arrival counters, which every launch leaves at 0."""
    tile, slots = plan.tile, 2 * plan.num_ctas

    def make() -> tuple[Tensor, Tensor, Tensor]:
        return (
            torch.empty((slots, tile.tile_m, tile.head_dim), dtype=torch.float32, device=device),
            torch.empty((slots, tile.tile_m, 2), dtype=torch.float32, device=device),
            torch.zeros(plan.num_items, dtype=torch.int32, device=device),
        )

    return shared((slots, tile.tile_m, tile.head_dim, plan.num_items), device.index, make)


def _empty(q: Tensor, k_cache: Tensor, v_cache: Tensor, args: DecodeArgs) -> Outputs:
    """A call without queries, or whose caches have no rows: out is 0, and the LSE of a row is its sink or -inf."""
    shape = (*q.shape[:-1], v_cache.shape[-1])
    out = torch.zeros(shape, dtype=q.dtype, device=q.device) if args.out is None else args.out.zero_()
    lse_shape = (q.shape[1], q.shape[0]) if args.cu_seqlens_q is not None else (q.shape[0], q.shape[2], q.shape[1])
    lse = torch.full(lse_shape, -math.inf, dtype=torch.float32, device=q.device)
    if args.sinks is not None:
        lse.copy_(args.sinks.float()[:, None].expand_as(lse))
    return out, lse
