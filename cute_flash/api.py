"""The call that users make."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from cute_flash import general, ops
from cute_flash.direct import Direct
from cute_flash.planning.plan import bwd_plan, plan
from cute_flash.spec.arch import detect
from cute_flash.spec.args import How, draw_rng
from cute_flash.spec.band import Band
from cute_flash.spec.problem import Support, UnsupportedError, check_window

if TYPE_CHECKING:
    from cute_flash.score_mod.block_mask import BlockMap

LAYOUTS = ("bhsd", "bshd")


def attn(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    window: tuple[int | None, int | None] = (None, None),
    scale: float | None = None,
    return_lse: bool = False,
    layout: str = "bhsd",
    deterministic: bool = False,
    softcap: float | None = None,
    alibi: Tensor | None = None,
    sinks: Tensor | None = None,
    dropout: float | None = None,
    return_max_logit: bool = False,
    out_dtype: torch.dtype | None = None,
    batch_invariant: bool = False,
    bias: Tensor | None = None,
    score_mod: Callable | None = None,
    mask_mod: Callable | None = None,
    score_mod_bwd: Callable | None = None,
    block_map: BlockMap | None = None,
) -> Tensor | tuple[Tensor, ...]:
    """Exact attention: softmax(scale · q kᵀ, masked) v.

    Args:
        q: (B, H, Sq, D), or (B, S, H, D) with `layout="bshd"`; also (B, S, D) and (S, D) for a single head.
        k, v: (B, Hkv, Sk, D) and (B, Hkv, Sk, Dv) likewise. H must be a multiple of Hkv: each K/V head serves
        H / Hkv query heads. Dv is D or any other width; the output has it.
        causal: query i sees keys up to its own position (the same as `window=(…, 0)`). window: (left, right),
        how many keys before and after its own position a query sees; None is unbounded. scale: of the scores
        before the softmax; 1 / sqrt(D) by default. return_lse: return (out, lse), lse being the logarithm of
        the sum of the exponentials of each row. layout: order of the dimensions of 4-D tensors, "bhsd" (as in
        torch SDPA) or "bshd" (as in flash-attn). deterministic: gradients with the same bits every time, also
        asked for by `torch.use_deterministic_algorithms`.

    More than plain attention (docs/semantics.md says exactly what they do):
        softcap: scores become softcap · tanh(score / softcap). alibi: slopes, (H) or (B, H), of a bias
        -slope · |distance| on the scores. sinks: (H), a logit for each head that takes part in the softmax
        and has no value. dropout: the probability that a weight is dropped, by torch's generator.
        return_max_logit: also return the largest score of each head as it enters the softmax, (H), the last
        of the results. alibi and sinks have gradients. out_dtype: torch.float32 for an output that is not
        rounded to the dtype of q, as parts are that `merge` puts together. batch_invariant: a query's result
        has the same bits whatever else is in the call (docs/batch-invariance.md), on CUDA; its gradients are
        `deterministic`.

    Your own attention (docs/mods.md), on the CPU and on CUDA:
        bias: added to the scores, to broadcast with (B, H, Sq, Sk). score_mod(score, b, h, q_idx, kv_idx):
        what becomes of a score; mask_mod(b, h, q_idx, kv_idx): whether it counts, besides the mask below.
        Both are traced, once, as FlexAttention's are; captured tensors and numbers are arguments. bias and
        captured floating-point tensors have gradients. score_mod_bwd(grad, score, b, h, q_idx, kv_idx): the
        gradient of the score, if not the derived one. block_map: which blocks mask_mod leaves, made before.

    Mask: positions are aligned at the end (bottom right): query i sees the keys j with ``i + Sk - Sq - left
    <= j <= i + Sk - Sq + right``. A query that sees no key gives 0, its LSE is -inf and its gradients are
    zero.

    Tensors: fp16 or bf16 with D a multiple of 8 up to 256 on CUDA; fp16, bf16, fp32 or fp64 with any D on the
    CPU, by a slower reference path. Any strides are read in place if the last dimension is contiguous and
    rows start at multiples of 16 bytes; other tensors are copied first. The output has the dimensions and the
    stride order of q.

    Gradients: of out and of lse, on the CPU and on CUDA; on sm_90 by wgmma, else by mma.sync. On CUDA dq is
    summed by atomic additions in no certain order: its bits may change from call to call, unless
    `deterministic`; above D = 128 that is done by mma.sync on sm_90 too, several times slower.

    Returns:
        out, like q; with `return_lse` also lse, fp32 (fp64 for fp64 inputs), natural logarithm, (B, H, Sq)
        for 4-D tensors in either layout, (B, Sq) and (Sq,) for the smaller ones.

    Raises:
        ValueError: arguments that contradict each other. UnsupportedError: what no kernel serves. Both before
        any launch; a gradient that no kernel computes is refused when it is asked for, in `backward()`.
    """
    left, right = _band(causal, window)
    if scale is None:
        scale = _default_scale(q)
    asked = None
    if not (bias is score_mod is mask_mod is score_mod_bwd is block_map is None):
        asked = bias, score_mod, mask_mod, score_mod_bwd, block_map
    more = asked or alibi is not None or sinks is not None or out_dtype is not None
    if more or softcap or dropout or return_max_logit or batch_invariant:
        floats = _wants_floats(q, out_dtype)
        how = _how(
            scale, left, right, deterministic, softcap, alibi, sinks, dropout, return_max_logit, floats
        )  # fmt: skip
        how = _invariant(how) if batch_invariant else how
        found = _general(*_to_bhsd(q, k, v, layout), how, asked)
        return _chosen(
            *_from_bhsd(found[0], found[1], q.dim(), layout), found[2], return_lse, return_max_logit
        )
    if layout == "bhsd" and q.dim() == 4:
        out, lse = _fwd(q, k, v, scale, left, right, deterministic)
        return (out, lse) if return_lse else out
    out, lse = _fwd(*_to_bhsd(q, k, v, layout), scale, left, right, deterministic)
    out, lse = _from_bhsd(out, lse, q.dim(), layout)
    return (out, lse) if return_lse else out


def supports(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    window: tuple[int | None, int | None] = (None, None),
    scale: float | None = None,
    return_lse: bool = False,
    layout: str = "bhsd",
    deterministic: bool = False,
    softcap: float | None = None,
    alibi: Tensor | None = None,
    sinks: Tensor | None = None,
    dropout: float | None = None,
    return_max_logit: bool = False,
    out_dtype: torch.dtype | None = None,
    batch_invariant: bool = False,
    bias: Tensor | None = None,
    score_mod: Callable | None = None,
    mask_mod: Callable | None = None,
    score_mod_bwd: Callable | None = None,
    block_map: BlockMap | None = None,
) -> Support:
    """Whether `attn` takes these arguments: a `Support`, true or false, with the reason; nothing is run.

    It speaks of the forward pass only, but of the gradients too with `deterministic`.
    """
    try:
        left, right = _band(causal, window)
        scale = _default_scale(q) if scale is None else scale
        floats = _wants_floats(q, out_dtype)
        how = _how(
            scale, left, right, deterministic, softcap, alibi, sinks, dropout, return_max_logit, floats
        )  # fmt: skip
        how = _invariant(how) if batch_invariant else how
        tensors = _to_bhsd(q, k, v, layout)
        problem = general.checked_problem(*tensors, how)
        if not (bias is score_mod is mask_mod is score_mod_bwd is block_map is None):
            from cute_flash import custom

            asked = _custom(bias, score_mod, mask_mod, score_mod_bwd, block_map)
            problem = custom.checked_problem(*tensors, how, asked)
        if q.device.type == "cuda":
            plan(problem, detect(q.device.index))
            if deterministic:
                bwd_plan(problem, detect(q.device.index), True)
    except ValueError as error:
        return Support(False, str(error))
    return Support(True)


def _fwd(
    q: Tensor, k: Tensor, v: Tensor, scale: float, left: int | None, right: int | None, deterministic: bool
) -> tuple[Tensor, Tensor]:
    if torch.compiler.is_compiling():
        return ops.fwd(q, k, v, scale, left, right, deterministic)
    wants_grad = torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad)
    if not wants_grad and forward_ad._current_level >= 0:
        _refuse_tangents(q, k, v)
    if ops.is_direct(q, k, v):
        # The dispatcher would only call this, later.
        if wants_grad:
            return Direct.apply(ops, (scale, left, right, deterministic), q, k, v)
        return ops.fwd_cuda(q, k, v, scale, left, right)
    if wants_grad:
        return ops.fwd(q, k, v, scale, left, right, deterministic)
    # Nothing to differentiate: step over the operator's autograd layer.
    with torch._C._AutoDispatchBelowAutograd():
        return ops.fwd(q, k, v, scale, left, right)


def _how(
    scale, left, right, deterministic, softcap, alibi, sinks, dropout, max_logit, float_out=False
) -> How:
    """The rest of a call, without (seed, offset)."""
    for name, x in (("alibi", alibi), ("sinks", sinks)):
        if x is not None and not isinstance(x, Tensor):
            raise ValueError(
                f"{name} is a {type(x).__name__}: give a tensor with a value for each query head"
            )
    cap, drop = softcap or 0.0, dropout or 0.0
    given = scale, left, right, deterministic, cap, alibi, sinks, drop, None, max_logit
    return How(*given, float_out=float_out)


def _wants_floats(q: Tensor, out_dtype: torch.dtype | None) -> bool:
    if out_dtype is None or out_dtype == q.dtype:
        return False
    if out_dtype != torch.float32:
        raise UnsupportedError(f"out_dtype={out_dtype}: use None, torch.float32, or {q.dtype}, that of q")
    return True


def _invariant(how: How) -> How:
    """Sums over queries are those of the same queries, in the same order."""
    return how._replace(batch_invariant=True, deterministic=True)


def _custom(bias, score_mod, mask_mod, score_mod_bwd, block_map) -> Any:
    from cute_flash import custom

    return custom.custom_of(bias, custom.Call.of(score_mod, mask_mod, score_mod_bwd), block_map)


def _general(
    q: Tensor, k: Tensor, v: Tensor, how: How, asked: tuple | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    if how.dropout:
        how = how._replace(rng=draw_rng(q.device))
    if not torch.compiler.is_compiling() and forward_ad._current_level >= 0:
        _refuse_tangents(*(x for x in (q, k, v, how.alibi, how.sinks) if x is not None))
    if asked is not None:
        from cute_flash import custom

        given = _custom(*asked)
        if forward_ad._current_level >= 0:
            _refuse_tangents(*given.tables, *(() if given.bias is None else (given.bias,)))
        if ops.is_direct(q, k, v, *how.tensors, given.bias, *given.tables):
            return _direct(custom, (how, given), q, k, v, how.alibi, how.sinks, given.bias, *given.tables)
        return custom.custom_fwd(q, k, v, *how, *given)
    if ops.is_direct(q, k, v, *how.tensors):
        return _direct(general, (how,), q, k, v, how.alibi, how.sinks)
    return general.general_fwd(q, k, v, *how)


def _direct(module: Any, how: tuple, *tensors: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """What the operator of a module does, which the dispatcher would only call later: see `direct.Direct`."""
    if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors):
        return Direct.apply(module, how, *tensors)
    return module.fwd_cuda(*tensors[:3], *how)


def _chosen(
    out: Tensor, lse: Tensor, max_logit: Tensor, return_lse: bool, return_max_logit: bool
) -> Tensor | tuple[Tensor, ...]:
    wanted = (out, *(lse,) * return_lse, *(max_logit,) * return_max_logit)
    return wanted if len(wanted) > 1 else out


def _refuse_tangents(*inputs: Tensor) -> None:
    """Torch drops forward-mode tangents at an operator without a rule for them: a silent derivative of 0."""
    if any(forward_ad.unpack_dual(x).tangent is not None for x in inputs):
        raise UnsupportedError(
            "forward-mode differentiation of attn: use reverse mode, such as out.backward()"
        )


def _band(causal: bool, window: tuple[int | None, int | None]) -> tuple[int | None, int | None]:
    """The two bounds, checked. Causal lowers the right one to 0."""
    if window == (None, None):
        return None, 0 if causal else None
    check_window(window)
    band = Band.of(causal, window)
    return band.left, band.right


def _default_scale(q: Tensor) -> float:
    return (q.size(-1) or 1) ** -0.5 if q.dim() else 1.0


def _to_bhsd(q: Tensor, k: Tensor, v: Tensor, layout: str) -> tuple[Tensor, Tensor, Tensor]:
    """Views in the order (B, H, S, D)."""
    if layout not in LAYOUTS:
        raise ValueError(f"layout={layout!r}: use one of {', '.join(LAYOUTS)}")
    if not 2 <= q.dim() <= 4 or q.dim() != k.dim() or q.dim() != v.dim():
        shapes = ", ".join(f"{name} {tuple(x.shape)}" for name, x in (("q", q), ("k", k), ("v", v)))
        raise ValueError(f"{shapes}: all three must be 4-D ({layout}), 3-D (B, S, D) or 2-D (S, D)")
    if q.dim() == 4:
        return (q, k, v) if layout == "bhsd" else (q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2))
    if q.dim() == 3:
        return q.unsqueeze(1), k.unsqueeze(1), v.unsqueeze(1)
    return q[None, None], k[None, None], v[None, None]


def _from_bhsd(out: Tensor, lse: Tensor, dim: int, layout: str) -> tuple[Tensor, Tensor]:
    """Views in the order of a call's q."""
    if dim == 4:
        return (out if layout == "bhsd" else out.transpose(1, 2)), lse
    heads = (slice(None), 0) if dim == 3 else (0, 0)
    return out[heads], lse[heads]
