"""The public functions. They turn keywords into one `AttentionArgs`, and tensors into (B, H, S, D) or (T, H, D)."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, lru_cache
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Literal, overload

import torch
from torch import Tensor

from cute_flash import ops
from cute_flash.errors import UnsupportedError
from cute_flash.runtime.rng import draw_seed, next_seed
from cute_flash.spec.arch import by_name
from cute_flash.spec.args import AttentionArgs, needs_grad
from cute_flash.spec.describe import describe, refusing_at_forward
from cute_flash.spec.family import current_family, requested_family
from cute_flash.spec.foreign import bind_keywords, refuse_foreign, refuse_unknown, without_foreign
from cute_flash.spec.problem import Support
from cute_flash.spec.values import as_bool, as_chunk, as_float, as_int, as_window, check_are_tensors

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask as TorchBlockMask
    from typing_extensions import Unpack

    from cute_flash.score_mod.block_mask import BlockMask
    from cute_flash.spec.keywords import AttnKeywords, VarlenKeywords

LAYOUTS = ("bhsd", "bshd")
UNBOUNDED = (None, None)
_is_dynamo_compiling = torch.compiler.is_dynamo_compiling


# fmt: off
@overload
def attn(
    q: Tensor, k: Tensor, v: Tensor, *,
    return_lse: Literal[False] = ..., return_max_logit: Literal[False] = ..., **keywords: Unpack[AttnKeywords],
) -> Tensor: ...
@overload
def attn(
    q: Tensor, k: Tensor, v: Tensor, *,
    return_lse: Literal[True], return_max_logit: Literal[False] = ..., **keywords: Unpack[AttnKeywords],
) -> tuple[Tensor, Tensor]: ...
@overload
def attn(
    q: Tensor, k: Tensor, v: Tensor, *,
    return_lse: Literal[False] = ..., return_max_logit: Literal[True], **keywords: Unpack[AttnKeywords],
) -> tuple[Tensor, Tensor]: ...
@overload
def attn(
    q: Tensor, k: Tensor, v: Tensor, *,
    return_lse: Literal[True], return_max_logit: Literal[True], **keywords: Unpack[AttnKeywords],
) -> tuple[Tensor, Tensor, Tensor]: ...
@overload
def attn(
    q: Tensor, k: Tensor, v: Tensor, *,
    return_lse: bool = ..., return_max_logit: bool = ..., **keywords: Unpack[AttnKeywords],
) -> Tensor | tuple[Tensor, ...]: ...
# fmt: on
@without_foreign
def attn(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *extra: Any,
    causal: bool = False,
    window: tuple[int | None, int | None] = UNBOUNDED,
    attention_chunk: int | None = None,
    scale: float | None = None,
    return_lse: bool = False,
    layout: Literal["bhsd", "bshd"] = "bhsd",
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
    block_mask: BlockMask | TorchBlockMask | None = None,
    **foreign: Any,
) -> Tensor | tuple[Tensor, ...]:
    """Exact attention: softmax(scale · q kᵀ, masked) v.

    Scores are computed in this order: scale, softcap, alibi, bias, score_mod, mask (causal, window, attention_chunk,
    mask_mod), sinks, softmax, dropout. docs/semantics.md defines each step.

    The mask aligns the last query with the last key (bottom right): query i sees the keys j with
    ``i + Sk - Sq - left <= j <= i + Sk - Sq + right``. A query that sees no key has output 0 and gradient 0. Its LSE is
    -inf or, with `sinks`, the sink of its head.

    On CUDA, q, k and v are fp16, bf16 or fp32; D and Dv are multiples of 8 up to 512, or up to 128 for fp32. The
    forward on Hopper takes D up to 576. fp32 calls have fp32 accuracy (docs/numerics.md), use mma.sync on every GPU,
    and have no backward pass with a score_mod. On the CPU, q, k and v are fp16, bf16, fp32 or fp64 with any D and Dv,
    and a slower reference path computes the result. Under autocast, q, k and v are cast to the autocast dtype. Kernels
    read tensors in place if the last dimension is contiguous and rows start at multiples of 16 bytes; other tensors are
    copied first. Jagged NestedTensors are passed on to `attn_nested`.

    Gradients flow through out and lse. On CUDA, dq is accumulated by atomic additions in no fixed order, so its bits
    may differ between calls unless `deterministic` is set. On sm_90, gradients of fp16 and bf16 calls use wgmma, except
    in two cases, which use the slower mma.sync: mods with many operations (docs/mods.md), and deterministic gradients
    of tensors that score_mod captures.

    Args:
        q: Queries, (B, H, Sq, D), or (B, Sq, H, D) with `layout="bshd"`; (B, Sq, D) or (Sq, D) for a single head.
        k: Keys, (B, Hkv, Sk, D), in the layout and dtype of q. H must be a multiple of Hkv: H / Hkv query heads share
            a K/V head (GQA, MQA).
        v: Values, (B, Hkv, Sk, Dv), in the layout and dtype of q. Dv may differ from D.
        causal: Mask the keys after the query's own position; the same as a right bound of 0.
        window: (left, right), the number of keys before and after its own position that a query sees; None: unbounded.
        attention_chunk: The keys are divided into chunks of this many keys, and a query sees only keys of the chunk of
            its own position (Llama 4). `causal` and `window` apply too. None or 0: no chunks.
        scale: Factor of q kᵀ; 1 / sqrt(D) by default. Not differentiable.
        return_lse: Also return the log-sum-exp of each row.
        layout: Order of the dimensions of 4-D tensors: "bhsd" as in torch's SDPA, or "bshd" as in flash-attn. 3-D
            tensors are (B, S, D) with either; give (1, S, H, D) for (S, H, D).
        deterministic: Compute bitwise reproducible gradients; `torch.use_deterministic_algorithms(True)` implies it.
        softcap: Replace a score by softcap · tanh(score / softcap); None or 0: no cap.
        alibi: Slopes, (H) or (B, H), of any floating-point dtype; slope · |distance| is subtracted from a score.
            Differentiable.
        sinks: Attention sinks, (H), of any floating-point dtype: one more logit, without a value, in each row's
            softmax. Differentiable.
        dropout: Probability, in [0, 1), that an attention weight is dropped; None or 0: no dropout. The seed comes from
            torch's generator of the device.
        return_max_logit: Also return the largest score of each head before the softmax.
        out_dtype: torch.float32 returns the output unrounded, for `merge`; None: the dtype of q.
        batch_invariant: On CUDA, the bits of a query's result do not depend on the rest of the batch
            (docs/determinism.md). Implies `deterministic`.
        bias: Added to the scores; broadcasts with (B, H, Sq, Sk); any floating-point dtype. Differentiable.
        score_mod: A function score_mod(score, b, h, q_idx, kv_idx) that returns the new score (docs/mods.md). It is
            traced once. Tensors and numbers that it captures are kernel arguments; captured floating-point tensors are
            differentiable.
        mask_mod: A function mask_mod(b, h, q_idx, kv_idx) that returns whether query q_idx sees key kv_idx. `causal`,
            `window` and `attention_chunk` apply too.
        score_mod_bwd: A function score_mod_bwd(grad, score, b, h, q_idx, kv_idx) that returns the gradient of the score
            and replaces the derivative of score_mod.
        block_mask: A `BlockMask`, or a `torch.nn.attention.flex_attention.BlockMask`. Its empty blocks are skipped, and
            its mask_mod and window are applied, so leave mask_mod out.

    Returns:
        `out`, or a tuple of `out` and the requested results, in the order (out, lse, max_logit).
            `out` has the dimensions and stride order of q, with head dim Dv. `lse` is the natural logarithm, fp32 (fp64
            for fp64 inputs), (B, H, Sq) for 4-D tensors in either layout, (B, Sq) or (Sq) for a single head.
            `max_logit` is (H), in the dtype of `lse`.

    Raises:
        ValueError: Arguments are invalid or contradict each other.
        UnsupportedError: No kernel supports the arguments, or computes the gradients if a tensor requires one. It is
            raised before any launch.
        TraceError: A mod cannot be compiled into a kernel.

    Examples:
        >>> import torch, cute_flash
        >>> q = torch.randn(2, 8, 16, 32, requires_grad=True)
        >>> k, v = torch.randn(2, 2, 16, 32), torch.randn(2, 2, 16, 32)
        >>> out, lse = cute_flash.attn(q, k, v, causal=True, return_lse=True)
        >>> out.shape, lse.shape
        (torch.Size([2, 8, 16, 32]), torch.Size([2, 8, 16]))
        >>> out.sum().backward()

        >>> distance_penalty = lambda score, b, h, q_idx, kv_idx: score - 0.1 * (q_idx - kv_idx).abs()
        >>> out = cute_flash.attn(q, k, v, score_mod=distance_penalty)
    """
    if extra or foreign:
        refuse_foreign("attn", extra, foreign)
    if not (isinstance(q, Tensor) and isinstance(k, Tensor) and isinstance(v, Tensor)):
        check_are_tensors(q=q, k=k, v=v)
    if q.is_nested:
        _refuse_for_nested(bias=bias, block_mask=block_mask)
        _check_nested_layout(q, layout)
        return attn_nested(
            q, k, v, causal=causal, window=window, attention_chunk=attention_chunk, scale=scale, return_lse=return_lse,
            deterministic=deterministic, softcap=softcap, alibi=alibi, sinks=sinks, dropout=dropout,
            return_max_logit=return_max_logit, out_dtype=out_dtype, batch_invariant=batch_invariant,
            score_mod=score_mod, mask_mod=mask_mod, score_mod_bwd=score_mod_bwd,
        )  # fmt: skip
    if type(return_lse) is not bool:
        return_lse = as_bool("return_lse", return_lse)
    args = _args(
        q, causal, window, attention_chunk, scale, deterministic, softcap, return_max_logit, out_dtype, batch_invariant
    )
    if alibi is not None or sinks is not None or dropout is not None:
        args = _with_features(args, q, alibi, sinks, dropout)
    if not (bias is score_mod is mask_mod is score_mod_bwd is block_mask is None):
        if bias is not None:
            bias = _checked_bias(bias, q, k, layout)
        args = _with_mods(args, q, bias, score_mod, mask_mod, score_mod_bwd, block_mask)
    if layout == "bhsd" and q.dim() == 4:
        out, lse, max_logit = ops.attention(q, k, v, args, return_lse)
    else:
        out, lse, max_logit = ops.attention(*_to_bhsd(q, k, v, layout), args, return_lse)
        out, lse = _from_bhsd(out, lse, q.dim(), layout)
    if return_max_logit:
        return (out, lse, max_logit) if return_lse else (out, max_logit)  # type: ignore[return-value]
    return (out, lse) if return_lse else out


def supports(q: Tensor, k: Tensor, v: Tensor, *, gpu: str | None = None, **keywords: Any) -> Support:
    """Check whether `attn` supports these tensors and keywords. No attention kernel is launched.

    The answer covers the forward pass and, if a tensor requires a gradient or with `deterministic`, the backward pass.

    Args:
        q: Queries, as for `attn`.
        k: Keys, as for `attn`.
        v: Values, as for `attn`.
        gpu: Answer for tensors on this GPU, which need not be there: "H100", "RTX 5090", "sm_90". None: answer for the
            device of q.
        **keywords: Keywords of `attn`.

    Returns:
        A `Support`, which is true if the call is supported, and whose `reason` is the error message if not.

    Examples:
        >>> import torch, cute_flash
        >>> x = torch.empty(1, 4, 16, 64)
        >>> bool(cute_flash.supports(x, x, x, causal=True))
        True
        >>> cute_flash.supports(x, x, x, dropout=1.5).reason
        'dropout=1.5: use a probability from 0 up to, not including, 1'
        >>> x = torch.empty(1, 4, 16, 512)
        >>> bool(cute_flash.supports(x, x, x)), bool(cute_flash.supports(x, x, x, gpu="H100"))
        (True, False)
    """
    try:
        named = None if gpu is None else by_name(str(gpu))
        values = SimpleNamespace(**bind_keywords(attn, q, k, v, **keywords).arguments)
        check_are_tensors(q=q, k=k, v=v)
        as_bool("return_lse", values.return_lse)
        if q.is_nested:
            raise UnsupportedError("q is a NestedTensor: supports() takes dense tensors; pass the longest sequence")
        args = _args(
            q, values.causal, values.window, values.attention_chunk, values.scale, values.deterministic,
            values.softcap, values.return_max_logit, values.out_dtype, values.batch_invariant,
        )  # fmt: skip
        args = _with_features(args, q, values.alibi, values.sinks, values.dropout, draws_seed=False)
        bias = None if values.bias is None else _checked_bias(values.bias, q, k, values.layout)
        mods = (values.score_mod, values.mask_mod, values.score_mod_bwd)
        args = _with_mods(args, q, bias, *mods, values.block_mask)
        device = "cuda" if named is not None or q.is_cuda else q.device.type
        Q, K, V = ops.autocast(*_to_bhsd(q, k, v, values.layout), device)
        problem = describe(Q, K, V, args, "cuda" if device == "cuda" else "")
        if device == "cuda" and not problem.is_empty:
            from cute_flash.planning.plan import plan_attention
            from cute_flash.runtime.gpu import current_gpu
            from cute_flash.runtime.launcher import check_backward

            arch = named or current_gpu().arch(q.device.index)
            plan_attention(problem, arch, args.kernel_family)
            if args.deterministic or ops.is_recorded(q, k, v, args):
                check_backward(problem, arch, args)
        elif device != "cuda" and ops.is_recorded(q, k, v, args):
            with refusing_at_forward():
                problem.check_gradients("cpu")
    except (ValueError, TypeError) as error:
        return Support(False, str(error))
    return Support(True)


# fmt: off
@overload
def attn_varlen(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, *,
    return_lse: Literal[False] = ..., return_max_logit: Literal[False] = ..., **keywords: Unpack[VarlenKeywords],
) -> Tensor: ...
@overload
def attn_varlen(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, *,
    return_lse: Literal[True], return_max_logit: Literal[False] = ..., **keywords: Unpack[VarlenKeywords],
) -> tuple[Tensor, Tensor]: ...
@overload
def attn_varlen(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, *,
    return_lse: Literal[False] = ..., return_max_logit: Literal[True], **keywords: Unpack[VarlenKeywords],
) -> tuple[Tensor, Tensor]: ...
@overload
def attn_varlen(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, *,
    return_lse: Literal[True], return_max_logit: Literal[True], **keywords: Unpack[VarlenKeywords],
) -> tuple[Tensor, Tensor, Tensor]: ...
@overload
def attn_varlen(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, *,
    return_lse: bool = ..., return_max_logit: bool = ..., **keywords: Unpack[VarlenKeywords],
) -> Tensor | tuple[Tensor, ...]: ...
# fmt: on
@without_foreign
def attn_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    *extra: Any,
    max_seqlen_q: int | Tensor | None = None,
    max_seqlen_k: int | Tensor | None = None,
    seqused_k: Tensor | None = None,
    causal: bool = False,
    window: tuple[int | None, int | None] = UNBOUNDED,
    attention_chunk: int | None = None,
    scale: float | None = None,
    return_lse: bool = False,
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
    **foreign: Any,
) -> Tensor | tuple[Tensor, ...]:
    """`attn` on a varlen batch: sequences of different lengths, concatenated along the first dimension.

    Every sequence is computed separately: masks and positions are relative to the sequence. score_mod and mask_mod get
    the index of the sequence as b, and positions within the sequence as q_idx and kv_idx.

    On CUDA, only kernels read the lengths. The host does not synchronize, new lengths need no compilation, and a CUDA
    graph uses the offsets that the tensors hold when it is replayed. Wrong offsets give wrong results, but no access
    outside of the tensors; `use_checks` finds them.

    Args:
        q: Queries of all sequences, (Tq, H, D); dtypes and head dims as for `attn`.
        k: Keys of all sequences, (Tk, Hkv, D). H must be a multiple of Hkv.
        v: Values of all sequences, (Tk, Hkv, Dv).
        cu_seqlens_q: (B + 1), int32, on the device of q: cumulative lengths, starting with 0. Lengths may be 0. Tokens
            after the last offset are padding, with output 0, LSE -inf and gradients 0.
        cu_seqlens_k: The same for the keys.
        max_seqlen_q: An upper bound of the lengths, accepted for compatibility with flash-attn. CUDA kernels do not
            need it. The CPU path raises `ValueError` for a number that is too small. A tensor is never read.
        max_seqlen_k: The same for the keys.
        seqused_k: (B), int32: only the first seqused_k[b] keys of sequence b are used, and the mask is aligned to
            their end.
        causal: As for `attn`.
        window: As for `attn`.
        attention_chunk: As for `attn`. Chunks of a sequence begin at its first key.
        scale: As for `attn`.
        return_lse: Also return the log-sum-exp of each row.
        deterministic: As for `attn`.
        softcap: As for `attn`.
        alibi: Slopes, (H), or (B, H) with a row for each sequence.
        sinks: As for `attn`.
        dropout: As for `attn`.
        return_max_logit: Also return the largest score of each head before the softmax.
        out_dtype: As for `attn`.
        batch_invariant: As for `attn`.
        bias: Broadcasts with (B, H, max_seqlen_q, max_seqlen_k): bias[b, h, i, j] is added to the score of query i and
            key j of sequence b. Give max_seqlen_q and max_seqlen_k as numbers if its last two sizes are not 1.
            Differentiable. Not with score_mod_bwd.
        score_mod: As for `attn`.
        mask_mod: As for `attn`.
        score_mod_bwd: As for `attn`.

    Returns:
        `out`, or a tuple of `out` and the requested results, in the order (out, lse, max_logit).
            `out` is (Tq, H, Dv), `lse` is (H, Tq), `max_logit` is (H).

    Raises:
        ValueError: Arguments are invalid. The values of offsets and lengths are checked on the CPU only.
        UnsupportedError: No kernel supports the arguments.
        TraceError: A mod cannot be compiled into a kernel.

    Examples:
        >>> import torch, cute_flash
        >>> q, k, v = (torch.randn(10, 4, 32) for _ in range(3))
        >>> cu_seqlens = torch.tensor([0, 3, 10], dtype=torch.int32)  # two sequences, of 3 and 7 tokens
        >>> cute_flash.attn_varlen(q, k, v, cu_seqlens, cu_seqlens, causal=True).shape
        torch.Size([10, 4, 32])
    """
    if extra or foreign:
        refuse_foreign("attn_varlen", extra, foreign)
    if type(return_lse) is not bool:
        return_lse = as_bool("return_lse", return_lse)
    if not (isinstance(q, Tensor) and isinstance(k, Tensor) and isinstance(v, Tensor)):
        check_are_tensors(q=q, k=k, v=v)
    if not (isinstance(cu_seqlens_q, Tensor) and isinstance(cu_seqlens_k, Tensor)):
        check_are_tensors(cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k)
    if seqused_k is not None:
        check_are_tensors(seqused_k=seqused_k)
    args = _args(
        q, causal, window, attention_chunk, scale, deterministic, softcap, return_max_logit, out_dtype, batch_invariant
    )._replace(
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_k=cu_seqlens_k,
        seqused_k=seqused_k,
        max_seqlen_q=_max_seqlen("max_seqlen_q", max_seqlen_q),
        max_seqlen_k=_max_seqlen("max_seqlen_k", max_seqlen_k),
    )
    if alibi is not None or sinks is not None or dropout is not None:
        args = _with_features(args, q, alibi, sinks, dropout)
    if bias is not None:
        if score_mod_bwd is not None:
            raise UnsupportedError("bias with score_mod_bwd in attn_varlen: add the bias inside of your score_mod")
        sizes = cu_seqlens_q.shape[0] - 1, q.shape[1]
        score_mod, bias = _with_bias(score_mod, bias, sizes, max_seqlen_q, max_seqlen_k)
    # Three comparisons with None: Dynamo cannot compare two functions that were defined inside the compiled function.
    if score_mod is not None or mask_mod is not None or score_mod_bwd is not None:
        args = _with_mods(args, q, None, score_mod, mask_mod, score_mod_bwd, None)
    if bias is not None and not any([x is bias for x in args.captures]):
        # score_mod ignores the score, so the graph has no bias. An empty sum gives the bias a gradient of 0.
        q = q + bias[:0].sum()
    out, lse, max_logit = ops.attention(q, k, v, args)
    results = (out, *((lse,) if return_lse else ()), *((max_logit,) if return_max_logit else ()))
    return results if len(results) > 1 else out


# fmt: off
@overload
def attn_nested(
    q: Any, k: Any, v: Any, *,
    return_lse: Literal[False] = ..., return_max_logit: Literal[False] = ..., **keywords: Unpack[VarlenKeywords],
) -> Tensor: ...
@overload
def attn_nested(
    q: Any, k: Any, v: Any, *,
    return_lse: Literal[True], return_max_logit: Literal[False] = ..., **keywords: Unpack[VarlenKeywords],
) -> tuple[Tensor, Tensor]: ...
@overload
def attn_nested(
    q: Any, k: Any, v: Any, *,
    return_lse: Literal[False] = ..., return_max_logit: Literal[True], **keywords: Unpack[VarlenKeywords],
) -> tuple[Tensor, Tensor]: ...
@overload
def attn_nested(
    q: Any, k: Any, v: Any, *,
    return_lse: Literal[True], return_max_logit: Literal[True], **keywords: Unpack[VarlenKeywords],
) -> tuple[Tensor, Tensor, Tensor]: ...
@overload
def attn_nested(
    q: Any, k: Any, v: Any, *,
    return_lse: bool = ..., return_max_logit: bool = ..., **keywords: Unpack[VarlenKeywords],
) -> Tensor | tuple[Tensor, ...]: ...
# fmt: on
def attn_nested(q: Any, k: Any, v: Any, **keywords: Any) -> Tensor | tuple[Tensor, ...]:
    """`attn_varlen` on NestedTensors with `layout=torch.jagged`.

    Args:
        q: Queries, (B, H, j, D) as in torch's SDPA, or (B, j, H, D), where j is the ragged dimension.
        k: Keys, with the dimension order of q.
        v: Values, with the lengths of k.
        **keywords: Keywords of `attn_varlen`.

    Returns:
        `out`, or a tuple of `out` and the requested results, in the order (out, lse, max_logit).
            `out` and `lse` are NestedTensors with the lengths and the dimension order of q; `lse` is (B, H, j) or
            (B, j, H). `max_logit` is a dense (H).

    Raises:
        ValueError: A tensor is not a jagged 4-D NestedTensor, or the tensors do not fit each other.
        UnsupportedError: A tensor has holes between its sequences, or no kernel supports the arguments.

    Examples:
        >>> import torch, cute_flash
        >>> tokens = [torch.randn(3, 4, 32), torch.randn(7, 4, 32)]
        >>> x = torch.nested.nested_tensor(tokens, layout=torch.jagged)  # (B, j, H, D)
        >>> [len(sequence) for sequence in cute_flash.attn_nested(x, x, x, causal=True).unbind()]
        [3, 7]
    """
    refuse_unknown("attn_nested", keywords)
    check_are_tensors(q=q, k=k, v=v)
    ragged = _ragged_dim(q, "q")
    for name, x in (("k", k), ("v", v)):
        if _ragged_dim(x, name) != ragged:
            raise ValueError(f"{name} and q have different ragged dimensions: transpose one of them")
    if k.offsets() is not v.offsets() and not torch.equal(k.offsets(), v.offsets()):
        raise ValueError("k and v have sequences of different lengths: give v the offsets of k")
    Q, K, V = (x.transpose(1, 2) if ragged == 2 else x for x in (q, k, v))
    offsets = q.offsets()
    returns_lse = as_bool("return_lse", keywords.pop("return_lse", False))
    out, lse, *max_logit = attn_varlen(
        Q.values(), K.values(), V.values(), offsets.int(), k.offsets().int(), return_lse=True, **keywords
    )
    jagged = (torch.nested.nested_tensor_from_jagged(x, offsets) for x in (out, lse.transpose(0, 1)))
    out, lse = (x.transpose(1, 2) if ragged == 2 else x for x in jagged)
    results = (out, *((lse,) if returns_lse else ()), *max_logit)
    return results if len(results) > 1 else out


def _refuse_for_nested(**arguments: Any) -> None:
    for name, value in arguments.items():
        if value is not None:
            remedy = (
                "call attn_nested with max_seqlen_q and max_seqlen_k"
                if name == "bias"
                else "use score_mod and mask_mod"
            )
            raise UnsupportedError(f"{name} with NestedTensors: {remedy}")


def _check_nested_layout(q: Tensor, layout: str) -> None:
    """Raise `ValueError` for a layout that does not exist, or that contradicts a NestedTensor."""
    if layout not in LAYOUTS:
        raise ValueError(f"layout={layout!r}: use one of {', '.join(LAYOUTS)}")
    if layout == "bshd" and _ragged_dim(q, "q") == 2:
        raise ValueError("layout='bshd' with a NestedTensor (B, H, j, D): leave layout out; it follows from the tensor")


def _ragged_dim(x: Any, name: str) -> int:
    """Check a NestedTensor and return its ragged dimension, 1 or 2."""
    if not x.is_nested or x.layout != torch.jagged or x.dim() != 4:
        raise ValueError(f"{name}: expected a NestedTensor with layout=torch.jagged of four dimensions")
    if x.lengths() is not None:
        raise UnsupportedError(f"{name} has holes between its sequences: call contiguous() on it")
    ragged = [dim for dim, size in enumerate(x.shape) if not isinstance(size, int)]
    if ragged not in ([1], [2]):
        raise ValueError(f"{name} is ragged in the dimensions {ragged}: expected (B, H, j, D) or (B, j, H, D)")
    return ragged[0]


# ---- from keywords to AttentionArgs
# ----------------------------------------------------------------------------------------------------------


def _args(
    q: Tensor,
    causal: Any,
    window: Any,
    attention_chunk: Any,
    scale: Any,
    deterministic: Any,
    softcap: Any,
    return_max_logit: Any,
    out_dtype: torch.dtype | None,
    batch_invariant: Any,
) -> AttentionArgs:
    """Build the `AttentionArgs` of the arguments that are not tensors. Equal values share one cached object."""
    if scale is None:
        scale = (q.shape[-1] or 1) ** -0.5 if q.dim() else 1.0
    elif type(scale) is not float:
        scale = as_float("scale", scale)
    if softcap is not None and type(softcap) is not float:
        softcap = as_float("softcap", softcap)
    if type(causal) is not bool:
        causal = as_bool("causal", causal)
    # Dynamo of torch 2.9 does not compare tuples by identity.
    left, right = as_window(window) if _is_dynamo_compiling() or window is not UNBOUNDED else UNBOUNDED
    values = (
        scale,
        left,
        0 if causal else right,
        None if attention_chunk is None else as_chunk(attention_chunk),
        as_bool("deterministic", deterministic),
        softcap,
        as_bool("return_max_logit", return_max_logit),
        out_dtype is not None and _is_fp32_output(q, out_dtype),
        as_bool("batch_invariant", batch_invariant),
    )
    if _is_dynamo_compiling():
        return _cached_args.__wrapped__(*values, requested_family())
    return _cached_args(*values, current_family())


def _max_seqlen(name: str, value: Any) -> int | None:
    """An upper bound of lengths. A tensor becomes None: reading it could synchronize with the GPU."""
    return None if value is None or isinstance(value, Tensor) else as_int(name, value)


@lru_cache(maxsize=1024)
def _cached_args(
    scale: float,
    left: int | None,
    right: int | None,
    attention_chunk: int | None,
    deterministic: bool,
    softcap: float | None,
    return_max_logit: bool,
    out_fp32: bool,
    batch_invariant: bool,
    family: str,
) -> AttentionArgs:
    return AttentionArgs(
        scale=scale,
        window_left=left,
        window_right=right,
        attention_chunk=attention_chunk,
        softcap=softcap or 0.0,
        # Explicit, because Dynamo would make the default of a field an input of the graph.
        dropout=0.0,
        return_max_logit=return_max_logit,
        out_fp32=out_fp32,
        # A batch-invariant gradient sums over queries in a fixed order.
        deterministic=deterministic or batch_invariant,
        batch_invariant=batch_invariant,
        kernel_family=family,
    )


def _with_features(
    args: AttentionArgs,
    q: Tensor,
    alibi: Tensor | None,
    sinks: Tensor | None,
    dropout: float | None,
    draws_seed: bool = True,
) -> AttentionArgs:
    if alibi is not None and not isinstance(alibi, Tensor):
        _refuse_per_head("alibi", alibi)
    if sinks is not None and not isinstance(sinks, Tensor):
        _refuse_per_head("sinks", sinks)
    if dropout is not None and type(dropout) is not float:
        dropout = as_float("dropout", dropout)
    rng = _seed(q) if dropout and draws_seed else None
    return args.with_features(alibi, sinks, dropout or 0.0, rng)


def _refuse_per_head(name: str, value: Any) -> None:
    raise ValueError(f"{name} is a {type(value).__name__}: give a tensor with a value for each query head")


def _seed(q: Tensor) -> Tensor:
    """The seed of a call with dropout. Modes and compilers must see a random operation, so they get `draw_seed`."""
    index = -1 if _is_dynamo_compiling() or type(q) not in ops.PLAIN_TYPES else q.get_device()
    return draw_seed(q.device) if index < 0 or ops.is_observed() else next_seed(index)


def _with_mods(
    args: AttentionArgs,
    q: Tensor,
    bias: Any,
    score_mod: Callable | None,
    mask_mod: Callable | None,
    score_mod_bwd: Callable | None,
    block_mask: Any,
) -> AttentionArgs:
    BlockMask, mod_arguments = _mod_parts.__wrapped__() if _is_dynamo_compiling() else _mod_parts()
    if block_mask is not None:
        if not isinstance(block_mask, BlockMask):
            block_mask, mask_mod = _from_torch_block_mask(block_mask, mask_mod)
        mask_mod = block_mask.mask_for(mask_mod)
        left, right = block_mask.window
        args = args._replace(
            block_mask=block_mask.tensors,
            block_mask_sizes=block_mask.sizes,
            window_left=_tighter_bound(args.window_left, left),
            window_right=_tighter_bound(args.window_right, right),
        )
    text, captures, scalars = mod_arguments(score_mod, mask_mod, score_mod_bwd, q.device)
    flags = needs_grad(bias, captures) if torch.is_grad_enabled() else ()
    return args.with_mods(bias, text, captures, scalars, flags)


def _from_torch_block_mask(block_mask: Any, mask_mod: Callable | None) -> tuple[BlockMask, Callable | None]:
    """Convert FlexAttention's block mask to a `BlockMask` and a mask_mod.

    Its class is recognised by name, without importing FlexAttention.
    """
    kinds = [f"{kind.__module__}.{kind.__name__}" for kind in type(block_mask).__mro__]
    if "torch.nn.attention.flex_attention.BlockMask" not in kinds:
        raise ValueError(
            f"block_mask is a {kinds[0]}: make one with cute_flash.BlockMask.of(mask_mod, (B, H, Sq, Sk)), "
            "or with torch's create_block_mask"
        )
    from cute_flash.score_mod.torch_block_mask import convert

    return convert(block_mask, mask_mod)


def _tighter_bound(a: int | None, b: int | None) -> int | None:
    """The tighter of two bounds of a window."""
    return a if b is None else b if a is None else min(a, b)


@cache
def _mod_parts() -> tuple[Any, Any]:
    """`BlockMask` and `mod_arguments`, imported at the first call with mods."""
    from cute_flash.score_mod.block_mask import BlockMask
    from cute_flash.score_mod.bound import mod_arguments

    return BlockMask, mod_arguments


def _checked_bias(bias: Any, q: Tensor, k: Tensor, layout: str) -> Tensor:
    """Check the bias and return it with four dimensions."""
    bias = _checked_bias_type(bias, "(B, H, Sq, Sk)")
    if bias.dim() == 4:
        return bias  # `describe` compares its shape with (B, H, Sq, Sk)
    sizes = _score_shape(q, k, layout)
    if bias.dim() > 4 or any(x not in (1, size) for x, size in zip(reversed(bias.shape), reversed(sizes))):
        raise ValueError(f"bias has shape {tuple(bias.shape)}: it does not broadcast with (B, H, Sq, Sk) = {sizes}")
    return bias.reshape((1,) * (4 - bias.dim()) + tuple(bias.shape))


def _checked_bias_type(bias: Any, sizes: str) -> Tensor:
    """Check that the bias is a tensor of numbers."""
    if not isinstance(bias, Tensor):
        raise ValueError(f"bias is a {type(bias).__name__}: give a tensor, to broadcast with {sizes}")
    if bias.dtype == torch.bool:
        raise ValueError(
            "bias is torch.bool: pass a mask as mask_mod, such as lambda b, h, q_idx, kv_idx: mask[q_idx, kv_idx]"
        )
    return bias


def _with_bias(
    score_mod: Callable | None, bias: Any, sizes: tuple[int, int], *max_seqlens: Any
) -> tuple[Callable, Tensor]:
    """The score_mod that adds the bias of a varlen batch and then calls the user's score_mod, and its captured values.

    Dimensions in which the bias has size 1 are not indexed.
    """
    if score_mod is not None and not callable(score_mod):
        return score_mod, bias  # `score_mod.trace.bind` raises the error for a score_mod that is not a function
    bias = _checked_bias_type(bias, "(B, H, max_seqlen_q, max_seqlen_k)")
    if bias.dim() > 4 or not bias.is_floating_point():
        raise ValueError(
            f"bias is {bias.dtype} of shape {tuple(bias.shape)}: give a floating-point tensor of at most 4 dimensions"
        )
    bias = bias.reshape((1,) * (4 - bias.dim()) + tuple(bias.shape))
    for size, expected in zip(bias.shape[:2], sizes):
        if size not in (1, expected):
            raise ValueError(
                f"bias has shape {tuple(bias.shape)}: it does not broadcast "
                f"with {sizes[0]} sequences and {sizes[1]} heads"
            )
    for name, size, bound in zip(("max_seqlen_q", "max_seqlen_k"), bias.shape[2:], max_seqlens):
        bound = _max_seqlen(name, bound)
        if size != 1 and (bound is None or bound > size):
            raise ValueError(f"bias of shape {tuple(bias.shape)} with {name}={bound}: give a {name} of at most {size}")
    used = [size != 1 for size in bias.shape]
    table = bias.reshape([size for size in bias.shape if size != 1] or [1])

    def biased(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        index = tuple([x for x, is_used in zip((b, h, q_idx, kv_idx), used) if is_used])
        score = score + table[index or 0]
        return score if score_mod is None else score_mod(score, b, h, q_idx, kv_idx)

    if score_mod is not None and not _is_dynamo_compiling():
        # Trace errors name the line where the user's function is defined.
        biased.__wrapped__ = score_mod  # type: ignore[attr-defined]
    return biased, table


def _score_shape(q: Tensor, k: Tensor, layout: str) -> tuple[int, int, int, int]:
    """(B, H, Sq, Sk) of tensors in the caller's layout."""
    Q, K, _ = _to_bhsd(q, k, k, layout)
    return Q.shape[0], Q.shape[1], Q.shape[2], K.shape[2]


def _is_fp32_output(q: Tensor, out_dtype: torch.dtype) -> bool:
    """Whether the output is fp32 and q, after autocast, is not."""
    dtype = ops.autocast_dtype(q, q.device.type)
    if out_dtype == dtype:
        return False
    if out_dtype != torch.float32:
        is_fp32 = dtype == torch.float32
        choices = "None or torch.float32" if is_fp32 else f"None, torch.float32, or {dtype}, the dtype of q"
        raise UnsupportedError(f"out_dtype={out_dtype}: use {choices}")
    return True


# ---- tensors
# ----------------------------------------------------------------------------------------------------------


def _to_bhsd(q: Tensor, k: Tensor, v: Tensor, layout: str) -> tuple[Tensor, Tensor, Tensor]:
    """Views of q, k and v as (B, H, S, D)."""
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


def _from_bhsd(out: Tensor, lse: Any, dim: int, layout: str) -> tuple[Tensor, Any]:
    """Views of out and lse with the dimensions and layout of the caller's q."""
    if dim == 4:
        return (out if layout == "bhsd" else out.transpose(1, 2)), lse
    heads = (slice(None), 0) if dim == 3 else (0, 0)
    return out[heads], None if lse is None else lse[heads]
