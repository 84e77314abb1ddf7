"""The torch operators for all that a call may ask for beyond q, k, v and a band.

    general_fwd(q, k, v, *How) -> (out, lse, max_logit)
    general_bwd(dout, dlse, q, k, v, out, lse, *How) -> (dq, dk, dv, dalibi, dsinks)

`How` lists the arguments in the order of the schema. Tensors are as those of `cute_flash::fwd`, (B, H, S, D);
with offsets of sequences, `cu_seqlens_q` and `cu_seqlens_k`, they are packed: (T, H, D), the LSE (H, T).
What was not asked for comes back empty. Plain attention has operators of its own (`ops.py`), whose host path
is short.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from cute_flash import operands, ops
from cute_flash.planning import plan as planning
from cute_flash.spec.args import SCHEMA, How
from cute_flash.spec.problem import (
    CPU_DTYPES,
    PLAIN,
    Problem,
    UnsupportedError,
    check_dropout,
    check_softcap,
)

ops.LIBRARY.define(
    f"general_fwd(Tensor q, Tensor k, Tensor v, {SCHEMA}) -> (Tensor, Tensor, Tensor)",
    tags=(torch.Tag.pt2_compliant_tag,),
)
ops.LIBRARY.define(
    f"general_bwd(Tensor dout, Tensor? dlse, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, {SCHEMA}) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    tags=(torch.Tag.pt2_compliant_tag,),
)


# ---- checks
# ----------------------------------------------------------------------------------------------------------


def checked_problem(q: Tensor, k: Tensor, v: Tensor, how: How) -> Problem:
    """Describe a call and refuse what contradicts itself, or what the device has no kernel for."""
    window = how.window_left, how.window_right
    if how.cu_seqlens_q is None:
        problem = operands.problem_of(q, k, v, window)
    else:
        from cute_flash.reference import varlen as packed

        problem = packed.problem_of(q, k, v, how)
    problem = replace(problem, features=how.features)
    ops.check_scale(how.scale)
    _check_numbers(how)
    if how.rng is not None and how.rng.device != q.device:
        raise ValueError(f"rng is on {how.rng.device} and q is on {q.device}: they must agree")
    _check_per_head("alibi", how.alibi, q, [(problem.heads,), (problem.batch, problem.heads)])
    _check_per_head("sinks", how.sinks, q, [(problem.heads,)])
    device = "cpu" if q.device.type in ("cpu", "meta") else "cuda"
    problem.check(device)
    if device == "cuda":
        check_softcap(how.softcap)
        check_dropout(how.dropout)
    return problem


# Problems of calls that were checked, by all that checks ask about.
_checked: dict[tuple, Problem] = {}


def known_problem(q: Tensor, k: Tensor, v: Tensor, how: How) -> Problem:
    """`checked_problem`, looked up where it is known: the host's part of a call is short."""
    key = how.described, *map(operands.described, (q, k, v))
    found = _checked.get(key)
    if found is None:
        found = checked_problem(q, k, v, how)
        operands.remember(_checked, key, found)
    return found


def _check_numbers(how: How) -> None:
    if not 0 <= how.softcap < math.inf:
        raise ValueError(f"softcap={how.softcap}: use a positive number, or None for no cap")
    if not 0 <= how.dropout < 1:
        raise ValueError(f"dropout={how.dropout}: use a probability from 0 up to, not including, 1")
    if how.rng is not None and (how.rng.dtype != torch.int64 or how.rng.shape != (2,)):
        raise ValueError(f"rng is {how.rng.dtype} of shape {tuple(how.rng.shape)}: expected int64, (2)")


def _check_per_head(name: str, x: Tensor | None, q: Tensor, shapes: list[tuple[int, ...]]) -> None:
    if x is None:
        return
    if tuple(x.shape) not in shapes:
        choices = " or ".join(map(str, shapes))
        raise ValueError(f"{name} has shape {tuple(x.shape)}: expected {choices}, by query head")
    if x.device != q.device:
        raise ValueError(f"{name} is on {x.device} and q is on {q.device}: they must agree")
    if str(x.dtype).removeprefix("torch.") not in CPU_DTYPES:
        raise UnsupportedError(f"{name} is {x.dtype}: use one of {', '.join(CPU_DTYPES)}")


