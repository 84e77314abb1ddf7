"""Forward calls up to their launches, on CPU tensors: see `tests.fakes.gpu`."""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from cute_flash import UnsupportedError
from cute_flash.jit import nvtx
from cute_flash.planning.plan import MAX_SEQLEN, CompileKey, plan_forward
from cute_flash.runtime import gpu as gpu_module
from cute_flash.runtime import launcher, operands
from cute_flash.runtime.gpu import bound, use_gpu
from cute_flash.spec.arch import ARCHS, ArchSpec
from cute_flash.spec.describe import describe
from cute_flash.spec.problem import MAX_DROPOUT, MAX_SOFTCAP, check_dropout, check_softcap
from tests.combinations import RNG
from tests.fakes.gpu import FakeGpu, is_shared
from tests.runtime import strides
from tests.runtime.calls import BATCH, HEADS, WINDOWS, D, inputs, normal, plain, run_forward

# ---- strides


@pytest.mark.parametrize("scale", [0.3, -0.3])
@pytest.mark.parametrize("position", range(3))
@pytest.mark.parametrize("name", strides.ALL)
def test_only_tensors_that_kernels_cannot_read_are_copied(gpu: FakeGpu, name: str, position: int, scale: float) -> None:
    tensors = inputs()
    heads, length = tensors[position].shape[1:3]
    tensors[position] = strides.ALL[name](heads, length)
    out, lse, _ = run_forward(tensors, plain(scale))
    for i, (operand, x) in enumerate(zip("qkv", tensors, strict=True)):
        is_copied = (i == position and name in strides.COPIED) or (i == 0 and scale < 0)
        assert is_shared(gpu.main[operand], x) != is_copied
    assert is_shared(gpu.main["lse"], lse)
    is_aligned = out.stride(-1) == 1 and all(stride % 8 == 0 for stride in out.stride()[:3])
    assert is_shared(gpu.main["out"], out) == is_aligned


def test_row_strides_beyond_32_bit_tile_offsets_are_copied(gpu: FakeGpu) -> None:
    storage = torch.zeros((1 << 22) + D, dtype=torch.bfloat16)
    for stride, is_copied in ((1 << 22, True), ((1 << 22) - 8, False)):
        k = storage.as_strided((1, 1, 2, D), (0, 0, stride, 1))
        k.copy_(normal(1, 1, 2, D))
        run_forward([normal(1, 1, 3, D), k, k])
        assert is_shared(gpu.main["k"], k) != is_copied


def test_a_known_signature_still_checks_addresses(gpu: FakeGpu) -> None:
    aligned = inputs()
    run_forward(aligned)
    for position in range(3):
        shifted = list(aligned)
        buffer = normal(aligned[position].numel() + 1, seed=9)
        shifted[position] = buffer[1:].view(aligned[position].shape)
        assert shifted[position].data_ptr() % 16
        run_forward(shifted)
        in_place = [is_shared(gpu.main[name], x) for name, x in zip("qkv", shifted, strict=True)]
        assert in_place == [i != position for i in range(3)]
    assert len(gpu.keys) == 1


# ---- pack_gqa, and Dv ≠ D


@pytest.mark.parametrize("window", [(None, None), (None, 0), (3, 1)])
@pytest.mark.parametrize("rows", [1, 7, 33, 200])
def test_few_queries_of_grouped_heads_use_pack_gqa(
    gpu: FakeGpu, rows: int, window: tuple[int | None, int | None]
) -> None:
    k, v = normal(2, 2, 40, D), normal(2, 2, 40, D, seed=1)
    layouts = {
        "contiguous": normal(2, 16, rows, D),
        "sequence before heads": normal(2, rows, 16, D).transpose(1, 2),
        "heads expanded": normal(2, 1, rows, D).expand(2, 16, rows, D),
        "columns of a wider row": normal(2, 16, rows, 3 * D)[..., 8 : 8 + D],
    }
    for name, q in layouts.items():
        run_forward([q, k, v], plain(0.3, *window))
        # Rows of neighbouring heads must be one row apart.
        can_pack = rows == 1 or name in ("contiguous", "columns of a wider row")
        is_packed = gpu.name == "sm_90" and can_pack and rows < 128
        assert gpu.main["q"].shape == ((2, 2, 8 * rows, D) if is_packed else (2, 16, rows, D)), name
        assert gpu.main.key.static.pack_gqa == (is_packed and window != (None, None))
        assert is_shared(gpu.main["q"], q)


