"""Training steps in CUDA graphs and in torch.compile: dense and varlen, with features and user mods."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

import cute_flash
from tests.combinations import VarlenCombination
from tests.gpu.calls import ALIBI, BF16, DROPOUT, RAGGED, SINKS, SOFTCAP, dense, varlen
from tests.gpu.captured import Captured
from tests.lengths import Lengths

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("family", "poisoned_memory")]


@dataclass(frozen=True)
class Step:
    """A training step, which returns out and the gradients of all leaves."""

    leaves: list[Tensor]
    attend: Callable[..., Tensor]  # of the leaves
    lengths: list[tuple[Tensor, list[Tensor]]] = field(default_factory=list)  # offsets, and values of later steps

    def __call__(self, attend: Callable[..., Tensor] | None = None) -> list[Tensor]:
        out = (attend or self.attend)(*self.leaves)
        return [out.detach(), *torch.autograd.grad(out.float().square().sum(), self.leaves)]


def normal(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(shape, device="cuda", dtype=dtype).requires_grad_()


def qkv() -> list[Tensor]:
    return [normal(2, 4, 256, 64), *(normal(2, 2, 320, 64) for _ in range(2))]


def plain() -> Step:
    return Step(qkv(), lambda q, k, v: cute_flash.attn(q, k, v, causal=True))


def features() -> Step:
    def attend(q: Tensor, k: Tensor, v: Tensor, slopes: Tensor, sinks: Tensor) -> Tensor:
        return cute_flash.attn(q, k, v, causal=True, softcap=5.0, alibi=slopes, sinks=sinks)

    return Step([*qkv(), *(normal(4, dtype=torch.float32) for _ in range(2))], attend)


def add_table(table: Tensor) -> Callable[..., Tensor]:
    return lambda score, b, h, q, kv: score + table[h, (q - kv).abs()]


def mods() -> Step:
    """A learned table and a block mask."""
    mask = cute_flash.masks.causal()
    block_mask = cute_flash.BlockMask.of(mask, (2, 4, 300, 300), device="cuda")

    def attend(q: Tensor, k: Tensor, v: Tensor, table: Tensor) -> Tensor:
        return cute_flash.attn(q, k, v, score_mod=add_table(table), mask_mod=mask, block_mask=block_mask)

    return Step([*(normal(2, 4, 300, 64) for _ in range(3)), normal(4, 300, dtype=torch.float32)], attend)


def varlen_step(has_mods: bool) -> Step:
    batches = (
        Lengths([200, 0, 56], [150, 30, 76]),
        Lengths([1, 250, 5], [1, 255, 0]),
        Lengths([10, 20, 30], [10, 20, 30], None, (196, 196)),
    )
    cu_q, cu_k = batches[0].cu_q.cuda(), batches[0].cu_k.cuda()

    def attend(q: Tensor, k: Tensor, v: Tensor, *table: Tensor) -> Tensor:
        options: dict[str, Any] = {"score_mod": add_table(*table)} if table else {}
        return cute_flash.attn_varlen(q, k, v, cu_q, cu_k, causal=True, **options)

    leaves = [normal(256, 4, 64) for _ in range(3)] + [normal(4, 256, dtype=torch.float32)] * has_mods
    return Step(leaves, attend, [(cu_q, [x.cu_q for x in batches]), (cu_k, [x.cu_k for x in batches])])


STEPS: dict[str, Callable[[], Step]] = {
    "plain": plain,
    "features": features,
    "mods": mods,
    "varlen": lambda: varlen_step(has_mods=False),
    "varlen mods": lambda: varlen_step(has_mods=True),
}


def assert_equal_results(found: list[Tensor], expected: list[Tensor]) -> None:
    """dQ is accumulated in no fixed order."""
    for x, y in zip(found, expected, strict=True):
        torch.testing.assert_close(x, y, rtol=0.02, atol=0.02 * y.abs().max().item() + 1e-6)


@pytest.mark.parametrize("name", STEPS)
def test_captured_training_step(name: str) -> None:
    """Replayed with new inputs and new lengths, a graph of forward and backward gives their results."""
    step = STEPS[name]()
    captured = Captured.of(step)
    for i in range(3):
        with torch.no_grad():
            for leaf in step.leaves:
                leaf.copy_(torch.randn_like(leaf))
        for offsets, values in step.lengths:
            offsets.copy_(values[i])
        replayed = [x.clone() for x in captured.replay()]
        assert_equal_results(replayed, step())


@pytest.mark.parametrize("name", ("plain", "features"))
def test_compiled_training_step(name: str) -> None:
    step = STEPS[name]()
    assert_equal_results(step(torch.compile(step.attend, fullgraph=True)), step())


MANY = {**SOFTCAP, **ALIBI, **DROPOUT}
RANDOM = {
    "dense": dense(1, 2, 1, 200, 300, 64, BF16, features={**MANY, "dropout": 0.5}),
    "varlen": varlen(RAGGED, 2, 2, 128, BF16, features={**MANY, **SINKS}),
}


@pytest.mark.parametrize("case", RANDOM.values(), ids=RANDOM)
def test_every_replay_has_a_new_dropout_mask(case: Any) -> None:
    """The gradients use the mask of their own replay; checked by the linearity of out in v."""
    leaves = {name: x.nan_to_num().cuda().requires_grad_() for name, x in case.tensors().items()}
    if isinstance(case, VarlenCombination):
        # Lengths are on the device before the capture begins.
        attend = partial(cute_flash.attn_varlen, **case.lengths.args("cuda"), **case.one.options(leaves))
    else:
        attend = partial(cute_flash.attn, **case.options(leaves))

    def step() -> tuple[Tensor, ...]:
        out = attend(leaves["q"], leaves["k"], leaves["v"]).float()
        return out.detach().sum(), *torch.autograd.grad(out.sum(), list(leaves.values()))

    captured, sums = Captured.of(step), []
    for _ in range(3):
        total, *grads = captured.replay()
        sums.append(total.item())
        assert all(x.isfinite().all() for x in grads)
        found = (grads[2].double() * leaves["v"].double()).sum().item()
        torch.testing.assert_close(found, sums[-1], rtol=0.02, atol=4.0)
    assert len(set(sums)) == 3
