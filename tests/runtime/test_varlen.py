"""Varlen calls up to their launches, on CPU tensors: each tile is computed from the tile list."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from cute_flash.planning.plan import MAX_SEQLEN
from cute_flash.planning.varlen import ASCENDING, BY_LENGTH, DESCENDING
from cute_flash.reference import cpu
from cute_flash.runtime import launcher
from cute_flash.spec.args import AttentionArgs
from tests.combinations import RNG
from tests.fakes.gpu import FakeGpu, is_shared
from tests.lengths import Lengths
from tests.runtime.calls import D, normal, plain, run_backward, run_forward

Window = tuple[int | None, int | None]
WINDOWS: list[Window] = [(None, None), (None, 0), (30, 0), (5, None)]
SMALL = Lengths([5, 0, 40], [7, 3, 30])
# Several tiles, one key more than a tile, no queries or no keys; tokens that belong to no sequence.
SEVERAL = Lengths([130, 0, 5, 64], [129, 30, 0, 257], None, (3, 70))
USED = Lengths([40, 7, 0], [200, 64, 9], [150, 0, 9], (0, 5))


def tensors(lengths: Lengths, heads: int = 4, heads_kv: int = 2, width: int = D, width_v: int = D) -> list[Tensor]:
    queries, keys = lengths.totals
    shapes = ((queries, heads, width), (keys, heads_kv, width), (keys, heads_kv, width_v))
    return [normal(*shape, seed=i) for i, shape in enumerate(shapes)]


def varlen(lengths: Lengths, window: Any = (None, 0), scale: float = 0.3, **fields: Any) -> AttentionArgs:
    return plain(scale, *window, **lengths.args(), **fields)


def douts(lengths: Lengths, has_dlse: bool, width_v: int = D) -> dict[str, Tensor | None]:
    """Gradients of out and LSE; those of rows that belong to no sequence are NaN."""
    total, rest = lengths.totals[0], sum(lengths.queries)
    dout, dlse = normal(total, 4, width_v, seed=5), normal(4, total, dtype=torch.float32)
    dout[rest:], dlse[:, rest:] = torch.nan, torch.nan
    return {"dout": dout, "dlse": dlse if has_dlse else None}


# ---- forward


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(12))
def test_random_batches(gpu: FakeGpu, seed: int) -> None:
    lengths, window, chunk = Lengths.drawn(seed), WINDOWS[seed % 4], (None, None, 50)[seed % 3]
    args = varlen(lengths, window, -0.3 if seed % 3 == 0 else 0.3, attention_chunk=chunk)
    inputs = tensors(lengths)
    run_forward(inputs, args)
    if 0 not in lengths.totals:
        scheduler, main = gpu.launches[-2:]
        assert (scheduler.kernel, main.kernel) == ("varlen_scheduler_fwd", f"fwd_{gpu.family}")
        # On Hopper the kernel is launched early, and waits for the end of the scheduler.
        assert scheduler.key.static.overlaps_next == (gpu.name == "sm_90")
        expected = tuple(MAX_SEQLEN if side is None else side for side in window)
        assert (scheduler["scheduler_left"], scheduler["scheduler_right"]) == expected
        absent = 0 if chunk is None else MAX_SEQLEN
        assert (main["window_left"], main["window_right"]) == tuple(absent if x is None else x for x in window)
        assert scheduler["attention_chunk"] == main["attention_chunk"] == chunk
        assert (scheduler["tile_m"], scheduler["tile_n"]) == (main.key.tile.tile_m, main.key.tile.tile_n)
        assert (scheduler["total_q"], scheduler["total_k"]) == lengths.totals
        assert scheduler["tile_order"] == (ASCENDING if (window, chunk) == ((None, None), None) else BY_LENGTH)
        assert is_shared(scheduler["q_tile_list"], main["q_tile_list"])
        static = main.key.static
        assert static.varlen and not static.seqused_k and not static.pack_gqa
    gpu.launches.clear()
    _, dk, dv, *_ = run_backward(inputs, args, **douts(lengths, seed % 2 == 1))
    assert dk is not None and dv is not None
    # Keys that belong to no sequence, and those of sequences without queries.
    unseen = torch.ones(lengths.totals[1], dtype=torch.bool)
    for (_, keys), queries in zip(lengths.spans(), lengths.queries, strict=True):
        unseen[keys] = queries == 0
    assert not dk[unseen].any() and not dv[unseen].any()
    if gpu.launches:
        names = [f"bwd_{gpu.family}", f"bwd_postprocess_{gpu.family}"]
        assert gpu.kernels == ["varlen_scheduler_bwd", "bwd_preprocess", *names]


def test_new_lengths_compile_nothing(gpu: FakeGpu) -> None:
    for seed in range(8):
        lengths = Lengths.drawn(seed, longest=70)
        run_forward(tensors(lengths), varlen(lengths))
    # One main kernel, and a scheduler with and without `seqused_k`.
    assert len(set(gpu.keys)) == 3


STRIDES: dict[str, tuple[Callable[[Tensor], Tensor], bool]] = {
    "one of qkv": (lambda x: torch.stack([x, x, x], dim=1)[:, 1], False),
    "heads first": (lambda x: x.transpose(0, 1).contiguous().transpose(0, 1), False),
    "columns of a wider row": (lambda x: torch.cat([x, x], dim=2)[..., 8 : 8 + D], False),
    "expanded heads": (lambda x: x[:, :1].expand(x.shape), False),
    "columns not contiguous": (lambda x: x.mT.contiguous().mT, True),
    "odd rows": (lambda x: torch.cat([x, x], dim=2)[..., 1 : 1 + D], True),
    "offset of 2 bytes": (lambda x: torch.cat([x.flatten()[:1], x.flatten()])[1:].view(x.shape), True),
}


@pytest.mark.parametrize("position", range(3))
@pytest.mark.parametrize("name", STRIDES)
def test_strides(gpu: FakeGpu, name: str, position: int) -> None:
    make, is_copied = STRIDES[name]
    inputs = tensors(SMALL)
    inputs[position] = make(inputs[position])
    run_forward(inputs, varlen(SMALL))
    for i, (operand, x) in enumerate(zip("qkv", inputs, strict=True)):
        assert is_shared(gpu.main[operand], x) != (i == position and is_copied)


def test_offsets_of_any_stride(gpu: FakeGpu) -> None:
    twice = torch.stack([SMALL.cu_q, SMALL.cu_q], dim=1)[:, 0]
    run_forward(tensors(SMALL), varlen(SMALL)._replace(cu_seqlens_q=twice))
    assert gpu.last("varlen_scheduler")["cu_seqlens_q"].is_contiguous()


def test_dv_other_than_d(gpu: FakeGpu) -> None:
    inputs = tensors(SMALL, width_v=64)
    assert run_forward(inputs, varlen(SMALL))[0].shape[2] == 64
    dv = run_backward(inputs, varlen(SMALL))[2]
    assert dv is not None and dv.shape[2] == 64


def test_fp32_outputs(gpu: FakeGpu) -> None:
    args = varlen(SMALL, out_fp32=True)
    assert run_forward(tensors(SMALL), args)[0].dtype == torch.float32
    run_backward(tensors(SMALL), args)
    before = gpu.last("bwd_preprocess")
    assert before["out"].dtype == before["dout"].dtype == torch.float32
    assert gpu.main["dout_cast"].dtype == torch.bfloat16
    assert run_forward(tensors(SMALL), args._replace(out_fp32=False))[0].dtype == torch.bfloat16


# ---- backward


@pytest.mark.parametrize("name", ["strides of 0", "heads first", "columns not contiguous"])
def test_strides_of_the_output_gradient(gpu: FakeGpu, name: str) -> None:
    make = (lambda x: x[:1, :1].expand(x.shape)) if name == "strides of 0" else STRIDES[name][0]
    run_backward(tensors(SMALL), varlen(SMALL), dout=make(normal(SMALL.totals[0], 4, D, seed=5)))


def test_strides_of_gradients(gpu: FakeGpu) -> None:
    for make, _ in STRIDES.values():
        run_backward(list(map(make, tensors(SMALL))), varlen(SMALL))


# ---- features

SLOPES, SINKS = torch.tensor([0.3, -0.2, 0.0, 1.5]), torch.tensor([0.3, -math.inf, 4.0, -2.0])
FEATURES: dict[str, dict[str, Any]] = {
    "softcap": {"softcap": 0.7},
    "alibi": {"alibi": SLOPES},
    "alibi by sequence": {"alibi": 2},
    "sinks": {"sinks": SINKS.double()},
    "dropout": {"dropout": 0.4, "rng": torch.tensor(RNG)},
}
ALL = {**FEATURES["softcap"], **FEATURES["alibi by sequence"], **FEATURES["sinks"], **FEATURES["dropout"]}


def with_slopes(lengths: Lengths, fields: dict[str, Any]) -> dict[str, Any]:
    """With slopes of each sequence."""
    if isinstance(fields.get("alibi"), int):
        return {**fields, "alibi": normal(len(lengths.queries), 4, seed=8, dtype=torch.bfloat16)}
    return fields


def run(lengths: Lengths, args: AttentionArgs, has_dlse: bool = False, width: int = D) -> tuple[Tensor | None, ...]:
    """Forward and gradients."""
    inputs = tensors(lengths, width=width, width_v=width)
    run_forward(inputs, args)
    return run_backward(inputs, args, **douts(lengths, has_dlse, width))


# Each feature with one window; all together with each.
FEATURE_CALLS = [*zip(FEATURES, WINDOWS * 2), *(("all", window) for window in WINDOWS[:3])]


@pytest.mark.parametrize(("name", "window"), FEATURE_CALLS, ids=str)
def test_features(gpu: FakeGpu, name: str, window: Window) -> None:
    fields = ALL if name == "all" else FEATURES[name]
    for seed, lengths in enumerate((SEVERAL, USED)):
        args = varlen(lengths, window, -0.3 if seed else 0.3, **with_slopes(lengths, fields))
        run(lengths, args, has_dlse=seed == 1)
    assert gpu.main.kernel == f"bwd_{gpu.family}"
    assert set(gpu.main.key.static.features) == {"softcap", "alibi", "dropout"} & set(fields)


@pytest.mark.parametrize("fields", [{}, ALL], ids=["plain", "all"])
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("width", [D, 136])
def test_deterministic_gradients_and_wide_heads(
    gpu: FakeGpu, fields: dict[str, Any], deterministic: bool, width: int
) -> None:
    lengths = Lengths([5, 0, 140], [7, 3, 230], None, (2, 1))
    run(lengths, varlen(lengths, deterministic=deterministic, **with_slopes(lengths, fields)), width=width)
    main = f"bwd_{gpu.family}" if width == D else gpu.wide_kernel
    assert gpu.kernels[-3:] == ["bwd_preprocess", main, f"bwd_postprocess_{gpu.family}"]
    assert gpu.main.key.static.deterministic == deterministic
    if deterministic:
        # The last K/V tile of a sequence comes first: others wait for it.
        assert gpu.main["dq_progress"] is not None and gpu.last("varlen_scheduler")["tile_order"] == DESCENDING


def test_softcap_with_slopes_is_compiled_with_dropout_where_it_would_spill(gpu: FakeGpu) -> None:
    """The kernel is called with a probability of 0."""
    for width in (16, 72):
        run(SMALL, varlen(SMALL, softcap=0.7, alibi=SLOPES), width=width)
        is_padded = gpu.name == "sm_90" and width == 72
        assert ("dropout" in gpu.main.key.static.features) == is_padded
        if is_padded:
            assert (gpu.main["dropout_threshold"], gpu.main["dropout_scale"]) == (0, 1.0)


@pytest.mark.parametrize(
    "lengths",
    [
        Lengths([0, 0], [3, 4]),
        Lengths([3, 4], [0, 0]),
        Lengths([3, 4], [0, 0], None, (5, 0)),
        Lengths([], []),
        Lengths([], [], None, (5, 7)),
    ],
    ids=("queries", "keys", "padding", "nothing", "sequences"),
)
def test_nothing_to_launch(gpu: FakeGpu, lengths: Lengths) -> None:
    out, lse, _ = run_forward(tensors(lengths), varlen(lengths))
    assert not out.any() and (lse == -torch.inf).all()
    args = varlen(lengths, **with_slopes(lengths, ALL))
    *_, dalibi, dsinks, _dbias = run(lengths, args, has_dlse=True)
    assert not gpu.launches and dalibi is not None
    assert dalibi.shape == (len(lengths.queries), 4) and not dalibi.any()
    dlse = normal(4, lengths.totals[0], dtype=torch.float32)
    expected = dlse[:, : sum(lengths.queries)].sum(dim=1).where(SINKS > -math.inf, 0.0)
    torch.testing.assert_close(dsinks, expected.double(), rtol=1e-5, atol=1e-5)
    run(lengths, args)


def test_values_of_features_compile_nothing(gpu: FakeGpu) -> None:
    for number, (softcap, dropout) in enumerate(((0.7, 0.4), (3.0, 0.1))):
        for lengths in (Lengths([5, 0, 40], [7, 3, 30]), Lengths([40, 5, 0], [0, 30, 10])):
            fields = {**ALL, "softcap": softcap, "dropout": dropout, "sinks": SINKS * (number + 1)}
            run(lengths, varlen(lengths, **with_slopes(lengths, fields)))
    # Two schedulers, two main kernels, preprocess and postprocess.
    assert len(set(gpu.keys)) == 6


@pytest.mark.parametrize("chunk", [None, 2])
def test_rows_without_keys_give_their_sink_the_gradient_of_the_lse(gpu: FakeGpu, chunk: int | None) -> None:
    """For any gradient of their output."""
    lengths = Lengths([9, 4, 5, 3], [4, 0, 6, 3], [3, 0, 6, 0], (2, 0))
    inputs, dlse = tensors(lengths), normal(4, 23, dtype=torch.float32)
    args = varlen(lengths, (None, 1), sinks=SINKS, attention_chunk=chunk)
    out, lse, _ = cpu.forward(*inputs, args)
    dout = normal(*out.shape, seed=5)
    expected = cpu.backward(dout, dlse, *inputs, out, lse, args)[3][1]
    # Rows without keys: five of the first sequence (or the six before key 0), all of the second and the last, and the
    # padding.
    for blind in (slice(0, 5 if chunk is None else 6), slice(9, 13), slice(18, 23)):
        dout[blind] = torch.nan
    found = launcher.backward(dout, dlse, *inputs, out, lse, args)[3][1]
    torch.testing.assert_close(found, expected, rtol=0.01, atol=0.01)
