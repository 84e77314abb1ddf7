"""The CUDA implementation of `attn_decode`: plans a call once per signature, and calls the function bound to it.

The host does not read lengths: the kernel divides the keys of all sequences among its CTAs. If several CTAs compute
splits of one query tile, the splits are merged through a workspace.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from cute_flash.planning.decode import DecodePlan, plan_decode
from cute_flash.runtime import binder
from cute_flash.runtime.gpu import bound, current_gpu, remember
from cute_flash.runtime.operands import cache_operand, check_caches, has_aligned_strides
from cute_flash.runtime.suggest import decode_warmup, suggesting
from cute_flash.spec.arch import ArchSpec
from cute_flash.spec.decode import DecodeArgs, describe_decode, width_of_values
from cute_flash.spec.dtypes import ROW_ALIGN_BYTES
from cute_flash.spec.family import current_family

Outputs = tuple[Tensor, Tensor]
# Types of arguments that are not tensors. `isinstance(x, Tensor)` takes 0.2 us if x is not a tensor.
VALUE_TYPES = frozenset((bool, int, float))


def run(q: Tensor, k_cache: Tensor, v_cache: Tensor | None, args: DecodeArgs, return_lse: bool = True) -> Outputs:
    """Compute out and lse, and append new keys and values to the caches.

    Without `return_lse`, the values of lse are undefined: calls share its memory.
    """
    arguments: Any = args
    signature = (
        "decode", q.shape, q.stride(), q.dtype, k_cache.shape, k_cache.stride(), k_cache.dtype,
        v_cache if v_cache is None else (v_cache.shape, v_cache.stride(), v_cache.dtype),
        q.get_device(), return_lse, current_family(),
        *[x if x is None or type(x) in VALUE_TYPES else (x.shape, x.stride(), x.dtype) for x in arguments],
    )  # fmt: skip
    launch = bound.get(signature)
    if launch is None:
        launch = remember(signature, _bind(q, k_cache, v_cache, args, return_lse))
    return launch(q, k_cache, v_cache, args)


def _bind(
    q: Tensor, k_cache: Tensor, v_cache: Tensor | None, args: DecodeArgs, return_lse: bool = True
) -> Callable[..., Outputs]:
    plan = plan_call(q, k_cache, v_cache, args)
    if plan is None:
        return _append if only_appends(q, args) else _empty
    problem = plan.problem
    with suggesting(lambda: decode_warmup(q, args)):
        return binder.bind_decode(
            plan,
            q.device,
            _values(plan, k_cache, v_cache, args),
            copies_q=not has_aligned_strides(q),
            is_like_q=problem.out_shape == q.shape and q.is_contiguous(),
            writes_to_args=args.out is not None,
            scratch_lse=None if return_lse else current_gpu().scratch(problem.lse_shape, q.device.index),
        )


def plan_call(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor | None,
    args: DecodeArgs,
    gpu: ArchSpec | None = None,
    has_addresses: bool = True,
) -> DecodePlan | None:
    """Describe and plan a call, or raise an error; None if there is nothing to compute.

    `gpu`: the GPU of q by default. `has_addresses`: whether the caches have addresses to check; fake tensors have none.
    """
    problem = describe_decode(q, k_cache, v_cache, args, "cuda")
    if has_addresses:
        check_caches(k_cache, v_cache, args)
    if 0 in (problem.batch, problem.total_tokens, problem.heads, problem.capacity, k_cache.shape[0]):
        return None
    return plan_decode(problem, gpu or current_gpu().arch(q.device.index), current_family())


def _values(plan: DecodePlan, k_cache: Tensor, v_cache: Tensor | None, args: DecodeArgs) -> dict[str, str]:
    """The expressions of the operands that come from the caches and from `args`.

    Strides and dtypes are those of the signature, so conversions that a tensor does not need are left out.
    """
    values = {}
    for name, cache in (("k_cache", k_cache), ("v_cache", v_cache)):
        if cache is not None:
            values[name] = name if cache_operand(cache) is cache else f"cache_operand({name})"
    for name in ("cache_seqlens", "cu_seqlens_q", "cache_batch_idx", "leftpad", "page_table"):
        x = getattr(args, name)
        is_plain = x is None or name == "page_table" or x.is_contiguous()
        values[name] = f"args.{name}" if is_plain else f"args.{name}.contiguous()"
    if plan.problem.has_query_tables:
        values["cache_seqlens"] += ".view(-1)"
        values["page_table"] = "args.page_table.flatten(0, 1)"
    if args.page_table is not None and args.cache_batch_idx is not None:
        values["page_table"] = "rows_of_table(args.page_table, args.cache_batch_idx)"
    for name in ("k_new", "v_new"):
        x = getattr(args, name)
        is_plain = x is not None and has_aligned_strides(x)
        condition = f"args.{name} if args.{name}.data_ptr() % {ROW_ALIGN_BYTES} == 0 else " if is_plain else ""
        values[name] = f"({condition}ensure_aligned(args.{name}))"
    for name in ("rotary_cos", "rotary_sin"):
        x = getattr(args, name)
        is_plain = x is None or (str(x.dtype) == f"torch.{plan.problem.rotary_dtype}" and x.is_contiguous())
        values[name] = f"args.{name}" if is_plain else f"rotary_operand(args.{name}, problem)"
    for name in ("k_scale", "v_scale"):
        values[name] = f"cache_scale(args.{name}, problem.heads_kv, device)"
    return values


def only_appends(q: Tensor, args: DecodeArgs) -> bool:
    """Whether a call has new keys and no queries."""
    return args.k_new is not None and args.k_new.numel() > 0 and not q.numel()


def _append(q: Tensor, k_cache: Tensor, v_cache: Tensor | None, args: DecodeArgs) -> Outputs:
    """Append without queries."""
    queries, own_row = append_call(args)
    run(queries, k_cache, v_cache, own_row, return_lse=False)
    return _empty(q, k_cache, v_cache, args)


def append_call(args: DecodeArgs) -> tuple[Tensor, DecodeArgs]:
    """The queries and arguments of a call that only appends.

    The kernel appends while it computes query tiles. So the queries are zeros, one for each new row of a K/V head, and
    see only their own row.
    """
    own_row = args._replace(
        window_left=0, window_right=0, leftpad=None, softcap=None, alibi=None, sinks=None, num_splits=None, out=None
    )
    return torch.zeros_like(args.k_new), own_row  # type: ignore[arg-type]


def _empty(q: Tensor, k_cache: Tensor, v_cache: Tensor | None, args: DecodeArgs) -> Outputs:
    """A call without queries, or whose caches have no rows: out is 0, and the LSE of a row is its sink or -inf."""
    shape = (*q.shape[:-1], width_of_values(v_cache, args))
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
