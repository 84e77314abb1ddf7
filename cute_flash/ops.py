"""The torch operators: `cute_flash::fwd` and `cute_flash::bwd`, with CPU, CUDA and fake kernels and autograd.

Both take (B, H, S, D) tensors of any strides, the softmax scale, and the two bounds of the band (None:
unbounded):

    fwd(q, k, v, scale, window_left, window_right, deterministic=False) -> (out, lse)
    bwd(dout, dlse, q, k, v, out, lse, scale, window_left, window_right, deterministic=False) -> (dq, dk, dv)

`deterministic` asks for gradients with the same bits every time; the forward has them anyway.

`out` has q's strides (dense, in q's order); `lse` is fp32 (fp64 for fp64 inputs), natural log, (B, H, Sq).
They are defined through `torch.library.Library`: `custom_op` would cost more host time than a whole call may.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from cute_flash import operands
from cute_flash.backward import bwd_cuda
from cute_flash.jit import nvtx as ranges
from cute_flash.operands import (
    MAX_ROW_STRIDE,
    MAX_WINDOW,
    MIN_SCALE,
    ROW_ALIGN_BYTES,
    is_launchable,
    launchable,
    problem_of,
)
from cute_flash.planning import plan as planning
from cute_flash.runtime import counters
from cute_flash.spec import arch
from cute_flash.spec.band import Band, is_narrow
from cute_flash.spec.problem import check_window

# Bound once: each look-up through torch._C costs as much as the call.
_dispatch_modes = torch._C._len_torch_dispatch_stack
_function_modes = torch._C._len_torch_function_stack
_transform = torch._C._functorch.peek_interpreter_stack
_profiling = torch._C._autograd._profiler_enabled
_tracing = torch._C._get_tracing_state
# Tensors with no dispatch of their own.
_PLAIN_TYPES = frozenset((Tensor, torch.nn.Parameter))

LIBRARY = torch.library.Library("cute_flash", "DEF")
LIBRARY.define(
    "fwd(Tensor q, Tensor k, Tensor v, float scale, SymInt? window_left, SymInt? window_right, "
    "bool deterministic=False) -> (Tensor, Tensor)",
    tags=(torch.Tag.pt2_compliant_tag,),
)
LIBRARY.define(
    "bwd(Tensor dout, Tensor? dlse, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, "
    "float scale, SymInt? window_left, SymInt? window_right, bool deterministic=False) "
    "-> (Tensor, Tensor, Tensor)",
    tags=(torch.Tag.pt2_compliant_tag,),
)


def check_scale(scale: float) -> None:
    if not math.isfinite(scale):
        raise ValueError(f"scale={scale} is not finite")


def _out_like(q: Tensor, v: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """(B, H, Sq, Dv), dense, in the order of q's strides; in the dtype of q by default."""
    dtype = q.dtype if dtype is None else dtype
    if q.shape[3] == v.shape[3]:
        return torch.empty_like(q, dtype=dtype)
    # A tensor like q tells the order; the last dimension changes its size in it.
    like_q = torch.empty_like(q).stride()
    order = sorted(range(4), key=lambda i: like_q[i], reverse=True)
    out = torch.empty([(*q.shape[:3], v.shape[3])[i] for i in order], dtype=dtype, device=q.device)
    return out.permute([order.index(i) for i in range(4)])


def lse_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _lse_like(q: Tensor) -> Tensor:
    return torch.empty(q.shape[:3], dtype=lse_dtype(q.dtype), device=q.device)


# ---- forward
# ---------------------------------------------------------------------------------------------------------


def _fwd_fake(q, k, v, scale, left, right, deterministic=False) -> Any:
    problem_of(q, k, v, (left, right)).check("cpu" if q.device.type in ("cpu", "meta") else "cuda")
    return _out_like(q, v), _lse_like(q)


def _fwd_cpu(q, k, v, scale, left, right, deterministic=False) -> Any:
    problem = problem_of(q, k, v, (left, right))
    problem.check("cpu")
    check_scale(scale)
    from cute_flash.reference import tiled as reference

    out, lse = reference.forward(q, k, v, problem.band, scale)
    return _out_like(q, v).copy_(out), lse


# What one call signature needs: (q, k, v, scale, window_left, window_right) -> (out, lse).
Launch = Callable[[Tensor, Tensor, Tensor, float, int, int], tuple[Tensor, Tensor]]
_launches: dict[tuple, Launch] = {}


