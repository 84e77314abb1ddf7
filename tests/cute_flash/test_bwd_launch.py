"""The way from CUDA tensors to the launches of the gradients, on CPU tensors: see `tests.fake_backward`."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from cute_flash import UnsupportedError, backward, operands, use_kernels
from cute_flash.jit import compile as compiling
from cute_flash.planning import plan as planning
from cute_flash.planning.plan import MAX_SEQLEN
from cute_flash.runtime import counters
from cute_flash.spec import arch
from tests.cute_flash.test_launch import LAUNCHABLE, REPAIRED
from tests.fake_backward import FakeBackward, run
from tests.fake_gpu import COUNTER, D, inputs, normal


def poisoned(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
    @functools.wraps(make)
    def made(*args: Any, **kwargs: Any) -> Tensor:
        x = make(*args, **kwargs)
        return x.fill_(torch.nan if x.is_floating_point() else 1 << 20)

    return made


def faked(name: str, monkeypatch: pytest.MonkeyPatch) -> FakeBackward:
    fake = FakeBackward(name)
    monkeypatch.setattr(arch, "detect", fake.detect)
    monkeypatch.setattr(planning, "bwd_plan", fake.bwd_plan)
    monkeypatch.setattr(compiling, "compiled_kernel", fake.compiled_kernel)
    monkeypatch.setattr(counters, "counter", lambda index: (None, COUNTER))
    monkeypatch.setattr(operands, "current_device", lambda: fake.current)
    monkeypatch.setattr(torch.cuda, "device", fake.device)
    monkeypatch.setattr(backward, "_launches", {})
    monkeypatch.delenv("CUTE_FLASH_KERNELS", raising=False)
    for name in ("empty", "empty_like", "empty_strided"):
        monkeypatch.setattr(torch, name, poisoned(getattr(torch, name)))
    return fake


@pytest.fixture(params=["sm_80", "sm_90"])
def gpu(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> FakeBackward:
    return faked(request.param, monkeypatch)


@pytest.fixture
def sm_90(monkeypatch: pytest.MonkeyPatch) -> FakeBackward:
    return faked("sm_90", monkeypatch)


def wide(sk: int = 9) -> list[Tensor]:
    """A head dim that has no tile of its own."""
    return [normal(2, heads, s, 72, seed=i) for i, (heads, s) in enumerate(((4, 7), (2, sk), (2, sk)))]


# What the kernels are given


def scalars(gpu: FakeBackward) -> tuple[Any, ...]:
    """The arguments of the last main kernel, but for a persistent one's grid and counter."""
    arguments, plan = gpu.arguments(f"bwd_sm{gpu.name[3:]}"), gpu.bwd_plans[-1]
    if plan.family == "sm80":
        return arguments
    *arguments, num_blocks, _counter = arguments
    assert num_blocks == plan.num_blocks
    return tuple(arguments)


@pytest.mark.parametrize("with_dlse", [False, True])
@pytest.mark.parametrize("scale", [0.3, -0.3])
@pytest.mark.parametrize(("left", "right"), [(None, None), (None, 0), (3, 1), (1 << 40, 1 << 62)])
def test_kernels_in_their_order(
    gpu: FakeBackward, left: int | None, right: int | None, scale: float, with_dlse: bool
) -> None:
    for tensors in (inputs(), wide(), wide(sk=4)):  # the last one: rows without keys
        dlse = normal(2, 4, 7, dtype=torch.float32) if with_dlse else None
        for _ in range(2):
            gpu.calls.clear()
            run(tensors, scale, left, right, dlse=dlse)
            *_, seen_left, seen_right, section = scalars(gpu)
            assert section == gpu.bwd_plans[-1].section
            assert (seen_left, seen_right) == tuple(min(x or 0, MAX_SEQLEN) for x in (left, right))
            plan = gpu.bwd_plans[-1]
            keys = plan.before(with_dlse), plan.main, plan.after
            assert [name for name, _ in gpu.calls] == [key.kernel for key in keys]


@pytest.mark.parametrize("is_ordered", [False, True])
def test_workspaces_do_not_overlap(gpu: FakeBackward, is_ordered: bool) -> None:
    run(inputs(), deterministic=is_ordered)
    assert gpu.bwd_plans[-1].is_ordered == is_ordered
    main = gpu.arguments(f"bwd_sm{gpu.name[3:]}")
    given = [x for x in main[4:8] if x is not None]
    assert len(given) == 3 + is_ordered
    ends = sorted((x.data_ptr(), x.data_ptr() + x.numel() * x.element_size()) for x in given)
    assert all(end <= begin for (_, end), (begin, _) in itertools.pairwise(ends))
    tile = gpu.bwd_plans[-1].tile
    assert [x.shape[2:] for x in given] == [
        (tile.tile_m,), (tile.tile_m,), (1, tile.tile_m * tile.head_dim), (1,)
    ][: len(given)]  # fmt: skip