@pytest.mark.parametrize("heads_kv", [1, 4])
@pytest.mark.parametrize("width", [8, 64])
def test_dv_other_than_d(gpu: FakeGpu, width: int, heads_kv: int) -> None:
    k, v = normal(2, heads_kv, 9, D), normal(2, heads_kv, 9, width)
    queries = {
        "contiguous": normal(2, 4, 7, D),
        "sequence before heads": normal(2, 7, 4, D).transpose(1, 2),
        "columns late": normal(2, 4, D, 7).mT,
    }
    for q in queries.values():
        out, _, _ = run_forward([q, k, v], plain(right=0))
        assert out.shape == (2, 4, 7, width)
        # In the order of q.
        assert sorted(range(4), key=out.stride) == sorted(range(4), key=q.stride)


# ---- scale and window


@pytest.mark.parametrize("is_known", [False, True])
@pytest.mark.parametrize("scale", [0.3, 7, -0.3, -1e-3, 0.0, -0.0, 1e-35, -1e-35])
def test_kernels_take_a_positive_scale(gpu: FakeGpu, scale: float, is_known: bool) -> None:
    tensors = inputs(heads_kv=4)
    if is_known:
        run_forward(tensors, plain(left=3, right=0))
    # |scale| below 1e-30 is 0 to the softmax, in both paths.
    run_forward(tensors, plain(scale, left=3, right=0))
    assert gpu.main["scale"] == max(abs(scale), operands.MIN_SCALE)
    assert torch.equal(gpu.main["q"], -tensors[0] if scale < 0 else tensors[0])
    assert len(gpu.keys) == 1


@pytest.mark.parametrize("is_known", [False, True])
@pytest.mark.parametrize("scale", [math.nan, math.inf, -math.inf])
def test_a_scale_that_is_not_finite_launches_nothing(gpu: FakeGpu, scale: float, is_known: bool) -> None:
    tensors = inputs()
    if is_known:
        run_forward(tensors)
    with pytest.raises(ValueError, match=f"scale={scale} is not finite"):
        launcher.forward(*tensors, plain(scale))
    assert len(gpu.launches) == is_known


@pytest.mark.parametrize(
    ("left", "right", "expected"),
    [
        (None, None, (0, 0)),
        (None, 0, (0, 0)),
        (2, None, (2, 0)),
        (3, 1, (3, 1)),
        (1 << 40, 1 << 62, (MAX_SEQLEN, MAX_SEQLEN)),
        (MAX_SEQLEN, MAX_SEQLEN + 1, (MAX_SEQLEN, MAX_SEQLEN)),
    ],
)
def test_windows_fit_32_bits(gpu: FakeGpu, left: int | None, right: int | None, expected: tuple[int, int]) -> None:
    run_forward(inputs(), plain(left=left, right=right))
    assert (gpu.main["window_left"], gpu.main["window_right"]) == expected
    static = gpu.main.key.static
    assert (static.has_left, static.has_right) == (left is not None, right is not None)


@pytest.mark.parametrize("is_known", [False, True])
@pytest.mark.parametrize(("left", "right", "name"), [(-1, 0, "left=-1"), (0, -5, "right=-5")])
def test_negative_windows_launch_nothing(gpu: FakeGpu, left: int, right: int, name: str, is_known: bool) -> None:
    tensors = inputs()
    if is_known:
        run_forward(tensors, plain(left=3, right=3))
    with pytest.raises(ValueError, match=f"window {name} is negative"):
        launcher.forward(*tensors, plain(left=left, right=right))
    assert len(gpu.launches) == is_known


# ---- arguments


@pytest.mark.parametrize("window", WINDOWS, ids=str)
def test_arguments_are_those_of_the_plan(gpu: FakeGpu, window: tuple[int | None, int | None]) -> None:
    tensors, args = [normal(3, 6, 300, D), *(normal(3, 2, 500, D) for _ in range(2))], plain(0.3, *window)
    run_forward(tensors, args)
    plan = plan_forward(describe(*tensors, args, "cuda"), ARCHS[gpu.name])
    assert gpu.main.key == plan.main and gpu.kernels == [f"fwd_{gpu.family}"]
    for name in ("num_ctas", "seqlen_q", "heads_per_l2_group"):
        assert gpu.main.arguments.get(name, plan.sizes[name]) == plan.sizes[name]


# ---- signatures


def test_one_kernel_serves_every_value_of_scale_and_window(gpu: FakeGpu) -> None:
    for scale, left, right in ((0.3, 1, 2), (0.7, 3, 0), (-0.2, 0, 50)):
        run_forward(inputs(), plain(scale, left, right))
    assert len(set(gpu.keys)) == 1
    assert len(gpu.launches) == 3


