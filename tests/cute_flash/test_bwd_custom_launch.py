"""The way from CUDA tensors to the launches of gradients with users' functions, a bias and block maps, on CPU
tensors: see `tests.fake_custom`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from cute_flash.custom import custom_of
from torch import Tensor

from cute_flash import UnsupportedError, attn, backward_general, custom, use_kernels
from cute_flash.score_mod.block_mask import BlockMask
from cute_flash.score_mod.bound import BoundMods
from cute_flash.spec.args import How
from tests.combinations import RNG
from tests.cute_flash.test_bwd_launch import faked
from tests.fake_backward import FakeBackward
from tests.fake_gpu import inputs, normal

B, H, HKV, SQ, SK, D = 2, 4, 2, 150, 333, 16
WEIGHTS = normal(H, seed=11, dtype=torch.float32)
TABLE = normal(H, 40, seed=12, dtype=torch.float64)
OF_KEYS = normal(SK, seed=13, dtype=torch.bfloat16)
ONE = torch.tensor(0.7)
IDS = torch.arange(SK) // 60
FLAGS = torch.arange(SK) % 3 > 0
CAP, STEP = 3.0, 2


def capped(score, b, h, q, kv):
    return CAP * torch.tanh(score * WEIGHTS[h] / CAP) + ONE


def tables(score, b, h, q, kv):
    return score + TABLE[h, (q - kv).abs() // STEP] - OF_KEYS[kv] * ONE


def doubled(grad, score, b, h, q, kv):
    return grad * 2.0 * WEIGHTS[h]


def documents(b, h, q, kv):
    return (IDS[q + 100] == IDS[kv]) & FLAGS[kv]


def by_head(b, h, q, kv):
    return (kv + h * 40 < q + 128) | (b == 1)


@dataclass(frozen=True)
class Case:
    score_mod: Any = None
    mask_mod: Any = None
    bias: tuple[int, ...] | None = None
    bias_dtype: torch.dtype = torch.bfloat16
    score_mod_bwd: Any = None
    mapped: bool = False
    band: tuple[int | None, int | None] = (None, None)
    how: tuple[tuple[str, Any], ...] = ()

    @property
    def call(self) -> BoundMods:
        return BoundMods.of(self.score_mod, self.mask_mod, self.score_mod_bwd)


ALL_HOW = (("softcap", 2.0), ("alibi", torch.tensor([0.1, 0.2, -0.1, 0.0])), ("dropout", 0.3),
           ("rng", torch.tensor(RNG)), ("sinks", torch.tensor([0.3, 1.0, 0.0, -2.0])))  # fmt: skip
CASES = {
    "capped": Case(capped),
    "tables": Case(tables, band=(None, 0)),
    "own gradient": Case(capped, score_mod_bwd=doubled),
    "documents": Case(None, documents),
    "full bias": Case(bias=(B, H, SQ, SK)),
    "full bias, causal": Case(bias=(B, H, SQ, SK), band=(None, 0), bias_dtype=torch.float32),
    "double bias": Case(bias=(B, H, SQ, SK), bias_dtype=torch.float64),
    "bias of heads": Case(bias=(1, H, SQ, SK)),
    "bias of keys": Case(bias=(B, 1, 1, SK), bias_dtype=torch.float16),
    "bias of queries": Case(bias=(1, 1, SQ, 1), bias_dtype=torch.float32),
    "bias of few dimensions": Case(bias=(SQ, SK)),
    "all": Case(tables, documents, (1, H, SQ, SK), how=ALL_HOW, band=(100, 20)),
    "documents, mapped": Case(None, documents, mapped=True),
    "heads, mapped": Case(None, by_head, mapped=True, band=(None, 30)),
    "all, mapped": Case(tables, by_head, (B, 1, SQ, SK), how=ALL_HOW, mapped=True),
    "map alone": Case(mapped=True),
}


@pytest.fixture(params=["sm_80", "sm_90"])
def gpu(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> FakeBackward:
    monkeypatch.setattr(backward_general, "_launches", {})
    return faked(request.param, monkeypatch)


def tensors() -> list[Tensor]:
    return [normal(B, heads, s, D, seed=i) for i, (heads, s) in enumerate(((H, SQ), (HKV, SK), (HKV, SK)))]


def arguments(case: Case, given: list[Tensor], **more: Any) -> tuple[Any, ...]:
    bias = None if case.bias is None else normal(*case.bias, seed=9, dtype=torch.float32).to(case.bias_dtype)
    bias = None if bias is None else bias.requires_grad_()
    call, block_map = case.call, None
    if case.mapped:
        sizes = given[0].shape[2], given[1].shape[2]
        block_map = (
            BlockMask.of(case.mask_mod, (B, H, *sizes)) if case.mask_mod is not None else whole_map(sizes)
        )
    found = custom_of(bias, call, block_map)
    num = 0 if call.graphs.score is None else len(call.graphs.score.captures)
    wants = [bias is not None] + [i < num and x.is_floating_point() for i, x in enumerate(call.captures)]
    how = How(0.3, *case.band, **{**dict(case.how), **more})
    return (*how, *found._replace(wants=wants))


def whole_map(sizes: tuple[int, int]) -> BlockMask:
    """Where a block is full, or is not: the functions are not asked."""
    blocks = tuple(-(-n // 128) for n in sizes)
    status = torch.randint(0, 3, (1, H, *blocks), generator=torch.Generator().manual_seed(5)).to(torch.uint8)
    status[..., -1].clamp_(max=1)
    return BlockMask.of_status(status, 128, 128, *sizes)


def call_of(case: Case, with_dlse: bool = False, given: list[Tensor] | None = None, **more: Any) -> Any:
    given = tensors() if given is None else given
    rest = arguments(case, given, **more)
    out, lse, _ = custom._fwd_cpu(*given, *rest)
    dout = normal(*out.shape, seed=5, dtype=out.dtype)
    dlse = normal(*lse.shape, seed=6, dtype=torch.float32) if with_dlse else None
    return dout, dlse, *given, out, lse, *rest


def run(*args: Any, **more: Any) -> Any:
    """The gradients of the CUDA path, compared with those of the CPU path."""
    call = call_of(*args, **more)
    found, expected = custom._bwd_cuda(*call), custom._bwd_cpu(*call)
    fake = custom._bwd_fake(*call)
    flat = [[*x[:-1], *x[-1]] for x in (found, expected, fake)]
    for mine, theirs, faked_one in zip(*flat, strict=True):
        assert (mine.shape, mine.stride(), mine.dtype) == (theirs.shape, theirs.stride(), theirs.dtype)
        assert (mine.shape, mine.stride(), mine.dtype) == (
            faked_one.shape, faked_one.stride(), faked_one.dtype
        )  # fmt: skip
        largest = max(1.0, theirs.abs().max().item()) if theirs.numel() else 1.0
        torch.testing.assert_close(mine, theirs, rtol=0.02, atol=0.03 * largest)
    return found


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_gradients(gpu: FakeBackward, case: Case) -> None:
    for with_dlse in (False, True):
        run(case, with_dlse)
    assert gpu.bwd_plans[-1].main.kernel == f"bwd_{'sm' + gpu.name[3:]}_custom"
    # Other values are no part of a signature, nor of a kernel.
    num = len(gpu.bwd_plans)
    custom._bwd_cuda(*call_of(case))
    assert len(gpu.bwd_plans) == num


def test_wide_heads_go_to_the_other_family(gpu: FakeBackward) -> None:
    given = [normal(1, 2, 40, 192, seed=i) for i in range(3)]
    run(Case(None, by_head, (1, 1, 40, 40)), given=given)
    assert gpu.bwd_plans[-1].main.kernel == "bwd_sm80_custom"


def test_deterministic(gpu: FakeBackward) -> None:
    for name in ("bias of keys", "bias of heads", "full bias", "documents"):
        run(CASES[name], deterministic=True)
        assert gpu.bwd_plans[-1].main.kernel == f"bwd_{gpu.name.replace('_', '')}_ordered_custom"
        assert not gpu.bwd_plans[-1].main.static.mods.dbias_accumulates
    for name, what in (("tables", "captured tensors of score_mod"), ("documents, mapped", "a block_map")):
        with pytest.raises(UnsupportedError, match=f"deterministic gradients with {what}"):
            run(CASES[name], deterministic=True)


def test_nothing_to_launch(gpu: FakeBackward) -> None:
    given = tensors()
    given[0] = given[0][:, :, :0]
    found = run(Case(tables, bias=(B, H, 1, SK)), given=given)
    assert gpu.calls == [] and not found[5].any()


def test_maps_of_other_blocks_are_refused(gpu: FakeBackward) -> None:
    given = tensors()
    how, made = How(0.3, None, None), BlockMask.of(by_head, (B, H, SQ, SK), tile=(96, 96))
    rest = (*how, *custom_of(None, BoundMods.of(None, by_head, None), made))
    out, lse, _ = custom._fwd_cpu(*given, *rest)
    with pytest.raises(UnsupportedError, match=r"block_map of blocks of 96 x 96"):
        custom._bwd_cuda(out, None, *given, out, lse, *rest)


def test_lists_are_made_once(gpu: FakeBackward) -> None:
    made = BlockMask.of(by_head, (B, H, SQ, SK))
    rest = (*How(0.3, None, None), *custom_of(None, BoundMods.of(None, by_head, None), made))
    given = tensors()
    out, lse, _ = custom._fwd_cpu(*given, *rest)
    lists = []
    for _ in range(2):
        custom._bwd_cuda(out, None, *given, out, lse, *rest)
        lists.append(gpu.arguments("bwd_sm")[-2])
    assert lists[0] is lists[1]


def test_gradients_are_computed_by_the_family_of_their_forward(
    gpu: FakeBackward, monkeypatch: pytest.MonkeyPatch
) -> None:
    from cute_flash.spec.family import requested_family

    seen = []

    def watched(*args: Any) -> Any:
        seen.append(requested_family())
        return custom._bwd_cpu(*args)

    monkeypatch.setattr(custom, "custom_bwd", watched)
    q, k, v = (x.requires_grad_() for x in inputs())
    with use_kernels("sm80"):
        out = attn(q, k, v, mask_mod=lambda b, h, q, kv: kv <= q + 3)
    out.sum().backward()
    assert seen == ["sm80"] and requested_family() is None
