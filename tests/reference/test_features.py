"""Softcap, ALiBi, sinks, dropout and the largest logit: `attn` on the CPU against the fp64 oracle."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from cute_flash import api, attn, general
from cute_flash.reference import tiled as reference
from tests.cases import assert_close, assert_error_within
from tests.combinations import RNG, Combination, gradients, normal, qkv
from tests.cute_flash.test_reference import Memory
from tests.feature_gradients import by_cpu_path
from tests.gradients import largest


@pytest.fixture
def known_rng(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(api, "draw_rng", lambda device: torch.tensor(RNG))


# Values


def by_definition(q: Tensor, k: Tensor, v: Tensor, score: reference.Score, scale: float) -> Any:
    """Score by score, in Python's floats: out, LSE and the largest logit of each head; causal."""
    (batch, heads, sq, _), sk = q.shape, k.shape[2]
    out, lse = torch.zeros(*q.shape[:3], v.shape[3], dtype=q.dtype), torch.zeros(q.shape[:3], dtype=q.dtype)
    most = torch.full((heads,), -math.inf, dtype=q.dtype)
    assert score.dropout is not None and score.alibi is not None and score.sinks is not None
    kept = score.dropout.kept(range(batch), range(heads), range(sq), range(sk))
    for b, h, i in itertools.product(range(batch), range(heads), range(sq)):
        head, own = h // (heads // k.shape[1]), i + sk - sq
        total, weights = math.exp(score.sinks[h]), {}
        for j in range(min(sk, own + 1)):
            s = scale * float(q[b, h, i] @ k[b, head, j])
            s = score.softcap * math.tanh(s / score.softcap) if score.softcap else s
            s -= float(score.alibi[b, h]) * abs(own - j)
            most[h] = max(float(most[h]), s)
            weights[j] = math.exp(s)
            total += weights[j]
        lse[b, h, i] = math.log(total)
        for j, weight in weights.items():
            if kept[b, h, i, j]:
                out[b, h, i] += weight / total / (1 - score.dropout.p) * v[b, head, j]
    return out, lse, most


@pytest.mark.usefixtures("known_rng")
@pytest.mark.parametrize(("sq", "sk"), [(7, 7), (4, 9), (9, 4)])
def test_all_together_by_definition(sq: int, sk: int) -> None:
    features = {"softcap": 0.7, "alibi": 2, "sinks": True, "dropout": 0.4}
    case = Combination(2, 2, 2, sq, sk, 4, 3, torch.float64, None, 0, features)
    tensors = case.tensors()
    q, k, v = (tensors[name] for name in "qkv")
    options = case.options(tensors)
    found = attn(q, k, v, **options, scale=0.9, return_lse=True, return_max_logit=True)
    expected = by_definition(q, k, v, case.score(tensors), 0.9)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-13)
    oracle = reference.dense(q, k, v, case.band, 0.9, case.score(tensors))
    torch.testing.assert_close(oracle, expected[:2], rtol=1e-12, atol=1e-13)


@settings(max_examples=120, deadline=None, derandomize=True)
@given(seed=st.integers(0, 10**6), tile=st.sampled_from([(512, 256), (16, 32), (7, 5)]))
def test_combinations(seed: int, tile: tuple[int, int]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reference, "MAX_ROWS", tile[0])
        patch.setattr(reference, "MAX_KEYS", tile[1])
        patch.setattr(api, "draw_rng", lambda device: torch.tensor(RNG))
        check(Combination.drawn(seed))


def check(case: Combination) -> None:
    tensors = case.tensors()

    def mine(x: dict[str, Tensor]) -> Any:
        return attn(x["q"], x["k"], x["v"], **case.options(x), return_lse=True)

    def dense(by: Any) -> Any:
        return lambda x: by(x["q"], x["k"], x["v"], case.band, None, case.score(x))

    wide = {name: x.double() for name, x in tensors.items()}
    exact, rough = dense(reference.dense)(wide), dense(reference.dense_low_precision)(tensors)
    # Both in the precision in which the CPU path adds up; `rough` alone knows how it rounds.
    out, lse = mine(tensors)
    if "sinks" in case.features:
        assert torch.isfinite(lse).all()
    assert_close(out, lse, *exact, rough[0])
    weights = normal(*out.shape, seed=3), normal(*lse.shape, seed=4)
    found = gradients(mine, tensors, weights)
    oracle = gradients(dense(reference.dense), wide, weights)
    most = max(map(largest, oracle.values()))
    # What a rounded `out` alone makes of them: terms of a sum over a head may cancel, their rounding not.
    rounded = exact[0].to(case.dtype).double(), exact[1]
    of_rounded = by_cpu_path(case, wide, rounded, tuple(x.double() for x in weights), None)
    for name, x in tensors.items():
        assert (found[name].shape, found[name].dtype) == (x.shape, x.dtype)
        if largest(oracle[name]) <= 1e-12 * most:
            assert largest(found[name]) <= 1e-4 * most, f"d{name}: should be 0"
            continue
        # The gradients' own rounding, and that of `out`, from which they are computed.
        yardstick = oracle[name] + torch.finfo(case.dtype).eps * largest(oracle[name])
        yardstick = yardstick + (of_rounded[name] - oracle[name]).abs()
        assert_error_within(f"d{name}", found[name], oracle[name], yardstick.to(x.dtype))


