"""The forward on CUDA with what a call asks for beyond plain attention: plan, launch, extra arguments.

Plain calls go through `ops.fwd_cuda`, whose host path is short.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from cute_flash import operands, ops
from cute_flash.jit import nvtx as ranges
from cute_flash.operands import MAX_WINDOW, MIN_SCALE, ROW_ALIGN_BYTES, is_launchable, launchable
from cute_flash.planning import plan as planning
from cute_flash.reference import dropout as philox
from cute_flash.runtime import counters
from cute_flash.spec import arch
from cute_flash.spec.args import How
from cute_flash.spec.band import is_narrow
from cute_flash.spec.problem import Problem

# out, LSE, and the largest logit of each head, or nothing.
Outputs = tuple[Tensor, Tensor, Tensor]
# What one call signature needs.
Launch = Callable[[Tensor, Tensor, Tensor, How, tuple], Outputs]
_launches: dict[tuple, Launch] = {}
# The quotient of scale and softcap stays finite. Scores below such a cap are 0 to the softmax.
MIN_SOFTCAP = 1e-30


def fwd_cuda(
    q: Tensor, k: Tensor, v: Tensor, how: How, problem: Problem, given: tuple[Any, ...] = ()
) -> Outputs:
    """`problem` describes the call, and was checked. `given`: see `custom_cuda.Given`."""
    if how.dropout and how.rng is None:
        raise ValueError("dropout needs rng: (seed, offset)")
    signature = (
        q.shape, q.stride(), k.shape, k.stride(), v.shape, v.stride(), q.dtype, q.get_device(),
        how.window_left is None, how.window_right is None, is_narrow(*problem.band.bounds), problem.features,
        problem.mods, planning.requested_family(),
    )  # fmt: skip
    launch = _launches.get(signature)
    if launch is None:
        launch = _prepare(q, k, v, problem)
        operands.remember(_launches, signature, launch)
    return launch(q, k, v, how, given)


def _prepare(q: Tensor, k: Tensor, v: Tensor, problem: Problem) -> Launch:
    """Plan and compile for one call signature."""
    if problem.is_empty:
        return _launch_empty
    dtype = torch.float32 if problem.features.out_dtype else q.dtype
    like_out = ops._out_like(q, v, dtype)
    must_copy_out = not is_launchable(like_out)
    is_packable = all(ops._is_packable(x) or not is_launchable(x) for x in (q, like_out))
    with ranges.marked("plan"):
        plan = planning.plan(problem, arch.detect(q.device.index), is_packable)
    from cute_flash.jit.compile import compiled

    function, arguments, group = compiled(plan), plan.launch_arguments, problem.group
    device, index, packs_heads, draws_tiles = q.device, q.device.index, plan.packs_heads, plan.draws_tiles
    must_copy = not all(map(is_launchable, (q, k, v)))
    heads = problem.batch, problem.heads
    lse_shape = (*heads, problem.seqlen_q)
    lse_stride = (problem.heads * problem.seqlen_q, problem.seqlen_q, 1)
    lse_packed = (problem.batch, problem.heads_kv, group * problem.seqlen_q)

    def launch(q: Tensor, k: Tensor, v: Tensor, how: How, more: tuple[Any, ...] = ()) -> Outputs:
        if operands.current_device() != index:
            with torch.cuda.device(index):
                return launch(q, k, v, how, more)
        out, most = ops._out_like(q, v, dtype), largest(q, how, -math.inf)
        lse = torch.empty_strided(lse_shape, lse_stride, dtype=torch.float32, device=device)
        target = torch.empty_like(out, memory_format=torch.contiguous_format) if must_copy_out else out
        scale = max(abs(how.scale), MIN_SCALE)
        # The kernels take the maximum of the raw scores, which a negative scale would turn into a minimum.
        q = launchable(-q) if how.scale < 0 else q
        if must_copy or (q.data_ptr() | k.data_ptr() | v.data_ptr()) % ROW_ALIGN_BYTES:
            q, k, v = launchable(q), launchable(k), launchable(v)
        outputs = target, lse
        if packs_heads:
            q, outputs = ops._packed(q, group), (ops._packed(target, group), lse.view(lse_packed))
        bounds = (0 if x is None else min(x, MAX_WINDOW) for x in (how.window_left, how.window_right))
        # Held until the launch: a counter of its own may be given to another stream after it.
        counter = counters.counter(index) if draws_tiles else None
        address = () if counter is None else (counter[1],)
        extras = extra_arguments(how, scale, most, heads)
        function(q, k, v, *outputs, scale, *bounds, *arguments, *address, *extras, *more, None)
        if must_copy_out:
            out.copy_(target)
        return out, lse, most

    return launch


def extra_arguments(how: How, scale: float, most: Tensor, heads: tuple[int, int]) -> tuple[Any, ...]:
    """softcap, slopes (B, H), sinks, threshold, 1 / (1 - dropout), rng, the largest logits; None: unasked."""
    softcap = max(how.softcap, MIN_SOFTCAP, MIN_SOFTCAP * scale) if how.softcap else None
    slopes = None if how.alibi is None else how.alibi.float().expand(heads)
    sinks = None if how.sinks is None else how.sinks.float()
    threshold = keep_scale = rng = None
    if how.dropout:
        assert how.rng is not None
        threshold, keep_scale, rng = (
            philox.threshold(how.dropout) * 0x10001,  # in both halves
            1 / (1 - how.dropout),
            how.rng.contiguous(),
        )
    return softcap, slopes, sinks, threshold, keep_scale, rng, most if how.max_logit else None


def largest(q: Tensor, how: How, value: float) -> Tensor:
    """(H), or nothing."""
    dtype = ops.lse_dtype(q.dtype)
    return q.new_full((q.shape[1],), value, dtype=dtype) if how.max_logit else q.new_empty(0, dtype=dtype)


def _launch_empty(q: Tensor, k: Tensor, v: Tensor, how: How, _more: tuple = ()) -> Outputs:
    """No keys, or no rows: rows without keys give 0 and the sink, or -inf."""
    lse = ops._lse_like(q).fill_(-math.inf)
    if how.sinks is not None:
        lse.copy_(how.sinks[:, None].expand_as(lse))
    return ops._out_like(q, v, how.out_dtype(q)).zero_(), lse, largest(q, how, -math.inf)