def fwd_cuda(q, k, v, scale, left, right, deterministic=False) -> Any:
    """The CUDA kernel of `cute_flash::fwd`."""
    # Everything that decides the launch but the addresses and the values of the window: a hit needs no
    # further check.
    signature = (
        q.shape, q.stride(), k.shape, k.stride(), v.shape, v.stride(), q.dtype, k.dtype, v.dtype,
        q.get_device(), k.get_device(), v.get_device(), left is None, right is None, is_narrow(left, right),
        planning.chosen_family(),
    )  # fmt: skip
    launch = _launches.get(signature)
    if launch is None:
        launch = _prepare(q, k, v, (left, right))
        operands.remember(_launches, signature, launch)
    window_left = 0 if left is None else min(left, MAX_WINDOW)
    window_right = 0 if right is None else min(right, MAX_WINDOW)
    if not (MIN_SCALE <= scale < math.inf) or window_left < 0 or window_right < 0:
        check_scale(scale)
        check_window((left, right))
        # The kernels take the maximum of the raw scores, which a negative scale would turn into a minimum.
        q, scale = (-q if scale < 0 else q), max(abs(scale), MIN_SCALE)
    return launch(q, k, v, scale, window_left, window_right)


def _prepare(q: Tensor, k: Tensor, v: Tensor, window: tuple[int | None, int | None]) -> Launch:
    """Check, plan and compile for one call signature."""
    problem = problem_of(q, k, v, window)
    problem.check("cuda")
    if problem.is_empty:
        return _launch_empty
    # One to look at: on the meta device the first would import much of torch.
    like_out = _out_like(q, v)
    # A dense output in q's order has launchable strides unless D comes late in that order.
    must_copy = not all(map(is_launchable, (q, k, v)))
    must_copy_out = not is_launchable(like_out)
    is_packable = all(_is_packable(x) or not is_launchable(x) for x in (q, like_out))
    with ranges.marked("plan"):
        plan = planning.plan(problem, arch.detect(q.device.index), is_packable)
    from cute_flash.jit.compile import compiled

    function, arguments = compiled(plan), plan.launch_arguments
    device, index = q.device, q.device.index
    draws_tiles, packs_heads, group = plan.draws_tiles, plan.packs_heads, problem.group
    has_other_width = problem.head_dim_v is not None
    # Plain tuples: slicing a torch.Size costs as much as the allocation.
    lse_shape = (problem.batch, problem.heads, problem.seqlen_q)
    lse_stride = (problem.heads * problem.seqlen_q, problem.seqlen_q, 1)
    lse_packed = (problem.batch, problem.heads_kv, group * problem.seqlen_q)

    def launch(q, k, v, scale, window_left, window_right):
        if operands.current_device() != index:
            with torch.cuda.device(index):
                return launch(q, k, v, scale, window_left, window_right)
        out = _out_like(q, v) if has_other_width else torch.empty_like(q)
        lse = torch.empty_strided(lse_shape, lse_stride, dtype=torch.float32, device=device)
        if must_copy or (q.data_ptr() | k.data_ptr() | v.data_ptr()) % ROW_ALIGN_BYTES:
            q, k, v = (launchable(tensor) for tensor in (q, k, v))
        target = torch.empty_like(out, memory_format=torch.contiguous_format) if must_copy_out else out
        outputs = target, lse
        if packs_heads:
            q, outputs = _packed(q, group), (_packed(target, group), lse.view(lse_packed))
        if draws_tiles:
            _counter, address = counters.counter(index)
            function(q, k, v, *outputs, scale, window_left, window_right, *arguments, address)
        else:
            function(q, k, v, *outputs, scale, window_left, window_right, *arguments)
        if must_copy_out:
            out.copy_(target)
        return out, lse

    if ranges.LAUNCH_RANGES:

        def marked_launch(*args):
            with ranges.marked("launch"):
                return launch(*args)

        return marked_launch
    return launch


def _launch_empty(q, k, v, scale, window_left, window_right):
    """No keys, or no rows: rows without keys give 0 and -inf."""
    out, lse = _out_like(q, v), _lse_like(q)
    return out.zero_(), lse.fill_(-math.inf)


