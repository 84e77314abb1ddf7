"""Dense calls and their gradients up to the launches, on CPU tensors: see `tests.fakes.gpu`."""

from __future__ import annotations

import contextlib
import itertools
import math
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from cute_flash import LayoutWarning, UnsupportedError
from cute_flash.jit import nvtx
from cute_flash.planning.plan import MAX_SEQLEN, CompileKey, plan_backward, plan_forward
from cute_flash.reference import cpu
from cute_flash.runtime import gpu as gpu_module
from cute_flash.runtime import launcher, operands
from cute_flash.runtime.gpu import bound, use_gpu
from cute_flash.spec.arch import ARCHS, ArchSpec
from cute_flash.spec.args import AttentionArgs
from cute_flash.spec.describe import describe
from cute_flash.spec.problem import MAX_DROPOUT, MAX_SOFTCAP, check_dropout, check_softcap
from tests.combinations import RNG
from tests.fakes.gpu import FakeGpu, Launch, is_shared, poisoned_memory
from tests.runtime import strides
from tests.runtime.calls import BATCH, HEADS, WINDOWS, D, inputs, normal, plain, run_backward, run_forward

Window = tuple[int | None, int | None]
DLSE = normal(BATCH, HEADS, 7, dtype=torch.float32)


def wide(sk: int = 9) -> list[Tensor]:
    """A head dim that has no tile of its own."""
    return [normal(2, heads, s, 72, seed=i) for i, (heads, s) in enumerate(((4, 7), (2, sk), (2, sk)))]


def large() -> list[Tensor]:
    return [normal(2, heads, s, D, seed=i) for i, (heads, s) in enumerate(((6, 300), (2, 500), (2, 500)))]


def run(tensors: list[Tensor], args: AttentionArgs | None = None, **options: Any) -> None:
    """The forward and the gradients. `options` are those of `run_backward`."""
    run_forward(tensors, args)
    run_backward(tensors, args, **options)


def main_keys(gpu: FakeGpu) -> list[CompileKey]:
    """The kernels of attention and of its gradients of all bound signatures, in order."""
    return [key for key in gpu.keys if key.kernel.startswith(("fwd_sm", "bwd_sm"))]


# ---- arguments of the kernels


@pytest.mark.slow
@pytest.mark.parametrize(
    ("window", "chunk", "scale"),
    [
        *((window, None, 0.3) for window in WINDOWS),
        ((1 << 40, 1 << 62), None, -0.3),
        ((MAX_SEQLEN, MAX_SEQLEN + 1), None, -0.3),
        *((window, 5, 0.3) for window in WINDOWS),
        ((None, 0), 1 << 62, -0.3),
    ],
    ids=str,
)
def test_kernels_and_arguments_are_those_of_the_plan(
    gpu: FakeGpu, window: Window, chunk: int | None, scale: float
) -> None:
    args = plain(scale, *window, attention_chunk=chunk)
    # wide(sk=4) has rows without keys.
    for tensors, dlse in ((inputs(), None), (inputs(), DLSE), (wide(), None), (wide(sk=4), DLSE), (large(), None)):
        problem = describe(*tensors, args, "cuda")
        forward = plan_forward(problem, ARCHS[gpu.name], can_pack_gqa=True)
        backward = plan_backward(problem, ARCHS[gpu.name], has_dlse=dlse is not None)
        for _, plan in itertools.product(range(2), (forward, backward)):
            gpu.launches.clear()
            if plan is forward:
                run_forward(tensors, args)
            else:
                run_backward(tensors, args, dlse=dlse)
            assert [launch.key for launch in gpu.launches] == list(plan.launches)
            bounds = gpu.main["window_left"], gpu.main["window_right"]
            absent = 0 if chunk is None else MAX_SEQLEN
            assert bounds == tuple(absent if x is None else min(x, MAX_SEQLEN) for x in window), "windows fit 32 bits"
            assert gpu.main["attention_chunk"] == (None if chunk is None else min(chunk, MAX_SEQLEN))
            static = gpu.main.key.static
            # A kernel with a chunk has both bounds.
            sides = tuple(x is not None or chunk is not None for x in window)
            assert (static.has_left, static.has_right, static.has_chunk) == (*sides, chunk is not None)
            for name in {"num_ctas", "seqlen_q", "heads_per_l2_group"} & set(plan.sizes):
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


