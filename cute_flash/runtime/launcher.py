"""The CUDA implementation of the operators: plans a call once per signature, and calls the function bound to it.

A signature is the shapes, strides, dtypes and devices of q, k and v, `AttentionArgs.key`, and whether autograd records
the call. `forward` and `backward` look up its bound function. On a miss, the call is described and planned, its kernels
are compiled, and `runtime.binder` generates the function.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from cute_flash.jit import nvtx
from cute_flash.planning.plan import Plan, plan_attention, plan_backward
from cute_flash.runtime import binder
from cute_flash.runtime.finalizers import rows_of_sequences, sinks_gradient
from cute_flash.runtime.gpu import bound, current_gpu, remember
from cute_flash.runtime.operands import can_pack_gqa, has_aligned_strides
from cute_flash.runtime.suggest import attn_warmup, suggesting
from cute_flash.spec.arch import ArchSpec
from cute_flash.spec.args import AttentionArgs
from cute_flash.spec.describe import check_rng, describe, refusing_at_forward
from cute_flash.spec.layout import warn_if_swapped
from cute_flash.spec.problem import Problem
from cute_flash.spec.shapes import outputs

Outputs = tuple[Tensor, Tensor, Tensor | None]
# dq, dk, dv, and the gradients of `AttentionArgs.differentiable`.
Gradients = tuple[Tensor, Tensor, Tensor, tuple[Tensor | None, ...]]


def forward(q: Tensor, k: Tensor, v: Tensor, args: AttentionArgs, is_recorded: bool = False) -> Outputs:
    """Compute out, lse and max_logit, which is None unless `args.return_max_logit`.

    `is_recorded`: autograd records the call, so a backward that no kernel computes is refused here.
    """
    signature = (
        q.shape, q.stride(), k.shape, k.stride(), v.shape, v.stride(), q.dtype, k.dtype, v.dtype,
        q.get_device(), k.get_device(), v.get_device(), args.key, is_recorded,
    )  # fmt: skip
    launch = bound.get(signature)
    if launch is None:
        launch = remember(signature, _bind_forward(q, k, v, args, is_recorded))
    return launch(q, k, v, args)


def backward(
    dout: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, args: AttentionArgs
) -> Gradients:
    """Compute dq, dk, dv and the gradients of `args.differentiable`."""
    # The compiled kernels check the shapes and dtypes of dout, out, lse and dlse.
    signature = (
        q.shape, q.stride(), k.shape, k.stride(), v.shape, v.stride(), dout.stride(), out.stride(), q.dtype,
        k.dtype, v.dtype, q.get_device(), k.get_device(), v.get_device(), dlse is None, args.key,
        is_mode_deterministic(),
    )  # fmt: skip
    launch = bound.get(signature)
    if launch is None:
        launch = remember(signature, _bind_backward(dout, dlse, q, k, v, out, args))
    return launch(dout, dlse, q, k, v, out, lse, args)


def is_mode_deterministic() -> bool:
    """Whether `torch.use_deterministic_algorithms` is on, and not with `warn_only`."""
    return torch.are_deterministic_algorithms_enabled() and (not torch.is_deterministic_algorithms_warn_only_enabled())


def _is_deterministic(args: AttentionArgs) -> bool:
    return args.deterministic or is_mode_deterministic()


def check_backward(problem: Problem, gpu: ArchSpec, args: AttentionArgs) -> None:
    """Raise `UnsupportedError` at the forward if no kernel computes the gradients."""
    with refusing_at_forward():
        plan_backward(problem, gpu, _is_deterministic(args), family=args.kernel_family)


# ---- forward
# ----------------------------------------------------------------------------------------------------------


def _bind_forward(q: Tensor, k: Tensor, v: Tensor, args: AttentionArgs, is_recorded: bool) -> Callable[..., Outputs]:
    plan = forward_plan(q, k, v, args, is_recorded)
    if plan is None:
        return _empty_forward
    out, _lse, _max_logit = outputs(q, v, args)
    with suggesting(lambda: attn_warmup(q, k, v, args, has_backward=is_recorded)):
        return binder.bind_forward(
            plan,
            q.device,
            copies_inputs=not all(map(has_aligned_strides, (q, k, v))),
            copies_output=not has_aligned_strides(out),
        )


def forward_plan(
    q: Tensor, k: Tensor, v: Tensor, args: AttentionArgs, is_recorded: bool, gpu: ArchSpec | None = None
) -> Plan | None:
    """Describe and plan a call for a GPU, by default that of q; None if there is nothing to compute.

    No address is read, so the tensors may be fake.
    """
    check_rng(args)
    problem = describe(q, k, v, args, "cuda")
    if not problem.varlen:
        warn_if_swapped(q, k)
    if problem.is_empty:
        return None
    out, _lse, _max_logit = outputs(q, v, args)
    can_pack = all(can_pack_gqa(x) or not has_aligned_strides(x) for x in (q, out))
    with nvtx.marked("plan"):
        gpu = gpu or current_gpu().arch(q.device.index)
        plan = plan_attention(problem, gpu, args.kernel_family, can_pack)
        if is_recorded:
            check_backward(problem, gpu, args)
    return plan


def _empty_forward(q: Tensor, k: Tensor, v: Tensor, args: AttentionArgs) -> Outputs:
    """The forward without keys or without queries: out is 0, and the LSE of a row is its sink or -inf."""
    out, lse, max_logit = outputs(q, v, args)
    out.zero_()
    lse.fill_(-math.inf)
    if args.sinks is not None:
        sinks = args.sinks.to(lse.dtype)[:, None]
        varlen = args.cu_seqlens_q is not None
        lse = torch.where(rows_of_sequences(args, q), sinks, lse) if varlen else lse.copy_(sinks.expand_as(lse))
    return out, lse, None if max_logit is None else max_logit.fill_(-math.inf)


# ---- backward
# ----------------------------------------------------------------------------------------------------------


def _bind_backward(
    dout: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, args: AttentionArgs
) -> Callable[..., Gradients]:
    plan = backward_plan(dlse, q, k, v, args)
    if plan is None:
        return _empty_backward
    with suggesting(lambda: attn_warmup(q, k, v, args, has_backward=True, has_dlse=dlse is not None)):
        return binder.bind_backward(
            plan,
            q.device,
            copies_inputs=not all(map(has_aligned_strides, (q, k, v, out, dout))),
            copies_gradients=not all(has_aligned_strides(torch.empty_like(x)) for x in (q, k, v)),
        )


def backward_plan(
    dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, args: AttentionArgs, gpu: ArchSpec | None = None
) -> Plan | None:
    """`forward_plan` for the gradients of a call."""
    check_rng(args)
    problem = describe(q, k, v, args, "cuda")
    if problem.is_empty:
        return None
    with nvtx.marked("plan"):
        gpu = gpu or current_gpu().arch(q.device.index)
        return plan_backward(problem, gpu, _is_deterministic(args), dlse is not None, args.kernel_family)


def _empty_backward(
    dout: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, args: AttentionArgs
) -> Gradients:
    """The backward without keys or without queries: all gradients are 0, except that of the sinks through the LSE."""
    grads = [None if x is None else torch.zeros_like(x) for x in args.differentiable]
    if args.sinks is not None:
        grads[1] = sinks_gradient(args, describe(q, k, v, args, "cuda"), lse, None, dlse, 1)
    needs = args.needs_grad or (False,) * (1 + len(args.captures))
    for i, needed in enumerate(needs):
        grads[2 + i] = grads[2 + i] if needed else None
    return torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v), tuple(grads)
