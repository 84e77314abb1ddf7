"""The way from a CUDA tensor to a launch, on CPU tensors: see `tests.fake_gpu`."""

from __future__ import annotations

import contextlib
import math

import pytest
import torch

from cute_flash import UnsupportedError, operands, ops, use_kernels
from cute_flash.jit import compile as compiling
from cute_flash.jit import nvtx as ranges
from cute_flash.planning.plan import MAX_SEQLEN, Plan
from cute_flash.spec import arch
from tests.fake_gpu import D, FakeGpu, inputs, normal, run

# Reading in place, and copies of what cannot be


LAUNCHABLE = {
    "contiguous": lambda h, s: normal(2, h, s, D),
    "heads transposed": lambda h, s: normal(2, s, h, D).transpose(1, 2),
    "packed": lambda h, s: normal(2, s, 3, h, D).permute(2, 0, 3, 1, 4)[1],
    "every third row": lambda h, s: normal(2, h, 3 * s, D)[:, :, ::3],
    "columns of a wider row": lambda h, s: normal(2, h, s, 3 * D)[..., 8 : 8 + D],
    "expanded heads": lambda h, s: normal(2, 1, s, D).expand(2, h, s, D),
    "expanded rows": lambda h, s: normal(2, h, 1, D).expand(2, h, s, D),
    "sequence outermost": lambda h, s: normal(s, 2, h, D).permute(1, 2, 0, 3),
    "offset of 16 bytes": lambda h, s: normal(2 * h * s * D + 8)[8:].view(2, h, s, D),
}
REPAIRED = {
    "row stride of 17": lambda h, s: normal(2, h, s, D + 1)[..., :D],
    "row stride of 20": lambda h, s: normal(2, h, s, D + 4)[..., :D],
    "columns not contiguous": lambda h, s: normal(2, h, D, s).mT,
    "every second column": lambda h, s: normal(2, h, s, 2 * D)[..., ::2],
    "expanded columns": lambda h, s: normal(2, h, s, 1).expand(2, h, s, D),
    "offset of 2 bytes": lambda h, s: normal(2 * h * s * D + 1)[1:].view(2, h, s, D),
    "offset of 8 bytes": lambda h, s: normal(2 * h * s * D + 4)[4:].view(2, h, s, D),
    "head stride of 4": lambda h, s: normal(2 * s * 64).as_strided((2, h, s, D), (s * 64, 4, 64, 1)),
}


@pytest.mark.parametrize("scale", [0.3, -0.3])
@pytest.mark.parametrize("position", range(3))
@pytest.mark.parametrize("name", [*LAUNCHABLE, *REPAIRED])
def test_strides(gpu: FakeGpu, name: str, position: int, scale: float) -> None:
    tensors = inputs()
    heads, length = tensors[position].shape[1:3]
    tensors[position] = {**LAUNCHABLE, **REPAIRED}[name](heads, length)
    out, lse = run(tensors, scale)
    given = (gpu.last.q, gpu.last.k, gpu.last.v)
    for i, (seen, asked) in enumerate(zip(given, tensors, strict=True)):
        is_copied = (i == position and name in REPAIRED) or (i == 0 and scale < 0)
        # Read in place unless there is no way to, and nothing else is copied along.
        assert (seen.data_ptr() != asked.data_ptr()) == is_copied
    assert gpu.last.lse.data_ptr() == lse.data_ptr()
    dense_rows = out.stride(-1) == 1 and all(stride % 8 == 0 for stride in out.stride()[:3])
    assert (gpu.last.out.data_ptr() == out.data_ptr()) == dense_rows


def test_row_strides_beyond_32_bit_tile_offsets_are_copied(gpu: FakeGpu) -> None:
    storage = torch.zeros((1 << 22) + D, dtype=torch.bfloat16)
    for stride, is_copied in ((1 << 22, True), ((1 << 22) - 8, False)):
        k = storage.as_strided((1, 1, 2, D), (0, 0, stride, 1))
        k.copy_(normal(1, 1, 2, D))
        run([normal(1, 1, 3, D), k, k])
        assert (gpu.last.k.data_ptr() != k.data_ptr()) == is_copied


def test_a_known_signature_still_looks_at_the_addresses(gpu: FakeGpu) -> None:
    aligned = inputs()
    run(aligned)
    for position in range(3):
        shifted = list(aligned)
        flat = normal(aligned[position].numel() + 1, seed=9)
        shifted[position] = flat[1:].view(aligned[position].shape)
        assert shifted[position].data_ptr() % 16
        run(shifted)
        given = (gpu.last.q, gpu.last.k, gpu.last.v)
        in_place = [seen.data_ptr() == asked.data_ptr() for seen, asked in zip(given, shifted, strict=True)]
        assert in_place == [i != position for i in range(3)]
    assert len(gpu.plans) == 1


# Heads of a group that are rows of one tile, and values of another width