@pytest.mark.parametrize(
    ("name", "position"),
    [
        (name, position)
        for name, position in itertools.product(strides.ALL, ("q", "k", "v", "dout", "out"))
        # Tensors with overlapping elements are not outputs.
        if position != "out" or not name.startswith(("expanded", "head stride"))
    ],
)
def test_only_tensors_that_kernels_cannot_read_are_copied(gpu: FakeGpu, name: str, position: str) -> None:
    tensors = {**dict(zip("qkv", inputs(), strict=True)), "dout": normal(2, 4, 7, D), "out": normal(2, 4, 7, D)}
    tensors[position] = strides.ALL[name](*tensors[position].shape[1:3])
    q, k, v, dout, out = tensors.values()
    for scale in (0.3, -0.3):
        copied = {position} if name in strides.COPIED else set()
        copied |= {"q"} if scale < 0 else set()
        made, lse, _ = run_forward([q, k, v], plain(scale))
        for operand in "qkv":
            assert is_shared(gpu.main[operand], tensors[operand]) != (operand in copied)
        is_aligned = made.stride(-1) == 1 and all(stride % 8 == 0 for stride in made.stride()[:3])
        assert is_shared(gpu.main["out"], made) == is_aligned and is_shared(gpu.main["lse"], lse)
        run_backward([q, k, v], plain(scale), dout=dout, out=out)
        before = gpu.last("bwd_preprocess")
        passed = {name: gpu.main[name] for name in "qkv"} | {"dout": gpu.main["dout_cast"], "out": before["out"]}
        for operand, x in tensors.items():
            assert is_shared(passed[operand], x) != (operand in copied)
        assert is_shared(before["dout"], gpu.main["dout_cast"])


def test_row_strides_beyond_32_bit_tile_offsets_are_copied(gpu: FakeGpu) -> None:
    storage = torch.zeros((1 << 22) + D, dtype=torch.bfloat16)
    for stride, is_copied in ((1 << 22, True), ((1 << 22) - 8, False)):
        k = storage.as_strided((1, 1, 2, D), (0, 0, stride, 1))
        k.copy_(normal(1, 1, 2, D))
        run_forward([normal(1, 1, 3, D), k, k])
        assert is_shared(gpu.main["k"], k) != is_copied


def test_gradients_with_strides_of_0(gpu: FakeGpu) -> None:
    """The gradient of a sum has such strides."""
    run_backward(inputs(), dout=torch.ones((), dtype=torch.bfloat16).expand(2, 4, 7, D))
    # A transposed gradient of the LSE is copied.
    run_backward(inputs(), dlse=normal(2, 7, 4, dtype=torch.float32).mT)


def shifted(x: Tensor) -> Tensor:
    """The same values at an address that is not a multiple of 16."""
    moved = torch.cat([x.flatten()[:1], x.flatten()])[1:].view(x.shape)
    assert moved.data_ptr() % 16
    return moved


def test_a_known_signature_still_checks_addresses(gpu: FakeGpu) -> None:
    run(inputs())
    for position in range(3):
        tensors = inputs()
        tensors[position] = shifted(tensors[position])
        run_forward(tensors)
        in_place = [is_shared(gpu.main[name], x) for name, x in zip("qkv", tensors, strict=True)]
        assert in_place == [i != position for i in range(3)]
        run_backward(tensors)
    run_backward(inputs(), dout=shifted(normal(2, 4, 7, D)))
    assert len(main_keys(gpu)) == 2


@pytest.mark.parametrize("is_known", [False, True])
@pytest.mark.parametrize("scale", [7, -1e-3, 0.0, -0.0, 1e-35, -1e-35])
def test_kernels_take_a_positive_scale(gpu: FakeGpu, scale: float, is_known: bool) -> None:
    tensors, args = inputs(heads_kv=4), plain(scale, left=3)
    if is_known:
        run(tensors, plain(left=3))
    # |scale| below 1e-30 is 0 to the softmax, in both paths.
    size = max(abs(scale), operands.MIN_SCALE)
    for one in (run_forward, run_backward):
        one(tensors, args)
        assert gpu.main["scale"] == size
        assert torch.equal(gpu.main["q"], -tensors[0] if scale < 0 else tensors[0])
    assert gpu.last("bwd_postprocess")["dq_scale"] == (-size if scale < 0 else size)
    assert len(main_keys(gpu)) == 2


