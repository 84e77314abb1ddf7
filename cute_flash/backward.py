"""The gradients on CUDA: the kernels before, in the middle and after, and their workspace.

Those with what a call asks for beyond plain attention come through `backward_general`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from cute_flash import operands
from cute_flash.jit import nvtx as ranges
from cute_flash.operands import MAX_WINDOW, MIN_SCALE, ROW_ALIGN_BYTES, is_launchable, launchable
from cute_flash.planning import plan as planning
from cute_flash.planning.plan import BwdPlan
from cute_flash.runtime import counters
from cute_flash.spec import arch
from cute_flash.spec.problem import Problem

Grads = tuple[Tensor, Tensor, Tensor]
# What one call signature needs: (dout, dlse, q, k, v, out, lse, scale, window) -> (dq, dk, dv). And, of a
# general one, what its main kernel takes besides and what is done with the workspace at the end.
Launch = Callable[..., Grads]
_launches: dict[tuple, Launch] = {}


def bwd_cuda(dout, dlse, q, k, v, out, lse, scale, left, right, deterministic=False) -> Grads:
    """The CUDA kernel of `cute_flash::bwd`."""
    deterministic = deterministic or is_mode_deterministic()
    # Everything that decides the launch but the addresses and the values of the window. The kernels check the
    # shapes and dtypes of dout, out, lse and dlse by themselves.
    signature = (
        q.shape, q.stride(), k.shape, k.stride(), v.shape, v.stride(), dout.stride(), out.stride(), q.dtype,
        k.dtype, v.dtype, q.get_device(), k.get_device(), v.get_device(), left is None, right is None,
        dlse is None, deterministic, planning.requested_family(),
    )  # fmt: skip
    launch = _launches.get(signature)
    if launch is None:
        problem = operands.problem_of(q, k, v, (left, right))
        launch = _launch_empty
        if not problem.is_empty:
            launch = prepare(dout, dlse, q, k, v, out, problem, deterministic)
        operands.remember(_launches, signature, launch)
    return launch(dout, dlse, q, k, v, out, lse, scale, kernel_window(left, right))


def kernel_window(left: int | None, right: int | None) -> tuple[int, int]:
    return 0 if left is None else min(left, MAX_WINDOW), 0 if right is None else min(right, MAX_WINDOW)


def is_mode_deterministic() -> bool:
    """Whether torch was told to be deterministic, and not just to warn."""
    return torch.are_deterministic_algorithms_enabled() and (
        not torch.is_deterministic_algorithms_warn_only_enabled()
    )


def in_dtype_of(q: Tensor, dout: Tensor) -> Tensor:
    """What products are made of, where out and its gradient are in fp32."""
    if dout.dtype == q.dtype:
        return dout
    return dout.to(q.dtype, memory_format=torch.contiguous_format)


def prepare(dout, dlse, q, k, v, out, problem: Problem, deterministic: bool) -> Launch:
    """Plan and compile for one call signature."""
    with ranges.marked("plan"):
        plan = planning.bwd_plan(problem, arch.detect(q.device.index), deterministic)
    run, workspace = _kernels(plan, dlse is not None, q.device), _workspace(plan, q.device)
    must_copy = not all(map(is_launchable, (q, k, v, out, dout)))
    # Dense gradients have launchable strides unless D comes late in the order of what they belong to.
    must_copy_grads = not all(is_launchable(torch.empty_like(x)) for x in (q, k, v))
    index = q.device.index

    def launch(dout, dlse, q, k, v, out, lse, scale, window, terms=None, finish=None):
        if operands.current_device() != index:
            with torch.cuda.device(index):
                return launch(dout, dlse, q, k, v, out, lse, scale, window, terms, finish)
        grads = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
        targets = tuple(map(_target, grads)) if must_copy_grads else grads
        addresses = q.data_ptr() | k.data_ptr() | v.data_ptr() | out.data_ptr() | dout.data_ptr()
        dq_scale = scale
        if scale < MIN_SCALE:
            # The forward has taken a negative scale for -q.
            q, scale = (launchable(-q) if scale < 0 else q), max(abs(scale), MIN_SCALE)
            dq_scale = -scale if dq_scale < 0 else scale
        if must_copy or addresses % ROW_ALIGN_BYTES:
            q, k, v, out, dout = map(launchable, (q, k, v, out, dout))
        dlse = None if dlse is None else dlse.contiguous()
        given = q, k, v, out, dout, lse.contiguous(), dlse
        room = workspace()
        besides = None if terms is None else terms(scale, room, plan.tile)
        run(given, room, targets, (scale, dq_scale), window, besides)
        if must_copy_grads:
            for grad, target in zip(grads, targets, strict=True):
                if grad is not target:
                    grad.copy_(target)
        return grads if finish is None else (*grads, *finish(room))

    return launch


def _launch_empty(dout, dlse, q, k, v, out, lse, scale, window) -> Grads:
    return torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)


def _target(grad: Tensor) -> Tensor:
    """What the kernels write: the gradient itself, or memory in an order that they can store to."""
    if is_launchable(grad):
        return grad
    return torch.empty_like(grad, memory_format=torch.contiguous_format)


def _kernels(plan: BwdPlan, has_dlse: bool, device: torch.device) -> Callable[..., None]:
    """The launches of a plan, one after the other."""
    from cute_flash.jit.compile import compiled_kernel

    before, main = compiled_kernel(plan.before(has_dlse)), compiled_kernel(plan.main)
    section, num_blocks = plan.section, plan.num_blocks

    after, is_sm90 = compiled_kernel(plan.after), plan.family == "sm90"
    draws_tiles, index = plan.draws_tiles, device.index

    def run(given, workspace, targets, scales, window, terms):
        q, k, v, out, dout, lse, dlse = given
        lse_log2, d, sums, turns = workspace[:4]
        dq, dk, dv = targets
        # Before the first launch: nothing may come between it and the main one, which waits for its end.
        _counter, address = counters.counter(index) if draws_tiles else (None, 0)
        rounded = in_dtype_of(q, dout)
        before(out, dout, lse, lse_log2, d, sums, turns, dlse, None)
        scale, dq_scale = scales
        grid = (section, num_blocks, address) if is_sm90 else (section,)
        more = () if terms is None else (*terms, None)
        main(q, k, v, rounded, lse_log2, d, sums, turns, dk, dv, scale, *window, *grid, *more)
        after(sums, dq, dq_scale, None)

    return run


def _workspace(plan: BwdPlan, device: torch.device) -> Callable[[], tuple[Any, ...]]:
    """Allocates LSE and D (B, H, Sq), sums of dQ (B, H, m_block, elements of a tile), all fp32 and padded to
    whole tiles of queries, and an ordered plan's counters (B, H, m_block), int32; with ALiBi, zeros for the
    parts of the gradients of the slopes, (B, H, tiles of keys times warps), fp32.

    Each by itself: a view of one piece for all costs the host as much as an allocation.
    """
    tile_m, blocks = plan.tile.tile_m, plan.num_m_blocks
    heads = plan.problem.batch, plan.problem.heads
    rows = _compact(*heads, blocks * tile_m)
    tiles = _compact(*heads, blocks, tile_m * plan.tile.head_dim)
    turns = _compact(*heads, blocks) if plan.is_ordered else None
    num_parts = math.prod(plan.slope_sums) if plan.problem.features.alibi else 0

    def allocate():
        return (
            torch.empty_strided(*rows, dtype=torch.float32, device=device),
            torch.empty_strided(*rows, dtype=torch.float32, device=device),
            torch.empty_strided(*tiles, dtype=torch.float32, device=device),
            None if turns is None else torch.empty_strided(*turns, dtype=torch.int32, device=device),
            # Keys that no query sees write none.
            *((torch.zeros(*heads, num_parts, device=device),) if num_parts else ()),
        )

    return allocate


def _compact(*shape: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The shape, and its strides."""
    return shape, tuple(math.prod(shape[i + 1 :]) for i in range(len(shape)))
