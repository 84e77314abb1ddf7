"""Softcap, ALiBi, sinks, dropout and the largest logit of the CPU path, dense and varlen, against the oracle."""

from __future__ import annotations

import itertools
import math
import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from cute_flash import reference
from cute_flash.reference import plain_args, tiled
from cute_flash.reference.dropout import Dropout
from cute_flash.reference.varlen import sequences
from cute_flash.spec.args import AttentionArgs
from tests.arguments import attention
from tests.cases import CAUSAL, FULL, assert_close, assert_error_within
from tests.combinations import RNG, Combination, VarlenCombination, gradients, normal, qkv, results
from tests.feature_gradients import assert_feature_gradients, by_cpu_path
from tests.gradients import largest
from tests.lengths import Lengths
from tests.reference.memory import largest_within_budget

CLOSE = {"rtol": 1e-11, "atol": 1e-12}


def by_definition(q: Tensor, k: Tensor, v: Tensor, args: AttentionArgs) -> Any:
    """Causal attention score by score with Python floats: out, LSE and the largest logit of each head."""
    (batch, heads, sq, _), sk = q.shape, k.shape[2]
    out, lse = torch.zeros(*q.shape[:3], v.shape[3], dtype=q.dtype), torch.zeros(q.shape[:3], dtype=q.dtype)
    max_logit = torch.full((heads,), -math.inf, dtype=q.dtype)
    assert args.rng is not None and args.alibi is not None and args.sinks is not None
    dropout = Dropout(args.dropout, args.rng, heads)
    keep_mask = dropout.keep_mask(range(batch), range(heads), range(sq), range(sk))
    for b, h, i in itertools.product(range(batch), range(heads), range(sq)):
        head, own = h // (heads // k.shape[1]), i + sk - sq
        total, weights = math.exp(args.sinks[h]), {}
        for j in range(min(sk, own + 1)):
            s = args.scale * float(q[b, h, i] @ k[b, head, j])
            s = args.softcap * math.tanh(s / args.softcap)
            s -= float(args.alibi[b, h]) * abs(own - j)
            max_logit[h] = max(float(max_logit[h]), s)
            weights[j] = math.exp(s)
            total += weights[j]
        lse[b, h, i] = math.log(total)
        for j, weight in weights.items():
            if keep_mask[b, h, i, j]:
                out[b, h, i] += weight / total / (1 - args.dropout) * v[b, head, j]
    return out, lse, max_logit


@pytest.mark.parametrize(("sq", "sk"), [(7, 7), (4, 9), (9, 4)])
def test_all_together_by_definition(sq: int, sk: int) -> None:
    features = {"softcap": 0.7, "alibi": 2, "sinks": True, "dropout": 0.4}
    case = Combination(2, 2, 2, sq, sk, 4, 3, torch.float64, None, 0, features)
    tensors = case.tensors()
    q, k, v = (tensors[name] for name in "qkv")
    args = case.args(tensors, 0.9)._replace(return_max_logit=True)
    expected = by_definition(q, k, v, args)
    torch.testing.assert_close(reference.forward(q, k, v, args), expected, rtol=1e-12, atol=1e-13)
    oracle = reference.dense(q, k, v, args=args)
    torch.testing.assert_close(oracle, expected[:2], rtol=1e-12, atol=1e-13)


def attend(case: Combination | VarlenCombination) -> Any:
    """Maps tensors by name to (out, LSE) of the CPU path, differentiably."""
    return lambda x: attention(x["q"], x["k"], x["v"], case.args(x))


@pytest.mark.slow
@settings(max_examples=120, deadline=None, derandomize=True)
@given(seed=st.integers(0, 10**6), tile=st.sampled_from([(512, 256), (16, 32), (7, 5)]))
def test_combinations(seed: int, tile: tuple[int, int]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tiled, "MAX_ROWS", tile[0])
        patch.setattr(tiled, "MAX_KEYS", tile[1])
        check(Combination.drawn(seed))