@pytest.mark.parametrize("is_known", [False, True])
@pytest.mark.parametrize(
    ("args", "message"),
    [
        (plain(math.nan), "scale=nan is not finite"),
        (plain(-math.inf), "scale=-inf is not finite"),
        (plain(left=-1, right=0), "window left=-1 is negative"),
        (plain(left=0, right=-5), "window right=-5 is negative"),
    ],
    ids=["nan", "-inf", "left", "right"],
)
def test_wrong_numbers_launch_nothing(gpu: FakeGpu, args: AttentionArgs, message: str, is_known: bool) -> None:
    tensors = inputs()
    if is_known:
        run_forward(tensors, plain(left=3, right=3))
        run_forward(tensors, plain())
    num = len(gpu.launches)
    with pytest.raises(ValueError, match=message):
        launcher.forward(*tensors, args)
    assert len(gpu.launches) == num


@pytest.mark.parametrize("width", [8, 72, 256])
@pytest.mark.parametrize("deterministic", [False, True])
def test_dv_other_than_d(gpu: FakeGpu, width: int, deterministic: bool) -> None:
    """Dv above or below D. The backward has a tile that is wide enough for both."""
    tensors, args = [*inputs()[:2], normal(2, 2, 9, width)], plain(right=0, deterministic=deterministic)
    for v in (tensors[2], normal(2, 2, width, 9).mT):
        dq, _, dv, *_ = run_backward([*tensors[:2], v], args, dlse=DLSE)
        assert dq is not None and dv is not None and (dq.shape[3], dv.shape[3]) == (D, width)
        assert gpu.main.key.tile.head_dim >= max(D, width)  # type: ignore[union-attr]
        # Preprocess and postprocess each see rows of one width.
        before, after = gpu.last("bwd_preprocess").key.static, gpu.last("bwd_postprocess").key.static
        assert (before.width_v, after.head_dim) == (width, D)
        assert before.head_dim_v is None is after.head_dim_v
    for q in (normal(2, 4, 7, D), normal(2, 7, 4, D).transpose(1, 2), normal(2, 4, D, 7).mT):
        out, _, _ = run_forward([q, *tensors[1:]], args)
        assert out.shape == (2, 4, 7, width)
        assert sorted(range(4), key=out.stride) == sorted(range(4), key=q.stride), "in the order of q"


@pytest.mark.parametrize("window", [(None, None), (None, 0), (3, 1)])
@pytest.mark.parametrize("rows", [1, 7, 33, 200])
def test_few_queries_of_grouped_heads_use_pack_gqa(gpu: FakeGpu, rows: int, window: Window) -> None:
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


# ---- signatures


def test_a_known_signature_plans_and_compiles_nothing(gpu: FakeGpu) -> None:
    for tensors, right in ((inputs(), None), (wide(), 0)):
        first = run_backward(tensors, plain(right=right))[:3]
        num = len(gpu.keys)
        assert all(map(torch.equal, run_backward(tensors, plain(right=right))[:3], first))  # type: ignore[arg-type]
        # The scale is not part of a signature.
        run_backward(tensors, plain(-0.7, right=right))
        assert len(gpu.keys) == num


def test_one_kernel_serves_every_value_of_scale_and_window(gpu: FakeGpu) -> None:
    for scale, left, right in ((0.3, 1, 2), (0.7, 3, 0), (-0.2, 0, 50)):
        run(inputs(), plain(scale, left, right))
    assert len(set(main_keys(gpu))) == 2


def test_everything_that_decides_a_launch_is_in_the_signature(gpu: FakeGpu) -> None:
    transposed = [inputs()[0].transpose(1, 2).contiguous().transpose(1, 2), *inputs()[1:]]
    calls: list[tuple[list[Tensor], dict[str, Any]]] = [
        (inputs(), {}),
        (inputs(), {"left": 3}),
        (inputs(), {"right": 3}),
        (inputs(heads_kv=4), {}),
        (inputs(sk=10), {}),
        (inputs(dtype=torch.float16), {}),
        (transposed, {}),
        *(([x.mT.contiguous().mT if i == j else x for j, x in enumerate(inputs())], {}) for i in range(3)),
        (inputs(), {"deterministic": True}),
        (inputs(), {"kernel_family": "sm80"}),
        *((inputs(), fields) for fields in (*ONE_OF_EACH.values(), ALL, {**ALL, "left": 3}, {**ALL, "right": 3})),
    ]
    for number, (tensors, fields) in enumerate(calls, start=1):
        for _ in range(2):
            run(tensors, plain(**fields), atol=0.03)
        assert len(main_keys(gpu)) == 2 * number
    outs = ({"dlse": DLSE}, {"dout": normal(2, 4, D, 7).mT}, {"out": normal(2, 4, D, 7).mT})
    for number, options in enumerate(outs, start=2 * len(calls) + 1):
        for _ in range(2):
            run_backward(inputs(), **options)
        assert len(main_keys(gpu)) == number
    run(inputs())
    assert len(main_keys(gpu)) == 2 * len(calls) + len(outs)


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
    for one, num in ((run_forward, 12), (run_backward, 24)):
        for _, sk in itertools.product(range(2), range(1, 7)):
            one(inputs(sk=sk))
            assert 1 <= len(bound) <= 3
        one(inputs(sk=6))
        assert len(main_keys(gpu)) == num


