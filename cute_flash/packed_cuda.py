"""Packed sequences on CUDA: the list of their tiles, made on the GPU, and the kernels that take theirs from it.

The host knows shapes only: how many tokens and sequences there are. So a new set of lengths needs no sync,
compiles nothing, and may be written into the same offsets between two replays of a captured graph.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from cute_flash import arch, counters, operands, packed, ranges
from cute_flash import plan as planning
from cute_flash.forward import Outputs, extra_arguments, largest
from cute_flash.how import How
from cute_flash.operands import (
    MAX_ROW_STRIDE,
    MAX_WINDOW,
    MIN_SCALE,
    ROW_ALIGN_BYTES,
    ROW_ALIGN_ELEMENTS,
)
from cute_flash.plan import Plan
from cute_flash.problem import Problem
from cute_flash.work import HEADER, ITEM

# (q, k, v, how, scale) -> (out, lse, largest logits)
Launch = Callable[[Tensor, Tensor, Tensor, How, float], Outputs]
_launches: dict[tuple, Launch] = {}


def forward(q: Tensor, k: Tensor, v: Tensor, how: How, problem: Problem) -> Outputs:
    """out (Tq, H, Dv), lse (H, Tq), and the largest logits if asked for, of a checked problem."""
    if how.dropout and how.rng is None:
        raise ValueError("dropout needs rng: (seed, offset)")
    problem = _all_tokens(problem, q, k)
    if problem.is_empty:
        return _empty(q, v, how)
    # All that decides the launch but addresses, strides and values.
    signature = (problem.static, *_sizes(problem), q.get_device(), planning.requested_family())
    launch = _launches.get(signature)
    if launch is None:
        launch = _prepare_forward(problem, q.device)
        operands.remember(_launches, signature, launch)
    scale = how.scale
    if scale < MIN_SCALE:
        # The kernels take the maximum of the raw scores, which a negative scale would turn into a minimum.
        q, scale = (-q if scale < 0 else q), max(abs(scale), MIN_SCALE)
    return launch(q, k, v, how, scale)


def _empty(q: Tensor, v: Tensor, how: How) -> Outputs:
    """No keys, or no rows: the rows of sequences give 0 and the sink, or -inf."""
    out, lse = packed.outputs(q, v)
    out.zero_()
    lse.fill_(-math.inf)
    if how.sinks is not None:
        assert how.cu_seqlens_q is not None
        is_row = torch.arange(q.shape[0], device=q.device) < how.cu_seqlens_q[-1]
        lse = torch.where(is_row, how.sinks.to(lse.dtype)[:, None], lse)
    return out, lse, largest(q, how, -math.inf)


def _all_tokens(problem: Problem, q: Tensor, k: Tensor) -> Problem:
    return replace(problem, seqlen_q=q.shape[0], seqlen_k=k.shape[0])


def _sizes(problem: Problem) -> tuple[int, ...]:
    return problem.batch, problem.heads, problem.heads_kv, problem.seqlen_q, problem.seqlen_k


def _prepare_forward(problem: Problem, device: torch.device) -> Launch:
    """Plan and compile for one call signature."""
    with ranges.marked("plan"):
        plan = planning.plan(problem, arch.detect(device.index))
    from cute_flash.compile import compiled, compiled_kernel

    prepare, function, arguments = compiled_kernel(plan.prepare), compiled(plan), plan.launch_arguments
    index, draws_tiles = device.index, plan.draws_tiles
    sizes = _prepare_sizes(plan)
    rows = (HEADER + plan.num_items, ITEM)
    descends = int(problem.static.has_right)

    def launch(q, k, v, how, scale):
        if operands.current_device() != index:
            with torch.cuda.device(index):
                return launch(q, k, v, how, scale)
        q, k, v = map(launchable, (q, k, v))
        (out, lse), most = packed.outputs(q, v), largest(q, how, -math.inf)
        extras = extra_arguments(how, scale, most, (problem.batch, problem.heads))
        items = torch.empty(rows, dtype=torch.int32, device=device)
        # Before the first launch: nothing may come between it and the main one, which waits for its end.
        _counter, address = counters.counter(index) if draws_tiles else (None, 0)
        prepare(*_offsets(how), items, *sizes, *_window(how, MAX_WINDOW), descends)
        more = (address,) if draws_tiles else ()
        function(q, k, v, out, lse, scale, *_window(how, 0), *arguments, *more, *extras, items)
        return out, lse, most

    return launch


def _prepare_sizes(plan: Plan) -> tuple[int, ...]:
    return plan.problem.seqlen_q, plan.problem.seqlen_k, plan.tile.tile_m, plan.tile.tile_n


def _offsets(how: How) -> tuple[Any, ...]:
    assert how.cu_seqlens_q is not None and how.cu_seqlens_k is not None
    used = None if how.seqused_k is None else how.seqused_k.contiguous()
    return how.cu_seqlens_q.contiguous(), how.cu_seqlens_k.contiguous(), used


def _window(how: How, unbounded: int) -> tuple[int, int]:
    left, right = how.window_left, how.window_right
    return (
        unbounded if left is None else min(left, MAX_WINDOW),
        unbounded if right is None else min(right, MAX_WINDOW),
    )


def is_launchable(tensor: Tensor) -> bool:
    """`operands.is_launchable` for (T, H, D)."""
    row, head, element = tensor.stride()
    return element == 1 and not (head | row) % ROW_ALIGN_ELEMENTS and 0 <= row < MAX_ROW_STRIDE


def launchable(tensor: Tensor) -> Tensor:
    if is_launchable(tensor) and tensor.data_ptr() % ROW_ALIGN_BYTES == 0:
        return tensor
    return tensor.clone(memory_format=torch.contiguous_format)
