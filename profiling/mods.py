"""What users' functions, biases and block maps cost, forward and backward.

    function    a score_mod or a mask_mod against FlexAttention, compiled, on the same function
    documents   a document mask of eight equal documents with its block map, against the same without one
    bias        a bias against plain attention on the same tensors

Cells and ratios are those of `features`: above 1 is faster than what is compared with.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor

from profiling.features import Cell, Settings, Side, _draw

NUM_DOCUMENTS = 8


def _functions(heads: int, device: torch.device) -> dict[str, dict[str, Any]]:
    from cute_flash import masks

    slopes = torch.linspace(0.5, 0.01, heads, device=device)
    table, near, cap = torch.zeros(heads, 256, device=device), 128, 20.0

    def alibi(score, b, h, q_idx, kv_idx):
        return score - slopes[h] * (q_idx - kv_idx).abs()

    def capped(score, b, h, q_idx, kv_idx):
        return cap * torch.tanh(score / cap)

    def relative(score, b, h, q_idx, kv_idx):
        return score + table[h, (q_idx - kv_idx + near).clamp(0, 255)]

    return {
        "alibi": {"score_mod": alibi},
        "capped": {"score_mod": capped},
        "relative": {"score_mod": relative},
        "causal": {"mask_mod": masks.causal()},
        "prefix": {"mask_mod": masks.prefix_lm(1024)},
        "window": {"mask_mod": masks.sliding_window(1024)},
    }


@lru_cache(maxsize=1)
def _compiled_flex() -> Callable[..., Any]:
    from torch.nn.attention.flex_attention import flex_attention

    # Every function and size is compiled anew; past the limit it would silently not be.
    torch._dynamo.config.recompile_limit = 256
    return torch.compile(flex_attention, dynamic=False)


def _flex(inputs: tuple[Tensor, ...], how: dict[str, Any]) -> Side:
    """Compiled on a GPU; its block mask is made before."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    seqlen, device = inputs[0].shape[2], inputs[0].device
    given: dict[str, Any] = {"score_mod": how.get("score_mod")}
    if "mask_mod" in how:
        given["block_mask"] = create_block_mask(how["mask_mod"], None, None, seqlen, seqlen, device=device)
    function: Any = _compiled_flex() if device.type == "cuda" else flex_attention
    return Side(partial(function, **given), inputs)


def _ours(inputs: tuple[Tensor, ...], how: dict[str, Any], with_map: bool = True) -> Side:
    from cute_flash import BlockMap, attn

    batch, heads, seqlen, _ = inputs[0].shape
    given = dict(how)
    if "mask_mod" in how and with_map:
        shape = batch, heads, seqlen, seqlen
        given["block_map"] = BlockMap.of(how["mask_mod"], shape, device=inputs[0].device)
    return Side(partial(attn, **given), inputs)


def _inputs(settings: Settings, device: torch.device) -> Iterator[tuple[str, tuple[Tensor, ...]]]:
    """As many tokens in fewer and longer sequences."""
    for head_dim in settings.head_dims:
        for seqlen in (settings.seqlen, settings.long):
            batch = max(1, settings.batch * settings.seqlen // seqlen)
            heads = settings.hidden // head_dim
            yield f"D={head_dim} S={seqlen}", _draw(settings, device, batch, heads, seqlen, head_dim)


def function_cells(settings: Settings, device: torch.device) -> Iterator[Cell]:
    for name, inputs in _inputs(settings, device):
        for kind, how in _functions(inputs[0].shape[1], device).items():
            sides = {"flex": _flex(inputs, how), "cute_flash": _ours(inputs, how)}
            yield Cell("function", f"{name} {kind}", sides, "flex")


def document_cells(settings: Settings, device: torch.device) -> Iterator[Cell]:
    from cute_flash import masks

    for name, inputs in _inputs(settings, device):
        seqlen = inputs[0].shape[2]
        ids = torch.arange(seqlen, device=device, dtype=torch.int32) // -(-seqlen // NUM_DOCUMENTS)
        how = {"mask_mod": masks.document(ids)}
        sides = {
            "without a map": _ours(inputs, how, with_map=False),
            "with a map": _ours(inputs, how),
            "flex": _flex(inputs, how),
        }
        yield Cell("documents", name, sides, "without a map")


def bias_cells(settings: Settings, device: torch.device) -> Iterator[Cell]:
    from cute_flash import attn

    for name, inputs in _inputs(settings, device):
        batch, heads, seqlen, _ = inputs[0].shape
        if seqlen > settings.seqlen:
            continue  # a bias of all pairs of long sequences is most of a GPU's memory
        sides = {"plain": Side(attn, inputs)}
        for shape in ((1, heads, seqlen, seqlen), (batch, heads, seqlen, seqlen), (batch, 1, 1, seqlen)):
            bias = torch.randn(shape, device=device, dtype=torch.bfloat16)
            sides[f"bias {shape[0]}x{shape[1]}x{shape[2]}"] = Side(partial(attn, bias=bias), inputs)
        yield Cell("bias", name, sides, "plain")


KINDS: dict[str, Callable[[Settings, torch.device], Iterator[Cell]]] = {
    "function": function_cells,
    "documents": document_cells,
    "bias": bias_cells,
}