class BrokenGpu(FakeGpu):
    def kernel(self, key: CompileKey) -> Callable[..., None]:
        raise RuntimeError("ptxas")


class UnknownGpu(FakeGpu):
    def arch(self, index: int | None) -> ArchSpec:
        raise UnsupportedError("GPU 0 is sm_120")


@pytest.mark.parametrize("one", [run_forward, run_backward])
def test_refusals_and_failures_are_not_remembered(gpu: FakeGpu, one: Callable[..., Any]) -> None:
    with use_gpu(BrokenGpu(gpu.name)):
        for _ in range(2):
            with pytest.raises(RuntimeError, match="ptxas"):
                one(inputs())
        assert bound == {}
    with pytest.raises(UnsupportedError, match="head_dim=12"):
        one([x[..., :12] for x in inputs()])
    with use_gpu(UnknownGpu(gpu.name)), pytest.raises(UnsupportedError, match="sm_120"):
        one(inputs())
    assert bound == {} and gpu.keys == []
    one(inputs())


def test_functions_bound_for_another_gpu_are_not_used(gpu: FakeGpu) -> None:
    run_forward(inputs())
    with use_gpu(FakeGpu("sm_80")) as other:
        run_forward(inputs())
    run_forward(inputs())
    assert len(gpu.launches) == 2 and len(gpu.keys) == 1 and len(other.launches) == 1  # type: ignore[attr-defined]


def test_the_tensors_device_is_made_current(gpu: FakeGpu) -> None:
    run(inputs())
    assert gpu.entered == []
    gpu.device = 3
    run(inputs())
    assert gpu.entered == [inputs()[0].device.index] * 2
    assert gpu.device == 3
    assert len(main_keys(gpu)) == 2


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


