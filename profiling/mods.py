"""What users' functions, biases and block maps cost, forward and backward.

    function    a score_mod or a mask_mod against FlexAttention, compiled, and FlashAttention-4 on the same
    documents   a document mask of eight equal documents with its block map, against the same without one
    bias        a bias against plain attention on the same tensors

Cells and ratios are those of `features`: above 1 is faster than what is compared with. A side that does not
compute what ours computes is not timed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor

from profiling import mods_fa4
from profiling.features import Cell, Settings, Side, Way, _draw

NUM_DOCUMENTS = 8
CAP, NEAR, DISTANCES, PREFIX, WINDOW = 20.0, 128, 256, 1024, 1024
FIRST_SLOPE, LAST_SLOPE = 0.5, 0.01
OURS, PEERS = "cute_flash", ("flex", "fa4")
WITHOUT_MAP, WITH_MAP, PLAIN = "without a map", "with a map", "plain"
FUNCTIONS = ("alibi", "capped", "relative", "causal", "prefix", "window")


@dataclass(frozen=True)
class Function:
    """What `attn` and FlexAttention are given, and the same made for FlashAttention-4 when it is wanted."""

    how: dict[str, Any]
    fa4: Callable[[], Any]


def _functions(heads: int, device: torch.device, seed: int = 0) -> dict[str, Function]:
    from cute_flash import masks

    step = (LAST_SLOPE - FIRST_SLOPE) / max(1, heads - 1)
    slopes = torch.arange(heads, device=device) * step + FIRST_SLOPE
    generator = torch.Generator(device).manual_seed(seed)
    table = torch.randn(heads, DISTANCES, generator=generator, device=device)
    near, cap = NEAR, CAP

    def alibi(score, b, h, q_idx, kv_idx):
        return score - slopes[h] * (q_idx - kv_idx).abs()

    def capped(score, b, h, q_idx, kv_idx):
        return cap * torch.tanh(score / cap)

    def relative(score, b, h, q_idx, kv_idx):
        return score + table[h, (q_idx - kv_idx + near).clamp(0, 255)]

    return {
        "alibi": Function({"score_mod": alibi}, partial(mods_fa4.function, "alibi", FIRST_SLOPE, step)),
        "capped": Function({"score_mod": capped}, partial(mods_fa4.function, "capped", CAP)),
        "relative": Function({"score_mod": relative}, partial(mods_fa4.function, "relative", table, NEAR)),
        "causal": Function({"mask_mod": masks.causal()}, partial(mods_fa4.function, "causal")),
        "prefix": Function(
            {"mask_mod": masks.prefix_lm(PREFIX)}, partial(mods_fa4.function, "prefix", PREFIX)
        ),
        "window": Function(
            {"mask_mod": masks.sliding_window(WINDOW)}, partial(mods_fa4.function, "window", WINDOW)
        ),
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
    from cute_flash import BlockMask, attn

    batch, heads, seqlen, _ = inputs[0].shape
    given = dict(how)
    if "mask_mod" in how and with_map:
        shape = batch, heads, seqlen, seqlen
        given["block_map"] = BlockMask.of(how["mask_mod"], shape, device=inputs[0].device)
    return Side(partial(attn, **given), inputs)


def _inputs(settings: Settings, device: torch.device) -> Iterator[tuple[str, tuple[Tensor, ...]]]:
    """As many tokens in fewer and longer sequences."""
    for head_dim in settings.head_dims:
        for seqlen in (settings.seqlen, settings.long):
            batch = max(1, settings.batch * settings.seqlen // seqlen)
            heads = settings.hidden // head_dim
            yield f"D={head_dim} S={seqlen}", _draw(settings, device, batch, heads, seqlen, head_dim)


def _chosen(wanted: Sequence[str], known: Sequence[str]) -> Sequence[str]:
    """All that are known, if none are wanted in particular."""
    for name in wanted:
        if name not in known:
            raise ValueError(f"{name!r}: choose from {', '.join(known)}")
    return wanted or known


def absent(settings: Settings) -> dict[str, str]:
    """Peers that are left out, and why. One that is named is not: it fails in every cell."""
    reason = None if settings.peers else mods_fa4.missing()
    return {} if reason is None else {"fa4": reason}


def _sides(inputs: tuple[Tensor, ...], function: Function, settings: Settings) -> dict[str, Way]:
    """The peers on the same function."""
    peers: dict[str, Callable[[], Way]] = {
        "flex": lambda: _flex(inputs, function.how),
        "fa4": lambda: mods_fa4.Fa4Side(inputs, function.fa4, function.how.get("mask_mod")),
    }
    left_out = absent(settings)
    return {name: peers[name]() for name in _chosen(settings.peers, PEERS) if name not in left_out}


def function_cells(settings: Settings, device: torch.device) -> Iterator[Cell]:
    chosen = _chosen(settings.functions, FUNCTIONS)
    for name, inputs in _inputs(settings, device):
        functions = _functions(inputs[0].shape[1], device)
        for kind in chosen:
            sides = _sides(inputs, functions[kind], settings)
            sides[OURS] = _ours(inputs, functions[kind].how)
            yield Cell("function", f"{name} {kind}", sides, next(iter(sides)), OURS)


def document_cells(settings: Settings, device: torch.device) -> Iterator[Cell]:
    from cute_flash import masks

    for name, inputs in _inputs(settings, device):
        seqlen = inputs[0].shape[2]
        ids = torch.arange(seqlen, device=device, dtype=torch.int32) // -(-seqlen // NUM_DOCUMENTS)
        function = Function({"mask_mod": masks.document(ids)}, partial(mods_fa4.function, "document", ids))
        sides: dict[str, Way] = {
            WITHOUT_MAP: _ours(inputs, function.how, with_map=False),
            WITH_MAP: _ours(inputs, function.how),
            **_sides(inputs, function, settings),
        }
        yield Cell("documents", name, sides, WITHOUT_MAP, WITH_MAP)


def bias_cells(settings: Settings, device: torch.device) -> Iterator[Cell]:
    from cute_flash import attn

    for name, inputs in _inputs(settings, device):
        batch, heads, seqlen, _ = inputs[0].shape
        if seqlen > settings.seqlen:
            continue  # a bias of all pairs of long sequences is most of a GPU's memory
        sides = {PLAIN: Side(attn, inputs)}
        shapes = {
            "each head": (1, heads, seqlen, seqlen),
            "all": (batch, heads, seqlen, seqlen),
            "each key": (batch, 1, 1, seqlen),
        }
        for what, shape in shapes.items():
            bias = torch.randn(shape, device=device, dtype=torch.bfloat16)
            sides[f"bias of {what}"] = Side(partial(attn, bias=bias), inputs)
        yield Cell("bias", name, sides, PLAIN)


KINDS: dict[str, Callable[[Settings, torch.device], Iterator[Cell]]] = {
    "function": function_cells,
    "documents": document_cells,
    "bias": bias_cells,
}