@pytest.mark.parametrize("scale", [0.3, -0.3])
@pytest.mark.parametrize(
    ("name", "position"),
    [
        (name, position)
        for name, position in itertools.product((*LAUNCHABLE, *REPAIRED), range(5))
        # Elements that share memory hold no output.
        if position < 4 or not name.startswith(("expanded", "head stride"))
    ],
)
def test_strides(gpu: FakeBackward, name: str, position: int, scale: float) -> None:
    tensors, more = inputs(), {"dout": normal(2, 4, 7, D), "out": normal(2, 4, 7, D)}
    heads, length = (tensors[position] if position < 3 else tensors[0]).shape[1:3]
    x = {**LAUNCHABLE, **REPAIRED}[name](heads, length)
    if position < 3:
        tensors[position] = x
    else:
        more[("dout", "out")[position - 3]] = x
    run(tensors, scale, **more)
    before, main = gpu.arguments("bwd_preprocess"), gpu.arguments(f"bwd_sm{gpu.name[3:]}")
    asked = [*tensors, more["dout"], more["out"]]
    for i, (seen, given) in enumerate(zip((*main[:4], before[0]), asked, strict=True)):
        is_copied = (i == position and name in REPAIRED) or (i == 0 and scale < 0)
        assert (seen.data_ptr() != given.data_ptr()) == is_copied
    assert before[1].data_ptr() == main[3].data_ptr()


def test_gradients_of_sums_have_strides_of_0(gpu: FakeBackward) -> None:
    run(inputs(), dout=torch.ones((), dtype=torch.bfloat16).expand(2, 4, 7, D))
    # A transposed gradient of the LSE, in a copy.
    run(inputs(), dlse=normal(2, 7, 4, dtype=torch.float32).mT)
    assert gpu.arguments("bwd_preprocess")[7].is_contiguous()


def test_a_known_signature_still_looks_at_the_addresses(gpu: FakeBackward) -> None:
    run(inputs())
    for position in range(3):
        shifted = inputs()
        flat = normal(shifted[position].numel() + 1, seed=9)
        shifted[position] = flat[1:].view(shifted[position].shape)
        run(shifted)
    run(inputs(), dout=normal(2 * 4 * 7 * D + 1)[1:].view(2, 4, 7, D))
    assert len(gpu.bwd_plans) == 1


@pytest.mark.parametrize("is_known", [False, True])
@pytest.mark.parametrize("scale", [7, -1e-3, 0.0, -0.0, 1e-35, -1e-35])
def test_kernels_see_a_positive_scale(gpu: FakeBackward, scale: float, is_known: bool) -> None:
    tensors = inputs()
    if is_known:
        run(tensors, left=3)
    run(tensors, scale, left=3)
    main, after = gpu.arguments(f"bwd_sm{gpu.name[3:]}"), gpu.arguments("bwd_postprocess")
    size = max(abs(scale), operands.MIN_SCALE)
    assert main[10] == size
    assert after[2] == (-size if scale < 0 else size)
    assert torch.equal(main[0], -tensors[0] if scale < 0 else tensors[0])
    assert len(gpu.bwd_plans) == 1


@pytest.mark.parametrize("width", [8, 72, 256])
@pytest.mark.parametrize("is_ordered", [False, True])
def test_values_of_another_width(gpu: FakeBackward, width: int, is_ordered: bool) -> None:
    """Wider or narrower than keys, in a tile that has room for both; columns late in one of them."""
    tensors = [*inputs()[:2], normal(2, 2, 9, width)]
    for v in (tensors[2], normal(2, 2, width, 9).mT):
        dlse = normal(2, 4, 7, dtype=torch.float32)
        dq, _, dv = run([*tensors[:2], v], right=0, dlse=dlse, deterministic=is_ordered)
        assert (dq.shape[3], dv.shape[3]) == (D, width)
        plan = gpu.bwd_plans[-1]
        assert plan.tile.head_dim >= max(D, width)
        # The kernels around are those of rows as wide, whatever the others are.
        assert (plan.before(False).static.width_v, plan.after.static.head_dim) == (width, D)
        assert plan.before(False).static.head_dim_v is None is plan.after.static.head_dim_v


# Signatures


def test_a_known_signature_plans_and_compiles_nothing(
    gpu: FakeBackward, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*args: Any) -> None:
        raise AssertionError("not again")

    for tensors, right in ((inputs(), None), (wide(), 0)):
        first = run(tensors, right=right)
        with monkeypatch.context() as patch:
            for where, name in ((arch, "detect"), (planning, "bwd_plan"), (compiling, "compiled_kernel")):
                patch.setattr(where, name, refuse)
            assert all(map(torch.equal, run(tensors, right=right), first))
            # Values of the scale and of the window are no part of it.
            run(tensors, -0.7, right=None if right is None else 3)