def test_nvtx_ranges(gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    marked = []

    def record(name: str) -> contextlib.AbstractContextManager:
        marked.append(name)
        return contextlib.nullcontext()

    monkeypatch.setattr(nvtx, "marked", record)
    run_forward(inputs())
    # A range costs about a microsecond, so launches have none unless a profiler listens.
    assert marked == ["plan"]
    monkeypatch.setattr(nvtx, "IS_MARKED", True)
    with use_gpu(FakeGpu(gpu.name)):
        run_forward(inputs())
        run_forward(inputs())
    assert marked == ["plan", "plan", "launch", "launch"]


# ---- features

SLOPES, SINKS = torch.tensor([0.3, -0.2, 0.0, 1.5]), torch.tensor([0.3, -math.inf, 4.0, -2.0])
DROPOUT = {"dropout": 0.4, "rng": torch.tensor(RNG)}
FEATURES: dict[str, dict[str, Any]] = {
    "softcap": {"softcap": 0.7},
    "slopes by head": {"alibi": SLOPES},
    "slopes by batch": {"alibi": normal(BATCH, HEADS, seed=8)},
    "slopes in fp16": {"alibi": SLOPES.half()},
    "strided slopes": {"alibi": normal(HEADS, 3, dtype=torch.float32)[:, 1]},
    "sinks": {"sinks": SINKS},
    "sinks in fp64": {"sinks": SINKS.double()},
    "dropout": DROPOUT,
    "much dropout": {"dropout": 0.75, "rng": torch.tensor([[1, 2], [3, 4]])[:, 1]},
    "dropout of a shard": {**DROPOUT, "dropout_origin": (64, 32, 3, HEADS + 5)},
    "max_logit": {"return_max_logit": True},
    "fp32 output": {"out_fp32": True},
    "all": {"softcap": 0.7, "alibi": SLOPES, "sinks": SINKS, **DROPOUT, "return_max_logit": True},
    "all, fp32 output": {"softcap": 3.0, "sinks": SINKS, **DROPOUT, "return_max_logit": True, "out_fp32": True},
}
ONE_OF_EACH = {name: FEATURES[name] for name in ("softcap", "slopes by head", "sinks", "dropout")}
ALL = {name: x for fields in ONE_OF_EACH.values() for name, x in fields.items()}


@pytest.mark.parametrize(
    ("window", "chunk"), [((None, None), None), ((None, 0), None), ((3, 1), None), ((None, None), 3)], ids=str
)
@pytest.mark.parametrize("name", FEATURES)
def test_features(gpu: FakeGpu, name: str, window: Window, chunk: int | None) -> None:
    fields = {**FEATURES[name], "attention_chunk": chunk}
    # With sk=4, some queries see no key.
    for tensors, scale, dlse in ((inputs(), 0.3, None), (inputs(sk=4), -0.3, DLSE), (inputs(), 0.0, DLSE)):
        args = plain(scale, *window, **fields)
        if scale:  # for which kernels get 1e-30, and so the largest logit is not 0
            run_forward(tensors, args)
            assert gpu.main.kernel == f"fwd_{gpu.family}" and gpu.main.key.static.out_fp32 == args.out_fp32
            assert gpu.main.key.static.features == describe(*tensors, args).features
        run_backward(tensors, args, dlse=dlse, atol=0.03)
    # The LSE contains the sink, so the backward kernels do not get it.
    names = {"softcap", "alibi", "dropout"} & set(fields)
    assert gpu.main.kernel == f"bwd_{gpu.family}" and set(gpu.main.key.static.features) == names
    for prefix in ("bwd_preprocess", "bwd_postprocess"):
        assert gpu.last(prefix).key.static.features == ()


def test_values_of_features_need_no_new_kernel(gpu: FakeGpu) -> None:
    origins = ({"dropout_origin": origin} for origin in ((32, 0, 0, HEADS), (0, 48, 1, HEADS + 1)))
    values = ({**ALL, "softcap": cap, "dropout": p, "right": r} for cap, p, r in ((0.5, 0.1, 0), (7.0, 0.9, 3)))
    for calls in (({**DROPOUT, **origin} for origin in origins), values):
        gpu.keys.clear()
        for fields in calls:
            run(inputs(), plain(**fields), atol=0.05)
        assert len(set(main_keys(gpu))) == 2


def test_deterministic_gradients_with_features(gpu: FakeGpu) -> None:
    run_backward(inputs(), plain(**ALL, deterministic=True), atol=0.03)
    assert is_deterministic(gpu.main) and gpu.main.kernel == f"bwd_{gpu.family}"
    run_backward([normal(1, 4, 7, 136, seed=i) for i in range(3)], plain(**ALL, deterministic=True), atol=0.03)
    assert is_deterministic(gpu.main) and gpu.main.kernel == gpu.wide_kernel


def test_dropout_of_a_shard_needs_aligned_positions(gpu: FakeGpu) -> None:
    args = plain(**DROPOUT, dropout_origin=(64, 32, 0, HEADS))
    run_forward(inputs(), args)
    for origin in ((16, 0, 0, HEADS), (32, 8, 0, HEADS)):
        with pytest.raises(UnsupportedError, match=f"begins at row {origin[0]} and key {origin[1]}"):
            launcher.forward(*inputs(), args._replace(dropout_origin=origin))
    with pytest.raises(ValueError, match="number of heads"):
        launcher.forward(*inputs(), args._replace(dropout_origin=(0, 0, 1, HEADS), deterministic=True))


def test_strides_with_features(gpu: FakeGpu) -> None:
    for name, turn in itertools.product(
        ("all", "fp32 output"),
        (
            lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
            lambda x: x.mT.contiguous().mT,
            lambda x: torch.cat([x, x], dim=-1)[..., :D],
        ),
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


def test_batch_invariant_calls_choose_tiles_by_nothing_else_in_the_batch(gpu: FakeGpu) -> None:
    keys = set()
    for batch, rows in ((1, 1), (1, 200), (7, 33)):
        q, k = normal(batch, 16, rows, D), normal(batch, 2, 300, D)
        launcher.forward(q, k, k, plain(right=0, batch_invariant=True, deterministic=True))
        keys.add(gpu.main.key)
        assert gpu.main["q"].shape == q.shape, "pack_gqa is not used"
    assert len(keys) == 1 and keys.pop().static.batch_invariant


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


@pytest.mark.parametrize("has_dlse", [False, True])
@pytest.mark.parametrize("order", ["contiguous", "by sequence", "columns late", "expanded"])
def test_gradients_of_fp32_outputs_are_rounded_for_the_products_alone(gpu: FakeGpu, has_dlse: bool, order: str) -> None:
    dout = {
        "contiguous": normal(2, 4, 7, D, dtype=torch.float32),
        "by sequence": normal(2, 7, 4, D, dtype=torch.float32).transpose(1, 2),
        "columns late": normal(2, 4, D, 7, dtype=torch.float32).mT,
        "expanded": normal(1, 4, 7, D, dtype=torch.float32).expand(2, -1, -1, -1),
    }[order]
    run_backward(inputs(), plain(right=0, out_fp32=True), dout=dout, dlse=DLSE if has_dlse else None, atol=0.03)
    before = gpu.last("bwd_preprocess")
    assert before["out"].dtype == before["dout"].dtype == torch.float32 and torch.equal(before["dout"], dout)
    assert gpu.main["dout_cast"].dtype == torch.bfloat16 and gpu.main["dout_cast"].is_contiguous()
    assert before.key.static.out_fp32 and not gpu.main.key.static.out_fp32


# ---- rows without keys, and calls without rows


@pytest.mark.parametrize(
    ("q", "k"), [((0, 2, 3), (0, 2, 5)), ((2, 0, 3), (2, 0, 5)), ((2, 2, 0), (2, 2, 5)), ((2, 4, 3), (2, 2, 0))]
)
def test_empty_problems_compile_nothing(gpu: FakeGpu, q: tuple[int, ...], k: tuple[int, ...]) -> None:
    tensors = [normal(*shape, D).mT.contiguous().mT for shape in (q, k, k)]
    for scale in (0.3, -0.3):
        out, lse, _ = run_forward(tensors, plain(scale, right=0))
        assert torch.equal(out, torch.zeros_like(out)) and torch.equal(lse, torch.full_like(lse, -torch.inf))
        grads = run_backward(tensors, plain(scale, right=0))
        assert not any(grad is not None and grad.any() for grad in grads)
    assert gpu.keys == gpu.launches == []


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


@pytest.mark.parametrize("mask", [{"right": 0}, {"attention_chunk": 3}, {"right": 2, "attention_chunk": 100}], ids=str)
def test_rows_without_keys_give_their_sink_the_gradient_of_the_lse(gpu: FakeGpu, mask: dict[str, int]) -> None:
    tensors, args = inputs(sk=4), plain(**mask, sinks=torch.tensor([0.3, 1.0, 4.0, -2.0]))
    out, lse, _ = cpu.forward(*tensors, args)
    dout = normal(*out.shape, seed=5)
    expected = launcher.backward(dout, DLSE, *tensors, out, lse, args)[3][1]
    # NaN of rows without keys reaches only dv of the stand-in.
    dout[:, :, :3] = torch.nan
    found = launcher.backward(dout, DLSE, *tensors, out, lse, args)[3][1]
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("sk", [0, 9])
def test_gradients_of_features_without_launches(gpu: FakeGpu, sk: int) -> None:
    tensors = inputs(sk=0) if sk == 0 else [inputs()[0][:, :, :0], *inputs()[1:]]
    args = plain(**{**ALL, "sinks": SINKS.double()})
    dlse = normal(2, 4, tensors[0].shape[2], dtype=torch.float32)
    grads = run_backward(tensors, args, dlse=dlse)
    assert gpu.launches == []
    expected = dlse.sum(dim=(0, 2)).where(SINKS > -math.inf, 0.0)
    torch.testing.assert_close(grads[4], expected.double())
    run_backward(tensors, args)


def test_memory_is_poisoned() -> None:
    with poisoned_memory():
        assert torch.empty_like(torch.ones(3)).isnan().all() and torch.ones(2).new_empty(2).isnan().all()
        assert torch.empty_strided((2,), (1,), dtype=torch.int32).tolist() == [(1 << 31) - 1] * 2


def test_swapped_dimensions_are_reported_once_for_a_signature(gpu: FakeGpu) -> None:
    """Tensors (B, S, H, D) without layout="bshd": the warning comes when the call is bound."""
    tensors = [normal(1, 128, heads, D, seed=i) for i, heads in enumerate((8, 2, 2))]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            run_forward(tensors)
        run_backward(tensors)
    assert [warning.category for warning in caught] == [LayoutWarning]