def test_everything_that_decides_a_launch_is_in_the_signature(gpu: FakeGpu) -> None:
    calls = [
        (inputs(), plain()),
        (inputs(), plain(left=3)),
        (inputs(), plain(right=3)),
        (inputs(heads_kv=4), plain()),
        (inputs(sk=10), plain()),
        (inputs(dtype=torch.float16), plain()),
        ([inputs()[0].transpose(1, 2).contiguous().transpose(1, 2), *inputs()[1:]], plain()),
        ([inputs()[0], inputs()[1].mT.contiguous().mT, inputs()[2]], plain()),
        ([*inputs()[:2], inputs()[2].mT.contiguous().mT], plain()),
        (inputs(), plain(kernel_family="sm80")),
    ]
    for number, (tensors, args) in enumerate(calls, start=1):
        for _ in range(2):
            run_forward(tensors, args)
        assert len(gpu.keys) == number
    assert gpu.keys[-1].kernel == "fwd_sm80"
    assert len(gpu.launches) == 2 * len(calls)


def test_a_tensor_of_another_dtype_is_no_known_signature(gpu: FakeGpu) -> None:
    run_forward(inputs())
    for position in range(3):
        mixed = inputs()
        mixed[position] = mixed[position].half()
        with pytest.raises(ValueError, match="they must agree"):
            launcher.forward(*mixed, plain())
    assert len(gpu.launches) == 1


def test_known_signatures_are_bounded(gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_module, "MAX_SIGNATURES", 3)
    for _ in range(2):
        for sk in range(1, 12):
            run_forward(inputs(sk=sk))
            assert 1 <= len(bound) <= 3
    run_forward(inputs(sk=11))
    assert len(gpu.keys) == 22


class BrokenGpu(FakeGpu):
    def kernel(self, key: CompileKey) -> Callable[..., None]:
        raise RuntimeError("ptxas")


class UnknownGpu(FakeGpu):
    def arch(self, index: int | None) -> ArchSpec:
        raise UnsupportedError("GPU 0 is sm_120")


def test_a_failed_compilation_is_not_remembered() -> None:
    with use_gpu(BrokenGpu("sm_90")):
        for _ in range(2):
            with pytest.raises(RuntimeError, match="ptxas"):
                launcher.forward(*inputs(), plain())
        assert bound == {}


def test_functions_bound_for_another_gpu_are_not_used(gpu: FakeGpu) -> None:
    run_forward(inputs())
    with use_gpu(FakeGpu("sm_80")) as other:
        run_forward(inputs())
    run_forward(inputs())
    assert len(gpu.launches) == 2 and len(gpu.keys) == 1 and len(other.launches) == 1  # type: ignore[attr-defined]


def test_the_tensors_device_is_made_current(gpu: FakeGpu) -> None:
    run_forward(inputs())
    assert gpu.entered == []
    gpu.device = 3
    run_forward(inputs())
    assert gpu.entered == [inputs()[0].device.index]
    assert gpu.device == 3
    assert len(gpu.keys) == 1