EACH: list[dict[str, Any]] = [{"softcap": 0.8}, {"alibi": 1}, {"alibi": 2}, {"sinks": True}, {"dropout": 0.5}]
TOGETHER = {"softcap": 2.0, "alibi": 2, "sinks": True, "dropout": 0.3}


@pytest.mark.usefixtures("known_rng")
@pytest.mark.parametrize("features", [*EACH, TOGETHER])
@pytest.mark.parametrize(("sq", "sk", "left", "right"), [(4, 5, None, None), (5, 3, None, 0), (4, 4, 1, 1)])
def test_gradcheck(features: dict[str, Any], sq: int, sk: int, left: int | None, right: int | None) -> None:
    case = Combination(2, 1, 2, sq, sk, 2, 3, torch.float64, left, right, features)
    tensors = case.tensors()

    def both(*leaves: Tensor) -> tuple[Tensor, Tensor]:
        x = dict(zip(tensors, leaves, strict=True))
        out, lse = attn(x["q"], x["k"], x["v"], **case.options(x), return_lse=True)
        return out, torch.where(lse == -torch.inf, 0.0, lse)

    assert torch.autograd.gradcheck(both, [x.requires_grad_() for x in tensors.values()])


# Edges


def test_a_row_without_keys_has_the_sink_alone() -> None:
    q, k, v = qkv(5, 3)
    sinks = normal(4, seed=1).requires_grad_()
    out, lse = attn(q, k, v, causal=True, sinks=sinks, return_lse=True)
    assert torch.equal(out[:, :, :2], torch.zeros(1, 4, 2, 3, dtype=torch.float64))
    assert torch.equal(lse[0, :, :2], sinks.detach()[:, None].expand(4, 2))
    # What flows into such rows does not reach anything, but the LSE's own gradient.
    dout, dlse = torch.ones_like(out), torch.zeros_like(lse)
    dout[:, :, :2] = torch.nan
    (dsinks,) = torch.autograd.grad((out, lse), sinks, (dout, dlse), retain_graph=True)
    assert torch.isfinite(dsinks).all()
    dlse[:, :, :2] = 1.0
    (more,) = torch.autograd.grad((out, lse), sinks, (dout, dlse))
    torch.testing.assert_close(more - dsinks, torch.full_like(sinks, 2.0))


def test_a_sink_of_minus_infinity_is_none() -> None:
    q, k, v = (x.requires_grad_() for x in qkv(5, 3))
    sinks = torch.full((4,), -torch.inf, dtype=torch.float64, requires_grad=True)
    found = attn(q, k, v, causal=True, sinks=sinks, return_lse=True)
    expected = attn(q, k, v, causal=True, return_lse=True)
    torch.testing.assert_close(found, expected)
    grads = torch.autograd.grad(found[0].sum(), (q, k, v, sinks))
    torch.testing.assert_close(grads[:3], torch.autograd.grad(expected[0].sum(), (q, k, v)))
    assert torch.equal(grads[3], torch.zeros(4, dtype=torch.float64))


