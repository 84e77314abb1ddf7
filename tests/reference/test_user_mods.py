"""Bias, score_mod, mask_mod and block mask of the CPU path, against the same functions on full tensors."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

from cute_flash import BlockMask, reference
from cute_flash.reference import tiled
from cute_flash.reference.dense import band_mask
from cute_flash.spec.args import AttentionArgs
from cute_flash.spec.band import Band
from tests.arguments import attention, call_args
from tests.combinations import normal
from tests.reference.memory import Memory

B, H, HKV, D = 2, 4, 2, 8
SLOPES = normal(H, seed=11).abs()
NEAR = normal(H, 12, seed=12)
PAIRS = normal(2, 2, 9, seed=13)
IDS = torch.tensor([0, 0, 1, 1, 1, 2, 2, 2, 2, 3] * 10)
SCALE, WIDTH = torch.tensor(1.3, dtype=torch.float64), 6


def alibi(score, b, h, q_idx, kv_idx):
    return score - SLOPES[h] * (q_idx - kv_idx).abs()


def relative(score, b, h, q_idx, kv_idx):
    return score + NEAR[h, (q_idx - kv_idx).clamp(0, NEAR.shape[1] - 1)]


def everything(score, b, h, q_idx, kv_idx):
    distance = (q_idx - kv_idx).abs()
    x = torch.tanh(score / 3) * SCALE + torch.sigmoid(score) * NEAR[h, distance % 12]
    x = x + torch.where(score > 0.2, score**2, torch.exp(-score)) / (1 + distance)
    x = torch.maximum(x, torch.minimum(score, PAIRS[b % 2, h // 2, kv_idx // 12])) - torch.log1p(distance)
    return x + torch.sqrt(score.abs() + 1) * torch.rsqrt(torch.square(x) + 1) + torch.sin(score) * (h == 1)


def masks_by_score(score, b, h, q_idx, kv_idx):
    return torch.where(q_idx >= kv_idx, score * WIDTH, -float("inf"))


def identity(score, b, h, q_idx, kv_idx):
    return score


def documents(b, h, q_idx, kv_idx):
    return (IDS[q_idx] == IDS[kv_idx]) & (q_idx >= kv_idx)


def by_head(b, h, q_idx, kv_idx):
    return (q_idx - kv_idx < WIDTH + h) & ((kv_idx + b) % 3 != 0)


@dataclass(frozen=True)
class Case:
    name: str
    sq: int = 37
    sk: int = 37
    bias: tuple[int, ...] | None = None
    score_mod: Any = None
    mask_mod: Any = None
    captures: tuple[Tensor, ...] = ()
    band: Band = field(default_factory=Band)
    softcap: float = 0.0

    def inputs(self) -> list[Tensor]:
        shapes = ((B, H, self.sq, D), (B, HKV, self.sk, D), (B, HKV, self.sk, D))
        return [normal(*shape, seed=i).requires_grad_() for i, shape in enumerate(shapes)]

    def args(self, q: Tensor, bias: Tensor | None) -> AttentionArgs:
        mods: dict[str, Any] = {"score_mod": self.score_mod, "mask_mod": self.mask_mod}
        return call_args(q, self.band, softcap=self.softcap, bias=bias, **mods)


CASES = [
    Case("alibi", score_mod=alibi, captures=(SLOPES,)),
    Case("relative", 20, 50, score_mod=relative, captures=(NEAR,), band=Band(None, 0)),
    Case("everything", score_mod=everything, captures=(NEAR, PAIRS, SCALE)),
    Case("masked by score", score_mod=masks_by_score),
    Case("identity", score_mod=identity),
    Case("documents", mask_mod=documents),
    Case("rows without keys", 50, 21, mask_mod=by_head),
    Case("bias", 33, 70, bias=(B, H, 33, 70)),
    Case("bias of heads", bias=(H, 1, 1), band=Band(9, 3)),
    Case("bias of keys", bias=(37,)),
    Case("bias of rows", bias=(B, 1, 37, 1)),
    Case("all", 37, 37, (1, H, 37, 37), everything, by_head, (NEAR, PAIRS, SCALE), Band(None, 0), 4.0),
]


def by_torch(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, case: Case) -> Tensor:
    """By definition: mods are called on full tensors, and autograd computes the gradients."""
    S = q @ k.repeat_interleave(H // HKV, 1).mT * D**-0.5
    if case.softcap:
        S = torch.tanh(S / case.softcap) * case.softcap
    S = S if bias is None else S + bias
    sizes = (B, 1, 1, 1), (H, 1, 1), (case.sq, 1), (case.sk,)
    indices = [torch.arange(size[0]).view(size) for size in sizes]
    S = S if case.score_mod is None else case.score_mod(S, *indices)
    mask = band_mask(case.band, case.sq, case.sk, S.device)
    mask = mask if case.mask_mod is None else mask & case.mask_mod(*indices)
    mask = mask.expand_as(S)
    empty = ~mask.any(-1, keepdim=True)
    P = S.masked_fill(~mask, -torch.inf).masked_fill(empty, 0.0).softmax(-1).masked_fill(empty, 0.0)
    return P @ v.repeat_interleave(H // HKV, 1)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_values_and_gradients(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MAX_ROWS", "MAX_KEYS"):
        monkeypatch.setattr(tiled, name, 16)
    tensors = case.inputs()
    bias = None if case.bias is None else normal(*case.bias, seed=5).requires_grad_()
    captures = [x.requires_grad_() for x in case.captures]
    leaves = [*tensors, *([] if bias is None else [bias]), *captures]
    try:
        args = case.args(tensors[0], bias)
        out, _ = attention(*tensors, args)
        expected = by_torch(*tensors, bias, case)
        weights = normal(*out.shape, seed=9)
        torch.testing.assert_close(out, expected)
        grads, expected_grads = (
            torch.autograd.grad((x * weights).sum(), leaves, materialize_grads=True) for x in (out, expected)
        )
        torch.testing.assert_close(grads, expected_grads)
        torch.testing.assert_close(reference.dense(*tensors, args=args)[0], out)
    finally:
        for x in captures:
            x.requires_grad_(False)


def test_gradients_that_are_not_needed_are_none() -> None:
    q, k, v = (x.detach() for x in CASES[0].inputs())
    table, other = normal(H, seed=1).requires_grad_(), normal(H, seed=2)
    ids = torch.arange(H)

    def mod(score, b, h, q_idx, kv_idx):
        return score * table[ids[h]] + other[h]

    args = call_args(q, score_mod=mod, bias=normal(1, H, 1, 1), mask_mod=documents)
    out, lse, _ = reference.forward(q, k, v, args)
    *_, grads = reference.backward(out, None, q, k, v, out, lse, args)
    needed = [x is table for x in args.differentiable]
    assert sum(needed) == 1 and [x is not None for x in grads] == needed


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_gradients_of_captures_have_their_dtype_and_strides(dtype: torch.dtype) -> None:
    q, k, v = (x.detach().to(dtype) for x in CASES[0].inputs())
    near = NEAR.to(torch.bfloat16).T.contiguous().T.requires_grad_()
    args = call_args(q, score_mod=lambda s, b, h, i, j: s + near[h, j % 12], out_fp32=True)
    out, lse, _ = reference.forward(q, k, v, args)
    assert out.dtype == torch.float32
    *_, grads = reference.backward(out, None, q, k, v, out, lse, args)
    assert (grads[3].dtype, grads[3].stride()) == (near.dtype, near.stride())


def test_varlen_mods_see_the_index_of_the_sequence() -> None:
    lengths = [5, 17, 9]
    offsets = torch.tensor([0, *lengths]).cumsum(0).int()
    q, k, v = (normal(sum(lengths), heads, D, seed=i).requires_grad_() for i, heads in enumerate((H, HKV, HKV)))
    table = normal(3, 20, seed=7).requires_grad_()

    def mod(score, b, h, q_idx, kv_idx):
        return score * table[b, q_idx] + table[b, kv_idx]

    args = call_args(q, score_mod=mod, mask_mod=by_head, cu_seqlens_q=offsets, cu_seqlens_k=offsets)
    out, lse = attention(q, k, v, args)
    expected, expected_lse = reference.dense(q, k, v, args=args)
    torch.testing.assert_close((out, lse), (expected, expected_lse))
    parts = []
    for b, (begin, end) in enumerate(zip(offsets[:-1].tolist(), offsets[1:].tolist(), strict=True)):
        one = [x[begin:end].transpose(0, 1)[None] for x in (q, k, v)]
        shifted = lambda s, _, h, i, j, b=b: mod(s, b, h, i, j)  # noqa: E731
        mask = lambda _, h, i, j, b=b: by_head(b, h, i, j)  # noqa: E731
        alone = attention(*one, call_args(one[0], score_mod=shifted, mask_mod=mask))[0]
        parts.append(alone[0].transpose(0, 1))
    torch.testing.assert_close(out, torch.cat(parts))
    weights = normal(*out.shape, seed=3)
    grads = [torch.autograd.grad((x * weights).sum(), (q, k, v, table)) for x in (out, expected, torch.cat(parts))]
    torch.testing.assert_close(grads[0], grads[1])
    torch.testing.assert_close(grads[0], grads[2])


# Block masks


def test_a_block_mask_alone() -> None:
    q, k, v = (x.detach() for x in CASES[0].inputs())
    status = torch.zeros(1, 1, 5, 5, dtype=torch.uint8)
    status[..., 0], status[..., 4] = 2, 1
    block_mask = BlockMask.of_status(status, 8, 8, 37, 37)
    found = reference.forward(q, k, v, call_args(q, block_mask=block_mask))
    same = call_args(q, mask_mod=lambda b, h, i, j: (j < 8) | (j >= 32))
    torch.testing.assert_close(found, reference.forward(q, k, v, same))
    # mask_mod is not evaluated in full blocks.
    args = call_args(q, block_mask=block_mask, mask_mod=lambda b, h, i, j: j % 2 == 0)
    same = call_args(q, mask_mod=lambda b, h, i, j: (j < 8) | ((j >= 32) & (j % 2 == 0)))
    torch.testing.assert_close(reference.forward(q, k, v, args), reference.forward(q, k, v, same))


# Memory


@pytest.mark.slow
def test_memory_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    budget = 1 << 20
    monkeypatch.setattr(tiled, "MAX_TEMPORARY_BYTES", budget)
    q, k, v = (normal(B, heads, 300, D, seed=heads, dtype=torch.float32) for heads in (H, HKV, HKV))
    near = NEAR.float().requires_grad_()
    args = call_args(
        q, Band(200, 0), bias=normal(1, H, 1, 300, dtype=torch.float32).requires_grad_(), mask_mod=by_head,
        score_mod=lambda s, b, h, i, j: torch.tanh(s) + near[h, (i - j).abs() % 12],
    )  # fmt: skip
    with torch.no_grad(), Memory() as memory:
        out, lse, _ = reference.forward(q, k, v, args)
    assert memory.peak <= out.nbytes + lse.nbytes + budget
    with torch.no_grad(), Memory() as memory:
        *grads, others = reference.backward(out, lse, q, k, v, out, lse, args)
    sums = sum(x.nbytes for x in (*grads, *others) if x is not None)
    assert memory.peak <= sums + k.nbytes + v.nbytes + budget