def check(case: Combination) -> None:
    tensors = case.tensors()
    wide = {name: x.double() for name, x in tensors.items()}
    exact, rough = case.dense(reference.dense, wide), case.dense(reference.dense_low_precision, tensors)
    # `rough` is the yardstick of the error rule.
    out, lse = attend(case)(tensors)
    if "sinks" in case.features:
        assert torch.isfinite(lse).all()
    assert_close(out, lse, *exact, rough[0])
    weights = normal(*out.shape, seed=3), normal(*lse.shape, seed=4)
    found = gradients(attend(case), tensors, weights)
    oracle = gradients(lambda x: case.dense(reference.dense, x), wide, weights)
    most = max(map(largest, oracle.values()))
    # The error from rounding `out`: terms of a sum over a head may cancel, but their rounding errors do not.
    # So do those of the products of dO and O, in fp32.
    of_products = torch.finfo(torch.float32).eps * exact[0].abs() * weights[0].sign()
    rounded = exact[0].to(case.dtype).double() + of_products, exact[1]
    of_rounded = by_cpu_path(case, wide, rounded, (weights[0].double(), weights[1].double()), None)
    for name, x in tensors.items():
        assert (found[name].shape, found[name].dtype) == (x.shape, x.dtype)
        if largest(oracle[name]) <= 1e-12 * most:
            assert largest(found[name]) <= 1e-4 * most, f"d{name}: should be 0"
            continue
        # The rounding of the gradients, and of `out`, from which they are computed.
        yardstick = oracle[name] + torch.finfo(case.dtype).eps * largest(oracle[name])
        yardstick = yardstick + (of_rounded[name] - oracle[name]).abs()
        assert_error_within(f"d{name}", found[name], oracle[name], yardstick.to(x.dtype))


@pytest.mark.slow
@settings(max_examples=40, deadline=None, derandomize=True)
@given(seed=st.integers(0, 10**6))
def test_varlen_combinations(seed: int) -> None:
    one, pick = replace(Combination.drawn(seed), dtype=torch.float64), random.Random(seed)
    sizes, batch = [0, 0, 1, 5, 17, 33], pick.randrange(1, 5)
    queries, keys = ([pick.choice(sizes) for _ in range(batch)] for _ in range(2))
    used = [pick.randrange(sk + 1) for sk in keys] if pick.random() < 0.5 else None
    case = VarlenCombination(one, Lengths(queries, keys, used, (pick.choice([0, 3]), pick.choice([0, 3]))))
    tensors, weights = case.tensors(), case.weights(torch.Generator().manual_seed(3))
    found = results(attend(case), tensors, weights)
    expected = results(lambda x: case.dense(reference.dense, x), tensors, weights)
    torch.testing.assert_close(found, expected, **CLOSE)
    # The error rule of the GPU tests holds too.
    assert_feature_gradients(attend(case), case, tensors, weights)


EACH: list[dict[str, Any]] = [{"softcap": 0.8}, {"alibi": 1}, {"alibi": 2}, {"sinks": True}, {"dropout": 0.5}]
TOGETHER = {"softcap": 2.0, "alibi": 2, "sinks": True, "dropout": 0.3}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("features", "sq", "sk", "left", "right"),
    [
        *((features, 5, 3, None, 0) for features in (*EACH, TOGETHER)),
        (TOGETHER, 4, 5, None, None),
        (TOGETHER, 4, 4, 1, 1),
    ],
)
def test_gradcheck(features: dict[str, Any], sq: int, sk: int, left: int | None, right: int | None) -> None:
    case = Combination(2, 1, 2, sq, sk, 2, 3, torch.float64, left, right, features)
    tensors = case.tensors()

    def outputs(*leaves: Tensor) -> tuple[Tensor, Tensor]:
        out, lse = attend(case)(dict(zip(tensors, leaves, strict=True)))
        return out, torch.where(lse == -torch.inf, 0.0, lse)

    assert torch.autograd.gradcheck(outputs, [x.requires_grad_() for x in tensors.values()])