@pytest.mark.parametrize("off", [{"softcap": None}, {"softcap": 0.0}, {"dropout": 0.0}, {"dropout": None}])
def test_off_is_off(off: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(general, "general_fwd", lambda *_: pytest.fail("not plain"))
    q, k, v = qkv()
    assert torch.equal(attn(q, k, v, **off), attn(q, k, v))


def test_extreme_scores_meet_the_cap() -> None:
    q, k, v = (1e6 * x for x in qkv())
    out, lse, most = attn(q, k, v, softcap=30.0, return_lse=True, return_max_logit=True)
    assert torch.isfinite(out).all()
    assert lse.abs().max() <= 30.0 + math.log(6)
    torch.testing.assert_close(most, torch.full((4,), 30.0, dtype=torch.float64))


def test_max_logit() -> None:
    q, k, v = (x.requires_grad_() for x in qkv(5, 7))
    out, most = attn(q, k, v, causal=True, scale=0.3, return_max_logit=True)
    scores = (0.3 * q @ k.repeat_interleave(2, 1).mT).masked_fill(torch.ones(5, 7).tril(2) == 0, -torch.inf)
    torch.testing.assert_close(most, scores.amax(dim=(0, 2, 3)).detach())
    assert not most.requires_grad and out.requires_grad
    out.sum().backward()
    # A sink is no score; a head that sees nothing has none.
    sinks = torch.full((4,), 100.0, dtype=torch.float64)
    assert torch.equal(attn(q, k, v, causal=True, scale=0.3, sinks=sinks, return_max_logit=True)[1], most)
    nothing = attn(q, k[:, :, :0], v[:, :, :0], return_max_logit=True)[1]
    assert torch.equal(nothing, torch.full((4,), -torch.inf, dtype=torch.float64))
    half = attn(*(x.detach().half() for x in (q, k, v)), return_lse=True, return_max_logit=True)
    assert [x.dtype for x in half] == [torch.float16, torch.float32, torch.float32]


@pytest.mark.parametrize("layout", ["bshd", "3-D", "2-D"])
def test_other_layouts(layout: str) -> None:
    q, k, v = (x.expand(2, -1, -1, -1)[:, : 1 if layout != "bshd" else None] for x in qkv())
    slopes = normal(2, q.shape[1], seed=5)
    if layout == "2-D":
        q, k, v, slopes = q[:1], k[:1], v[:1], slopes[:1]
    options: dict[str, Any] = {"alibi": slopes, "softcap": 2.0, "sinks": slopes[0], "return_lse": True}
    expected, expected_lse = attn(q, k, v, **options)
    reorder = {"bshd": lambda x: x.transpose(1, 2), "3-D": lambda x: x[:, 0], "2-D": lambda x: x[0, 0]}[
        layout
    ]
    out, lse = attn(*map(reorder, (q, k, v)), **options, layout="bshd" if layout == "bshd" else "bhsd")
    torch.testing.assert_close(out, reorder(expected))
    torch.testing.assert_close(lse, expected_lse if layout == "bshd" else reorder(expected_lse))


@pytest.mark.parametrize("features", [*EACH, TOGETHER])
def test_memory_is_bounded(features: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    budget = 1 << 20
    monkeypatch.setattr(reference, "MAX_TEMPORARY_BYTES", budget)
    case = Combination(2, 2, 2, 300, 400, 8, 8, torch.float32, 200, 0, features)
    tensors = case.tensors()
    q, k, v = (tensors[name] for name in "qkv")
    score = case.score(tensors)
    with Memory() as memory:
        out, lse = reference.forward(q, k, v, case.band, None, score)
    assert memory.peak <= out.nbytes + lse.nbytes + budget
    with Memory() as memory:
        grads = reference.backward_with(score, (out, lse), q, k, v, out, lse, case.band)
    assert memory.peak <= sum(x.nbytes for x in grads) + k.nbytes + v.nbytes + budget


# Dropout and its generator


def test_dropout_follows_the_generator() -> None:
    q, k, v = qkv(20, 30)
    outs = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        outs += [attn(q, k, v, dropout=0.5), attn(q, k, v, dropout=0.5)]
    assert torch.equal(outs[0], outs[2]) and torch.equal(outs[1], outs[3])
    assert not torch.equal(outs[0], outs[1]) and not torch.equal(outs[0], outs[4])


def test_dropout_keeps_the_mean() -> None:
    q, k, v = qkv(8, 16)
    torch.manual_seed(0)
    mean = torch.stack([attn(q, k, v, dropout=0.3) for _ in range(800)]).mean(0)
    torch.testing.assert_close(mean, attn(q, k, v), rtol=0, atol=0.1)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_dropout_in_a_checkpoint(use_reentrant: bool) -> None:
    found = []
    for is_saved in (False, True):
        torch.manual_seed(5)
        leaves = [x.requires_grad_() for x in qkv(20, 30)]

        def layer(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return attn(q, k, v, dropout=0.5).sin() + attn(q, k, v, dropout=0.2)

        out = checkpoint(layer, *leaves, use_reentrant=use_reentrant) if is_saved else layer(*leaves)
        torch.manual_seed(99)  # the backward pass draws nothing of its own
        out.sum().backward()
        found.append([out.detach(), *(x.grad for x in leaves)])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
