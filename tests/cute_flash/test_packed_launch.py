"""The way from packed CUDA tensors to launches, on CPU tensors: see `tests.fake_packed`."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from cute_flash import UnsupportedError, general, use_kernels
from cute_flash.planning.plan import MAX_SEQLEN
from cute_flash.reference import varlen as packed
from cute_flash.spec.args import How
from tests.fake_gpu import normal
from tests.fake_packed import FakePacked, faked
from tests.lengths import Lengths

D = 16
BANDS = [(None, None), (None, 0), (30, 0), (5, None)]


@pytest.fixture(params=["sm_80", "sm_90"])
def gpu(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> FakePacked:
    return faked(request.param, monkeypatch)


def tensors(lengths: Lengths, heads: int = 4, heads_kv: int = 2, width_v: int = D) -> list[Tensor]:
    queries, keys = lengths.totals
    shapes = ((queries, heads, D), (keys, heads_kv, D), (keys, heads_kv, width_v))
    return [normal(*shape, seed=i) for i, shape in enumerate(shapes)]


def how_of(lengths: Lengths, window: tuple[int | None, int | None], scale: float = 0.3, **rest: Any) -> How:
    given = {"cu_seqlens_q": lengths.cu_q, "cu_seqlens_k": lengths.cu_k, "seqused_k": lengths.used_k}
    return How(scale, *window)._replace(**given, **rest)


def run(inputs: list[Tensor], how: How) -> tuple[Tensor, Tensor]:
    """The CUDA path, compared with the CPU path."""
    out, lse, _ = general._fwd_cuda(*inputs, *how)
    expected, expected_lse = packed.forward(*inputs, how, None)
    assert torch.equal(out, expected) and torch.equal(lse, expected_lse)
    assert (out.dtype, lse.dtype, lse.stride()) == (inputs[0].dtype, torch.float32, expected_lse.stride())
    return out, lse


def run_backward(
    inputs: list[Tensor], how: How, dlse: Tensor | None = None, turn: Any = lambda x: x
) -> tuple[Tensor, ...]:
    """The gradients of the CUDA path, compared with those of the CPU path."""
    out, lse = packed.forward(*inputs, how, None)
    dout = turn(normal(*out.shape, seed=5, dtype=out.dtype))
    grads = general._bwd_cuda(dout, dlse, *inputs, out, lse, *how)[:3]
    expected = packed.backward((dout, dlse), *inputs, out, lse, how)[:3]
    for grad, other, x in zip(grads, expected, inputs, strict=True):
        assert (grad.shape, grad.dtype, grad.stride()) == (x.shape, x.dtype, torch.empty_like(x).stride())
        torch.testing.assert_close(grad, other.to(grad.dtype), rtol=0.02, atol=0.02)
        assert torch.equal(grad == 0, other == 0) or not (grad[other == 0].abs() > 1e-3).any()
    return grads


@pytest.mark.parametrize("window", BANDS, ids=str)
@pytest.mark.parametrize("seed", range(8))
def test_gradients_of_random_batches(
    gpu: FakePacked, seed: int, window: tuple[int | None, int | None]
) -> None:
    lengths = Lengths.drawn(seed)
    inputs = tensors(lengths)
    dlse = normal(4, lengths.totals[0], dtype=torch.float32) if seed % 2 else None
    _, dk, dv = run_backward(inputs, how_of(lengths, window, -0.3 if seed % 3 == 0 else 0.3), dlse)
    # Keys of nobody, and those of sequences without queries.
    unseen = torch.ones(lengths.totals[1], dtype=torch.bool)
    begins, counts = lengths.cu_k.tolist(), lengths.used or lengths.keys
    for begin, count, queries in zip(begins, counts, lengths.queries, strict=False):
        unseen[begin : begin + count] = queries == 0
    assert not dk[unseen].any() and not dv[unseen].any()


def test_gradients_in_order(gpu: FakePacked) -> None:
    run_backward(tensors(LENGTHS), how_of(LENGTHS, (None, 0), deterministic=True))
    assert f"bwd_{gpu.name.replace('_', '')}_ordered_general" in [key.kernel for key in gpu.keys]
    # The last tile of keys of a sequence comes first.
    assert gpu.arguments("prepare_bwd")[-1] == 1


def test_wide_gradients_are_of_the_other_family(gpu: FakePacked) -> None:
    lengths = Lengths([5, 0, 40], [7, 3, 30])
    queries, keys = lengths.totals
    inputs = [normal(n, 2, 136, seed=i) for i, n in enumerate((queries, keys, keys))]
    run_backward(inputs, how_of(lengths, (None, 0)))
    assert [key.kernel for key in gpu.keys][-3:] == [
        "bwd_preprocess",
        "bwd_sm80_general",
        "bwd_postprocess_sm80",
    ]
    if gpu.name == "sm_90":
        with use_kernels("sm90"), pytest.raises(UnsupportedError, match="attn_varlen with head_dim=136"):
            run_backward(inputs, how_of(lengths, (None, 0)))


@pytest.mark.parametrize("name", ["strides of 0", "heads first", "columns not contiguous"])
def test_strides_of_the_output_gradient(gpu: FakePacked, name: str) -> None:
    turn = (lambda x: x[:1, :1].expand(x.shape)) if name == "strides of 0" else STRIDES[name][0]
    run_backward(tensors(LENGTHS), how_of(LENGTHS, (None, 0)), turn=turn)


def test_strides_of_gradients(gpu: FakePacked) -> None:
    for make, _ in STRIDES.values():
        run_backward(list(map(make, tensors(LENGTHS))), how_of(LENGTHS, (None, 0)))


@pytest.mark.parametrize("window", BANDS, ids=str)
@pytest.mark.parametrize("seed", range(8))
def test_random_batches(gpu: FakePacked, seed: int, window: tuple[int | None, int | None]) -> None:
    lengths = Lengths.drawn(seed)
    run(tensors(lengths), how_of(lengths, window))
    if 0 not in lengths.totals:
        prepare, main = (args for _, args in gpu.calls[-2:])
        early = "_early" if gpu.name == "sm_90" else ""
        assert [name for name, _ in gpu.calls[-2:]] == [
            f"prepare_fwd{early}",
            f"fwd_{gpu.name.replace('_', '')}_general",
        ]
        assert prepare[-3:-1] == tuple(MAX_SEQLEN if side is None else side for side in window)
        assert main[6:8] == tuple(side or 0 for side in window)


def test_new_lengths_compile_nothing(gpu: FakePacked) -> None:
    for seed in range(20):
        lengths = Lengths.drawn(seed)
        run(tensors(lengths), how_of(lengths, (None, 0)))
    # One main kernel, and one to prepare it with and without `seqused_k`.
    assert len(set(gpu.keys)) == 3


LENGTHS = Lengths([5, 0, 40], [7, 3, 30])


@pytest.mark.parametrize("scale", [0.3, -0.3, 0.0, -0.0])
def test_kernels_see_a_positive_scale(gpu: FakePacked, scale: float) -> None:
    run(tensors(LENGTHS), how_of(LENGTHS, (None, None), scale))
    assert gpu.arguments("fwd")[5] > 0


STRIDES = {
    "packed qkv": (lambda x: torch.stack([x, x, x], dim=1)[:, 1], False),
    "heads first": (lambda x: x.transpose(0, 1).contiguous().transpose(0, 1), False),
    "columns of a wider row": (lambda x: torch.cat([x, x], dim=2)[..., 8 : 8 + D], False),
    "expanded heads": (lambda x: x[:, :1].expand(x.shape), False),
    "columns not contiguous": (lambda x: x.mT.contiguous().mT, True),
    "odd rows": (lambda x: torch.cat([x, x], dim=2)[..., 1 : 1 + D], True),
    "offset of 2 bytes": (lambda x: torch.cat([x.flatten()[:1], x.flatten()])[1:].view(x.shape), True),
}


@pytest.mark.parametrize("position", range(3))
@pytest.mark.parametrize("name", STRIDES)
def test_strides(gpu: FakePacked, name: str, position: int) -> None:
    make, is_copied = STRIDES[name]
    inputs = tensors(LENGTHS)
    inputs[position] = make(inputs[position])
    run(inputs, how_of(LENGTHS, (None, 0)))
    for i, (seen, given) in enumerate(zip(gpu.arguments("fwd"), inputs, strict=False)):
        assert (seen.data_ptr() != given.data_ptr()) == (i == position and is_copied)


def test_offsets_of_any_stride(gpu: FakePacked) -> None:
    how = how_of(LENGTHS, (None, 0))
    twice = torch.stack([LENGTHS.cu_q, LENGTHS.cu_q], dim=1)[:, 0]
    run(tensors(LENGTHS), how._replace(cu_seqlens_q=twice))
    assert gpu.arguments("prepare")[0].is_contiguous()


@pytest.mark.parametrize(
    "lengths", [Lengths([0, 0], [3, 4]), Lengths([3, 4], [0, 0])], ids=("queries", "keys")
)
def test_nothing_to_compute_launches_nothing(gpu: FakePacked, lengths: Lengths) -> None:
    run(tensors(lengths), how_of(lengths, (None, 0)))
    empty = torch.zeros(1, dtype=torch.int32)
    how = How(0.3, None, 0)._replace(cu_seqlens_q=empty, cu_seqlens_k=empty)
    out, lse, _ = general._fwd_cuda(*tensors(LENGTHS), *how)
    assert not out.any() and (lse == -torch.inf).all()
    assert not gpu.calls


def test_values_of_another_width(gpu: FakePacked) -> None:
    inputs, how = tensors(LENGTHS, width_v=64), how_of(LENGTHS, (None, 0))
    assert run(inputs, how)[0].shape[2] == 64
    assert run_backward(inputs, how)[2].shape[2] == 64


def test_what_contradicts_itself_is_refused(gpu: FakePacked) -> None:
    with pytest.raises(ValueError, match="seqused_k has 1 lengths for 3 sequences"):
        wrong = torch.ones(1, dtype=torch.int32)
        general._fwd_cuda(*tensors(LENGTHS), *how_of(LENGTHS, (None, 0))._replace(seqused_k=wrong))
    assert not gpu.calls