def test_a_sequence_does_not_depend_on_its_batch() -> None:
    """Bit by bit, except for dropout and (B, H) slopes, which depend on the index of the sequence."""
    one = Combination(1, 2, 2, 0, 0, 8, 8, torch.float32, 20, 3, {"softcap": 2.0, "alibi": 1, "sinks": True})
    case = VarlenCombination(one, Lengths([5, 40, 9], [7, 61, 30]))
    x = case.tensors()
    args = case.args(x)
    out, lse, _ = reference.forward(x["q"], x["k"], x["v"], args)
    for s in sequences(x["q"], x["k"], args):
        alone = reference.forward(s.of_queries(x["q"]), s.of_keys(x["k"]), s.of_keys(x["v"]), one.args(x))
        assert torch.equal(s.of_queries(out), alone[0])
        assert torch.equal(s.of_rows(lse), alone[1])


# Edges


def test_a_row_without_keys_has_the_sink_alone() -> None:
    q, k, v = qkv(5, 3)
    sinks = normal(4, seed=1)
    args = plain_args(q, CAUSAL)._replace(sinks=sinks)
    out, lse, _ = reference.forward(q, k, v, args)
    assert torch.equal(out[:, :, :2], torch.zeros(1, 4, 2, 3, dtype=torch.float64))
    assert torch.equal(lse[0, :, :2], sinks[:, None].expand(4, 2))
    # dO of such rows has no effect; dLSE reaches the sink.
    dout, dlse = torch.ones_like(out), torch.zeros_like(lse)
    dout[:, :, :2] = torch.nan
    *_, (_, dsinks, _) = reference.backward(dout, dlse, q, k, v, out, lse, args)
    assert dsinks is not None and torch.isfinite(dsinks).all()
    dlse[:, :, :2] = 1.0
    *_, (_, more, _) = reference.backward(dout, dlse, q, k, v, out, lse, args)
    torch.testing.assert_close(more - dsinks, torch.full_like(sinks, 2.0))


def test_a_sink_of_minus_infinity_is_none() -> None:
    q, k, v = qkv(5, 3)
    plain = plain_args(q, CAUSAL)
    args = plain._replace(sinks=torch.full((4,), -torch.inf, dtype=torch.float64))
    found, expected = (reference.forward(q, k, v, x)[:2] for x in (args, plain))
    torch.testing.assert_close(found, expected)
    dout = torch.ones_like(expected[0])
    *grads, others = reference.backward(dout, None, q, k, v, *found, args)
    *expected_grads, _ = reference.backward(dout, None, q, k, v, *expected, plain)
    torch.testing.assert_close(grads, expected_grads)
    assert torch.equal(others[1], torch.zeros(4, dtype=torch.float64))


def test_extreme_scores_meet_the_cap() -> None:
    q, k, v = (1e6 * x for x in qkv())
    args = plain_args(q)._replace(softcap=30.0, return_max_logit=True)
    out, lse, max_logit = reference.forward(q, k, v, args)
    assert torch.isfinite(out).all()
    assert lse.abs().max() <= 30.0 + math.log(6)
    torch.testing.assert_close(max_logit, torch.full((4,), 30.0, dtype=torch.float64))


def test_max_logit() -> None:
    q, k, v = qkv(5, 7)
    args = plain_args(q, CAUSAL, 0.3)._replace(return_max_logit=True)
    scores = (0.3 * q @ k.repeat_interleave(2, 1).mT).masked_fill(torch.ones(5, 7).tril(2) == 0, -torch.inf)
    max_logit = reference.forward(q, k, v, args)[2]
    torch.testing.assert_close(max_logit, scores.amax(dim=(0, 2, 3)))
    # A sink is not a score. A head without visible keys has no largest logit.
    sinks = torch.full((4,), 100.0, dtype=torch.float64)
    assert torch.equal(reference.forward(q, k, v, args._replace(sinks=sinks))[2], max_logit)
    nothing = reference.forward(q, k[:, :, :0], v[:, :, :0], args)[2]
    assert torch.equal(nothing, torch.full((4,), -torch.inf, dtype=torch.float64))


