"""The way from packed CUDA tensors with features to launches and back, on CPU tensors."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from cute_flash import UnsupportedError, general, packed_sums, use_kernels
from cute_flash.planning.varlen import num_padded_blocks, padded_block
from cute_flash.spec.args import How
from tests.combinations import RNG
from tests.cute_flash.test_packed_launch import BANDS, how_of, tensors
from tests.fake_gpu import normal
from tests.fake_packed import FakePacked, faked
from tests.lengths import Lengths

SLOPES, SINKS = torch.tensor([0.3, -0.2, 0.0, 1.5]), torch.tensor([0.3, -math.inf, 4.0, -2.0])
EACH: dict[str, dict[str, Any]] = {
    "softcap": {"softcap": 0.7},
    "alibi": {"alibi": SLOPES},
    "alibi by sequence": {"alibi": 2},
    "sinks": {"sinks": SINKS.double()},
    "dropout": {"dropout": 0.4, "rng": torch.tensor(RNG)},
}
ALL = {**EACH["softcap"], **EACH["alibi by sequence"], **EACH["sinks"], **EACH["dropout"]}


# Several tiles, one key more than they hold, none on either side; tokens of nobody.
FEW = Lengths([130, 0, 5, 64], [129, 30, 0, 257], None, (3, 70))
USED = Lengths([40, 7, 0], [200, 64, 9], [150, 0, 9], (0, 5))


@pytest.fixture(params=["sm_80", "sm_90"])
def gpu(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> FakePacked:
    return faked(request.param, monkeypatch)


def asked_of(lengths: Lengths, asked: dict[str, Any]) -> dict[str, Any]:
    """With slopes of each sequence."""
    if isinstance(asked.get("alibi"), int):
        return {**asked, "alibi": normal(len(lengths.queries), 4, seed=8, dtype=torch.bfloat16)}
    return asked


def run(
    inputs: list[Tensor], how: How, lengths: Lengths, dlse: Tensor | None = None, poison: bool = True
) -> tuple[Tensor, ...]:
    """Out, LSE and gradients of the CUDA path, compared with those of the CPU path; rows of nobody, and what
    flows into them, are no numbers.
    """
    out, lse, _ = general.general_fwd(*inputs, *how)
    found_out, found_lse, _ = general._fwd_cuda(*inputs, *how)
    torch.testing.assert_close((found_out, found_lse), (out, lse), rtol=0.01, atol=1e-3)
    assert torch.equal(found_lse == -torch.inf, lse == -torch.inf)
    dout, rest = normal(*out.shape, seed=5, dtype=out.dtype), sum(lengths.queries)
    if poison:
        dout[rest:] = torch.nan
        dlse = None if dlse is None else dlse.clone()
        if dlse is not None:
            dlse[:, rest:] = torch.nan
    given = (dout, dlse, *inputs, out, lse, *how)
    found, expected = general._bwd_cuda(*given), general._bwd_cpu(*given)
    for mine, theirs in zip(found, expected, strict=True):
        assert (mine.shape, mine.stride(), mine.dtype) == (theirs.shape, theirs.stride(), theirs.dtype)
        largest = theirs.abs().max().item() if theirs.numel() else 0.0
        torch.testing.assert_close(mine, theirs, rtol=0.02, atol=0.02 + 0.01 * largest)
    return found


@pytest.mark.parametrize("asked", [*EACH.values(), ALL], ids=[*EACH, "all"])
@pytest.mark.parametrize("window", BANDS[:3], ids=str)
def test_random_batches(
    gpu: FakePacked, asked: dict[str, Any], window: tuple[int | None, int | None]
) -> None:
    for seed, lengths in enumerate((FEW, USED)):
        dlse = normal(4, lengths.totals[0], dtype=torch.float32) if seed % 2 else None
        how = how_of(lengths, window, -0.3 if seed else 0.3, **asked_of(lengths, asked))
        run(tensors(lengths), how, lengths, dlse)
    general_one = f"bwd_sm{gpu.name[3:]}_general"
    main = [key for key in gpu.keys if key.kernel == general_one]
    assert main and main[-1].static.features.in_gradients == main[-1].static.features


def test_in_order(gpu: FakePacked) -> None:
    lengths = Lengths([5, 0, 140], [7, 3, 230])
    how = how_of(lengths, (None, 0), deterministic=True, **asked_of(lengths, ALL))
    run(tensors(lengths), how, lengths)
    assert f"bwd_{gpu.name.replace('_', '')}_ordered_general" in [key.kernel for key in gpu.keys]


def test_wide_heads_are_of_the_other_family(gpu: FakePacked) -> None:
    lengths = Lengths([5, 0, 40], [7, 3, 30], None, (2, 1))
    inputs = [normal(n, 4, 136, seed=i) for i, n in enumerate((47, 41, 41))]
    how = how_of(lengths, (None, 0), **asked_of(lengths, ALL))
    run(inputs, how, lengths)
    assert "bwd_sm80_general" in [key.kernel for key in gpu.keys]
    if gpu.name == "sm_90":
        message = "attn_varlen with softcap and alibi and dropout and head_dim=136"
        with use_kernels("sm90"), pytest.raises(UnsupportedError, match=message):
            run(inputs, how, lengths)


def test_softcap_beside_slopes_goes_with_a_dropout_of_none(gpu: FakePacked) -> None:
    """Where the kernel without it would spill."""
    lengths, asked = Lengths([5, 0, 40], [7, 3, 30]), {**EACH["softcap"], **EACH["alibi"]}
    for width in (16, 72):
        inputs = [normal(n, 4, width, seed=i) for i, n in enumerate((45, 40, 40))]
        run(inputs, how_of(lengths, (None, 0), **asked), lengths)
        main = [key for key in gpu.keys if key.kernel in ("bwd_sm80_general", "bwd_sm90_general")][-1]
        assert main.static.features.dropout == (gpu.name == "sm_90" and width == 72)


@pytest.mark.parametrize(
    "lengths",
    [
        Lengths([0, 0], [3, 4]),
        Lengths([3, 4], [0, 0]),
        Lengths([3, 4], [0, 0], None, (5, 0)),
        Lengths([], []),
    ],
    ids=("queries", "keys", "padding", "sequences"),
)
def test_nothing_to_launch(gpu: FakePacked, lengths: Lengths) -> None:
    total = lengths.totals[0]
    dlse = normal(4, total, dtype=torch.float32)
    how = how_of(lengths, (None, 0), **asked_of(lengths, ALL))
    *_, dalibi, dsinks = run(tensors(lengths), how, lengths, dlse)
    assert not gpu.calls
    assert dalibi.shape == (len(lengths.queries), 4) and not dalibi.any()
    expected = dlse[:, : sum(lengths.queries)].sum(dim=1).where(SINKS > -math.inf, 0.0)
    torch.testing.assert_close(dsinks, expected.double(), rtol=1e-5, atol=1e-5)
    run(tensors(lengths), how, lengths)


def test_values_decide_no_launch(gpu: FakePacked) -> None:
    for number, (softcap, dropout) in enumerate(((0.7, 0.4), (3.0, 0.1))):
        for lengths in (Lengths([5, 0, 40], [7, 3, 30]), Lengths([40, 5, 0], [0, 30, 10])):
            asked = {**ALL, "softcap": softcap, "dropout": dropout, "sinks": SINKS * (number + 1)}
            run(tensors(lengths), how_of(lengths, (None, 0), **asked_of(lengths, asked)), lengths)
    # Two to prepare, two around and two main ones.
    assert len(set(gpu.keys)) == len(gpu.keys) == 6


# Sums over sequences


def test_slopes_of_a_sequence_are_sums_of_its_own_blocks() -> None:
    keys, tile_n, warps = [300, 0, 1, 64, 63, 0, 129], 64, 4
    lengths = Lengths(keys, keys, None, (9, 100))
    total = lengths.totals[1]
    blocks = num_padded_blocks(total, tile_n, len(keys))
    parts = torch.zeros(1, 3, blocks, warps)
    expected = torch.zeros(len(keys), 3)
    for b, (begin, count) in enumerate(zip(lengths.cu_k.tolist(), keys, strict=False)):
        first, num = padded_block(begin, b, tile_n), -(-count // tile_n)
        assert not parts[:, :, first : first + num].any(), "two sequences in one place"
        parts[:, :, first : first + num] = normal(1, 3, num, warps, seed=b, dtype=torch.float32)
        expected[b] = parts[0, :, first : first + num].sum(dim=(1, 2))
    how = how_of(lengths, (None, 0), alibi=torch.zeros(len(keys), 3))
    torch.testing.assert_close(packed_sums.dalibi(parts, how, total, tile_n), expected)
    shared = packed_sums.dalibi(parts, how._replace(alibi=torch.zeros(3)), total, tile_n)
    torch.testing.assert_close(shared, expected.sum(dim=0)[None])
    # One that is no number stays by itself.
    parts[:, :, 0] = torch.nan
    found = packed_sums.dalibi(parts, how, total, tile_n)
    assert found[0].isnan().all()
    torch.testing.assert_close(found[1:], expected[1:])


@pytest.mark.parametrize("wrong", [[0, 100, 50, 557], [0, 9999, 9999, 3], [7, 7, -5, 9], [500, 0, 500, 0]])
def test_wrong_offsets_stay_within_the_tensors(wrong: list[int]) -> None:
    offsets, total, tile = torch.tensor(wrong).int(), 557, 64
    parts = torch.ones(1, 2, num_padded_blocks(total, tile, 3), 4)
    how = How(0.3, None, 0, cu_seqlens_q=offsets, cu_seqlens_k=offsets)
    assert packed_sums.dalibi(parts, how._replace(alibi=torch.zeros(3, 2)), total, tile).shape == (3, 2)
    lse, delta = torch.zeros(2, total), torch.ones(1, 2, num_padded_blocks(total, tile, 3) * tile)
    found = packed_sums.dsinks(lse, delta, None, how._replace(sinks=torch.zeros(2)), tile)
    assert found.shape == (2,) and found.isfinite().all()


def test_blind_queries_give_their_sink_the_gradient_of_the_lse(gpu: FakePacked) -> None:
    """Whatever flows into their output."""
    lengths = Lengths([9, 4, 5, 3], [4, 0, 6, 3], [3, 0, 6, 0], (2, 0))
    inputs, dlse = tensors(lengths), normal(4, 23, dtype=torch.float32)
    how = how_of(lengths, (None, 1), sinks=SINKS)
    out, lse, _ = general.general_fwd(*inputs, *how)
    dout = normal(*out.shape, seed=5)
    expected = general._bwd_cpu(dout, dlse, *inputs, out, lse, *how)[4]
    # Five of the first sequence, all of the second and of the last, and those after it.
    for blind in (slice(0, 5), slice(9, 13), slice(18, 23)):
        dout[blind] = torch.nan
    found = general._bwd_cuda(dout, dlse, *inputs, out, lse, *how)[4]
    torch.testing.assert_close(found, expected, rtol=0.01, atol=0.01)