def test_whatever_decides_a_launch_is_in_the_signature(gpu: FakeBackward) -> None:
    calls: list[tuple[list[Tensor], dict[str, Any]]] = [
        (inputs(), {}),
        (inputs(), {"left": 3}),
        (inputs(), {"right": 3}),
        (inputs(), {"dlse": normal(2, 4, 7, dtype=torch.float32)}),
        (inputs(), {"dout": normal(2, 4, D, 7).mT}),
        (inputs(), {"out": normal(2, 4, D, 7).mT}),
        (inputs(heads_kv=4), {}),
        (inputs(sk=10), {}),
        (inputs(dtype=torch.float16), {}),
        *(([x.mT.contiguous().mT if i == j else x for j, x in enumerate(inputs())], {}) for i in range(3)),
    ]
    calls.append((inputs(), {"deterministic": True}))
    for number, (tensors, how) in enumerate(calls, start=1):
        for _ in range(2):
            run(tensors, **how)
        assert len(gpu.bwd_plans) == number
    run(inputs())
    assert len(gpu.bwd_plans) == len(calls)


@pytest.mark.parametrize("by", ["context", "environment"])
def test_another_family_has_a_launch_of_its_own(
    sm_90: FakeBackward, monkeypatch: pytest.MonkeyPatch, by: str
) -> None:
    run(inputs())
    with monkeypatch.context() as patch:
        if by == "environment":
            # The one way that autograd's threads see.
            patch.setenv("CUTE_FLASH_KERNELS", "sm80")
            run(inputs())
        else:
            with use_kernels("sm80"):
                run(inputs())
    run(inputs())
    assert [plan.family for plan in sm_90.bwd_plans] == ["sm90", "sm80"]
    mains = [name for name, _ in sm_90.calls if name in ("bwd_sm80", "bwd_sm90")]
    assert mains == ["bwd_sm90", "bwd_sm80", "bwd_sm90"]


@pytest.fixture
def deterministic_mode() -> Iterator[Callable[..., None]]:
    yield torch.use_deterministic_algorithms
    torch.use_deterministic_algorithms(False)


def test_torch_may_ask_for_order_at_any_time(
    sm_90: FakeBackward, deterministic_mode: Callable[..., None]
) -> None:
    run(inputs())
    deterministic_mode(True, warn_only=True)
    run(inputs())
    assert [plan.is_ordered for plan in sm_90.bwd_plans] == [False]
    deterministic_mode(True)
    run(inputs())
    # The argument asks for the same.
    run(inputs(), deterministic=True)
    deterministic_mode(False)
    run(inputs(), deterministic=True)
    assert [plan.is_ordered for plan in sm_90.bwd_plans] == [False, True]
    run(inputs())
    mains = [name for name, _ in sm_90.calls if name.startswith("bwd_sm90")]
    assert mains == ["bwd_sm90"] * 2 + ["bwd_sm90_ordered"] * 3 + ["bwd_sm90"]


def test_known_signatures_are_bounded(gpu: FakeBackward, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operands, "MAX_LAUNCHES", 3)
    for _ in range(2):
        for sk in range(1, 8):
            run(inputs(sk=sk))
            assert 1 <= len(backward._launches) <= 3
    assert len(gpu.bwd_plans) == 14


def test_refusals_and_failures_are_not_remembered(gpu: FakeBackward, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(key: Any) -> None:
        raise RuntimeError("ptxas")

    with monkeypatch.context() as patch:
        patch.setattr(compiling, "compiled_kernel", broken)
        with pytest.raises(RuntimeError, match="ptxas"):
            run(inputs())
    with pytest.raises(UnsupportedError, match="head_dim=12"):
        run([x[..., :12] for x in inputs()])
    assert backward._launches == {}
    run(inputs())


def test_the_tensors_device_is_made_current(gpu: FakeBackward) -> None:
    run(inputs())
    assert gpu.entered == []
    gpu.current = 3
    run(inputs())
    assert gpu.entered == [inputs()[0].device.index]
    assert gpu.current == 3
    assert len(gpu.bwd_plans) == 1


@pytest.mark.parametrize(
    ("q", "k"),
    [((0, 2, 3), (0, 2, 5)), ((2, 0, 3), (2, 0, 5)), ((2, 2, 0), (2, 2, 5)), ((2, 4, 3), (2, 2, 0))],
)
def test_empty_problems_compile_nothing(gpu: FakeBackward, q: tuple[int, ...], k: tuple[int, ...]) -> None:
    for _ in range(2):
        grads = run([normal(*shape, D).mT.contiguous().mT for shape in (q, k, k)], right=0)
        assert not any(grad.any() for grad in grads)
    assert gpu.keys == gpu.calls == []