# ---- forward
# ---------------------------------------------------------------------------------------------------------


def _max_logit(q: Tensor, how: How, value: float | None = None) -> Tensor:
    """(H), or nothing."""
    shape = (q.shape[1] if how.max_logit else 0,)
    dtype = ops.lse_dtype(q.dtype)
    if value is None:
        return q.new_empty(shape, dtype=dtype)
    return q.new_full(shape, value, dtype=dtype)


def _fwd_fake(q, k, v, *how) -> Any:
    asked = How(*how)
    checked_problem(q, k, v, asked)
    if asked.cu_seqlens_q is None:
        return ops._out_like(q, v, asked.out_dtype(q)), ops._lse_like(q), _max_logit(q, asked)
    from cute_flash.reference import varlen as packed

    return *packed.outputs(q, v, asked), _max_logit(q, asked)


def _fwd_cpu(q, k, v, *how) -> Any:
    asked = How(*how)
    problem = checked_problem(q, k, v, asked)
    if asked.dropout and asked.rng is None:
        raise ValueError("dropout needs rng: (seed, offset)")
    from cute_flash.reference import tiled as reference
    from cute_flash.reference import varlen as packed

    most = _max_logit(q, asked, -torch.inf)
    if asked.cu_seqlens_q is not None:
        return *packed.forward(q, k, v, asked, most if asked.max_logit else None), most
    score, dtype = asked.score(problem.batch, problem.heads), asked.out_dtype(q)
    raised = most if asked.max_logit else None
    out, lse = reference.forward(q, k, v, problem.band, asked.scale, score, raised, dtype)
    return ops._out_like(q, v, dtype).copy_(out), lse, most


def _fwd_cuda(q, k, v, *how) -> Any:
    return fwd_cuda(q, k, v, How(*how))


def fwd_cuda(q: Tensor, k: Tensor, v: Tensor, how: How) -> Any:
    """What the operator does on CUDA, without the dispatcher."""
    problem = known_problem(q, k, v, how)
    if problem.features == PLAIN:
        return *ops.fwd_cuda(q, k, v, *how[:4]), _max_logit(q, how)
    if problem.features.varlen:
        from cute_flash import packed_cuda

        return packed_cuda.forward(q, k, v, how, problem)
    from cute_flash import forward

    return forward.fwd_cuda(q, k, v, how, problem)


# ---- backward
# --------------------------------------------------------------------------------------------------------


def _like(x: Tensor | None, q: Tensor) -> Tensor:
    return q.new_empty(0) if x is None else torch.empty_like(x)


def _bwd_fake(dout, dlse, q, k, v, out, lse, *how) -> Any:
    asked = How(*how)
    return *map(torch.empty_like, (q, k, v)), _like(asked.alibi, q), _like(asked.sinks, q)


def _bwd_cpu(dout, dlse, q, k, v, out, lse, *how) -> Any:
    from cute_flash.reference import tiled as reference
    from cute_flash.reference import varlen as packed

    asked = How(*how)
    if asked.cu_seqlens_q is not None:
        *grads, dalibi, dsinks = packed.backward((dout, dlse), q, k, v, out, lse, asked)
    else:
        score = asked.score(q.shape[0], q.shape[1])
        *grads, dalibi, dsinks = reference.backward_with(
            score, (dout, dlse), q, k, v, out, lse, asked.band, asked.scale
        )
    found = (torch.empty_like(x).copy_(grad) for x, grad in zip((q, k, v), grads, strict=True))
    return *found, *filled(_per_head(asked, dalibi, dsinks), q)


def _per_head(asked: How, dalibi: Tensor | None, dsinks: Tensor | None) -> tuple[Tensor | None, ...]:
    """From gradients (B, H), or of shared slopes (1, H), and (H) to those of the call's slopes and sinks."""
    if asked.alibi is not None and asked.alibi.dim() == 1:
        assert dalibi is not None
        dalibi = dalibi[0] if len(dalibi) == 1 else dalibi.sum(dim=0)
    given = (asked.alibi, dalibi), (asked.sinks, dsinks)
    return tuple(None if x is None or grad is None else as_that_of(x, grad) for x, grad in given)


