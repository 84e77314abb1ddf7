"""P, dS and the other gradients of a block of the backward, with all score features, on the CPU as in `test_parts`."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch

pytest.importorskip("cutlass")

import cutlass
from cutlass import Float32, Int32, cute
from cutlass.cute.nvgpu import OperandMajorMode
from cutlass.cute.runtime import from_dlpack

from cute_flash.device.gradients import gradient_sums, mods_bwd, score_bwd
from cute_flash.device.gradients.bias_bwd import BwdBiasParams, BwdBlockBias
from cute_flash.device.gradients.mods_bwd import BwdGraphs, BwdModParams, CaptureTerms, ModArguments
from cute_flash.device.gradients.score_bwd import BwdScoreParams, GradientBlock, compute_probs
from cute_flash.device.memory.views import as_mn
from cute_flash.device.mma.wgmma import make_mma
from cute_flash.device.scores import dropout_bits
from cute_flash.device.scores.band import Band
from cute_flash.device.scores.mask import Mask
from cute_flash.device.scores.score import Score
from cute_flash.device.softmax.softmax import LOG2_E
from cute_flash.kernels.sm80.bwd import BwdSm80
from cute_flash.planning.tiles.bwd_sm80 import SM80_BWD_SCORE, BwdTileSm80
from cute_flash.planning.tiles.bwd_sm90 import SM90_BWD_FEWER_KEYS
from cute_flash.reference import dropout as philox
from cute_flash.runtime.finalizers import sum_capture_terms
from cute_flash.score_mod.bound import BoundMods
from cute_flash.score_mod.evaluate import evaluate
from cute_flash.score_mod.graph import COLUMN, ROW
from cute_flash.score_mod.mod_spec import ModSpec
from cute_flash.spec.dropout import threshold
from cute_flash.spec.problem import Static
from tests.combinations import RNG
from tests.device.tiles import FOR_HOPPER, accumulators, coordinates

SQ, SK, SCALE, BATCH, HEADS, HEAD, CAP, SLOPE = 300, 333, 0.37, 1, 5, 3, 2.0, 0.02
GENERATOR = torch.Generator().manual_seed(3)
BUCKETS = torch.randn(HEADS, 20, generator=GENERATOR)
WEIGHTS, OF_QUERIES, OF_KEYS = (torch.randn(n, generator=GENERATOR) for n in (HEADS, SQ, SK))
DOCUMENTS = torch.arange(400) // 37
RATE = 1.5


# ---- shapes


class Shape(NamedTuple):
    keys: int
    queries: int
    threads: int
    row_step: int  # rows from one m16 tile of a thread to the next
    mma: Callable[[], Any]
    is_transposed: bool = True  # rows are keys: S^T


def mma_sync(tile: BwdTileSm80) -> Shape:
    kernel = BwdSm80(Static("bfloat16", tile.head_dim, True, True), tile)
    return Shape(tile.tile_n, tile.tile_m, 32 * tile.warps_per_score, 16 * tile.warps_s, kernel.s_grid.mma)


def wgmma(columns: int, is_transposed: bool = True) -> Shape:
    """S^T, or S in the kernel for wide heads, where the keys are those of one warpgroup."""
    K, size = OperandMajorMode.K, (64, columns) if is_transposed else (columns, 64)
    return Shape(*size, 128, 16, lambda: make_mma(cutlass.BFloat16, columns, False, K, K), is_transposed)


SHAPES = {f"d{tile.head_dim} sm_80": mma_sync(tile) for tile in SM80_BWD_SCORE["sm_80"]}
SHAPES |= {f"d{tile.head_dim} sm_86": mma_sync(tile) for tile in SM80_BWD_SCORE["sm_86"] if tile.head_dim in (256, 512)}
SHAPES["wgmma 64"] = wgmma(64)
SHAPES |= {"wide": wgmma(SM90_BWD_FEWER_KEYS[2].tile_n // 2, is_transposed=False)}


# ---- user mods and biases


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


BIASES = {
    "full": (BATCH + 1, HEADS, SQ, SK),
    "with holes": (BATCH + 1, HEADS, SQ, SK),
    "of heads": (1, HEADS, SQ, SK),
    "of keys": (BATCH + 1, 1, 1, SK),
    "of queries": (1, 1, SQ, 1),
    "one": (1, HEADS, 1, 1),
}


def bias_of(kind: str) -> torch.Tensor | None:
    if not kind:
        return None
    bias = torch.randn(BIASES[kind], generator=torch.Generator().manual_seed(4))
    if kind == "with holes":
        bias[..., ::7] = -torch.inf
    return bias


def expanded(bias: torch.Tensor) -> torch.Tensor:
    return bias.expand(BATCH + 1, HEADS, SQ, SK)


class Case(NamedTuple):
    shape: str
    features: str = ""  # softcap, alibi, dropout
    score_mod: Any = None
    mask_mod: Any = None
    bias: str = ""
    stores_terms: bool = False  # gradients of captured tensors are stored by score, and summed afterwards

    def __str__(self) -> str:
        mods = [f.__name__ for f in (self.score_mod, self.mask_mod) if f is not None]
        parts = [self.shape, self.features, *mods, self.bias and f"bias {self.bias}", "terms" * self.stores_terms]
        return "-".join(filter(None, parts))


FEATURES = ("softcap", "alibi", "dropout", "softcap alibi", "alibi dropout", "softcap alibi dropout")
CASES = [
    # Every shape with all features, and three shapes with all combinations of features.
    *(Case(name, FEATURES[-1]) for name in SHAPES),
    *(Case(name, features) for name in ("wgmma 64", "d96 sm_80", "wide") for features in FEATURES[:-1]),
    Case("wgmma 64", "", tangent),
    Case("wgmma 64", "", buckets, documents, "with holes"),
    Case("wgmma 64", "", wrapping, documents),
    Case("wgmma 64", "alibi", everywhere, documents, "of heads"),
    Case("wgmma 64", "", None, None, "with holes"),
    Case("wgmma 64", "", None, documents),
    Case("wgmma 64", "softcap", None, documents),
    Case("wgmma 64", "softcap dropout", None, None, "of keys"),
    Case("wgmma 64", "softcap alibi dropout", everywhere, documents, "full"),
    Case("wgmma 64", "", odd, documents, "with holes"),
    Case("d128 sm_80", "dropout", everywhere, documents, "of queries"),
    Case("d96 sm_80", "softcap", buckets, None, "one"),
    Case("d256 sm_80", "alibi", tangent, documents, "of keys"),
    Case("d512 sm_86", "dropout", everywhere, documents, "of queries"),
    Case("wide", "", tangent),
    Case("wide", "", buckets, documents, "with holes"),
    Case("wide", "alibi", everywhere, documents, "of heads"),
    Case("wide", "", None, documents, "of queries"),
    Case("wide", "softcap dropout", None, None, "of keys"),
    Case("wide", "softcap alibi dropout", everywhere, documents, "full"),
    Case("wide", "", odd, documents, "one"),
    Case("d128 sm_80", "", everywhere, documents, stores_terms=True),
    Case("d96 sm_80", "", buckets, documents, stores_terms=True),
]


# ---- a block by the kernels' code


@pytest.fixture(autouse=True)
def on_the_host(monkeypatch: pytest.MonkeyPatch, on_one_thread: None) -> None:
    """Replace inline PTX by equivalent host code."""

    def pack(low, high, dtype):  # type: ignore[no-untyped-def]
        both = cute.make_rmem_tensor(2, Float32)
        both[0], both[1] = low, high
        bits = cute.recast_tensor(both, Int32)
        return (bits[1] & -65536) | ((bits[0] >> 16) & 65535)

    def chosen_bytes(low, high, selector):  # type: ignore[no-untyped-def]
        even, odd = (low & 0xFFFF) | (high << 16), ((high >> 16) & 0xFFFF) | (low & -65536)
        return cutlass.select_(selector == Int32(dropout_bits.OF_EVEN_KEY), even, odd)

    def neighbour_word(self, own, dropout, position, steps):  # type: ignore[no-untyped-def]
        return self.own_word(dropout, position, steps, 1 - position.row(0) % 2)

    def spread_signs(word, selector):  # type: ignore[no-untyped-def]
        top = 7 if selector == dropout_bits.OF_LOW_BYTES else 15
        low, high = (((word >> bit) & 1) != 0 for bit in (top, top + 16))
        return cutlass.select_(low, Int32(0xFFFF), Int32(0)) | cutlass.select_(high, Int32(-65536), Int32(0))

    def tanh_derivative(t):  # type: ignore[no-untyped-def]
        x = Float32(1.0) - t * t
        return cutlass.select_(x > 0.0, x, Float32(0.0))

    def add_at(gradient, coord, value):  # type: ignore[no-untyped-def]
        gradient[coord] = gradient[coord] + value

    def store(self, gdBias, dS, r, c):  # type: ignore[no-untyped-def]
        query, key = self.position.query_at(r, c), self.position.key_at(r, c)
        # Values past the end are 0; they are added to the last valid entry.
        add_at(gdBias, (cutlass.min(query, SQ - 1), cutlass.min(key, SK - 1)), dS)

    @cute.jit
    def store_if(condition, address, value, dtype: cutlass.Constexpr):  # type: ignore[no-untyped-def]
        if condition != 0:
            cute.make_ptr(dtype, address, cutlass.AddressSpace.gmem, assumed_align=4).store(value)

    monkeypatch.setattr(dropout_bits, "chosen_bytes", chosen_bytes)
    monkeypatch.setattr(dropout_bits, "spread_signs", spread_signs)
    monkeypatch.setattr(dropout_bits.DropoutBits, "neighbour_word", neighbour_word)
    monkeypatch.setattr(score_bwd, "pack", pack)
    monkeypatch.setattr(score_bwd, "rederived", lambda value: value)
    for module in (score_bwd, mods_bwd):
        monkeypatch.setattr(module, "bits_and", lambda value, bits: Int32(0))
        monkeypatch.setattr(module, "tanh_derivative", tanh_derivative)
    monkeypatch.setattr(mods_bwd, "select_if", lambda is_visible, a, b: cutlass.select_(is_visible, a, b))
    monkeypatch.setattr(mods_bwd, "store_if", store_if)
    # Every thread adds its own value; lanes are not reduced.
    monkeypatch.setattr(gradient_sums, "sum_lanes", lambda value, offsets: value)
    monkeypatch.setattr(gradient_sums, "add_at", add_at)
    monkeypatch.setattr(gradient_sums, "add_once", lambda gradient, coord, value, lanes: add_at(gradient, coord, value))
    monkeypatch.setattr(gradient_sums, "is_first", lambda lanes: cutlass.Boolean(True))
    monkeypatch.setattr(BwdBlockBias, "_store", store)


class Found(NamedTuple):
    P: torch.Tensor  # keys x queries, rounded to 16 bits
    dS: torch.Tensor
    dalibi: float
    dbias: torch.Tensor | None
    dcaptures: list[torch.Tensor]


def block(
    case: Case, call: BoundMods, wanted: tuple[int, ...], bias: torch.Tensor | None, first: tuple[int, int],
    products: torch.Tensor, dP: torch.Tensor, statistics: torch.Tensor,
) -> Found:  # fmt: skip
    """P, dS and the other gradients for the block of keys x queries that starts at `first`.

    `wanted`: the captured tensors that need a gradient.
    """
    shape, names = SHAPES[case.shape], case.features.split()
    is_transposed = shape.is_transposed
    size = (shape.keys, shape.queries) if is_transposed else (shape.queries, shape.keys)
    has_mods = bias is not None or case.score_mod is not None or case.mask_mod is not None
    graphs = BwdGraphs.of(call.graphs, wanted)
    varies = 0 if bias is None else (ROW if bias.shape[2] > 1 else 0) | (COLUMN if bias.shape[3] > 1 else 0)
    accumulates = bias is not None and bias.shape != BIASES["full"]
    parts = call.graphs.split(call.captures, call.scalars)
    split = [len(x[0]) for x in (parts.score, parts.mask)]

    @cute.jit
    def program(P, dS, dalibi, products, dP, statistics, numbers, slopes, rng, threshold, captures, floats,
                dcaptures, mBias, mdBias, terms):  # type: ignore[no-untyped-def]  # fmt: skip
        mma = shape.mma()
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
        score, slopes = Score.of(numbers[0], softcap, True), slopes if "alibi" in names else None
        params = BwdScoreParams(score, Int32(HEADS), slopes, None, *dropout, mods if has_mods else None)
        # A query sees 50 keys before and 100 after its own key; if rows are keys, the band is mirrored.
        band = Band(Int32(100), Int32(50)) if is_transposed else Band(Int32(50), Int32(100))
        lengths, (first_row, first_column) = ((SK, SQ), first) if is_transposed else ((SQ, SK), first[::-1])
        for thread in range(shape.threads):
            tScS = coordinates(mma, Int32(thread), size)
            acc_S, acc_dP = (accumulators(mma, Int32(thread), size) for _ in range(2))
            at = [tScS[i] if is_transposed else (tScS[i][1], tScS[i][0]) for i in range(cute.size(tScS))]
            for i in cutlass.range_constexpr(cute.size(acc_S)):
                acc_S[i], acc_dP[i] = products[at[i]], dP[at[i]]
            coords = as_mn(tScS)
            lse, d = (cute.make_rmem_tensor(cute.size(coords, mode=[int(is_transposed)]), Float32) for _ in range(2))
            for n in cutlass.range_constexpr(cute.size(lse)):
                query = coords[0, n][1] if cutlass.const_expr(is_transposed) else coords[n, 0][0]
                lse[n], d[n] = statistics[0, query] * LOG2_E, statistics[1, query]
            mask = Mask(band, Int32(lengths[0]), Int32(lengths[1]), Int32(first_row), tScS)
            column = Int32(first_column)
            scores = params.block(mask, Int32(HEAD), Int32(BATCH), column, is_transposed, shape.row_step)
            scores.prefetch()
            rP = cute.make_rmem_tensor(acc_S.layout, cutlass.BFloat16)

            def apply_mask(scores=scores, acc_S=acc_S, mask=mask, column=column):  # type: ignore[no-untyped-def]
                scores.apply_band(acc_S, mask, column)
                scores.apply_mask(acc_S)

            compute_probs(scores, acc_S, rP, lse, apply_mask)
            total = cute.make_rmem_tensor(1, Float32)
            total.fill(0.0)
            scores.finish(scores.differentiate(GradientBlock(acc_S, acc_dP, lse, d, total)))
            dalibi[thread] = total[0]
            for i in cutlass.range_constexpr(cute.size(acc_S)):
                P[at[i]], dS[at[i]] = rP[i].to(Float32), acc_S[i]

    outs = [torch.full((shape.keys, shape.queries), torch.nan) for _ in range(2)] + [torch.zeros(shape.threads)]
    numbers = torch.tensor([SCALE, CAP, 1 / 0.7])
    slopes = torch.zeros(BATCH + 1, HEADS)
    slopes[BATCH, HEAD] = SLOPE
    tensors = map(from_dlpack, (*outs, products, dP, statistics, numbers, slopes, torch.tensor(RNG)))
    dcaptures = [torch.zeros(call.captures[i].shape) for i in wanted]
    dbias = None if bias is None else torch.zeros_like(bias)
    biases = [None if bias is None else from_dlpack(expanded(bias)), None]
    if dbias is not None:
        biases[1] = from_dlpack(dbias.expand(BATCH + 1, HEADS, -1, -1))
    places = (len(graphs.loads), *BIASES["full"])
    terms = [torch.zeros(places), torch.zeros(places, dtype=torch.int32)]
    floats = [Float32(x) if isinstance(x, float) else Int32(x) for x in call.scalars]
    arguments = (
        *tensors, Int32(threshold(0.3) * 0x10001), [from_dlpack(x) for x in call.captures] or None,
        floats or None, [from_dlpack(x) for x in dcaptures] or None, *biases,
        [from_dlpack(x) for x in terms] if case.stores_terms else None,
    )  # fmt: skip
    cute.compile(program, *arguments, options=FOR_HOPPER)(*arguments)
    if case.stores_terms:
        assert not any(x.any() for x in dcaptures)
        spec = ModSpec(call.graphs, captures_needing_grad=wanted)
        sum_capture_terms(SimpleNamespace(mods=spec), dcaptures, terms)  # type: ignore[arg-type]
    return Found(outs[0], outs[1], outs[2].double().sum().item(), dbias, dcaptures)


@pytest.mark.kernels("bwd_sm80", "bwd_sm90")
@pytest.mark.compiles
@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_block(case: Case) -> None:
    names, bias = case.features.split(), bias_of(case.bias)
    keys, queries, *_ = SHAPES[case.shape]
    generator = torch.Generator().manual_seed(1)
    products, dP = (torch.randn(keys, queries, generator=generator) * 4 for _ in range(2))
    statistics = torch.randn(2, queries, generator=generator)
    # Masked by both bounds and by the end of the keys.
    first = SK // keys * keys, SQ // queries * queries - queries
    call = BoundMods.of(case.score_mod, case.mask_mod, None)
    num_tables = 0 if call.graphs.score is None else len(call.graphs.score.captures)
    wanted = tuple(i for i in range(num_tables) if call.captures[i].is_floating_point())
    found = block(case, call, wanted, bias, first, products, dP, statistics)

    lse, delta = statistics.double()
    j = torch.arange(first[0], first[0] + keys)[:, None]
    i = torch.arange(first[1], first[1] + queries)
    raw = (SCALE * products.double()).requires_grad_()
    slope = torch.tensor(SLOPE, dtype=torch.float64, requires_grad=True)
    S = CAP * (raw / CAP).tanh() if "softcap" in names else raw
    ahead = i + SK - SQ - j
    if "alibi" in names:
        S = S - slope * ahead.abs()
    whole = None if bias is None else bias.double().requires_grad_()
    if whole is not None:
        S = S + expanded(whole)[BATCH, HEAD][i.clamp(max=SQ - 1), j.clamp(max=SK - 1)]
    tables = [x.double().requires_grad_(x.is_floating_point()) for x in call.captures[:num_tables]]
    seen = torch.ones((), dtype=torch.bool)
    places = torch.tensor(BATCH), torch.tensor(HEAD), i, j
    parts = call.graphs.split(call.captures, call.scalars)
    if call.graphs.score is not None:
        (S,) = evaluate(call.graphs.score, (tables, parts.score[1]), torch.float64, places, S)
    if call.graphs.mask is not None:
        (seen,) = evaluate(call.graphs.mask, parts.mask, torch.float64, places)
    # The same band: 50 keys before and 100 after the key of the query.
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
    torch.testing.assert_close(found.P.double(), exact * (Z > 0), rtol=2.0**-7, atol=1e-30)
    above = exact * (Z * dP.double() - delta)
    leaves = [raw, slope, *([] if whole is None else [whole]), *(tables[n] for n in wanted)]
    # Derivatives of masked scores do not count, even if they are NaN.
    chosen = S.masked_fill(exact == 0, 0.0)
    grads = torch.autograd.grad(chosen, leaves, above, allow_unused=True)
    dS, dalibi, *others = (torch.zeros_like(x) if g is None else g for g, x in zip(grads, leaves))
    torch.testing.assert_close(found.dS.double(), dS.nan_to_num(0.0), rtol=1e-4, atol=1e-5)
    assert found.dalibi == pytest.approx(dalibi.item(), rel=1e-4, abs=1e-3)
    if found.dbias is not None:
        torch.testing.assert_close(found.dbias.double(), others.pop(0), rtol=1e-4, atol=1e-4)
    for mine, theirs in zip(found.dcaptures, others, strict=True):
        torch.testing.assert_close(mine.double(), theirs, rtol=1e-4, atol=1e-3)