def test_gradients_have_the_dtype_and_strides_of_their_arguments() -> None:
    q, k, v = (x.float() for x in qkv())
    slopes = normal(4, 1, seed=1, dtype=torch.float16).T
    args = plain_args(q, FULL)._replace(alibi=slopes, sinks=normal(8, seed=2, dtype=torch.bfloat16)[::2])
    out, lse, _ = reference.forward(q, k, v, args._replace(out_fp32=True))
    *_, grads = reference.backward(out, None, q, k, v, out, lse, args)
    for x, grad in zip(args.differentiable, grads, strict=True):
        assert (x is None) == (grad is None)
        if x is not None and grad is not None:
            assert (grad.shape, grad.dtype) == (x.shape, x.dtype)
            assert grad.stride() == torch.empty_like(x).stride()


@pytest.mark.slow
@pytest.mark.parametrize("features", [*EACH, TOGETHER])
def test_memory_is_bounded(features: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    budget = 1 << 20
    monkeypatch.setattr(tiled, "MAX_TEMPORARY_BYTES", budget)
    case = Combination(2, 2, 2, 300, 400, 8, 8, torch.float32, 200, 0, features)
    tensors = case.tensors()
    q, k, v = (tensors[name] for name in "qkv")
    largest_within_budget(q, k, v, case.args(tensors), budget)


# Refusals


def test_dropout_needs_a_seed() -> None:
    q, k, v = qkv()
    args = plain_args(q)._replace(dropout=0.5)
    with pytest.raises(ValueError, match=r"dropout=.* needs rng: give \(seed, offset\)"):
        reference.forward(q, k, v, args)
    args = args._replace(rng=torch.tensor(RNG))
    out, lse, _ = reference.forward(q, k, v, args)
    with pytest.raises(ValueError, match=r"dropout=.* needs rng"):
        reference.backward(out, None, q, k, v, out, lse, args._replace(rng=None))


def offsets(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"cu_seqlens_q": offsets(0, 4, 10)}, "cu_seqlens_q ends with 10: there are 9 tokens in q"),
        ({"cu_seqlens_k": offsets(1, 4, 12)}, "cu_seqlens_k begins with 1: expected 0"),
        ({"cu_seqlens_k": offsets(0, 13, 12)}, r"cu_seqlens_k\[2\]=12 is less than cu_seqlens_k\[1\]=13"),
        ({"seqused_k": offsets(2, 11)}, r"seqused_k\[1\]=11: sequence 1 has 10 keys"),
        ({"seqused_k": offsets(-1, 1)}, r"seqused_k\[0\]=-1: sequence 0 has 2 keys"),
        ({"max_seqlen_q": 4}, "max_seqlen_q=4: sequence 1 has 5"),
        ({"max_seqlen_k": 9}, "max_seqlen_k=9: sequence 1 has 10"),
    ],
)
def test_wrong_offsets(fields: dict[str, Any], message: str) -> None:
    q, k, v = (normal(n, h, 4, seed=i) for i, (n, h) in enumerate(((9, 4), (12, 2), (12, 2))))
    args = plain_args(q)._replace(cu_seqlens_q=offsets(0, 4, 9), cu_seqlens_k=offsets(0, 2, 12))
    out, lse, _ = reference.forward(q, k, v, args)
    with pytest.raises(ValueError, match=message):
        reference.forward(q, k, v, args._replace(**fields))
    with pytest.raises(ValueError, match=message):
        reference.backward(out, None, q, k, v, out, lse, args._replace(**fields))


def test_no_sequences_at_all() -> None:
    q, k, v = (normal(n, h, 4, seed=i) for i, (n, h) in enumerate(((3, 4), (2, 2), (2, 2))))
    args = plain_args(q)._replace(cu_seqlens_q=offsets(0), cu_seqlens_k=offsets(0), sinks=normal(4))
    out, lse, _ = reference.forward(q, k, v, args)
    assert not out.any() and torch.equal(lse, torch.full((4, 3), -torch.inf, dtype=torch.float64))
    *grads, others = reference.backward(out, None, q, k, v, out, lse, args)
    assert not any(x.any() for x in (*grads, others[1]))