def _is_packable(tensor: Tensor) -> bool:
    """Whether the rows of neighbouring heads follow each other at the stride of rows."""
    if tensor.shape[2] == 1:
        return tensor.stride(1) < MAX_ROW_STRIDE
    return tensor.stride(1) == tensor.shape[2] * tensor.stride(2)


def _packed(tensor: Tensor, group: int) -> Tensor:
    """(B, H, S, D) as (B, H / group, group S, D)."""
    batch, heads, seqlen, width = tensor.shape
    row_stride = tensor.stride(2) if seqlen > 1 else tensor.stride(1)
    shape = (batch, heads // group, group * seqlen, width)
    return tensor.as_strided(shape, (tensor.stride(0), group * tensor.stride(1), row_stride, 1))


# ---- backward
# --------------------------------------------------------------------------------------------------------


def _bwd_fake(dout, dlse, q, k, v, out, lse, scale, left, right, deterministic=False) -> Any:
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


def _bwd_cpu(dout, dlse, q, k, v, out, lse, scale, left, right, deterministic=False) -> Any:
    from cute_flash.reference import tiled as reference

    grads = reference.backward(dout, q, k, v, out, lse, Band(left, right), scale, dlse)
    return tuple(torch.empty_like(x).copy_(grad) for x, grad in zip((q, k, v), grads, strict=True))


def keep(ctx, output, q, k, v, *how) -> None:
    """What `gradients` needs."""
    ctx.how = how
    # Gradients on a GPU are computed in threads of autograd's, which do not see it.
    ctx.family = planning.chosen_family()
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(q, k, v, *output)


def gradients(ctx, dout: Tensor | None, dlse: Tensor | None) -> Any:
    """Of q, k and v."""
    q, k, v, out, lse = ctx.saved_tensors
    if dout is None and dlse is None:
        return None, None, None
    dout = torch.zeros_like(out) if dout is None else dout
    with in_family(ctx.family):
        backward = bwd_cuda if is_last_and_direct(dout, dlse, q, k, v, out, lse) else bwd
        return backward(dout, dlse, q, k, v, out, lse, *ctx.how)


def in_family(family: str | None) -> contextlib.AbstractContextManager[None]:
    """Of kernels: that of the forward."""
    return contextlib.nullcontext() if family is None else planning.use_kernels(family)


def _setup_context(ctx, inputs, output) -> None:
    keep(ctx, output, *inputs)


def _autograd(ctx, dout: Tensor | None, dlse: Tensor | None) -> Any:
    return *gradients(ctx, dout, dlse), None, None, None, None


LIBRARY.impl("fwd", _fwd_cpu, "CPU")
LIBRARY.impl("fwd", fwd_cuda, "CUDA")
LIBRARY.impl("bwd", _bwd_cpu, "CPU")
LIBRARY.impl("bwd", bwd_cuda, "CUDA")
torch.library.register_fake("cute_flash::fwd", _fwd_fake, lib=LIBRARY)
torch.library.register_fake("cute_flash::bwd", _bwd_fake, lib=LIBRARY)
torch.library.register_autograd("cute_flash::fwd", _autograd, setup_context=_setup_context, lib=LIBRARY)

fwd = torch.ops.cute_flash.fwd.default
bwd = torch.ops.cute_flash.bwd.default


def is_watched() -> bool:
    """Whether something would see the operator pass: a mode, a transform, a profiler, torch.jit.trace."""
    return bool(
        _dispatch_modes()
        or _function_modes()
        or _transform() is not None
        or _profiling()
        or _tracing() is not None
    )


def is_direct(*tensors: Tensor | None) -> bool:
    """Whether a call of these is on CUDA, with nobody listening and nothing to unwrap, or to negate, before
    it is read: the dispatcher would only call what it calls, later. The first one is not None.
    """
    if torch.compiler.is_compiling() or is_watched():
        return False
    for x in tensors:
        if x is not None and (type(x) not in _PLAIN_TYPES or x.is_neg()):
            return False
    return tensors[0].is_cuda  # type: ignore[union-attr]


def is_last_and_direct(dout: Tensor, dlse: Tensor | None, *tensors: Tensor | None) -> bool:
    """Of gradients. Where they are to be differentiated again, autograd is to see an operator; zeros without
    memory, which autograd may make, get some from the dispatcher.
    """
    if torch.is_grad_enabled() or not is_direct(dout, dlse, *tensors):
        return False
    return not (dout._is_zerotensor() or (dlse is not None and dlse._is_zerotensor()))
