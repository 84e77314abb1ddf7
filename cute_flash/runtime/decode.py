"""The CUDA implementation of `attn_decode`: plans a call once per signature, then launches one kernel.

The host does not read lengths: the kernel divides the keys of all sequences among its CTAs. If several CTAs compute
splits of one query tile, the splits are merged through a workspace. Launches on one stream share it, except with
`num_splits` and during a CUDA graph capture (`_workspace`).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from cute_flash.errors import UnsupportedError
from cute_flash.planning.decode import CHUNK, DecodePlan, DecodeStatic, plan_decode
from cute_flash.runtime.counters import graph_counters, reserve, scratch, shared
from cute_flash.runtime.gpu import bound, current_gpu, remember
from cute_flash.runtime.operands import MAX_WINDOW, MIN_SCALE, ensure_aligned, positive_scale
from cute_flash.spec.arch import ArchSpec
from cute_flash.spec.args import AttentionArgs
from cute_flash.spec.decode import DecodeArgs, DecodeProblem, describe_decode
from cute_flash.spec.dtypes import ROW_ALIGN_BYTES
from cute_flash.spec.family import current_family
from cute_flash.spec.features import MIN_SOFTCAP
from cute_flash.spec.problem import Problem
from cute_flash.spec.shapes import outputs

Outputs = tuple[Tensor, Tensor]
# Types of arguments that are not tensors. `isinstance(x, Tensor)` takes 0.2 us if x is not a tensor.
VALUE_TYPES = frozenset((type(None), bool, int, float))
# The lowest compute capability with an instruction that converts FP8 to fp16.
FP8_CVT = (8, 9)
# Architectures with programmatic dependent launch.
DEPENDENT_LAUNCH = (9, 0)


def run(q: Tensor, k_cache: Tensor, v_cache: Tensor, args: DecodeArgs, return_lse: bool = True) -> Outputs:
    """Compute out and lse, and append new keys and values to the caches.

    Without `return_lse`, the values of lse are undefined: calls share its memory.
    """
    arguments: Any = args
    signature = (
        "decode", q.shape, q.stride(), q.dtype, k_cache.shape, k_cache.stride(), k_cache.dtype, v_cache.shape,
        v_cache.stride(), v_cache.dtype, q.get_device(), return_lse, current_family(),
        *[x if type(x) in VALUE_TYPES else (x.shape, x.stride(), x.dtype) for x in arguments],
    )  # fmt: skip
    launch = bound.get(signature)
    if launch is None:
        launch = remember(signature, _bind(q, k_cache, v_cache, args, return_lse))
    return launch(q, k_cache, v_cache, args)


def _bind(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, args: DecodeArgs, return_lse: bool = True
) -> Callable[..., Outputs]:
    problem, plan = plan_call(q, k_cache, v_cache, args)
    if plan is None:
        return _empty
    reserve(q.device.index)
    return _launch(plan, problem, q, (k_cache, v_cache), args, return_lse)


def plan_call(q: Tensor, k_cache: Tensor, v_cache: Tensor, args: DecodeArgs) -> tuple[DecodeProblem, DecodePlan | None]:
    """Describe and plan a call, or raise `UnsupportedError`; the plan is None if there is nothing to compute."""
    problem = describe_decode(q, k_cache, v_cache, args, "cuda")
    _check_caches(k_cache, v_cache)
    if 0 in (problem.batch, problem.total_tokens, problem.heads, problem.capacity, k_cache.shape[0]):
        if problem.has_new and 0 not in (problem.batch, problem.heads_kv, problem.capacity, k_cache.shape[0]):
            raise UnsupportedError("k_new without queries on cuda: write the rows into the caches by index")
        return problem, None
    gpu = current_gpu().arch(q.device.index)
    # The family sm80 uses only features of Ampere.
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
    sizes = (problem.batch, tokens, problem.heads, problem.heads_kv, problem.capacity)
    return problem, plan_decode(static, gpu, *sizes, args.num_splits)


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


# ---- the launch of a signature
# ----------------------------------------------------------------------------------------------------------

# A function of an operand's tensor, or None if the kernel takes the tensor itself.
Convert = Callable[[Tensor], Tensor] | None


def _launch(
    plan: DecodePlan,
    problem: DecodeProblem,
    q: Tensor,
    caches: tuple[Tensor, Tensor],
    args: DecodeArgs,
    return_lse: bool,
) -> Any:
    """The function that launches calls of one signature. It checks addresses; strides and dtypes are checked here."""
    static: DecodeStatic = plan.key.static
    kernel, current_device = current_gpu().kernel(plan.key), current_gpu().current_device
    device, index, ragged = q.device, q.device.index, static.ragged
    scale = max(abs(args.scale), MIN_SCALE)
    scalars = {"scale": scale, "num_splits": args.num_splits or 0, **_bounds(args.window_left, args.window_right)}
    if args.softcap:
        scalars["softcap"] = _softcap(args.softcap, scale)
    template, at = _template(plan, scalars)
    tensors = [(at[name], name, convert) for name, convert in _conversions(static, problem, args).items()]
    converts = [_cache_conversion(x) for x in caches]
    at_q, at_k, at_v, at_out, at_lse = (at[name] for name in ("q", "k_cache", "v_cache", "out", "lse"))
    copies_q, negates_q = not _is_aligned(q), args.scale < 0
    shape = (*q.shape[:-1], problem.head_dim_v)
    lse_shape = (q.shape[1], q.shape[0]) if ragged else (q.shape[0], q.shape[2], q.shape[1])
    dtype, has_shape_of_q = q.dtype, shape == q.shape and q.is_contiguous()
    scratch_lse = None if return_lse else scratch(lse_shape, index)
    add_workspace = _workspace(plan, at, index)

    def launch(q: Tensor, k_cache: Tensor, v_cache: Tensor, args: DecodeArgs) -> Outputs:
        if current_device() != index:
            return current_gpu().on_device(index, launch, q, k_cache, v_cache, args)
        if (k_cache.data_ptr() | v_cache.data_ptr()) % ROW_ALIGN_BYTES:
            _check_caches(k_cache, v_cache)
        if negates_q:
            q = -q
        if copies_q or q.data_ptr() % ROW_ALIGN_BYTES:
            q = ensure_aligned(q.contiguous())
        if args.out is not None:
            out = result = args.out
            if not _is_aligned(out):
                result = torch.empty(shape, dtype=dtype, device=device)
        else:
            # `empty_like` takes half the time.
            out = result = torch.empty_like(q) if has_shape_of_q else torch.empty(shape, dtype=dtype, device=device)
        lse = torch.empty(lse_shape, dtype=torch.float32, device=device) if scratch_lse is None else scratch_lse
        values = template.copy()
        values[at_q], values[at_out], values[at_lse] = (
            (q[None], result[None], lse[None]) if ragged else (q, result, lse)
        )
        values[at_k] = k_cache if converts[0] is None else converts[0](k_cache)
        values[at_v] = v_cache if converts[1] is None else converts[1](v_cache)
        for position, name, convert in tensors:
            x = getattr(args, name)
            values[position] = x if convert is None else convert(x)
        add_workspace(values)
        kernel(*values)
        if result is not out:
            out.copy_(result)
        return out, lse

    return launch


def _template(plan: DecodePlan, scalars: dict[str, Any]) -> tuple[list[Any], dict[str, int]]:
    """The arguments of the kernel, with numbers filled in and None for tensors, and the position of each operand."""
    values = [
        {"num_ctas": plan.num_ctas, "heads_at_once": plan.heads_at_once, **scalars}.get(name)
        for name in plan.key.operands
    ]
    at = {name: i for i, name in enumerate(plan.key.operands)} | {"alibi": plan.key.operands.index("alibi_slopes")}
    return values, at


def _bounds(left: int | None, right: int | None) -> dict[str, int]:
    bounds = {"window_left": left, "window_right": right}
    return {name: min(bound, MAX_WINDOW) for name, bound in bounds.items() if bound is not None}


def _softcap(softcap: float, scale: float) -> float:
    return max(softcap, MIN_SOFTCAP, MIN_SOFTCAP * scale)


def _conversions(static: DecodeStatic, problem: DecodeProblem, args: DecodeArgs) -> dict[str, Convert]:
    """The tensors of `args` that the kernel takes, and how they are converted."""
    found: dict[str, Convert] = {}
    for name in ("cache_seqlens", "cu_seqlens_q", "cache_batch_idx", "leftpad"):
        x = getattr(args, name)
        if x is not None:
            found[name] = None if x.is_contiguous() else Tensor.contiguous
    if args.page_table is not None:
        found["page_table"] = None
    if static.appends:
        for name in ("k_new", "v_new"):
            is_plain = not static.ragged and _is_aligned(getattr(args, name))
            found[name] = _at_aligned_address if is_plain else partial(_rows, is_ragged=static.ragged)
    if static.rotary:
        for name in ("rotary_cos", "rotary_sin"):
            x, dtype = getattr(args, name), getattr(torch, static.rotary_dtype)
            is_plain = x.dtype == dtype and x.is_contiguous()
            found[name] = None if is_plain else partial(_rotary, dtype=dtype)
    if args.alibi is not None:
        found["alibi"] = partial(_slopes, batch=problem.batch, heads=problem.heads)
    if args.sinks is not None:
        found["sinks"] = None if args.sinks.dtype == torch.float32 else Tensor.float
    if static.is_fp8:
        for name in ("k_scale", "v_scale"):
            found[name] = partial(_scales, heads_kv=problem.heads_kv, device=args.cache_seqlens.device)
    return found


def _at_aligned_address(x: Tensor) -> Tensor:
    return x.clone() if x.data_ptr() % ROW_ALIGN_BYTES else x


def _workspace(plan: DecodePlan, at: dict[str, int], index: int) -> Callable[[list[Any]], None]:
    """The function that adds the operands for outputs and statistics of splits, and for arrival counters."""
    slots, tile, device = plan.num_slots, plan.tile, f"cuda:{index}"
    key = slots, tile.tile_m, tile.head_dim, plan.num_counters
    at_out, at_stats, at_arrivals = (at[name] for name in ("partial_out", "partial_stats", "arrivals"))

    def make(counters: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        if counters is None:
            counters = torch.zeros(plan.num_counters, dtype=torch.int32, device=device)
        return (
            torch.empty((slots, tile.tile_m, tile.head_dim), dtype=torch.float32, device=device),
            torch.empty((slots, tile.tile_m, 2), dtype=torch.float32, device=device),
            counters,
        )

    def add(values: list[Any]) -> None:
        if torch._C._cuda_isCurrentStreamCapturing():
            workspace = make(graph_counters(plan.num_query_tiles, index))
        elif plan.num_splits:
            # With a fixed number of splits, the workspace grows with the batch, so it is not kept.
            workspace = make()
        else:
            workspace = shared(key, index, make)
        values[at_out], values[at_stats], values[at_arrivals] = workspace

    return add


# ---- attn with few queries
# ----------------------------------------------------------------------------------------------------------


def bind_attention(problem: Problem, gpu: ArchSpec, device: torch.device) -> Callable[..., tuple[Tensor, Tensor, None]]:
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
        varlen_keys=problem.varlen,
        overlaps_previous=gpu.capability >= DEPENDENT_LAUNCH,
    )
    plan = plan_decode(
        static, gpu, problem.batch, problem.seqlen_q, problem.heads, problem.heads_kv, problem.seqlen_k, None
    )
    kernel = current_gpu().kernel(plan.key)
    reserve(device.index)
    template, at = _template(plan, {"num_splits": 0, **_bounds(problem.band.left, problem.band.right)})
    add_workspace = _workspace(plan, at, device.index)

    def as_cache(x: Tensor) -> Tensor:
        """(B, H, S, D) as (B, S, H, D), and (T, H, D) as (1, T, H, D)."""
        return x[None] if problem.varlen else x.transpose(1, 2)

    def forward(q: Tensor, k: Tensor, v: Tensor, args: AttentionArgs) -> tuple[Tensor, Tensor, None]:
        if current_gpu().current_device() != q.device.index:
            return current_gpu().on_device(q.device.index, forward, q, k, v, args)
        out, lse, _ = outputs(q, v, args)
        q, scale = positive_scale(q, args.scale)
        k, v = (x if _is_aligned(x) else ensure_aligned(x) for x in (k, v))
        rows = as_cache(out)
        result = rows if _is_aligned(rows) else torch.empty_like(rows, memory_format=torch.contiguous_format)
        operands: dict[str, Any] = {
            "q": _rows(as_cache(q)),
            "k_cache": _cache(as_cache(k)),
            "v_cache": _cache(as_cache(v)),
            "out": result,
            "lse": lse[None] if problem.varlen else lse,
            "scale": scale,
        }
        if problem.varlen:
            operands |= {name: getattr(args, name).contiguous() for name in ("cu_seqlens_q", "cu_seqlens_k")}
            operands["cache_seqlens"] = None if args.seqused_k is None else args.seqused_k.contiguous()
        if "softcap" in problem.features:
            operands["softcap"] = _softcap(args.softcap, scale)
        if args.alibi is not None:
            operands["alibi_slopes"] = _slopes(args.alibi, problem.batch, problem.heads)
        if args.sinks is not None:
            operands["sinks"] = args.sinks.float()
        values = template.copy()
        for name, value in operands.items():
            values[at[name]] = value
        add_workspace(values)
        kernel(*values)
        if result is not rows:
            rows.copy_(result)
        return out, lse, None

    return forward


# ---- operands
# ----------------------------------------------------------------------------------------------------------


def _is_aligned(x: Tensor) -> bool:
    step = ROW_ALIGN_BYTES // x.element_size()
    return x.stride(-1) == 1 and not any(s % step for s in x.stride()[:-1]) and x.data_ptr() % ROW_ALIGN_BYTES == 0


def _rows(x: Tensor, is_ragged: bool = False) -> Tensor:
    """(B, T, H, D) with aligned rows; ragged tensors get a batch of 1."""
    x = x if _is_aligned(x) else ensure_aligned(x.contiguous())
    return x[None] if is_ragged else x


def _cache_conversion(x: Tensor) -> Convert:
    return None if _cache(x) is x else _cache


def _cache(x: Tensor) -> Tensor:
    """The cache, with FP8 as bytes. Strides of dimensions of size 1, which have no effect, become aligned ones."""
    x = x.view(torch.uint8) if x.element_size() == 1 else x
    step = ROW_ALIGN_BYTES // x.element_size()
    strides = x.stride()
    if any(s % step for s in strides[:-1]):
        x = x.as_strided(x.shape, (*(s if s % step == 0 else step for s in strides[:-1]), 1))
    return x


def _rotary(x: Tensor, dtype: torch.dtype) -> Tensor:
    return x.to(dtype).contiguous()


def _slopes(x: Tensor, batch: int, heads: int) -> Tensor:
    """Slopes as (B, H), in fp32."""
    return x.float().expand(batch, heads)


def _scales(x: Tensor | None, heads_kv: int, device: torch.device) -> Tensor:
    """The scale of each K/V head."""
    return torch.ones(heads_kv, dtype=torch.float32, device=device) if x is None else x.float().expand(heads_kv)


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
