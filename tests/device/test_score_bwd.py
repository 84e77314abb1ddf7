"""P and dS of a block of the backward with softcap, ALiBi and dropout, on the CPU as in `test_parts`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

pytest.importorskip("cutlass")

import cutlass
from cutlass import Float32, Int32, cute
from cutlass.cute.nvgpu import OperandMajorMode
from cutlass.cute.runtime import from_dlpack

from cute_flash.device.gradients import score_bwd
from cute_flash.device.gradients.score_bwd import BwdScoreParams, GradientBlock
from cute_flash.device.memory.views import as_mn
from cute_flash.device.mma.wgmma import make_mma
from cute_flash.device.scores import dropout_bits
from cute_flash.device.scores.band import Band
from cute_flash.device.scores.mask import Mask
from cute_flash.device.scores.score import Score
from cute_flash.device.softmax.softmax import LOG2_E
from cute_flash.kernels.sm80.bwd import BwdSm80
from cute_flash.planning.tiles.bwd_sm80 import SM80_BWD_SCORE, BwdTileSm80
from cute_flash.planning.tiles.bwd_sm90 import SM90_BWD_WIDE_SCORE
from cute_flash.reference import dropout as philox
from cute_flash.spec.dropout import threshold as dropout_threshold
from cute_flash.spec.problem import Static
from tests.combinations import RNG
from tests.device.test_score import on_one_thread as on_one_thread

FOR_HOPPER = "--gpu-arch sm_90a"
SQ, SK, SCALE, BATCH, HEADS, HEAD = 300, 333, 0.37, 1, 5, 3
FEATURES = ("softcap", "alibi", "dropout", "softcap alibi", "alibi dropout", "softcap alibi dropout")


def mma_sync(tile: BwdTileSm80) -> tuple[int, int, int, int, Callable[[], Any]]:
    """(keys, queries, threads, row distance between the m16 tiles of a thread, MMA) of S^T."""
    kernel = BwdSm80(Static("bfloat16", tile.head_dim, True, True), tile)
    return tile.tile_n, tile.tile_m, tile.num_threads, 16 * tile.warps_s, kernel.s_grid.mma


def wgmma(queries: int) -> tuple[int, int, int, int, Callable[[], Any]]:
    K = OperandMajorMode.K
    return 64, queries, 128, 16, lambda: make_mma(cutlass.BFloat16, queries, False, K, K)


SHAPES = {f"d{tile.head_dim} sm_80": mma_sync(tile) for tile in SM80_BWD_SCORE["sm_80"]}
SHAPES |= {"d256 sm_86": mma_sync(SM80_BWD_SCORE["sm_86"][-1]), "wgmma 64": wgmma(64)}


def wide() -> tuple[int, int, int, int, Callable[[], Any]]:
    """The same for S in the kernel for wide heads, where rows are queries; the keys are those of one warpgroup."""
    keys, K = SM90_BWD_WIDE_SCORE.tile_n // 2, OperandMajorMode.K
    return keys, 64, 128, 16, lambda: make_mma(cutlass.BFloat16, keys, False, K, K)


# Shapes whose rows are queries.
BY_QUERIES = {"wide": wide()}


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

    monkeypatch.setattr(dropout_bits, "chosen_bytes", chosen_bytes)
    monkeypatch.setattr(dropout_bits, "spread_signs", spread_signs)
    monkeypatch.setattr(dropout_bits.DropoutBits, "neighbour_word", neighbour_word)
    monkeypatch.setattr(score_bwd, "pack", pack)
    monkeypatch.setattr(score_bwd, "rederived", lambda value: value)
    monkeypatch.setattr(score_bwd, "bits_and", lambda value, bits: Int32(0))
    monkeypatch.setattr(score_bwd, "tanh_derivative", lambda t: cutlass.max(Float32(1.0) - t * t, Float32(0.0)))


def block(
    shape: Any, names: list[str], first: tuple[int, int], products: torch.Tensor, dP: torch.Tensor,
    statistics: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, float]:  # fmt: skip
    """P in 16 bits, dS and the gradient of the slope for the block of keys x queries that starts at `first`."""
    keys, queries, threads, row_step, mma_of = shape
    by_keys = shape not in BY_QUERIES.values()
    extent, lengths = ((keys, queries), (SK, SQ)) if by_keys else ((queries, keys), (SQ, SK))
    if not by_keys:
        first, products, dP = first[::-1], products.T.contiguous(), dP.T.contiguous()

    @cute.jit
    def program(P, dS, dalibi, products, dP, statistics, numbers, slopes, rng, threshold):  # type: ignore[no-untyped-def]
        mma = mma_of()
        score = Score.of(numbers[0], numbers[1] if "softcap" in names else None, True)
        dropout = (threshold, numbers[2], rng) if "dropout" in names else (None, None, None)
        params = BwdScoreParams(score, Int32(HEADS), slopes if "alibi" in names else None, None, *dropout)
        # A query sees 50 keys before and 100 after its own key; if rows are keys, the band is mirrored.
        band = Band(Int32(100), Int32(50)) if by_keys else Band(Int32(50), Int32(100))
        for thread in range(threads):
            thr_mma = mma.get_slice(Int32(thread))
            tScS = thr_mma.partition_C(cute.make_identity_tensor(extent))
            acc_S, acc_dP = (cute.make_rmem_tensor(thr_mma.partition_shape_C(extent), Float32) for _ in range(2))
            for i in cutlass.range_constexpr(cute.size(acc_S)):
                acc_S[i], acc_dP[i] = products[tScS[i]], dP[tScS[i]]
            coords = as_mn(tScS)
            lse, d = (cute.make_rmem_tensor(cute.size(coords, mode=[int(by_keys)]), Float32) for _ in range(2))
            for n in cutlass.range_constexpr(cute.size(lse)):
                query = coords[0, n][1] if cutlass.const_expr(by_keys) else coords[n, 0][0]
                lse[n], d[n] = statistics[0, query] * LOG2_E, statistics[1, query]
            mask = Mask(band, Int32(lengths[0]), Int32(lengths[1]), Int32(first[0]), tScS)
            scores = params.block(mask, Int32(HEAD), Int32(BATCH), Int32(first[1]), by_keys, row_step)
            scores.apply_softcap(acc_S)
            mask.apply(as_mn(acc_S), Int32(first[1]))
            if cutlass.const_expr(by_keys):
                mask.apply_to_tail_rows(as_mn(acc_S))
            rP = cute.make_rmem_tensor(acc_S.layout, cutlass.BFloat16)
            scores.exponentiate(acc_S, rP, lse)
            total = cute.make_rmem_tensor(1, Float32)
            total.fill(0.0)
            scores.differentiate(GradientBlock(acc_S, acc_dP, lse, d, total))
            dalibi[thread] = total[0]
            for i in cutlass.range_constexpr(cute.size(acc_S)):
                P[tScS[i]], dS[tScS[i]] = rP[i].to(Float32), acc_S[i]

    outs = [torch.full(extent, torch.nan) for _ in range(2)] + [torch.zeros(threads)]
    numbers = torch.tensor([SCALE, 2.0, 1 / 0.7])
    slopes = torch.zeros(BATCH + 1, HEADS)
    slopes[BATCH, HEAD] = 0.02
    given = (*outs, products, dP, statistics, numbers, slopes, torch.tensor(RNG))
    arguments = (*map(from_dlpack, given), Int32(dropout_threshold(0.3) * 0x10001))
    cute.compile(program, *arguments, options=FOR_HOPPER)(*arguments)
    P, dS = outs[:2] if by_keys else (x.T for x in outs[:2])
    return P, dS, outs[2].double().sum().item()


# Every shape with all features, and two shapes with all combinations of features.
BLOCKS = [(name, FEATURES[-1]) for name in SHAPES]
BLOCKS += [(name, features) for name in ("wgmma 64", "d96 sm_80") for features in FEATURES[:-1]]
BLOCKS += [("wide", features) for features in FEATURES]


@pytest.mark.kernels("bwd_sm80", "bwd_sm90")
@pytest.mark.compiles
@pytest.mark.parametrize(("name", "features"), BLOCKS)
def test_a_block(name: str, features: str) -> None:
    shape, names = (SHAPES | BY_QUERIES)[name], features.split()
    keys, queries, *_ = shape
    generator = torch.Generator().manual_seed(1)
    products, dP = (torch.randn(keys, queries, generator=generator) * 4 for _ in range(2))
    statistics = torch.randn(2, queries, generator=generator)
    # Masked by both bounds and by the end of the keys.
    first = SK // keys * keys, SQ // queries * queries - queries
    P, dS, dalibi = block(shape, names, first, products, dP, statistics)

    lse, delta = statistics.double()
    j = torch.arange(first[0], first[0] + keys)[:, None]
    i = torch.arange(first[1], first[1] + queries)
    S, factor, Z = SCALE * products.double(), torch.ones(()), torch.ones(())
    if "softcap" in names:
        tangent = (S / 2.0).tanh()
        S, factor = 2.0 * tangent, 1 - tangent**2
    away = (i + SK - SQ - j).abs()
    if "alibi" in names:
        S = S - 0.02 * away
    # The same band: 50 keys before and 100 after the key of the query.
    ahead = i + SK - SQ - j
    masked = (ahead > 50) | (ahead < -100) | (j >= SK)
    exact = (S - lse).exp().masked_fill(masked, 0.0)
    if "dropout" in names:
        ranges = range(first[1], first[1] + queries), range(first[0], first[0] + keys)
        kept = philox.Dropout(0.3, torch.tensor(RNG), HEADS).keep_mask(
            range(BATCH, BATCH + 1), range(HEAD, HEAD + 1), *ranges
        )
        Z = kept[0, 0].T / 0.7
    assert masked.any() and not masked.all()
    torch.testing.assert_close(P.double(), exact * (Z > 0), rtol=2.0**-7, atol=1e-30)
    dS_above = exact * (Z * dP.double() - delta)
    torch.testing.assert_close(dS.double(), dS_above * factor, rtol=1e-4, atol=1e-5)
    expected = -(dS_above * away).sum().item() if "alibi" in names else 0.0
    assert dalibi == pytest.approx(expected, rel=1e-4, abs=1e-3)
