"""Gradients and memory of the CPU path with a bias and user mods; `tests.score_mod.test_attention` has the results."""

from __future__ import annotations

import pytest
import torch

from cute_flash import reference
from cute_flash.reference import tiled
from cute_flash.spec.band import Band
from tests.arguments import call_args
from tests.combinations import normal
from tests.reference.memory import largest_within_budget

B, H, HKV, D = 2, 4, 2, 8


def by_head(b, h, q_idx, kv_idx):
    return (q_idx - kv_idx < 6 + h) & ((kv_idx + b) % 3 != 0)


def test_gradients_that_are_not_needed_are_none() -> None:
    q, k, v = (normal(B, heads, 37, D, seed=heads) for heads in (H, HKV, HKV))
    table, other = normal(H, seed=1).requires_grad_(), normal(H, seed=2)
    ids = torch.arange(H)

    def mod(score, b, h, q_idx, kv_idx):
        return score * table[ids[h]] + other[h]

    args = call_args(q, score_mod=mod, bias=normal(1, H, 1, 1), mask_mod=by_head)
    out, lse, _ = reference.forward(q, k, v, args)
    *_, grads = reference.backward(out, None, q, k, v, out, lse, args)
    needed = [x is table for x in args.differentiable]
    assert sum(needed) == 1 and [x is not None for x in grads] == needed


@pytest.mark.slow
def test_memory_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    budget = 1 << 20
    monkeypatch.setattr(tiled, "MAX_TEMPORARY_BYTES", budget)
    q, k, v = (normal(B, heads, 300, D, seed=heads, dtype=torch.float32) for heads in (H, HKV, HKV))
    near = normal(H, 12, dtype=torch.float32).requires_grad_()
    args = call_args(
        q, Band(200, 0), bias=normal(1, H, 1, 300, dtype=torch.float32).requires_grad_(), mask_mod=by_head,
        score_mod=lambda s, b, h, i, j: torch.tanh(s) + near[h, (i - j).abs() % 12],
    )  # fmt: skip
    largest_within_budget(q, k, v, args, budget)