@pytest.mark.parametrize(("left", "right"), [(None, None), (None, 0), (3, 1)])
@pytest.mark.parametrize("rows", [1, 7, 33, 200])
def test_few_rows_of_heads_that_share_keys_are_packed(
    gpu: FakeGpu, rows: int, left: int | None, right: int | None
) -> None:
    k, v = normal(2, 2, 40, D), normal(2, 2, 40, D, seed=1)
    layouts = {
        "contiguous": normal(2, 16, rows, D),
        "sequence before heads": normal(2, rows, 16, D).transpose(1, 2),
        "heads expanded": normal(2, 1, rows, D).expand(2, 16, rows, D),
        "columns of a wider row": normal(2, 16, rows, 3 * D)[..., 8 : 8 + D],
    }
    for name, q in layouts.items():
        run([q, k, v], left=left, right=right)
        # Rows of neighbouring heads must lie one row apart.
        is_packable = rows == 1 or name in ("contiguous", "columns of a wider row")
        assert gpu.last.plan.packs_heads == (gpu.name == "sm_90" and is_packable and rows < 128), name
        assert gpu.last.q.data_ptr() == q.data_ptr()


@pytest.mark.parametrize("heads_kv", [1, 4])
@pytest.mark.parametrize("width", [8, 64])
def test_values_of_another_width(gpu: FakeGpu, width: int, heads_kv: int) -> None:
    k, v = normal(2, heads_kv, 9, D), normal(2, heads_kv, 9, width)
    queries = {
        "contiguous": normal(2, 4, 7, D),
        "sequence before heads": normal(2, 7, 4, D).transpose(1, 2),
        "columns late": normal(2, 4, D, 7).mT,
    }
    for q in queries.values():
        out, _ = run([q, k, v], right=0)
        assert out.shape == (2, 4, 7, width)
        # In the order of q.
        assert sorted(range(4), key=out.stride) == sorted(range(4), key=q.stride)


# Scale and window


@pytest.mark.parametrize("is_known", [False, True])
@pytest.mark.parametrize("scale", [0.3, 7, -0.3, -1e-3, 0.0, -0.0, 1e-35, -1e-35])
def test_kernels_see_a_positive_scale(gpu: FakeGpu, scale: float, is_known: bool) -> None:
    tensors = inputs()
    if is_known:
        run(tensors, left=3, right=0)
    # |scale| below 1e-30 is 0 to the softmax, in both paths.
    run(tensors, scale, left=3, right=0)
    assert gpu.last.scale == max(abs(scale), operands.MIN_SCALE)
    assert torch.equal(gpu.last.heads(gpu.last.q), -tensors[0] if scale < 0 else tensors[0])
    assert len(gpu.plans) == 1


@pytest.mark.parametrize("is_known", [False, True])
@pytest.mark.parametrize("scale", [math.nan, math.inf, -math.inf])
def test_a_scale_that_is_not_finite_launches_nothing(gpu: FakeGpu, scale: float, is_known: bool) -> None:
    tensors = inputs()
    if is_known:
        run(tensors)
    with pytest.raises(ValueError, match=f"scale={scale} is not finite"):
        ops.fwd_cuda(*tensors, scale, None, None)
    assert len(gpu.launches) == is_known


@pytest.mark.parametrize(
    ("left", "right", "given"),
    [
        (None, None, (0, 0)),
        (None, 0, (0, 0)),
        (2, None, (2, 0)),
        (3, 1, (3, 1)),
        (1 << 40, 1 << 62, (MAX_SEQLEN, MAX_SEQLEN)),
        (MAX_SEQLEN, MAX_SEQLEN + 1, (MAX_SEQLEN, MAX_SEQLEN)),
    ],
)
def test_windows_fit_32_bits(
    gpu: FakeGpu, left: int | None, right: int | None, given: tuple[int, int]
) -> None:
    run(inputs(), left=left, right=right)
    assert (gpu.last.left, gpu.last.right) == given
    static = gpu.last.plan.problem.static
    assert (static.has_left, static.has_right) == (left is not None, right is not None)


@pytest.mark.parametrize("is_known", [False, True])
@pytest.mark.parametrize(("left", "right", "name"), [(-1, 0, "left=-1"), (0, -5, "right=-5")])
def test_negative_windows_launch_nothing(
    gpu: FakeGpu, left: int, right: int, name: str, is_known: bool
) -> None:
    tensors = inputs()
    if is_known:
        run(tensors, left=3, right=3)
    with pytest.raises(ValueError, match=f"window {name} is negative"):
        ops.fwd_cuda(*tensors, 0.3, left, right)
    assert len(gpu.launches) == is_known


# Signatures


def test_one_plan_serves_every_value_of_scale_and_window(gpu: FakeGpu) -> None:
    for scale, left, right in ((0.3, 1, 2), (0.7, 3, 0), (-0.2, 0, 50)):
        run(inputs(), scale, left, right)
    assert len(gpu.plans) == 1
    assert len(gpu.launches) == 3