def as_that_of(x: Tensor, grad: Tensor) -> Tensor:
    """A gradient that was made for x, in its dtype and in the order of its strides."""
    if x.dtype == grad.dtype and x.is_contiguous() and grad.is_contiguous():
        return grad
    return torch.empty_like(x).copy_(grad)


def _bwd_cuda(dout, dlse, q, k, v, out, lse, *how) -> Any:
    return filled(bwd_cuda(dout, dlse, q, k, v, out, lse, How(*how)), q)


def filled(found: Sequence[Tensor | None], q: Tensor) -> list[Tensor]:
    """As an operator returns them: empty where there is none."""
    return [_like(None, q) if x is None else x for x in found]


def bwd_cuda(dout, dlse, q, k, v, out, lse, how: How) -> tuple[Tensor | None, ...]:
    """What the operator does on CUDA, without the dispatcher; None: there is none."""
    problem = known_problem(q, k, v, how)
    if problem.features.varlen:
        from cute_flash import packed_cuda

        *grads, dalibi, dsinks = packed_cuda.backward((dout, dlse), q, k, v, out, lse, how, problem)
        return *grads, *_per_head(how, dalibi, dsinks)
    if problem.features.has_plain_gradients:
        return *ops.bwd_cuda(dout, dlse, q, k, v, out, lse, *how[:4]), None, None
    from cute_flash import backward_general

    *grads, dalibi, dsinks = backward_general.bwd_cuda(dout, dlse, q, k, v, out, lse, how, problem)
    return *grads, *_per_head(how, dalibi, dsinks)


def keep(ctx, output, q: Tensor, k: Tensor, v: Tensor, how: How) -> None:
    """What `gradients` needs."""
    out, lse, max_logit = output
    ctx.mark_non_differentiable(max_logit)
    # Gradients on a GPU are computed in threads of autograd's, which do not see it.
    ctx.family = planning.chosen_family()
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(q, k, v, out, lse, *how.tensors)
    ctx.how = how.without_tensors


def gradients(ctx, dout: Tensor | None, dlse: Tensor | None, _max_logit: None) -> Any:
    """Of q, k, v, slopes and sinks; None: there is none."""
    q, k, v, out, lse, *tensors = ctx.saved_tensors
    if dout is None and dlse is None:
        return (None,) * 5
    dout = torch.zeros_like(out) if dout is None else dout
    how = ctx.how.with_tensors(tensors)
    with ops.in_family(ctx.family):
        if ops.is_last_and_direct(dout, dlse, q, k, v, out, lse, *tensors):
            found = bwd_cuda(dout, dlse, q, k, v, out, lse, how)
        else:
            found = general_bwd(dout, dlse, q, k, v, out, lse, *how)
    dq, dk, dv, dalibi, dsinks = found
    return dq, dk, dv, None if how.alibi is None else dalibi, None if how.sinks is None else dsinks


def in_order_of_how(dalibi: Tensor | None, dsinks: Tensor | None) -> tuple[Tensor | None, ...]:
    by_name = {"alibi": dalibi, "sinks": dsinks}
    return tuple(by_name.get(name) for name in How._fields)


def _setup_context(ctx, inputs, output) -> None:
    q, k, v, *how = inputs
    keep(ctx, output, q, k, v, How(*how))


def _autograd(ctx, dout: Tensor | None, dlse: Tensor | None, _max_logit: None) -> Any:
    *grads, dalibi, dsinks = gradients(ctx, dout, dlse, None)
    return *grads, *in_order_of_how(dalibi, dsinks)


ops.LIBRARY.impl("general_fwd", _fwd_cpu, "CPU")
ops.LIBRARY.impl("general_fwd", _fwd_cuda, "CUDA")
ops.LIBRARY.impl("general_bwd", _bwd_cpu, "CPU")
ops.LIBRARY.impl("general_bwd", _bwd_cuda, "CUDA")
torch.library.register_fake("cute_flash::general_fwd", _fwd_fake, lib=ops.LIBRARY)
torch.library.register_fake("cute_flash::general_bwd", _bwd_fake, lib=ops.LIBRARY)
torch.library.register_autograd(
    "cute_flash::general_fwd", _autograd, setup_context=_setup_context, lib=ops.LIBRARY
)

general_fwd = torch.ops.cute_flash.general_fwd.default
general_bwd = torch.ops.cute_flash.general_bwd.default
