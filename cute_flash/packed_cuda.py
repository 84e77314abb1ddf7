"""Packed sequences on CUDA: a list of their tiles, made on the GPU, and kernels that take theirs from it.

The host knows shapes only: how many tokens and sequences there are. So a new set of lengths needs no sync,
compiles nothing, and may be written into the same offsets between two replays of a captured graph.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from cute_flash import operands, packed_sums
from cute_flash.backward import in_dtype_of, is_mode_deterministic
from cute_flash.backward_general import Gradients
from cute_flash.forward import Outputs, extra_arguments, largest
from cute_flash.jit import nvtx as ranges
from cute_flash.operands import (
    MAX_ROW_STRIDE,
    MAX_WINDOW,
    MIN_SCALE,
    ROW_ALIGN_BYTES,
    ROW_ALIGN_ELEMENTS,
)
from cute_flash.planning import plan as planning
from cute_flash.planning.plan import BwdPlan, Plan
from cute_flash.planning.varlen import ASCENDS, BY_LENGTH, DESCENDS, HEADER, ITEM
from cute_flash.reference import varlen as packed
from cute_flash.runtime import counters
from cute_flash.spec import arch
from cute_flash.spec.args import How
from cute_flash.spec.band import is_narrow
from cute_flash.spec.problem import Problem

# (q, k, v, how, scale) -> (out, lse, largest logits)
Launch = Callable[[Tensor, Tensor, Tensor, How, float, tuple], Outputs]
_launches: dict[tuple, Launch] = {}


def forward(
    q: Tensor, k: Tensor, v: Tensor, how: How, problem: Problem, given: tuple[Any, ...] = ()
) -> Outputs:
    """out (Tq, H, Dv), lse (H, Tq), and the largest logits if asked for, of a checked problem.

    `given`: see `custom_cuda.Given`.
    """
    if how.dropout and how.rng is None:
        raise ValueError("dropout needs rng: (seed, offset)")
    problem = _all_tokens(problem, q.shape[0], k.shape[0])
    if problem.is_empty:
        return _empty(q, v, how)
    # All that decides the launch but addresses, strides and values.
    narrow, family = is_narrow(*problem.band.bounds), planning.requested_family()
    signature = (problem.static, narrow, *_sizes(problem), q.get_device(), family)
    launch = _launches.get(signature)
    if launch is None:
        launch = _prepare_forward(problem, q.device)
        operands.remember(_launches, signature, launch)
    scale = how.scale
    if scale < MIN_SCALE:
        # The kernels take the maximum of the raw scores, which a negative scale would turn into a minimum.
        q, scale = (-q if scale < 0 else q), max(abs(scale), MIN_SCALE)
    return launch(q, k, v, how, scale, given)


def _empty(q: Tensor, v: Tensor, how: How) -> Outputs:
    """No keys, or no rows: the rows of sequences give 0 and the sink, or -inf."""
    out, lse = packed.outputs(q, v, how)
    out.zero_()
    lse.fill_(-math.inf)
    if how.sinks is not None:
        lse = torch.where(_is_row(how, q), how.sinks.to(lse.dtype)[:, None], lse)
    return out, lse, largest(q, how, -math.inf)


def _is_row(how: How, q: Tensor) -> Tensor:
    """(Tq): whether a row belongs to a sequence."""
    assert how.cu_seqlens_q is not None
    return torch.arange(q.shape[0], device=q.device) < how.cu_seqlens_q[-1]


@lru_cache(maxsize=1024)
def _all_tokens(problem: Problem, total_q: int, total_k: int) -> Problem:
    return replace(problem, seqlen_q=total_q, seqlen_k=total_k)


def _sizes(problem: Problem) -> tuple[int, ...]:
    return problem.batch, problem.heads, problem.heads_kv, problem.seqlen_q, problem.seqlen_k


def _prepare_forward(problem: Problem, device: torch.device) -> Launch:
    """Plan and compile for one call signature."""
    with ranges.marked("plan"):
        plan = planning.plan(problem, arch.detect(device.index))
    from cute_flash.jit.compile import compiled, compiled_kernel

    prepare, function, arguments = compiled_kernel(plan.prepare), compiled(plan), plan.launch_arguments
    index, draws_tiles = device.index, plan.draws_tiles
    sizes = _prepare_sizes(plan)
    rows = (HEADER + plan.num_items, ITEM)
    order = BY_LENGTH if problem.static.is_bounded else ASCENDS

    def launch(q, k, v, how, scale, given=()):
        if operands.current_device() != index:
            with torch.cuda.device(index):
                return launch(q, k, v, how, scale, given)
        q, k, v = map(launchable, (q, k, v))
        (out, lse), most = packed.outputs(q, v, how), largest(q, how, -math.inf)
        extras = extra_arguments(how, scale, most, (problem.batch, problem.heads))
        items = torch.empty(rows, dtype=torch.int32, device=device)
        # Before the first launch: nothing may come between it and the main one, which waits for its end.
        _counter, address = counters.counter(index) if draws_tiles else (None, 0)
        prepare(*_offsets(how), items, *sizes, *_window(how, MAX_WINDOW), order)
        more = (address,) if draws_tiles else ()
        function(q, k, v, out, lse, scale, *_window(how, 0), *arguments, *more, *extras, *given, items)
        if how.sinks is not None:
            # To the kernel, rows after the last sequence are those of one without keys.
            lse.masked_fill_(~_is_row(how, q), -math.inf)
        return out, lse, most

    return launch


# ---- backward
# --------------------------------------------------------------------------------------------------------

# (given, how, scale, dq_scale) -> gradients; given: q, k, v, out, dout, lse, dlse
LaunchBwd = Callable[[tuple, How, float, float], Gradients]
_bwd_launches: dict[tuple, LaunchBwd] = {}


def backward(
    douts: tuple[Tensor, Tensor | None],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    how: How,
    problem: Problem,
) -> Gradients:
    """dq, dk, dv, and those of slopes, (B, H) or (1, H), and sinks, (H), if asked for."""
    dout, dlse = douts
    problem = _all_tokens(problem, q.shape[0], k.shape[0])
    if problem.is_empty:
        dalibi = None if how.alibi is None else lse.new_zeros(problem.batch, problem.heads)
        dsinks = None if how.sinks is None else packed_sums.dsinks(lse, None, dlse, how, 1)
        return torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v), dalibi, dsinks
    deterministic = how.deterministic or is_mode_deterministic()
    signature = (
        problem.static, *_sizes(problem), q.get_device(), dlse is None, deterministic,
        planning.requested_family(),
    )  # fmt: skip
    launch = _bwd_launches.get(signature)
    if launch is None:
        launch = _prepare_backward(problem, dlse is not None, deterministic, q.device)
        operands.remember(_bwd_launches, signature, launch)
    scale = dq_scale = how.scale
    if scale < MIN_SCALE:
        # The forward has taken a negative scale for -q.
        q, scale = (-q if scale < 0 else q), max(abs(scale), MIN_SCALE)
        dq_scale = -scale if dq_scale < 0 else scale
    return launch((q, k, v, out, dout, lse, dlse), how, scale, dq_scale)


def _prepare_backward(
    problem: Problem, has_dlse: bool, deterministic: bool, device: torch.device
) -> LaunchBwd:
    """Plan and compile for one call signature."""
    with ranges.marked("plan"):
        plan = planning.bwd_plan(problem, arch.detect(device.index), deterministic)
    from cute_flash.jit.compile import compiled_kernel

    prepare, before, main, after = (
        compiled_kernel(key) for key in (plan.prepare, plan.before(has_dlse), plan.main, plan.after)
    )
    index, draws_tiles, is_sm90 = device.index, plan.draws_tiles, plan.family == "sm90"
    sizes, rows = _prepare_sizes(plan), [(HEADER + number, ITEM) for number in plan.num_items]
    # In order, a tile waits for those of later keys of its sequence: they come before it.
    order = DESCENDS if plan.is_ordered else BY_LENGTH if problem.static.is_bounded else ASCENDS
    workspace, section, num_blocks = _workspace(plan, device), plan.section, plan.num_blocks

    def launch(given, how, scale, dq_scale):
        if operands.current_device() != index:
            with torch.cuda.device(index):
                return launch(given, how, scale, dq_scale)
        grads = tuple(map(torch.empty_like, given[:3]))
        dq, dk, dv = targets = tuple(map(_target, grads))
        q, k, v, out, dout = map(launchable, given[:5])
        lse, dlse = given[5].contiguous(), None if given[6] is None else given[6].contiguous()
        keys, queries = (torch.empty(shape, dtype=torch.int32, device=device) for shape in rows)
        lse_log2, d, sums, turns, parts = workspace()
        window, terms = _window(how, 0), _terms(how, scale, lse, parts, plan)
        rounded = in_dtype_of(q, dout)
        # Before the launches: nothing may come between those that wait for each other by themselves.
        _counter, address = counters.counter(index) if draws_tiles else (None, 0)
        prepare(*_offsets(how), keys, queries, *sizes, *_window(how, MAX_WINDOW), order)
        before(out, dout, lse, lse_log2, d, sums, turns, dlse, queries)
        grid = (section, num_blocks, address) if is_sm90 else (section,)
        main(
            q, k, v, rounded, lse_log2, d, sums, turns, dk, dv, scale, *window, *grid, *terms, keys
        )  # fmt: skip
        after(sums, dq, dq_scale, queries)
        for grad, target in zip(grads, targets, strict=True):
            if grad is not target:
                grad.copy_(target)
        return *grads, *finish(how, d, parts, lse, dlse)

    def finish(how, d, parts, lse, dlse):
        """The gradients of slopes and sinks."""
        dalibi = dsinks = None
        if parts is not None:
            dalibi = packed_sums.dalibi(parts, how, problem.seqlen_k, plan.tile.tile_n)
        if how.sinks is not None:
            dsinks = packed_sums.dsinks(lse, d, dlse, how, plan.tile.tile_m)
        return dalibi, dsinks

    return launch


def _terms(how: How, scale: float, lse: Tensor, parts: Tensor | None, plan: BwdPlan) -> tuple[Any, ...]:
    """What the main kernel takes of softcap, slopes and their gradients, and dropout; None: not asked for."""
    heads = plan.problem.batch, plan.problem.heads
    softcap, slopes, _sinks, *dropout, _most = extra_arguments(how, scale, lse, heads)
    if plan.pads_with_dropout:
        # No draw is below 0.
        dropout = [0, 1.0, torch.zeros(2, dtype=torch.int64, device=lse.device)]
    return softcap, slopes, None if parts is None else parts.flatten(2), *dropout


def _workspace(plan: BwdPlan, device: torch.device) -> Callable[[], tuple[Any, ...]]:
    """Allocates LSE and D (1, H, rows), sums of dQ (1, H, m_block, elements of a tile), fp32, and an ordered
    plan's counters (1, H, m_block), int32; with ALiBi, zeros for the parts of the gradients of the slopes,
    (1, H, tiles of keys, warps), fp32. Every sequence is padded to whole blocks.
    """
    tile_m, blocks, heads = plan.tile.tile_m, plan.num_m_blocks, plan.problem.heads
    rows, sums = (1, heads, blocks * tile_m), (1, heads, blocks, tile_m * plan.tile.head_dim)
    has_slopes, parts = plan.problem.features.alibi, (1, heads, *plan.slope_sums)

    def allocate():
        return (
            torch.empty(rows, dtype=torch.float32, device=device),
            torch.empty(rows, dtype=torch.float32, device=device),
            torch.empty(sums, dtype=torch.float32, device=device),
            torch.empty((1, heads, blocks), dtype=torch.int32, device=device) if plan.is_ordered else None,
            # Keys that no query sees write none.
            torch.zeros(parts, device=device) if has_slopes else None,
        )

    return allocate


def _target(grad: Tensor) -> Tensor:
    """What the kernels write: the gradient itself, or memory in an order that they can store to."""
    return grad if is_launchable(grad) else torch.empty_like(grad, memory_format=torch.contiguous_format)


# ---- arguments of both
# ----------------------------------------------------------------------------------------------------------


def _prepare_sizes(plan: Plan | BwdPlan) -> tuple[int, ...]:
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