def test_whatever_decides_a_launch_is_in_the_signature(gpu: FakeGpu) -> None:
    calls = [
        (inputs(), None, None),
        (inputs(), 3, None),
        (inputs(), None, 3),
        (inputs(heads_kv=4), None, None),
        (inputs(sk=10), None, None),
        (inputs(dtype=torch.float16), None, None),
        ([inputs()[0].transpose(1, 2).contiguous().transpose(1, 2), *inputs()[1:]], None, None),
        ([inputs()[0], inputs()[1].mT.contiguous().mT, inputs()[2]], None, None),
        ([*inputs()[:2], inputs()[2].mT.contiguous().mT], None, None),
    ]
    for number, (tensors, left, right) in enumerate(calls, start=1):
        for _ in range(2):
            run(tensors, left=left, right=right)
        assert len(gpu.plans) == number
    with use_kernels("sm80"):
        run(inputs())
    assert gpu.plans[-1].family == "sm80"
    assert len(gpu.plans) == len(calls) + 1
    assert len(gpu.launches) == 2 * len(calls) + 1


def test_one_tensor_of_another_kind_is_no_known_signature(gpu: FakeGpu) -> None:
    run(inputs())
    for position in range(3):
        mixed = inputs()
        mixed[position] = mixed[position].half()
        with pytest.raises(ValueError, match="they must agree"):
            ops.fwd_cuda(*mixed, 0.3, None, None)
    assert len(gpu.launches) == 1


def test_known_signatures_are_bounded(gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operands, "MAX_LAUNCHES", 3)
    for _ in range(2):
        for sk in range(1, 12):
            run(inputs(sk=sk))
            assert 1 <= len(ops._launches) <= 3
    run(inputs(sk=11))
    assert len(gpu.plans) == 22


def test_a_failed_compilation_is_not_remembered(gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(plan: Plan) -> None:
        raise RuntimeError("ptxas")

    with monkeypatch.context() as patch:
        patch.setattr(compiling, "compiled", broken)
        with pytest.raises(RuntimeError, match="ptxas"):
            run(inputs())
    assert ops._launches == {}
    run(inputs())


def test_the_tensors_device_is_made_current(gpu: FakeGpu) -> None:
    run(inputs())
    assert gpu.entered == []
    gpu.current = 3
    run(inputs())
    assert gpu.entered == [inputs()[0].device.index]
    assert gpu.current == 3
    assert len(gpu.plans) == 1


def test_launch_ranges(gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    marked = []

    def record(name: str) -> contextlib.AbstractContextManager:
        marked.append(name)
        return contextlib.nullcontext()

    monkeypatch.setattr(ranges, "marked", record)
    run(inputs())
    # A range costs about a microsecond: without a listener, none around a launch.
    assert marked == ["plan"]
    monkeypatch.setattr(ranges, "MARKS_LAUNCHES", True)
    monkeypatch.setattr(ops, "_launches", {})
    run(inputs())
    run(inputs())
    assert marked == ["plan", "plan", "launch", "launch"]


# Nothing to launch, and refusals


@pytest.mark.parametrize("scale", [0.3, -0.3])
@pytest.mark.parametrize(
    ("q", "k"),
    [((0, 2, 3), (0, 2, 5)), ((2, 0, 3), (2, 0, 5)), ((2, 2, 0), (2, 2, 5)), ((2, 4, 3), (2, 2, 0))],
)
def test_empty_problems_compile_nothing(
    gpu: FakeGpu, q: tuple[int, ...], k: tuple[int, ...], scale: float
) -> None:
    for _ in range(2):
        out, lse = run([normal(*shape, D) for shape in (q, k, k)], scale, right=0)
        assert torch.equal(out, torch.zeros_like(out))
        assert torch.equal(lse, torch.full_like(lse, -torch.inf))
    assert gpu.plans == []
    assert gpu.launches == []


def test_refusals_come_before_compiling(gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = inputs()
    bad = {
        "head_dim=12": [x[..., :12] for x in (q, k, v)],
        "dtype float32 on cuda": [x.float() for x in (q, k, v)],
        "k is torch.float16": [q, k.half(), v],
        "q has 4 heads and k, v have 3": [q, normal(2, 3, 9, D), normal(2, 3, 9, D)],
        "batch and head dim must agree": [q[:1], k, v],
    }
    for message, tensors in bad.items():
        with pytest.raises(ValueError, match=message):
            ops.fwd_cuda(*tensors, 0.3, None, None)

    def unknown(index: int) -> arch.ArchSpec:
        raise UnsupportedError("GPU 0 is sm_120")

    monkeypatch.setattr(arch, "detect", unknown)
    with pytest.raises(UnsupportedError, match="sm_120"):
        ops.fwd_cuda(q, k, v, 0.3, None, None)
    assert gpu.plans == []
    assert ops._launches == {}
