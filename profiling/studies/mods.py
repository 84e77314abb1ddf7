"""The cost of score_mod, mask_mod, biases and block masks, forward and backward.

    function    a score_mod or a mask_mod against compiled FlexAttention and FlashAttention-4 with the same mod
    documents   a document mask of eight equal documents with its block mask, against the same without one
    bias        a bias against plain attention on the same tensors

Cells and ratios are those of `features`: above 1 the call is faster than its base. In `function` and `documents`, a
call whose results differ from ours is not timed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor

from profiling.peers import fa4_mods
from profiling.studies.features import AutogradCall, Cell, Cells, Implementation, Settings, random_qkv

NUM_DOCUMENTS = 8
# Softcap; index of distance 0 in the relative-position table, and its length; lengths of prefix and window.
CAP, NEAR, DISTANCES, PREFIX, WINDOW = 20.0, 128, 256, 1024, 1024
FIRST_SLOPE, LAST_SLOPE = 0.5, 0.01
OURS, PEERS = "cute_flash", ("flex", "fa4")
WITHOUT_BLOCK_MASK, WITH_BLOCK_MASK, PLAIN = "without a block mask", "with a block mask", "plain"
WITH_GRADIENT = "and its gradient"  # of a bias
FUNCTIONS = ("alibi", "capped", "relative", "causal", "prefix", "window")


@dataclass(frozen=True)
class Function:
    """The score_mod or mask_mod of `attn` and FlexAttention, and a factory of the same for FlashAttention-4."""

    mods: dict[str, Any]  # keyword arguments
    fa4: Callable[[], Any]


def _functions(heads: int, device: torch.device, seed: int = 0) -> dict[str, Function]:
    from cute_flash import masks

    step = (LAST_SLOPE - FIRST_SLOPE) / max(1, heads - 1)
    slopes = torch.arange(heads, device=device) * step + FIRST_SLOPE
    generator = torch.Generator(device).manual_seed(seed)
    table = torch.randn(heads, DISTANCES, generator=generator, device=device)
    near, cap = NEAR, CAP

    def alibi(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return score - slopes[h] * (q_idx - kv_idx).abs()

    def capped(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return cap * torch.tanh(score / cap)

    def relative(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return score + table[h, (q_idx - kv_idx + near).clamp(0, 255)]

    return {
        "alibi": Function({"score_mod": alibi}, partial(fa4_mods.function, "alibi", FIRST_SLOPE, step)),
        "capped": Function({"score_mod": capped}, partial(fa4_mods.function, "capped", CAP)),
        "relative": Function({"score_mod": relative}, partial(fa4_mods.function, "relative", table, NEAR)),
        "causal": Function({"mask_mod": masks.causal()}, partial(fa4_mods.function, "causal")),
        "prefix": Function({"mask_mod": masks.prefix_lm(PREFIX)}, partial(fa4_mods.function, "prefix", PREFIX)),
        "window": Function({"mask_mod": masks.sliding_window(WINDOW)}, partial(fa4_mods.function, "window", WINDOW)),
    }


@lru_cache(maxsize=1)
def _compiled_flex() -> Callable[..., Any]:
    from torch.nn.attention.flex_attention import flex_attention

    # Every function and size is a compilation; past the limit torch would silently run it uncompiled.
    torch._dynamo.config.recompile_limit = 256
    return torch.compile(flex_attention, dynamic=False)


def _flex(inputs: tuple[Tensor, ...], mods: dict[str, Any]) -> AutogradCall:
    """FlexAttention, compiled on a GPU; its block mask is made outside the timed calls."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    seqlen, device = inputs[0].shape[2], inputs[0].device
    options: dict[str, Any] = {"score_mod": mods.get("score_mod")}
    if "mask_mod" in mods:
        options["block_mask"] = create_block_mask(mods["mask_mod"], None, None, seqlen, seqlen, device=device)
    function: Any = _compiled_flex() if device.type == "cuda" else flex_attention
    return AutogradCall(partial(function, **options), inputs)


def _ours(inputs: tuple[Tensor, ...], mods: dict[str, Any], has_block_mask: bool = True) -> AutogradCall:
    from cute_flash import BlockMask, attn

    batch, heads, seqlen, _ = inputs[0].shape
    options = dict(mods)
    if "mask_mod" in mods and has_block_mask:
        shape = batch, heads, seqlen, seqlen
        options["block_mask"] = BlockMask.of(mods["mask_mod"], shape, device=inputs[0].device)
    return AutogradCall(partial(attn, **options), inputs)


