"""The CUDA implementation of the operators: plans a call once per signature, and calls the function bound to it.

A signature is the shapes, strides, dtypes and devices of q, k and v, and `AttentionArgs.key`. `forward` and `backward`
look up its bound function. On a miss, the call is described and planned, its kernels are compiled, and
`runtime.binder` generates the function.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from cute_flash.errors import UnsupportedError
from cute_flash.jit import nvtx
from cute_flash.planning.decode import splits_keys
from cute_flash.planning.plan import Buffer, plan_backward, plan_forward
from cute_flash.runtime import binder, decode
from cute_flash.runtime.finalizers import rows_of_sequences, sinks_gradient
from cute_flash.runtime.gpu import bound, current_gpu, remember
from cute_flash.runtime.operands import can_pack_gqa, has_aligned_strides
from cute_flash.spec.args import AttentionArgs
from cute_flash.spec.describe import check_rng, describe
from cute_flash.spec.features import BIAS, BIAS_DTYPES
from cute_flash.spec.problem import Problem
from cute_flash.spec.shapes import outputs

Outputs = tuple[Tensor, Tensor, Tensor | None]
# dq, dk, dv, and the gradients of `AttentionArgs.differentiable`.
Gradients = tuple[Tensor, Tensor, Tensor, tuple[Tensor | None, ...]]

# The largest captured tensor with a gradient: kernels index its elements with 32 bits.
MAX_CAPTURE_ELEMENTS = (1 << 31) - 1


def forward(q: Tensor, k: Tensor, v: Tensor, args: AttentionArgs) -> Outputs:
    """Compute out, lse and max_logit, which is None unless `args.return_max_logit`."""
    signature = (
        q.shape, q.stride(), k.shape, k.stride(), v.shape, v.stride(), q.dtype, k.dtype, v.dtype,
        q.get_device(), k.get_device(), v.get_device(), args.key,
    )  # fmt: skip
    launch = bound.get(signature)
    if launch is None:
        launch = remember(signature, _bind_forward(q, k, v, args))
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


# ---- forward
# ----------------------------------------------------------------------------------------------------------


def _bind_forward(q: Tensor, k: Tensor, v: Tensor, args: AttentionArgs) -> Callable[..., Outputs]:
    check_rng(args)
    problem = describe(q, k, v, args, "cuda")
    if problem.is_empty:
        return _empty_forward
    gpu = current_gpu().arch(q.device.index)
    if not args.kernel_family and splits_keys(problem, gpu):
        return decode.bind_attention(problem, gpu, q.device)
    problem = _with_bias(problem, args)
    out, _lse, _max_logit = outputs(q, v, args)
    can_pack = all(can_pack_gqa(x) or not has_aligned_strides(x) for x in (q, out))
    with nvtx.marked("plan"):
        plan = plan_forward(problem, gpu, args.kernel_family, can_pack)
    return binder.bind_forward(
        plan,
        q.device,
        copies_inputs=not all(map(has_aligned_strides, (q, k, v))),
        copies_output=not has_aligned_strides(out),
    )


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


# ---- bias
# ----------------------------------------------------------------------------------------------------------


def _with_bias(problem: Problem, args: AttentionArgs) -> Problem:
    """Set the fields of `Problem.mods` about loading the bias, which depend on its strides and address."""
    if args.bias is None:
        return problem
    assert BIAS.value is not None
    bias = BIAS.value(args, problem)
    *others, row, last = bias.stride()
    paired = last == 1 and not any(x % 2 for x in (*others, row, bias.shape[3]))
    # TMA needs 16-bit elements and distinct rows that start at multiples of 16 bytes. It changes the tile, and the
    # strides of a bias may differ from batch to batch, so `batch_invariant` disables it.
    starts = (*others, row, bias.data_ptr() // 2)
    tma = bias.element_size() == 2 and last == 1 and row > 0 and not any(x % 8 for x in starts)
    mods = replace(
        problem.mods,
        bias_dtype=str(bias.dtype).removeprefix("torch."),
        bias_paired_loads=paired and bias.data_ptr() % (2 * bias.element_size()) == 0,
        bias_tma=tma and not problem.batch_invariant,
        bias_varies_by_row=row != 0,
    )
    return replace(problem, mods=mods)


# If at most this many scores share an element of the bias, the kernel may store their terms of its gradient.
MAX_TERMS = 4


def _with_dbias(
    problem: Problem, args: AttentionArgs, deterministic: bool, allows_tma: bool = True
) -> tuple[Problem, Buffer | None]:
    """Set the fields of `Problem.mods` about writing the gradient of the bias, and return the buffer for it.

    If the bias does not broadcast, the kernel stores the gradient. If it does, there are two methods:

    - The kernel adds to the gradient by fp32 atomic additions, in no fixed order.
    - The kernel stores all terms, (B, H, Sq, Sk). TMA can store 16-bit terms, and `bwd_sum_dbias` sums them; at most
      MAX_TERMS per sum, so that they take at most twice the memory of fp32 sums. Deterministic gradients have fp32
      terms, which torch sums.

    `allows_tma`: False if the planned kernel does not store the gradient by TMA.
    """
    bias = args.bias
    if bias is None:
        return problem, None
    from cute_flash.score_mod.graph import COLUMN, ROW

    varies = ROW * (bias.shape[2] > 1) | COLUMN * (bias.shape[3] > 1)
    mods = replace(problem.mods, bias_varies=varies)
    if not args.bias_needs_grad:
        return replace(problem, mods=mods), None
    full_shape = (problem.batch, problem.heads, problem.seqlen_q, problem.seqlen_k)
    is_full = tuple(bias.shape) == full_shape
    # TMA stores dS in the dtype of q. dS is the gradient of the bias unless softcap precedes the bias. With a semaphore
    # the kernel has no warp for these stores.
    is_ds = mods.bias_dtype == problem.dtype and "softcap" not in problem.features and not deterministic
    tma = allows_tma and is_ds and mods.bias_tma and problem.seqlen_k % 8 == 0
    tma = tma and math.prod(full_shape) <= MAX_TERMS * bias.numel()
    # Zeros if the kernel skips blocks, because it does not write skipped blocks. If TMA stores the gradient, a producer
    # warp stores zeros in the blocks that a band excludes, or `bwd_sum_dbias` does not read them.
    writes_all = not problem.block_sparse and (tma or not problem.static.is_bounded)
    if is_full or tma:
        dtype = str(bias.dtype) if str(bias.dtype) in BIAS_DTYPES else "float32"
        init = "empty" if writes_all else "zeros"
        buffer = Buffer("dbias", full_shape, dtype.removeprefix("torch."), init)
    else:
        buffer = Buffer("dbias", full_shape if deterministic else tuple(bias.shape), init="zeros")
    accumulates = not (is_full or tma or deterministic)
    # With atomic additions, the kernel is faster if threads load the bias.
    mods = replace(mods, bias_tma=mods.bias_tma and not accumulates)
    mods = replace(
        mods, dbias_dtype=buffer.dtype, dbias_tma=tma, dbias_terms=tma and not is_full, dbias_accumulates=accumulates
    )
    return replace(problem, mods=mods), buffer


# ---- backward
# ----------------------------------------------------------------------------------------------------------


def _bind_backward(
    dout: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, args: AttentionArgs
) -> Callable[..., Gradients]:
    check_rng(args)
    problem = describe(q, k, v, args, "cuda")
    deterministic = args.deterministic or is_mode_deterministic()
    if problem.is_empty:
        return _empty_backward
    described = _with_bias(problem, args)
    problem, dbias = _with_dbias(described, args, deterministic)
    captures = args.captures_needing_grad
    for i in captures:
        if args.captures[i].numel() > MAX_CAPTURE_ELEMENTS:
            raise UnsupportedError(
                f"the gradient of a captured tensor of shape {tuple(args.captures[i].shape)} on cuda: give it at most "
                f"{MAX_CAPTURE_ELEMENTS} elements, or detach it"
            )
    with nvtx.marked("plan"):
        gpu = current_gpu().arch(q.device.index)
        plan = plan_backward(problem, gpu, deterministic, dlse is not None, args.kernel_family)
        if dbias is not None and problem.mods.dbias_tma and not plan.main.static.mods.dbias_tma:
            problem, dbias = _with_dbias(described, args, deterministic, allows_tma=False)
            plan = plan_backward(problem, gpu, deterministic, dlse is not None, args.kernel_family)
    buffers = [] if dbias is None else [dbias]
    if problem.mods is not None and problem.mods.dbias_terms:
        assert dbias is not None and args.bias is not None
        buffers.append(Buffer("dbias_sum", tuple(args.bias.shape), dbias.dtype))
    for i in captures:
        buffers.append(Buffer(f"dcapture_{i}", tuple(args.captures[i].shape) or (1,), init="zeros"))
    if captures and deterministic:
        # Zeros, because the kernel does not write scores of skipped blocks.
        shape = (len(problem.mods.capture_loads), problem.batch, problem.heads, problem.seqlen_q, problem.seqlen_k)
        buffers += [Buffer("terms", shape, init="zeros"), Buffer("elements", shape, "int32", "zeros")]
    return binder.bind_backward(
        replace(plan, workspace=(*plan.workspace, *buffers)),
        q.device,
        copies_inputs=not all(map(has_aligned_strides, (q, k, v, out, dout))),
        copies_gradients=not all(has_aligned_strides(torch.empty_like(x)) for x in (q, k, v)),
        captures=captures,
    )


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
