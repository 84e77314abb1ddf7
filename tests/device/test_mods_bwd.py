"""P, dS and the other gradients of a block of the backward with a bias and user mods, on the CPU."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("cutlass")

import cutlass
from cutlass import Float32, Int32, cute
from cutlass.cute.runtime import from_dlpack

from cute_flash.device.gradients import gradient_sums, mods_bwd
from cute_flash.device.gradients.bias_bwd import BwdBiasParams, BwdBlockBias
from cute_flash.device.gradients.mods_bwd import BwdGraphs, BwdModParams, CaptureTerms, ModArguments
from cute_flash.device.gradients.score_bwd import BwdScoreParams, GradientBlock
from cute_flash.device.memory.views import as_mn
from cute_flash.device.scores.band import Band
from cute_flash.device.scores.mask import Mask
from cute_flash.device.scores.score import Score
from cute_flash.device.softmax.softmax import LOG2_E
from cute_flash.reference import dropout as philox
from cute_flash.runtime.finalizers import sum_capture_terms
from cute_flash.score_mod.bound import BoundMods
from cute_flash.score_mod.graph import COLUMN, ROW
from cute_flash.score_mod.mod_spec import ModSpec
from cute_flash.spec.dropout import threshold
from tests.combinations import RNG
from tests.device.test_score import on_one_thread as on_one_thread
from tests.device.test_score_bwd import BY_QUERIES, FOR_HOPPER, SHAPES
from tests.device.test_score_bwd import on_the_host as plain_on_the_host  # noqa: F401

SQ, SK, SCALE, BATCH, HEADS, HEAD, CAP, SLOPE = 300, 333, 0.37, 1, 5, 3, 2.0, 0.02
GENERATOR = torch.Generator().manual_seed(3)
BUCKETS = torch.randn(HEADS, 20, generator=GENERATOR)
WEIGHTS, OF_QUERIES, OF_KEYS = (torch.randn(n, generator=GENERATOR) for n in (HEADS, SQ, SK))
DOCUMENTS = torch.arange(400) // 37
RATE = 1.5


def tangent(score, b, h, q, kv):
    return RATE * torch.tanh(score / RATE)


def buckets(score, b, h, q, kv):
    return score + BUCKETS[h, (q - kv).abs() // 16]


def wrapping(score, b, h, q, kv):
    """Negative indices count from the end of the table."""
    return score + BUCKETS[-h, (q - kv) // 64]


def everywhere(score, b, h, q, kv):
    return score * WEIGHTS[h] + OF_QUERIES[q] - OF_KEYS[kv] * 0.5 + score.abs() * (q - kv) * 0.001


def odd(score, b, h, q, kv):
    """Maps scores of -inf to finite numbers, and has an infinite or NaN derivative at some scores."""
    return torch.where(score < -3, -3.0, torch.sqrt((score + 3).clamp(min=0)))


def documents(b, h, q, kv):
    return (DOCUMENTS[q] + 3 == DOCUMENTS[kv]) | ((kv + q) % 5 == 0)


def positive(x):  # type: ignore[no-untyped-def]
    return cutlass.select_(x > 0.0, x, Float32(0.0))


@pytest.fixture(autouse=True)
def on_the_host(monkeypatch: pytest.MonkeyPatch, plain_on_the_host: None) -> None:  # noqa: F811
    from cute_flash.device.gradients import score_bwd

    monkeypatch.setattr(mods_bwd, "bits_and", score_bwd.bits_and)
    monkeypatch.setattr(mods_bwd, "select_if", lambda is_visible, a, b: cutlass.select_(is_visible, a, b))
    monkeypatch.setattr(mods_bwd, "tanh_derivative", lambda t: positive(Float32(1.0) - t * t))
    monkeypatch.setattr(cute.arch, "fmin", lambda a, b, nan=False: cutlass.min(a, b))
    monkeypatch.setattr(cute.arch, "fmax", lambda a, b, nan=False: cutlass.max(a, b))
    monkeypatch.setattr(cute.arch, "rcp_approx", lambda value: Float32(1.0) / value)
    # Every thread adds its own value; lanes are not reduced.
    monkeypatch.setattr(gradient_sums, "sum_lanes", lambda value, offsets: value)

    def add_at(gradient, coord, value):  # type: ignore[no-untyped-def]
        gradient[coord] = gradient[coord] + value

    def store(self, gdBias, dS, r, c):  # type: ignore[no-untyped-def]
        query, key = self.position.query_at(r, c), self.position.key_at(r, c)
        # Values past the end are 0; they are added to the last valid entry.
        at = cutlass.min(query, SQ - 1), cutlass.min(key, SK - 1)
        gdBias[at] = gdBias[at] + dS

    @cute.jit
    def store_if(condition, address, value, dtype: cutlass.Constexpr):  # type: ignore[no-untyped-def]
        if condition != 0:
            cute.make_ptr(dtype, address, cutlass.AddressSpace.gmem, assumed_align=4).store(value)

    monkeypatch.setattr(mods_bwd, "store_if", store_if)
    monkeypatch.setattr(gradient_sums, "add_at", add_at)
    monkeypatch.setattr(gradient_sums, "add_once", lambda gradient, coord, value, lanes: add_at(gradient, coord, value))
    monkeypatch.setattr(gradient_sums, "is_first", lambda lanes: cutlass.Boolean(True))
    monkeypatch.setattr(BwdBlockBias, "_store", store)


def expanded(bias: torch.Tensor) -> torch.Tensor:
    return bias.expand(BATCH + 1, HEADS, SQ, SK)


def bias_of(kind: str) -> torch.Tensor | None:
    generator = torch.Generator().manual_seed(4)
    shapes = {
        "full": (BATCH + 1, HEADS, SQ, SK),
        "with holes": (BATCH + 1, HEADS, SQ, SK),
        "of heads": (1, HEADS, SQ, SK),
        "of keys": (BATCH + 1, 1, 1, SK),
        "of queries": (1, 1, SQ, 1),
        "one": (1, HEADS, 1, 1),
    }
    if kind not in shapes:
        return None
    bias = torch.randn(shapes[kind], generator=generator)
    if kind == "with holes":
        bias[..., ::7] = -torch.inf
    return bias


def block(  # type: ignore[no-untyped-def]
    shape, names, call: BoundMods, wanted, bias, first, products, dP, statistics, stores_terms=False
) -> dict[str, Any]:
    """P in 16 bits, dS and the other gradients for the block of keys x queries that starts at `first`.

    `stores_terms`: gradients of captured tensors are stored by score, and summed afterwards.
    """
    keys, queries, threads, row_step, mma_of = shape
    is_transposed = shape not in BY_QUERIES.values()  # rows are keys
    size = (keys, queries) if is_transposed else (queries, keys)
    graphs = BwdGraphs.of(call.graphs, wanted)
    varies = 0 if bias is None else (ROW if bias.shape[2] > 1 else 0) | (COLUMN if bias.shape[3] > 1 else 0)
    accumulates = bias is not None and bias.shape != (BATCH + 1, HEADS, SQ, SK)
    parts = call.graphs.split(call.captures, call.scalars)
    split = [len(x[0]) for x in (parts.score, parts.mask)]

    @cute.jit
    def program(P, dS, dalibi, products, dP, statistics, numbers, slopes, rng, threshold, captures, floats,
                dcaptures, mBias, mdBias, terms):  # type: ignore[no-untyped-def]  # fmt: skip
        mma = mma_of()
        softcap = numbers[1] if "softcap" in names else None
        dropout = (threshold, numbers[2], rng) if "dropout" in names else (None, None, None)
        captures, floats, dcaptures = (() if x is None else tuple(x) for x in (captures, floats, dcaptures))
        num = [len(x[1]) for x in (parts.score, parts.mask)]
        of_score = ModArguments(captures[: split[0]], floats[: num[0]])
        of_mask = ModArguments(captures[split[0] : sum(split)], floats[num[0] :])
        bias_params = None if mBias is None else BwdBiasParams(mBias, mdBias, varies, accumulates, False)
        mods = BwdModParams(
            graphs, numbers[0], softcap, of_score, of_mask, of_score, bias_params, dcaptures,
            dcapture_terms=None if terms is None else CaptureTerms(*terms),
        )  # fmt: skip
        score = Score.of(numbers[0], softcap, True)
        params = BwdScoreParams(score, Int32(HEADS), slopes if "alibi" in names else None, None, *dropout, mods)
        for thread in range(threads):
            thr_mma = mma.get_slice(Int32(thread))
            tScS = thr_mma.partition_C(cute.make_identity_tensor(size))
            acc_S, acc_dP = (cute.make_rmem_tensor(thr_mma.partition_shape_C(size), Float32) for _ in range(2))
            at = [tScS[i] if is_transposed else (tScS[i][1], tScS[i][0]) for i in range(cute.size(tScS))]
            for i in cutlass.range_constexpr(cute.size(acc_S)):
                acc_S[i], acc_dP[i] = products[at[i]], dP[at[i]]
            coords = as_mn(tScS)
            lse, d = (cute.make_rmem_tensor(cute.size(coords, mode=[int(is_transposed)]), Float32) for _ in range(2))
            for c in cutlass.range_constexpr(cute.size(lse)):
                query = coords[0, c][1] if cutlass.const_expr(is_transposed) else coords[c, 0][0]
                lse[c], d[c] = statistics[0, query] * LOG2_E, statistics[1, query]
            if cutlass.const_expr(is_transposed):
                mask = Mask(Band(Int32(100), Int32(50)), Int32(SK), Int32(SQ), Int32(first[0]), tScS)
            else:
                mask = Mask(Band(Int32(50), Int32(100)), Int32(SQ), Int32(SK), Int32(first[1]), tScS)
            first_column = Int32(first[1] if cutlass.const_expr(is_transposed) else first[0])
            scores = params.block(mask, Int32(HEAD), Int32(BATCH), first_column, is_transposed, row_step)
            scores.prefetch()
            scores.apply_softcap(acc_S)
            rP = cute.make_rmem_tensor(acc_S.layout, cutlass.BFloat16)
            if cutlass.const_expr(scores.masks_probs):
                scores.exponentiate(acc_S, rP, lse)
            scores.apply_band(acc_S, mask, first_column)
            scores.apply_mask(acc_S)
            if cutlass.const_expr(scores.masks_probs):
                scores.pack_probs(acc_S, rP)
            else:
                scores.exponentiate(acc_S, rP, lse)
            total = cute.make_rmem_tensor(1, Float32)
            total.fill(0.0)
            scores.differentiate(GradientBlock(acc_S, acc_dP, lse, d, total)).finish()
            dalibi[thread] = total[0]
            for i in cutlass.range_constexpr(cute.size(acc_S)):
                P[at[i]], dS[at[i]] = rP[i].to(Float32), acc_S[i]

    outs = [torch.full((keys, queries), torch.nan) for _ in range(2)] + [torch.zeros(threads)]
    numbers = torch.tensor([SCALE, CAP, 1 / 0.7])
    slopes = torch.zeros(BATCH + 1, HEADS)
    slopes[BATCH, HEAD] = SLOPE
    given = map(from_dlpack, (*outs, products, dP, statistics, numbers, slopes, torch.tensor(RNG)))
    dcaptures = [torch.zeros(call.captures[i].shape) for i in wanted]
    dbias = None if bias is None else torch.zeros_like(bias)
    biases = [None if bias is None else from_dlpack(expanded(bias)), None]
    if dbias is not None:
        biases[1] = from_dlpack(dbias.expand(BATCH + 1, HEADS, -1, -1))
    places = (len(graphs.loads), BATCH + 1, HEADS, SQ, SK)
    terms = [torch.zeros(places), torch.zeros(places, dtype=torch.int32)]
    floats = [Float32(x) if isinstance(x, float) else Int32(x) for x in call.scalars]
    arguments = (
        *given, Int32(threshold(0.3) * 0x10001), [from_dlpack(x) for x in call.captures] or None,
        floats or None, [from_dlpack(x) for x in dcaptures] or None, *biases,
        [from_dlpack(x) for x in terms] if stores_terms else None,
    )  # fmt: skip
    cute.compile(program, *arguments, options=FOR_HOPPER)(*arguments)
    if stores_terms:
        assert not any(x.any() for x in dcaptures)
        spec = ModSpec(call.graphs, captures_needing_grad=wanted)
        sum_capture_terms(SimpleNamespace(mods=spec), dcaptures, terms)  # type: ignore[arg-type]
    dalibi = outs[2].double().sum().item()
    return {"P": outs[0], "dS": outs[1], "dalibi": dalibi, "dcaptures": dcaptures, "dbias": dbias}


CASES: list[tuple[str, str, Any, Any, str]] = [
    ("wgmma 64", "", tangent, None, ""),
    ("wgmma 64", "", buckets, documents, "with holes"),
    ("wgmma 64", "", wrapping, documents, ""),
    ("wgmma 64", "alibi", everywhere, documents, "of heads"),
    ("wgmma 64", "", None, None, "with holes"),
    ("wgmma 64", "", None, documents, ""),
    ("wgmma 64", "softcap", None, documents, ""),
    ("wgmma 64", "softcap dropout", None, None, "of keys"),
    ("wgmma 64", "softcap alibi dropout", everywhere, documents, "full"),
    ("wgmma 64", "", odd, documents, "with holes"),
    ("d128 sm_80", "dropout", everywhere, documents, "of queries"),
    ("d96 sm_80", "softcap", buckets, None, "one"),
    ("d256 sm_80", "alibi", tangent, documents, "of keys"),
    ("wide", "", tangent, None, ""),
    ("wide", "", buckets, documents, "with holes"),
    ("wide", "alibi", everywhere, documents, "of heads"),
    ("wide", "", None, documents, "of queries"),
    ("wide", "softcap dropout", None, None, "of keys"),
    ("wide", "softcap alibi dropout", everywhere, documents, "full"),
    ("wide", "", odd, documents, "one"),
]


@pytest.mark.kernels("bwd_sm80", "bwd_sm90")
@pytest.mark.compiles
@pytest.mark.parametrize(("name", "features", "score_mod", "mask_mod", "kind"), CASES)
def test_a_block(name: str, features: str, score_mod: Any, mask_mod: Any, kind: str) -> None:
    check_block(name, features, score_mod, mask_mod, kind)


@pytest.mark.compiles
@pytest.mark.parametrize(("name", "score_mod"), [("d128 sm_80", everywhere), ("d96 sm_80", buckets)])
def test_a_block_with_deterministic_gradients_of_tables(name: str, score_mod: Any) -> None:
    check_block(name, "", score_mod, documents, "", stores_terms=True)


def check_block(name: str, features: str, score_mod: Any, mask_mod: Any, kind: str, stores_terms: bool = False) -> None:
    shape, names, bias = (SHAPES | BY_QUERIES)[name], features.split(), bias_of(kind)
    keys, queries, *_ = shape
    generator = torch.Generator().manual_seed(1)
    products, dP = (torch.randn(keys, queries, generator=generator) * 4 for _ in range(2))
    statistics = torch.randn(2, queries, generator=generator)
    # Masked by both bounds and by the end of the keys.
    first = SK // keys * keys, SQ // queries * queries - queries
    call = BoundMods.of(score_mod, mask_mod, None)
    num_tables = 0 if call.graphs.score is None else len(call.graphs.score.captures)
    wanted = tuple(i for i in range(num_tables) if call.captures[i].is_floating_point())
    found = block(shape, names, call, wanted, bias, first, products, dP, statistics, stores_terms)

    lse, delta = statistics.double()
    j = torch.arange(first[0], first[0] + keys)[:, None]
    i = torch.arange(first[1], first[1] + queries)
    raw = (SCALE * products.double()).requires_grad_()
    slope = torch.tensor(SLOPE, dtype=torch.float64, requires_grad=True)
    S = CAP * (raw / CAP).tanh() if "softcap" in names else raw
    if "alibi" in names:
        S = S - slope * (i + SK - SQ - j).abs()
    whole = None if bias is None else bias.double().requires_grad_()
    at_j, at_i = j.clamp(max=SK - 1), i.clamp(max=SQ - 1)
    if whole is not None:
        S = S + expanded(whole)[BATCH, HEAD][at_i, at_j]
    tables = [x.double().requires_grad_(x.is_floating_point()) for x in call.captures[:num_tables]]
    seen = torch.ones((), dtype=torch.bool)
    from cute_flash.score_mod.evaluate import evaluate

    places = torch.tensor(BATCH), torch.tensor(HEAD), i, j
    parts = call.graphs.split(call.captures, call.scalars)
    if call.graphs.score is not None:
        (S,) = evaluate(call.graphs.score, (tables, parts.score[1]), torch.float64, places, S)
    if call.graphs.mask is not None:
        (seen,) = evaluate(call.graphs.mask, parts.mask, torch.float64, places)
    ahead = i + SK - SQ - j
    masked = (ahead > 50) | (ahead < -100) | (j >= SK) | ~seen
    assert masked.any() and not masked.all()
    exact = (S - lse).exp().masked_fill(masked, 0.0).detach()
    Z = torch.ones(())
    if "dropout" in names:
        ranges = range(first[1], first[1] + queries), range(first[0], first[0] + keys)
        kept = philox.Dropout(0.3, torch.tensor(RNG), HEADS).keep_mask(
            range(BATCH, BATCH + 1), range(HEAD, HEAD + 1), *ranges
        )
        Z = kept[0, 0].T / 0.7
    torch.testing.assert_close(found["P"].double(), exact * (Z > 0), rtol=2.0**-7, atol=1e-30)
    above = exact * (Z * dP.double() - delta)
    leaves = [raw, slope, *([] if whole is None else [whole]), *(tables[n] for n in wanted)]
    # Derivatives of masked scores do not count, even if they are NaN.
    chosen = S.masked_fill(exact == 0, 0.0)
    grads = torch.autograd.grad(chosen, leaves, above, allow_unused=True)
    dS, dalibi, *others = (torch.zeros_like(x) if g is None else g for g, x in zip(grads, leaves))
    torch.testing.assert_close(found["dS"].double(), dS.nan_to_num(0.0), rtol=1e-4, atol=1e-5)
    assert found["dalibi"] == pytest.approx(dalibi.item(), rel=1e-4, abs=1e-3)
    if found["dbias"] is not None:
        torch.testing.assert_close(found["dbias"].double(), others.pop(0), rtol=1e-4, atol=1e-4)
    for mine, theirs in zip(found["dcaptures"], others, strict=True):
        torch.testing.assert_close(mine.double(), theirs, rtol=1e-4, atol=1e-3)
