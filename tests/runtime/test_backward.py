"""Gradients up to their launches, on CPU tensors: see `tests.fakes.gpu`."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from cute_flash import UnsupportedError
from cute_flash.planning.plan import MAX_SEQLEN, CompileKey, plan_backward
from cute_flash.reference import cpu
from cute_flash.runtime import gpu as gpu_module
from cute_flash.runtime import launcher, operands
from cute_flash.runtime.gpu import bound, use_gpu
from cute_flash.spec.arch import ARCHS
from cute_flash.spec.describe import describe
from tests.combinations import RNG
from tests.fakes.gpu import FakeGpu, Launch, is_shared, poisoned_memory
from tests.runtime import strides
from tests.runtime.calls import D, inputs, normal, plain, run_backward


def wide(sk: int = 9) -> list[Tensor]:
    """A head dim that has no tile of its own."""
    return [normal(2, heads, s, 72, seed=i) for i, (heads, s) in enumerate(((4, 7), (2, sk), (2, sk)))]


def main_keys(gpu: FakeGpu) -> list[CompileKey]:
    """The main kernels of all bound signatures, in order."""
    return [key for key in gpu.keys if key.kernel.startswith("bwd_sm")]


# ---- arguments of the kernels


@pytest.mark.parametrize("has_dlse", [False, True])
@pytest.mark.parametrize("scale", [0.3, -0.3])
@pytest.mark.parametrize(("left", "right"), [(None, None), (None, 0), (3, 1), (1 << 40, 1 << 62)])
def test_kernels_and_arguments_are_those_of_the_plan(
    gpu: FakeGpu, left: int | None, right: int | None, scale: float, has_dlse: bool
) -> None:
    for tensors in (inputs(), wide(), wide(sk=4)):  # the last one: rows without keys
        dlse, args = normal(2, 4, 7, dtype=torch.float32) if has_dlse else None, plain(scale, left, right)
        plan = plan_backward(describe(*tensors, args, "cuda"), ARCHS[gpu.name], has_dlse=has_dlse)
        for _ in range(2):
            gpu.launches.clear()
            run_backward(tensors, args, dlse=dlse)
            assert [launch.key for launch in gpu.launches] == list(plan.launches)
            bounds = gpu.main["window_left"], gpu.main["window_right"]
            assert bounds == tuple(min(x or 0, MAX_SEQLEN) for x in (left, right))
            for name in ("num_ctas", "heads_per_l2_group"):
                assert gpu.main.arguments.get(name, plan.sizes[name]) == plan.sizes[name]


@pytest.mark.parametrize("deterministic", [False, True])
def test_workspaces_do_not_overlap(gpu: FakeGpu, deterministic: bool) -> None:
    run_backward(inputs(), plain(deterministic=deterministic))
    names = ["lse_log2", "delta", "dq_accum", *["dq_progress"] * (deterministic or gpu.family == "sm90")]
    workspace = [gpu.main[name] for name in names]
    ends = sorted((x.data_ptr(), x.data_ptr() + x.numel() * x.element_size()) for x in workspace)
    assert all(end <= begin for (_, end), (begin, _) in itertools.pairwise(ends))
    tile: Any = gpu.main.key.tile
    shapes = [(tile.tile_m,), (tile.tile_m,), (1, tile.tile_m * tile.head_dim), (1,)]
    assert [x.shape[2:] for x in workspace] == shapes[: len(names)]


@pytest.mark.parametrize("scale", [0.3, -0.3])
@pytest.mark.parametrize(
    ("name", "position"),
    [
        (name, position)
        for name, position in itertools.product(strides.ALL, ("q", "k", "v", "dout", "out"))
        # Tensors with overlapping elements are not outputs.
        if position != "out" or not name.startswith(("expanded", "head stride"))
    ],
)
def test_only_tensors_that_kernels_cannot_read_are_copied(gpu: FakeGpu, name: str, position: str, scale: float) -> None:
    tensors = {**dict(zip("qkv", inputs(), strict=True)), "dout": normal(2, 4, 7, D), "out": normal(2, 4, 7, D)}
    tensors[position] = strides.ALL[name](*tensors[position].shape[1:3])
    q, k, v, dout, out = tensors.values()
    run_backward([q, k, v], plain(scale), dout=dout, out=out)
    before = gpu.last("bwd_preprocess")
    passed = {name: gpu.main[name] for name in "qkv"} | {"dout": gpu.main["dout_cast"], "out": before["out"]}
    for operand, x in tensors.items():
        is_copied = (operand == position and name in strides.COPIED) or (operand == "q" and scale < 0)
        assert is_shared(passed[operand], x) != is_copied
    assert is_shared(before["dout"], gpu.main["dout_cast"])


def test_gradients_with_strides_of_0(gpu: FakeGpu) -> None:
    """The gradient of a sum has such strides."""
    run_backward(inputs(), dout=torch.ones((), dtype=torch.bfloat16).expand(2, 4, 7, D))
    # A transposed gradient of the LSE is copied.
    run_backward(inputs(), dlse=normal(2, 7, 4, dtype=torch.float32).mT)


def test_a_known_signature_still_checks_addresses(gpu: FakeGpu) -> None:
    run_backward(inputs())
    for position in range(3):
        shifted = inputs()
        buffer = normal(shifted[position].numel() + 1, seed=9)
        shifted[position] = buffer[1:].view(shifted[position].shape)
        run_backward(shifted)
    run_backward(inputs(), dout=normal(2 * 4 * 7 * D + 1)[1:].view(2, 4, 7, D))
    assert len(main_keys(gpu)) == 1


@pytest.mark.parametrize("is_known", [False, True])
@pytest.mark.parametrize("scale", [7, -1e-3, 0.0, -0.0, 1e-35, -1e-35])
def test_kernels_take_a_positive_scale(gpu: FakeGpu, scale: float, is_known: bool) -> None:
    tensors = inputs()
    if is_known:
        run_backward(tensors, plain(left=3))
    run_backward(tensors, plain(scale, left=3))
    size = max(abs(scale), operands.MIN_SCALE)
    assert gpu.main["scale"] == size
    assert gpu.last("bwd_postprocess")["dq_scale"] == (-size if scale < 0 else size)
    assert torch.equal(gpu.main["q"], -tensors[0] if scale < 0 else tensors[0])
    assert len(main_keys(gpu)) == 1


@pytest.mark.parametrize("width", [8, 72, 256])
@pytest.mark.parametrize("deterministic", [False, True])
def test_dv_other_than_d(gpu: FakeGpu, width: int, deterministic: bool) -> None:
    """Dv above or below D, in a tile that is wide enough for both."""
    tensors, args = [*inputs()[:2], normal(2, 2, 9, width)], plain(right=0, deterministic=deterministic)
    for v in (tensors[2], normal(2, 2, width, 9).mT):
        dq, _, dv, *_ = run_backward([*tensors[:2], v], args, dlse=normal(2, 4, 7, dtype=torch.float32))
        assert dq is not None and dv is not None and (dq.shape[3], dv.shape[3]) == (D, width)
        assert gpu.main.key.tile.head_dim >= max(D, width)  # type: ignore[union-attr]
        # Preprocess and postprocess each see rows of one width.
        before, after = gpu.last("bwd_preprocess").key.static, gpu.last("bwd_postprocess").key.static
        assert (before.width_v, after.head_dim) == (width, D)
        assert before.head_dim_v is None is after.head_dim_v


# ---- signatures


def test_a_known_signature_plans_and_compiles_nothing(gpu: FakeGpu) -> None:
    for tensors, right in ((inputs(), None), (wide(), 0)):
        dq, dk, dv, *_ = run_backward(tensors, plain(right=right))
        num = len(gpu.keys)
        again = run_backward(tensors, plain(right=right))[:3]
        assert all(map(torch.equal, again, (dq, dk, dv)))
        # The scale is not part of a signature.
        run_backward(tensors, plain(-0.7, right=right))
        assert len(gpu.keys) == num


def test_everything_that_decides_a_launch_is_in_the_signature(gpu: FakeGpu) -> None:
    calls: list[tuple[list[Tensor], dict[str, Any], dict[str, Any]]] = [
        (inputs(), {}, {}),
        (inputs(), {"left": 3}, {}),
        (inputs(), {"right": 3}, {}),
        (inputs(), {}, {"dlse": normal(2, 4, 7, dtype=torch.float32)}),
        (inputs(), {}, {"dout": normal(2, 4, D, 7).mT}),
        (inputs(), {}, {"out": normal(2, 4, D, 7).mT}),
        (inputs(heads_kv=4), {}, {}),
        (inputs(sk=10), {}, {}),
        (inputs(dtype=torch.float16), {}, {}),
        *(([x.mT.contiguous().mT if i == j else x for j, x in enumerate(inputs())], {}, {}) for i in range(3)),
        (inputs(), {"deterministic": True}, {}),
    ]
    for number, (tensors, fields, options) in enumerate(calls, start=1):
        for _ in range(2):
            run_backward(tensors, plain(**fields), **options)
        assert len(main_keys(gpu)) == number
    run_backward(inputs())
    assert len(main_keys(gpu)) == len(calls)


def test_the_family_of_the_forward_computes_the_gradients(sm_90: FakeGpu) -> None:
    for family in ("", "sm80", "", "sm80"):
        run_backward(inputs(), plain(kernel_family=family))
    mains = [name for name in sm_90.kernels if name.startswith("bwd_sm")]
    assert mains == ["bwd_sm90", "bwd_sm80"] * 2
    assert [key.kernel for key in main_keys(sm_90)] == ["bwd_sm90", "bwd_sm80"]


@pytest.fixture
def deterministic_mode() -> Iterator[Callable[..., None]]:
    yield torch.use_deterministic_algorithms
    torch.use_deterministic_algorithms(True, warn_only=True)


def is_deterministic(launch: Launch) -> bool:
    return launch.key.static.deterministic and launch["dq_progress"] is not None


def test_torch_may_ask_for_deterministic_gradients_at_any_time(
    sm_90: FakeGpu, deterministic_mode: Callable[..., None]
) -> None:
    run_backward(inputs())
    # `poisoned_memory` sets `warn_only`, which does not request deterministic gradients.
    assert torch.is_deterministic_algorithms_warn_only_enabled()
    deterministic_mode(True)
    run_backward(inputs())
    # The argument requests the same.
    run_backward(inputs(), plain(deterministic=True))
    deterministic_mode(False)
    run_backward(inputs(), plain(deterministic=True))
    run_backward(inputs())
    mains = [launch for launch in sm_90.launches if launch.kernel == "bwd_sm90"]
    assert [is_deterministic(launch) for launch in mains] == [False, True, True, True, False]
    assert len(set(main_keys(sm_90))) == 2


def test_known_signatures_are_bounded(gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_module, "MAX_SIGNATURES", 3)
    for _ in range(2):
        for sk in range(1, 8):
            run_backward(inputs(sk=sk))
            assert 1 <= len(bound) <= 3
    assert len(main_keys(gpu)) == 14


class BrokenGpu(FakeGpu):
    def kernel(self, key: CompileKey) -> Callable[..., None]:
        raise RuntimeError("ptxas")


def test_refusals_and_failures_are_not_remembered(gpu: FakeGpu) -> None:
    with use_gpu(BrokenGpu(gpu.name)):
        with pytest.raises(RuntimeError, match="ptxas"):
            run_backward(inputs())
        assert bound == {}
    with pytest.raises(UnsupportedError, match="head_dim=12"):
        run_backward([x[..., :12] for x in inputs()])
    assert bound == {}
    run_backward(inputs())


def test_the_tensors_device_is_made_current(gpu: FakeGpu) -> None:
    run_backward(inputs())
    assert gpu.entered == []
    gpu.device = 3
    run_backward(inputs())
    assert gpu.entered == [inputs()[0].device.index]
    assert gpu.device == 3
    assert len(main_keys(gpu)) == 1


@pytest.mark.parametrize(
    ("q", "k"), [((0, 2, 3), (0, 2, 5)), ((2, 0, 3), (2, 0, 5)), ((2, 2, 0), (2, 2, 5)), ((2, 4, 3), (2, 2, 0))]
)
def test_empty_problems_compile_nothing(gpu: FakeGpu, q: tuple[int, ...], k: tuple[int, ...]) -> None:
    for _ in range(2):
        grads = run_backward([normal(*shape, D).mT.contiguous().mT for shape in (q, k, k)], plain(right=0))
        assert not any(grad is not None and grad.any() for grad in grads)
    assert gpu.keys == gpu.launches == []


# ---- features

FEATURES: dict[str, dict[str, Any]] = {
    "softcap": {"softcap": 0.7},
    "alibi": {"alibi": torch.tensor([0.3, -0.2, 0.0, 1.5])},
    "alibi by batch": {"alibi": normal(2, 4, seed=8)},
    "sinks": {"sinks": torch.tensor([0.3, -math.inf, 4.0, -2.0], dtype=torch.float64)},
    "dropout": {"dropout": 0.4, "rng": torch.tensor(RNG)},
    "dropout of a shard": {"dropout": 0.4, "rng": torch.tensor(RNG), "dropout_origin": (32, 16, 2, 7)},
}
ALL = {**FEATURES["softcap"], **FEATURES["alibi"], **FEATURES["sinks"], **FEATURES["dropout"]}


@pytest.mark.parametrize("has_dlse", [False, True])
@pytest.mark.parametrize("window", [(None, None), (None, 0), (3, 1)])
@pytest.mark.parametrize("fields", [*FEATURES.values(), ALL], ids=[*FEATURES, "all"])
def test_features(gpu: FakeGpu, fields: dict[str, Any], window: tuple[int | None, int | None], has_dlse: bool) -> None:
    # With sk=4, some queries see no key.
    for tensors in (inputs(), inputs(sk=4)):
        dlse = normal(2, 4, 7, dtype=torch.float32) if has_dlse else None
        for scale in (0.3, -0.3, 0.0):
            run_backward(tensors, plain(scale, *window, **fields), dlse=dlse, atol=0.03)
    # The LSE contains the sink, so the kernels do not get it.
    names = {"softcap", "alibi", "dropout"} & set(fields)
    assert gpu.main.kernel == f"bwd_{gpu.family}" and set(gpu.main.key.static.features) == names
    for prefix in ("bwd_preprocess", "bwd_postprocess"):
        assert gpu.last(prefix).key.static.features == ()
    assert len(main_keys(gpu)) == 2


def test_rows_without_keys_give_their_sink_the_gradient_of_the_lse(gpu: FakeGpu) -> None:
    tensors, dlse = inputs(sk=4), normal(2, 4, 7, dtype=torch.float32)
    args = plain(right=0, sinks=torch.tensor([0.3, 1.0, 4.0, -2.0]))
    out, lse, _ = cpu.forward(*tensors, args)
    dout = normal(*out.shape, seed=5)
    expected = launcher.backward(dout, dlse, *tensors, out, lse, args)[3][1]
    # NaN of rows without keys reaches only dv of the stand-in.
    dout[:, :, :3] = torch.nan
    found = launcher.backward(dout, dlse, *tensors, out, lse, args)[3][1]
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("sk", [0, 9])
def test_nothing_to_launch_with_features(gpu: FakeGpu, sk: int) -> None:
    tensors = inputs(sk=0) if sk == 0 else [inputs()[0][:, :, :0], *inputs()[1:]]
    dlse = normal(2, 4, tensors[0].shape[2], dtype=torch.float32)
    grads = run_backward(tensors, plain(**ALL), dlse=dlse)
    assert gpu.launches == []
    expected = dlse.sum(dim=(0, 2)).where(ALL["sinks"] > -math.inf, 0.0)
    torch.testing.assert_close(grads[4], expected.double())
    run_backward(tensors, plain(**ALL))


def test_features_are_in_the_signature_and_their_values_in_no_kernel(gpu: FakeGpu) -> None:
    calls: list[tuple[dict[str, Any], Tensor | None]] = [
        (FEATURES["softcap"], None),
        (FEATURES["alibi"], None),
        (FEATURES["sinks"], None),
        (FEATURES["dropout"], None),
        (ALL, None),
        ({**ALL, "left": 3}, None),
        ({**ALL, "right": 3}, None),
        (ALL, normal(2, 4, 7, dtype=torch.float32)),
        ({**ALL, "deterministic": True}, None),
    ]
    for number, (fields, dlse) in enumerate(calls, start=1):
        for _ in range(2):
            run_backward(inputs(), plain(**fields), dlse=dlse, atol=0.03)
        assert len(main_keys(gpu)) == number
    kernels = set(gpu.keys)
    run_backward(inputs(), plain(**{**ALL, "softcap": 3.0, "dropout": 0.1}), atol=0.03)
    assert set(gpu.keys) == kernels


def test_deterministic_gradients_with_features(gpu: FakeGpu) -> None:
    run_backward(inputs(), plain(**ALL, deterministic=True), atol=0.03)
    assert is_deterministic(gpu.main) and gpu.main.kernel == f"bwd_{gpu.family}"
    run_backward([normal(1, 4, 7, 136, seed=i) for i in range(3)], plain(**ALL, deterministic=True), atol=0.03)
    assert is_deterministic(gpu.main) and gpu.main.kernel == gpu.wide_kernel


# ---- fp32 outputs


@pytest.mark.parametrize("has_dlse", [False, True])
@pytest.mark.parametrize("fields", [{}, {"softcap": 0.7}], ids=str)
@pytest.mark.parametrize("order", ["contiguous", "by sequence", "columns late", "expanded"])
def test_fp32_outputs_are_rounded_for_the_products_alone(
    gpu: FakeGpu, has_dlse: bool, fields: dict[str, Any], order: str
) -> None:
    dout = {
        "contiguous": normal(2, 4, 7, D, dtype=torch.float32),
        "by sequence": normal(2, 7, 4, D, dtype=torch.float32).transpose(1, 2),
        "columns late": normal(2, 4, D, 7, dtype=torch.float32).mT,
        "expanded": normal(1, 4, 7, D, dtype=torch.float32).expand(2, -1, -1, -1),
    }[order]
    dlse = normal(2, 4, 7, dtype=torch.float32) if has_dlse else None
    run_backward(inputs(), plain(right=0, out_fp32=True, **fields), dout=dout, dlse=dlse, atol=0.03)
    before = gpu.last("bwd_preprocess")
    assert before["out"].dtype == before["dout"].dtype == torch.float32 and torch.equal(before["dout"], dout)
    assert gpu.main["dout_cast"].dtype == torch.bfloat16 and gpu.main["dout_cast"].is_contiguous()
    assert before.key.static.out_fp32 and not gpu.main.key.static.out_fp32


def test_memory_is_poisoned() -> None:
    with poisoned_memory():
        assert torch.empty_like(torch.ones(3)).isnan().all() and torch.ones(2).new_empty(2).isnan().all()
        assert torch.empty_strided((2,), (1,), dtype=torch.int32).tolist() == [(1 << 31) - 1] * 2
