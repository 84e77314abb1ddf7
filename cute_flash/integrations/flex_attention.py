"""`flex_attention` with the signature of `torch.nn.attention.flex_attention.flex_attention`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Literal, overload

from torch import Tensor

from cute_flash.api import attn
from cute_flash.errors import UnsupportedError
from cute_flash.spec.values import as_bool, check_are_tensors

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import AuxOutput, AuxRequest
    from torch.nn.attention.flex_attention import BlockMask as TorchBlockMask

    from cute_flash.score_mod.block_mask import BlockMask

    AnyBlockMask = TorchBlockMask | BlockMask

# Options that tune torch's Triton kernels and do not change the result, beyond rounding.
TUNING_HINTS = frozenset({
    "BLOCKS_ARE_CONTIGUOUS", "BLOCK_M", "BLOCK_M1", "BLOCK_M2", "BLOCK_N", "BLOCK_N1", "BLOCK_N2",
    "FORCE_USE_FLEX_ATTENTION", "PRESCALE_QK", "ROWS_GUARANTEED_SAFE", "USE_TMA", "WRITE_DQ", "kpack",
    "matrix_instr_nonkdim", "num_stages", "num_warps", "waves_per_eu",
})  # fmt: skip


# fmt: off
@overload
def flex_attention(
    query: Tensor, key: Tensor, value: Tensor, score_mod: Callable | None = ..., block_mask: AnyBlockMask | None = ...,
    scale: float | None = ..., enable_gqa: bool = ..., return_lse: Literal[False] = ...,
    kernel_options: Mapping[str, Any] | None = ..., *, return_aux: None = ...,
) -> Tensor: ...
@overload
def flex_attention(
    query: Tensor, key: Tensor, value: Tensor, score_mod: Callable | None = ..., block_mask: AnyBlockMask | None = ...,
    scale: float | None = ..., enable_gqa: bool = ..., *, return_lse: Literal[True],
    kernel_options: Mapping[str, Any] | None = ..., return_aux: None = ...,
) -> tuple[Tensor, Tensor]: ...
@overload
def flex_attention(
    query: Tensor, key: Tensor, value: Tensor, score_mod: Callable | None = ..., block_mask: AnyBlockMask | None = ...,
    scale: float | None = ..., enable_gqa: bool = ..., return_lse: Literal[False] = ...,
    kernel_options: Mapping[str, Any] | None = ..., *, return_aux: AuxRequest,
) -> tuple[Tensor, AuxOutput]: ...
# fmt: on
def flex_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: Callable | None = None,
    block_mask: TorchBlockMask | BlockMask | None = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    kernel_options: Mapping[str, Any] | None = None,
    *,
    return_aux: AuxRequest | None = None,
) -> Tensor | tuple[Tensor, Tensor] | tuple[Tensor, AuxOutput]:
    """`attn` with the signature of torch's `flex_attention`. It needs no `torch.compile`, and works inside of it.

    torch's score_mods and mask_mods work unchanged. docs/integrations/flex-attention.md lists the differences.

    Args:
        query: (B, H, Sq, D).
        key: (B, Hkv, Sk, D); with a block_mask also (1, Hkv, Sk, D), shared by the batch.
        value: (B, Hkv, Sk, Dv), with the batch of key.
        score_mod: A function score_mod(score, b, h, q_idx, kv_idx) that returns the new score.
        block_mask: The result of torch's `create_block_mask` or of `BlockMask.of`.
        scale: Factor of q kᵀ; 1 / sqrt(D) by default.
        enable_gqa: Allow H to be a multiple of Hkv.
        return_lse: Also return the log-sum-exp of each row.
        kernel_options: Tuning hints for torch's kernels, which have no effect here. Options that choose a backend, and
            unknown options, raise an error.
        return_aux: torch's `AuxRequest`; only `lse` can be requested.

    Returns:
        `out`, (B, H, Sq, Dv); with `return_lse`, (out, lse); with `return_aux`, (out, AuxOutput).
            `lse` is the natural logarithm, (B, H, Sq), fp32 (fp64 for fp64 inputs), and differentiable.

    Raises:
        ValueError: Arguments are invalid or contradict each other.
        UnsupportedError: `return_aux` requests max_scores, an option chooses a backend, or no kernel supports the
            arguments.
        TraceError: A mod cannot be compiled into a kernel.

    Examples:
        >>> import torch
        >>> from torch.nn.attention.flex_attention import create_block_mask
        >>> from cute_flash import flex_attention
        >>> q, k, v = (torch.randn(1, 4, 256, 32) for _ in range(3))
        >>> block_mask = create_block_mask(lambda b, h, i, j: i >= j, None, None, 256, 256, device="cpu")
        >>> flex_attention(q, k, v, block_mask=block_mask).shape
        torch.Size([1, 4, 256, 32])
    """
    check_are_tensors(query=query, key=key, value=value)
    _check_shapes(query, key, value, block_mask is not None, as_bool("enable_gqa", enable_gqa))
    if kernel_options:
        _check_options(kernel_options)
    return_lse = as_bool("return_lse", return_lse)
    if return_aux is not None:
        _check_aux(return_aux, return_lse)
    if key.shape[0] != query.shape[0]:
        key, value = (x.expand(query.shape[0], -1, -1, -1) for x in (key, value))
    out, lse = attn(query, key, value, score_mod=score_mod, block_mask=block_mask, scale=scale, return_lse=True)
    if return_aux is None:
        return (out, lse) if return_lse else out

    from torch.nn.attention.flex_attention import AuxOutput

    return out, AuxOutput(lse=lse if return_aux.lse else None)


def _check_shapes(query: Tensor, key: Tensor, value: Tensor, has_block_mask: bool, enable_gqa: bool) -> None:
    """Check the rules of torch's `flex_attention` that `attn` does not have."""
    for name, x in (("query", query), ("key", key), ("value", value)):
        if x.is_nested:
            raise UnsupportedError(f"{name} is a NestedTensor: use cute_flash.attn_nested, with score_mod and mask_mod")
        if x.dim() != 4:
            raise ValueError(f"{name} has shape {tuple(x.shape)}: flex_attention takes (B, H, S, D)")
    batch, batch_kv, heads, heads_kv = query.shape[0], key.shape[0], query.shape[1], key.shape[1]
    if heads != heads_kv and not enable_gqa:
        raise ValueError(f"query has {heads} heads and key has {heads_kv}: set enable_gqa=True")
    if batch != batch_kv and not (has_block_mask and batch_kv == value.shape[0] == 1):
        raise ValueError(
            f"query has batch={batch} and key has batch={batch_kv}: they must be equal; with a block_mask, key and "
            "value may have batch=1"
        )


def _check_options(options: Mapping[str, Any]) -> None:
    for name, option in options.items():
        if name == "BACKEND":
            if option != "AUTO":
                raise UnsupportedError(
                    f"kernel_options={{'BACKEND': {option!r}}}: the kernels are those of cute_flash; leave it out, or "
                    "call torch's flex_attention"
                )
        elif name.removeprefix("fwd_").removeprefix("bwd_") not in TUNING_HINTS:
            raise UnsupportedError(f"kernel_options has {name!r}, which is not a tuning hint of torch: leave it out")


def _check_aux(request: Any, return_lse: bool) -> None:
    if return_lse:
        raise ValueError("return_lse and return_aux: give one of them, such as return_aux=AuxRequest(lse=True)")
    if not hasattr(request, "lse") or not hasattr(request, "max_scores"):
        raise ValueError(f"return_aux is a {type(request).__name__}: give torch's AuxRequest(lse=True)")
    if request.max_scores:
        raise UnsupportedError(
            "return_aux requests max_scores, the largest score of each row: no kernel returns it; the largest score "
            "of each head is attn(..., return_max_logit=True)"
        )
