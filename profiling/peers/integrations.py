"""The attention functions that `training` compares: integrations of cute_flash, and other libraries.

Each computes causal attention. It takes q, (B, S, H, D), and k and v, (B, S, Hkv, D), as the projections return them,
and returns (B, S, H, D).
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import lru_cache
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import create_block_mask
from torch.nn.functional import scaled_dot_product_attention

from profiling.peers.flash_attention import fa3_gradients, fa3_ops
from profiling.peers.flex import is_causal, shared_compiled_flex
from profiling.peers.peer import missing

Function = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Attention:
    name: str
    make: Callable[[], Function]  # imports the library and returns its function
    is_ours: bool = False
    context: Callable[[], AbstractContextManager[Any]] = nullcontext

    def unavailable(self, device: torch.device) -> str | None:
        """The reason why it cannot run here, or None."""
        return missing(self.make, needs_gpu=device.type == "cuda")


def _heads_first(*tensors: Tensor) -> list[Tensor]:
    """Views (B, H, S, D)."""
    return [x.transpose(1, 2) for x in tensors]


def _attn() -> Function:
    from cute_flash import attn

    return lambda q, k, v: attn(q, k, v, causal=True, layout="bshd")


def _flash_attn_names() -> Function:
    from cute_flash.integrations.flash_attn import flash_attn_func

    return lambda q, k, v: flash_attn_func(q, k, v, causal=True)


def _transformers() -> Function:
    """The function that transformers calls in each layer, with the arguments of a Llama."""
    from cute_flash.integrations.transformers import attention

    layer: Any = SimpleNamespace(is_causal=True)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = _heads_first(q, k, v)
        return attention(layer, q, k, v, None, dropout=0.0, scaling=q.shape[-1] ** -0.5)[0]

    return attend


def _sdpa() -> Function:
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = _heads_first(q, k, v)
        return scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2)

    return attend


def _sdpa_through_us() -> AbstractContextManager[Any]:
    from cute_flash.integrations.sdpa import sdpa

    return sdpa()


@lru_cache(maxsize=8)
def _block_mask(seqlen: int, device: torch.device) -> Any:
    """torch's `BlockMask` of a causal mask. It is made at the first step, which is not timed."""
    return create_block_mask(is_causal, None, None, seqlen, seqlen, device=device)


def _flex_with(function: Callable[..., Any]) -> Function:
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        mask = _block_mask(q.shape[1], q.device)
        return function(*_heads_first(q, k, v), block_mask=mask, enable_gqa=True).transpose(1, 2)

    return attend


def _our_flex() -> Function:
    from cute_flash import flex_attention

    return _flex_with(flex_attention)


def _flex() -> Function:
    return _flex_with(shared_compiled_flex())


class _Fa3(torch.autograd.Function):
    """FlashAttention-3's operators, which have no autograd formula."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        ctx.options = {"softmax_scale": q.shape[-1] ** -0.5, "is_causal": True}
        out, lse = fa3_ops().fwd(q, k, v, num_splits=1, **ctx.options)[:2]
        ctx.save_for_backward(q, k, v, out, lse)
        return out

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> Any:
        q, k, v, out, lse = ctx.saved_tensors
        return fa3_gradients(dout.contiguous(), q, k, v, out, lse, **ctx.options)


def _fa3() -> Function:
    fa3_ops()
    return lambda q, k, v: _Fa3.apply(q, k, v)


OURS = "cute_flash.attn"
ATTENTIONS = (
    Attention(OURS, _attn, is_ours=True),
    Attention("flash_attn names", _flash_attn_names, is_ours=True),
    Attention("transformers", _transformers, is_ours=True),
    Attention("SDPA with cute_flash", _sdpa, is_ours=True, context=_sdpa_through_us),
    Attention("cute_flash.flex_attention", _our_flex, is_ours=True),
    Attention("SDPA, cuDNN", _sdpa, context=lambda: sdpa_kernel(SDPBackend.CUDNN_ATTENTION)),
    Attention("SDPA, FlashAttention-2", _sdpa, context=lambda: sdpa_kernel(SDPBackend.FLASH_ATTENTION)),
    Attention("FlashAttention-3", _fa3),
    Attention("FlexAttention, compiled", _flex),
)
# Those that take CPU tensors, forward and backward.
ON_CPU = tuple(one for one in ATTENTIONS if one.is_ours and one.context is nullcontext)
