"""Arguments and results of flash-attn's functions in the form of `attn` and `attn_decode`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from cute_flash import ops_decode
from cute_flash.decode import attn_decode, bind
from cute_flash.errors import UnsupportedError
from cute_flash.spec.refusals import Refused, refuse
from cute_flash.spec.values import as_bool, as_float, as_int, check_are_tensors

# Head dims on CUDA are multiples of this.
HEAD_DIM_STEP = 8
# Keywords that change the speed in flash-attn, and no result. They are ignored: the runtime chooses the number of
# splits, and kernels divide the keys on the device.
HINTS = ("num_splits", "scheduler_metadata")
# Keywords without a counterpart, and keywords of `attn` that flash-attn calls otherwise.
OFF: Refused = {
    "alibi": ((None,), "write alibi_slopes"),
    "dropout": ((None, 0), "write dropout_p"),
    "k_descale": ((None,), "use fp16 or bf16; flash_attn_with_kvcache reads FP8 caches"),
    "pack_gqa": ((None, False, True), "use None; cute_flash packs query heads where this is faster"),
    "q_descale": ((None,), "use fp16 or bf16 queries"),
    "qv": ((None,), "concatenate q with qv, and k with v"),
    "rotary_seqlens": ((None,), "use flash_attn_with_kvcache"),
    "scale": ((None,), "write softmax_scale"),
    "seqused_q": ((None,), "use flash_attn_varlen_func"),
    "sm_margin": ((None, 0), "leave it out"),
    "v_descale": ((None,), "use fp16 or bf16; flash_attn_with_kvcache reads FP8 caches"),
    "ver": ((None, 2, 3, 4), "leave it out; there is one implementation"),
    "window": ((None,), "write window_size"),
}


def check_off(function: str, keywords: Mapping[str, Any]) -> None:
    """Raise `UnsupportedError` for a keyword that is on, and `TypeError` for an unknown one."""
    splits(keywords.get("num_splits"))
    refuse(function, {name: value for name, value in keywords.items() if name not in HINTS}, others=OFF)


def splits(num_splits: Any) -> int | None:
    """`num_splits` of `attn_decode`; any integer is valid."""
    return None if num_splits is None else as_int("num_splits", num_splits)


def forward(function: Callable, arguments: dict[str, Any], dropped: Sequence[str] = (), **changes: Any) -> Any:
    """Call a function with the arguments of an adapter by name.

    Args:
        function: The function.
        arguments: `locals()` of the adapter. `others` are its keywords without a parameter.
        dropped: The arguments that the function does not take.
        **changes: Arguments to add or to replace.
    """
    others = arguments["others"]
    kept = {name: value for name, value in arguments.items() if name != "others" and name not in dropped}
    return function(**{**kept, **others, **changes})


def check_qkv(
    q: Tensor, k: Tensor, v: Tensor, dims_q: int, dims_kv: int = 0, names: tuple[str, str] = ("k", "v")
) -> None:
    """Check numbers of dimensions, and that q and k have equal head dims. Call it before padding hides a difference."""
    for name, x, dims in (("q", q, dims_q), (names[0], k, dims_kv or dims_q), (names[1], v, dims_kv or dims_q)):
        check_are_tensors(**{name: x})
        if x.dim() != dims:
            raise ValueError(f"{name} has shape {tuple(x.shape)}: expected {dims} dimensions")
    if q.shape[-1] != k.shape[-1]:
        raise ValueError(f"q has head dim {q.shape[-1]} and {names[0]} has {k.shape[-1]}: they must agree")


def result_width(dropout_p: Any, return_attn_probs: Any, return_softmax_lse: Any) -> int:
    """The number of results: 1 (out), 2 (and the LSE), or 3 (and None in place of the attention weights)."""
    returns_probs = as_bool("return_attn_probs", return_attn_probs)
    if not as_bool("return_softmax_lse", return_softmax_lse):
        if returns_probs and dropout_p:
            raise UnsupportedError(
                f"return_attn_probs=True with dropout_p={dropout_p}: the dropout mask is not available; "
                "use return_softmax_lse=True, which returns (out, softmax_lse)"
            )
        return 3 if returns_probs else 1
    if returns_probs:
        raise ValueError("return_attn_probs=True with return_softmax_lse=True: their results differ; set one")
    return 2


def results(out: Tensor, lse: Tensor, width: int) -> Any:
    return out if width == 1 else (out, lse, None)[:width]


def keywords(
    q: Tensor,
    softmax_scale: Any,
    causal: Any,
    window_size: Any,
    softcap: Any,
    alibi_slopes: Tensor | None,
    attention_chunk: Any,
) -> dict[str, Any]:
    """The keywords that `attn`, `attn_varlen` and `attn_decode` share. q has its original head dim."""
    softcap = 0.0 if softcap is None else as_float("softcap", softcap)
    return {
        "scale": (q.shape[-1] or 1) ** -0.5 if softmax_scale is None else as_float("softmax_scale", softmax_scale),
        "causal": as_bool("causal", causal),
        "window": window(window_size),
        "attention_chunk": attention_chunk,
        "softcap": softcap if softcap > 0 else None,
        "alibi": alibi_slopes,
    }


def window(window_size: Any) -> tuple[int | None, int | None]:
    """(left, right) with None for an unbounded side. Bounds may be integers of any type, or tensors."""
    if window_size is None:
        return None, None
    try:
        left, right = window_size
    except (TypeError, ValueError):
        raise ValueError(f"window_size={window_size!r}: give (left, right), with -1 for an unbounded side") from None
    return _bound("left", left), _bound("right", right)


def _bound(side: str, value: Any) -> int | None:
    remedy = "give a whole number of keys, or -1 for an unbounded side"
    bound = -1 if value is None else as_int(f"window_size {side}", value, remedy)
    return bound if bound >= 0 else None


def one_of(**names: Any) -> Any:
    """The value of an argument that has several names; None if no name is used."""
    used = {name: value for name, value in names.items() if value is not None}
    if len(used) > 1:
        raise ValueError(f"{' and '.join(used)} are the same argument: give one of them")
    return next(iter(used.values()), None)


def sinks(s_aux: Tensor | None, learnable_sink: Tensor | None, sinks: Tensor | None) -> Tensor | None:
    return one_of(s_aux=s_aux, learnable_sink=learnable_sink, sinks=sinks)


def unstacked(name: str, x: Tensor, dims: int, count: int) -> Any:
    """Views of the tensors that are stacked in the dimension before heads and head dim."""
    check_are_tensors(**{name: x})
    if x.dim() != dims or x.shape[-3] != count:
        leading = "B, S" if dims == 5 else "T"
        raise ValueError(f"{name} has shape {tuple(x.shape)}: expected ({leading}, {count}, H, D)")
    return x.unbind(-3)


def padded(x: Tensor) -> Tensor:
    """x, with the head dim padded with zeros to a multiple of `HEAD_DIM_STEP`."""
    missing = -x.shape[-1] % HEAD_DIM_STEP
    return pad(x, (0, missing)) if missing else x


def narrowed(x: Tensor, original: Tensor) -> Tensor:
    """x without the columns that `padded` added."""
    size = original.shape[-1]
    return x if x.shape[-1] == size else x[..., :size]


def scale(name: str, value: Any, cache: Tensor) -> Any:
    """The scale of an FP8 cache. A scale (B, Hkv), as in flash-attn, must be (1, Hkv) or expanded from it."""
    if value is not None and cache.dtype.itemsize != 1:
        raise UnsupportedError(f"{name} with a cache of {cache.dtype}: leave it out, or use an FP8 cache")
    if not isinstance(value, Tensor) or value.dim() != 2:
        return value
    if value.shape[0] != 1 and value.stride(0) != 0:
        raise UnsupportedError(
            f"{name} has a scale for each sequence, {tuple(value.shape)}: give (Hkv), or an expanded (1, Hkv)"
        )
    return value[0].contiguous()


def decode(q: Tensor, k: Tensor, v: Tensor, /, appended: Sequence[Any] = (), **keywords: Any) -> tuple[Tensor, Tensor]:
    """out and lse of `attn_decode`, also for tensors that require grad; `backward()` then raises `UnsupportedError`.

    `appended`: tensors that an earlier call appended to the caches.
    """
    with torch.no_grad():
        out, lse = attn_decode(q, k, v, return_lse=True, **keywords)
    inputs = [x for x in (q, k, v, *appended, *keywords.values()) if isinstance(x, Tensor) and x.requires_grad]
    return _NoBackward.apply(out, lse, *inputs) if inputs and torch.is_grad_enabled() else (out, lse)


def check_decode(q: Tensor, k: Tensor, v: Tensor, /, **keywords: Any) -> None:
    """Raise the errors of `decode`. Nothing is launched."""
    with torch.no_grad():
        ops_decode.check(*bind(q, k, v, **keywords))


class _NoBackward(torch.autograd.Function):
    """Makes `backward()` through results of `attn_decode` raise an error."""

    @staticmethod
    def forward(ctx: Any, out: Tensor, lse: Tensor, *inputs: Tensor) -> tuple[Tensor, Tensor]:
        return out.view_as(out), lse.view_as(lse)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        raise UnsupportedError(
            "there are no gradients with a K/V cache or block_table: use flash_attn_func, or flash_attn_varlen_func "
            "without block_table"
        )