def _inputs(settings: Settings, device: torch.device) -> Iterator[tuple[str, tuple[Tensor, ...]]]:
    """Inputs of two lengths, with the same number of tokens."""
    for head_dim in settings.head_dims:
        for seqlen in (settings.seqlen, settings.long):
            batch = max(1, settings.batch * settings.seqlen // seqlen)
            heads = settings.hidden // head_dim
            yield f"D={head_dim} S={seqlen}", random_qkv(settings, device, batch, heads, seqlen, head_dim)


def _chosen(wanted: Sequence[str], known: Sequence[str]) -> Sequence[str]:
    """The wanted names, or all known names if none is wanted; `ValueError` for an unknown name."""
    for name in wanted:
        if name not in known:
            raise ValueError(f"{name!r}: choose from {', '.join(known)}")
    return wanted or known


def unavailable(settings: Settings) -> dict[str, str]:
    """The peers that are left out, with the reason. A peer that was named is not left out: it fails in every cell."""
    reason = None if settings.peers else fa4_mods.missing()
    return {} if reason is None else {"fa4": reason}


def _peers(inputs: tuple[Tensor, ...], function: Function, settings: Settings) -> dict[str, Implementation]:
    peers: dict[str, Callable[[], Implementation]] = {
        "flex": lambda: _flex(inputs, function.mods),
        "fa4": lambda: fa4_mods.Fa4Call(inputs, function.fa4, function.mods.get("mask_mod")),
    }
    left_out = unavailable(settings)
    return {name: peers[name]() for name in _chosen(settings.peers, PEERS) if name not in left_out}


def function_cells(settings: Settings, device: torch.device) -> Iterator[Cell]:
    chosen = _chosen(settings.functions, FUNCTIONS)
    for name, inputs in _inputs(settings, device):
        functions = _functions(inputs[0].shape[1], device)
        for kind in chosen:
            calls = _peers(inputs, functions[kind], settings)
            calls[OURS] = _ours(inputs, functions[kind].mods)
            yield Cell("function", f"{name} {kind}", calls, next(iter(calls)), OURS)


def document_cells(settings: Settings, device: torch.device) -> Iterator[Cell]:
    from cute_flash import masks

    for name, inputs in _inputs(settings, device):
        seqlen = inputs[0].shape[2]
        ids = torch.arange(seqlen, device=device, dtype=torch.int32) // -(-seqlen // NUM_DOCUMENTS)
        function = Function({"mask_mod": masks.document(ids)}, partial(fa4_mods.function, "document", ids))
        calls: dict[str, Implementation] = {
            WITHOUT_BLOCK_MASK: _ours(inputs, function.mods, has_block_mask=False),
            WITH_BLOCK_MASK: _ours(inputs, function.mods),
            **_peers(inputs, function, settings),
        }
        yield Cell("documents", name, calls, WITHOUT_BLOCK_MASK, WITH_BLOCK_MASK)


def bias_cells(settings: Settings, device: torch.device) -> Iterator[Cell]:
    from cute_flash import attn

    for name, inputs in _inputs(settings, device):
        batch, heads, seqlen, _ = inputs[0].shape
        if seqlen > settings.seqlen:
            continue  # a bias of all pairs of long sequences takes most of a GPU's memory
        calls = {PLAIN: AutogradCall(attn, inputs)}
        shapes = {
            "each head": (1, heads, seqlen, seqlen),
            "all": (batch, heads, seqlen, seqlen),
            "each key": (batch, 1, 1, seqlen),
        }
        for what, shape in shapes.items():
            bias = torch.randn(shape, device=device, dtype=torch.bfloat16)
            calls[f"bias of {what}"] = AutogradCall(partial(attn, bias=bias), inputs)
            if what != "each key":
                leaf = bias.detach().requires_grad_()
                calls[f"bias of {what} {WITH_GRADIENT}"] = AutogradCall(partial(attn, bias=leaf), inputs)
        yield Cell("bias", name, calls, PLAIN)


KINDS: dict[str, Cells] = {"function": function_cells, "documents": document_cells, "bias": bias_cells}
