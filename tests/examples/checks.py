"""Checks of the examples: each runs the `main` of one and compares its results with an independent computation.

Tolerances are relative to the largest expected value, so that the same checks serve fp32 and bf16.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any
from unittest import mock

import torch.nn.functional as F
from torch import Tensor

import cute_flash
from cute_flash import BlockMask
from examples import (
    document_mask,
    gemma_softcap,
    generate,
    mla,
    ring_merge,
    t5_bias,
    train_gpt,
    tree_mask,
    varlen_packing,
    window_and_sinks,
)


def assert_close(found: Sequence[Tensor], expected: Sequence[Tensor], tolerance: float) -> None:
    for x, y in zip(found, expected, strict=True):
        assert x.shape == y.shape and y.abs().max() > 0
        error = (x.float() - y.float()).abs().max() / y.float().abs().max()
        assert error <= tolerance, f"{error:.1e} > {tolerance:.1e}"


@contextmanager
def plain_calls_by_sdpa() -> Iterator[None]:
    """Compute calls of `attn` that have only `causal`, `scale` and `layout` by torch's SDPA in fp32, for comparison."""
    attn = cute_flash.attn

    def attn_or_sdpa(q: Tensor, k: Tensor, v: Tensor, **keywords: Any) -> Any:
        if any(value is not None for name, value in keywords.items() if name not in ("causal", "scale", "layout")):
            return attn(q, k, v, **keywords)
        dims = (1, 2) if keywords.get("layout") == "bshd" else (1, 1)
        inputs = (x.transpose(*dims).float() for x in (q, k, v))
        options = {"is_causal": keywords["causal"], "scale": keywords.get("scale")}
        out = F.scaled_dot_product_attention(*inputs, enable_gqa=True, **options)
        return out.transpose(*dims).to(q.dtype)

    with mock.patch.object(cute_flash, "attn", attn_or_sdpa):
        yield


def entropy(text: str, length: int) -> float:
    """The mean surprise, in nats, of a character given the `length` characters before it."""
    contexts = Counter(text[i : i + length] for i in range(len(text) - length))
    longer = Counter(text[i : i + length + 1] for i in range(len(text) - length))
    return -sum(n * math.log(n / contexts[x[:-1]]) for x, n in longer.items()) / sum(longer.values())


def check_train_gpt(tolerance: float, steps: int = 120, **options: Any) -> None:
    losses = train_gpt.main(steps, **options)
    assert len(losses) == steps and losses[0] > 4  # log 128 and some noise
    # Only a model that attends to the previous number can have a lower loss.
    assert sum(losses[-10:]) / 10 < entropy(train_gpt.TEXT, 4)


def check_varlen_packing(tolerance: float) -> None:
    with plain_calls_by_sdpa():
        packed, padded = varlen_packing.main()
    assert_close(packed, padded, tolerance)


def check_window_and_sinks(tolerance: float) -> None:
    assert_close(*window_and_sinks.main(), tolerance)


def check_gemma_softcap(tolerance: float) -> None:
    assert_close(*gemma_softcap.main(), tolerance)


def check_t5_bias(tolerance: float) -> None:
    found, dense, losses = t5_bias.main()
    assert_close(found, dense, tolerance)
    assert losses[-1] < losses[0] / 10


def check_document_mask(tolerance: float) -> None:
    with plain_calls_by_sdpa():
        packed, alone, block_mask = document_mask.main()
    assert_close(packed, alone, tolerance)
    causal = BlockMask.of(None, (1, 1, block_mask.seqlen_q, block_mask.seqlen_k), causal=True)
    assert block_mask.density < causal.density


def check_tree_mask(tolerance: float) -> None:
    logits, expected, accepted = tree_mask.main()
    assert_close([logits], [expected], tolerance)
    assert accepted == [0, 2, 5]


def check_generate(tolerance: float) -> None:
    """The script compares the tokens; here its dense attention is torch's SDPA."""
    with plain_calls_by_sdpa():
        generated = generate.main()
    assert generated.shape == (3, 12)
    followers: dict[int, set[int]] = {}
    for tokens in generated.tolist():
        for token, following in pairwise(tokens):
            followers.setdefault(token, set()).add(following)
    assert any(len(tokens) > 1 for tokens in followers.values()), "the next token depends on more than the last one"


def check_mla(tolerance: float) -> None:
    """The script compares the tokens; here its prefill is torch's SDPA."""
    with plain_calls_by_sdpa():
        generated = mla.main()
    assert generated.shape == (3, 12) and len({tuple(tokens) for tokens in generated.tolist()}) == 3


def check_ring_merge(tolerance: float) -> None:
    with plain_calls_by_sdpa():
        ring, whole = ring_merge.main()
    assert_close(ring, whole, tolerance)


MODULES = {
    module.__name__.rpartition(".")[2]: module
    for module in (
        document_mask, gemma_softcap, generate, mla, ring_merge, t5_bias, train_gpt, tree_mask, varlen_packing,
        window_and_sinks,
    )
}  # fmt: skip
CHECKS: dict[str, Callable[..., None]] = {name: globals()[f"check_{name}"] for name in MODULES}