def test_nvtx_ranges(gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    marked = []

    def record(name: str) -> contextlib.AbstractContextManager:
        marked.append(name)
        return contextlib.nullcontext()

    monkeypatch.setattr(nvtx, "marked", record)
    run_forward(inputs())
    # A range costs about a microsecond, so launches have none unless a profiler listens.
    assert marked == ["plan"]
    monkeypatch.setattr(nvtx, "MARKS_LAUNCHES", True)
    with use_gpu(FakeGpu(gpu.name)):
        run_forward(inputs())
        run_forward(inputs())
    assert marked == ["plan", "plan", "launch", "launch"]


# ---- nothing to launch, and refusals


@pytest.mark.parametrize("scale", [0.3, -0.3])
@pytest.mark.parametrize(
    ("q", "k"), [((0, 2, 3), (0, 2, 5)), ((2, 0, 3), (2, 0, 5)), ((2, 2, 0), (2, 2, 5)), ((2, 4, 3), (2, 2, 0))]
)
def test_empty_problems_compile_nothing(gpu: FakeGpu, q: tuple[int, ...], k: tuple[int, ...], scale: float) -> None:
    for _ in range(2):
        out, lse, _ = run_forward([normal(*shape, D) for shape in (q, k, k)], plain(scale, right=0))
        assert torch.equal(out, torch.zeros_like(out))
        assert torch.equal(lse, torch.full_like(lse, -torch.inf))
    assert gpu.keys == [] and gpu.launches == []


def test_refusals_come_before_compiling(gpu: FakeGpu) -> None:
    q, k, v = inputs()
    bad = {
        "head_dim=12": [x[..., :12] for x in (q, k, v)],
        "dtype float64 on cuda": [x.double() for x in (q, k, v)],
        "k is torch.float16": [q, k.half(), v],
        "q has 4 heads and k, v have 3": [q, normal(2, 3, 9, D), normal(2, 3, 9, D)],
        "batch and head dim must agree": [q[:1], k, v],
    }
    for message, tensors in bad.items():
        with pytest.raises(ValueError, match=message):
            launcher.forward(*tensors, plain())
    assert gpu.keys == [] and bound == {}
    with use_gpu(UnknownGpu(gpu.name)), pytest.raises(UnsupportedError, match="sm_120"):
        launcher.forward(q, k, v, plain())


# ---- features

SLOPES, SINKS = normal(HEADS, dtype=torch.float32) / 8, normal(HEADS, seed=1, dtype=torch.float32)
DROPOUT = {"dropout": 0.5, "rng": torch.tensor(RNG)}
FEATURES: dict[str, dict[str, Any]] = {
    "softcap": {"softcap": 1.5},
    "slopes by head": {"alibi": SLOPES},
    "slopes by batch": {"alibi": normal(BATCH, HEADS, seed=2, dtype=torch.float32)},
    "slopes in fp16": {"alibi": SLOPES.half()},
    "strided slopes": {"alibi": normal(HEADS, 3, dtype=torch.float32)[:, 1]},
    "sinks": {"sinks": SINKS},
    "sinks in fp64": {"sinks": SINKS.double()},
    "dropout": {"dropout": 0.25, "rng": torch.tensor(RNG)},
    "much dropout": {"dropout": 0.75, "rng": torch.tensor([[1, 2], [3, 4]])[:, 1]},
    "dropout of a shard": {"dropout": 0.5, "rng": torch.tensor(RNG), "dropout_origin": (64, 32, 3, HEADS + 5)},
    "max_logit": {"return_max_logit": True},
    "fp32 output": {"out_fp32": True},
    "all": {"softcap": 3.0, "alibi": SLOPES, "sinks": SINKS, **DROPOUT, "return_max_logit": True},
    "all, fp32 output": {"softcap": 3.0, "sinks": SINKS, **DROPOUT, "return_max_logit": True, "out_fp32": True},
}


@pytest.mark.parametrize("scale", [0.3, -0.3])
@pytest.mark.parametrize("name", FEATURES)
def test_features(gpu: FakeGpu, name: str, scale: float) -> None:
    for window in WINDOWS:
        args = plain(scale, *window, **FEATURES[name])
        run_forward(inputs(), args)
        assert gpu.main.key.static.features == describe(*inputs(), args).features
        assert gpu.main.key.static.out_fp32 == args.out_fp32
        assert gpu.kernels[-1] == f"fwd_{gpu.family}"


def test_values_of_features_need_no_new_kernel(gpu: FakeGpu) -> None:
    rng = torch.tensor(RNG)
    for origin in ((32, 0, 0, HEADS), (0, 48, 1, HEADS + 1)):
        run_forward(inputs(), plain(dropout=0.5, rng=rng, dropout_origin=origin))
    assert len(set(gpu.keys)) == 1
    for softcap, dropout, right in itertools.product((0.5, 7.0), (0.1, 0.9), (0, 3)):
        run_forward(inputs(), plain(right=right, softcap=softcap, dropout=dropout, rng=rng))
    run_forward(inputs(), plain(right=0, softcap=1.0, dropout=0.5, rng=torch.tensor([5, 6])))
    assert len(set(gpu.keys)) == 2


def test_dropout_of_a_shard_needs_aligned_positions(gpu: FakeGpu) -> None:
    args = plain(dropout=0.5, rng=torch.tensor(RNG), dropout_origin=(64, 32, 0, HEADS))
    run_forward(inputs(), args)
    for origin in ((16, 0, 0, HEADS), (32, 8, 0, HEADS)):
        with pytest.raises(UnsupportedError, match=f"begins at row {origin[0]} and key {origin[1]}"):
            launcher.forward(*inputs(), args._replace(dropout_origin=origin))
    with pytest.raises(ValueError, match="number of heads"):
        launcher.forward(*inputs(), args._replace(dropout_origin=(0, 0, 1, HEADS), deterministic=True))


@pytest.mark.parametrize("name", ["all", "fp32 output"])
def test_strides_with_features(gpu: FakeGpu, name: str) -> None:
    for turn in (
        lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
        lambda x: x.mT.contiguous().mT,
        lambda x: torch.cat([x, x], dim=-1)[..., :D],
    ):
        run_forward([turn(x) for x in inputs()], plain(right=0, **FEATURES[name]))


def test_pack_gqa_is_used_only_with_features_that_do_not_depend_on_the_head(gpu: FakeGpu) -> None:
    tensors = [normal(2, 16, 5, D), normal(2, 2, 40, D), normal(2, 2, 40, D, seed=1)]
    slopes = normal(16, dtype=torch.float32)
    for fields in ({"softcap": 2.0}, {"out_fp32": True}):
        run_forward(tensors, plain(right=0, **fields))
        assert gpu.main.key.static.pack_gqa == (gpu.name == "sm_90")
    apart: list[dict[str, Any]] = [{"alibi": slopes}, {"sinks": slopes}, DROPOUT, {"return_max_logit": True}]
    for fields in apart:
        run_forward(tensors, plain(right=0, softcap=2.0, **fields))
        assert not gpu.main.key.static.pack_gqa and gpu.main["q"].shape == (2, 16, 5, D)


def test_rows_without_keys(gpu: FakeGpu) -> None:
    """Calls without keys or queries launch nothing. With Sq > Sk the first rows of a causal mask see no key."""
    q, k, v = inputs()
    for args in (plain(sinks=SINKS, return_max_logit=True), plain(softcap=1.0), plain(out_fp32=True)):
        out, lse, max_logit = run_forward([q, k[:, :, :0], v[:, :, :0]], args)
        assert not out.any() and (max_logit is None or torch.equal(max_logit, torch.full_like(max_logit, -math.inf)))
        expected = torch.full((HEADS,), -math.inf) if args.sinks is None else SINKS
        assert torch.equal(lse, expected[:, None].expand_as(lse))
        run_forward([q[:, :, :0], k, v], args)
        run_forward([x[:0] for x in (q, k, v)], args)
    assert not gpu.launches
    out, lse, _ = run_forward([q, k[:, :, :3], v[:, :, :3]], plain(right=0, sinks=SINKS))
    assert not out[:, :, :4].any() and torch.equal(lse[0, :, :4], SINKS[:, None].expand(-1, 4))


def test_extreme_numbers_stay_finite(gpu: FakeGpu) -> None:
    """Kernels use the quotient of scale and softcap; `tests.fakes.checks` checks that it is finite."""
    for scale, softcap in ((1e30, 1e-40), (1e-30, 1e-40), (3.0, 1e-300), (1e38, 1e-3)):
        launcher.forward(*inputs(), plain(scale, softcap=softcap))
    check_softcap(MAX_SOFTCAP)
    check_dropout(MAX_DROPOUT)
    refused = {
        r"softcap=20000\.0 on cuda: at most 16384; leave it out": {"softcap": 2e4},
        r"dropout=0\.97 on cuda: at most 0\.96875": {"dropout": 0.97, "rng": torch.tensor(RNG)},
    }
    for message, fields in refused.items():
        with pytest.raises(UnsupportedError, match=message):
            launcher.forward(*inputs(), plain(**fields))


def test_dropout_needs_a_seed(gpu: FakeGpu) -> None:
    wrong: dict[str, Tensor | None] = {
        "dropout=0.5 needs rng": None,
        "rng is on meta and q is on cpu": torch.zeros(2, dtype=torch.int64, device="meta"),
        r"rng is torch.int32 of shape \(2,\)": torch.zeros(2, dtype=torch.int32),
        r"rng is torch.int64 of shape \(3,\)": torch.zeros(3, dtype=torch.int64),
    }
    for message, rng in wrong.items():
        with pytest.raises(ValueError, match=message):
            launcher.forward(*inputs(), plain(dropout=0.5, rng=rng))
    assert not gpu.launches


def test_batch_invariant_calls_choose_tiles_by_nothing_else_in_the_batch(gpu: FakeGpu) -> None:
    keys = set()
    for batch, rows in ((1, 1), (1, 200), (7, 33)):
        q, k = normal(batch, 16, rows, D), normal(batch, 2, 300, D)
        launcher.forward(q, k, k, plain(right=0, batch_invariant=True, deterministic=True))
        keys.add(gpu.main.key)
        assert gpu.main["q"].shape == q.shape, "pack_gqa is not used"
    assert len(keys) == 1 and keys.pop().static.batch_invariant
