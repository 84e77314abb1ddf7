"""Stand-ins for the kernels of the gradients: they refuse what real ones could not read, and compute in fp32.

Sums of dQ are kept by rows, in no order of accumulators: only the kernels know that one.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cute_flash import backward, ops
from cute_flash.planning.plan import MAX_SEQLEN, BwdPlan, CompileKey, bwd_plan
from cute_flash.planning.tiles.bwd_sm80 import BwdTileSm80
from cute_flash.spec import arch
from cute_flash.spec.band import Band
from tests.fake_custom import Given
from tests.fake_gpu import COUNTER, FakeGpu, dropped

LOG2_E = math.log2(math.e)


@dataclass
class FakeBackward(FakeGpu):
    """Kernels by name, each with its arguments, in the order of their launches."""

    keys: list[CompileKey] = field(default_factory=list)
    calls: list[tuple[str, tuple[Any, ...]]] = field(default_factory=list)
    bwd_plans: list[BwdPlan] = field(default_factory=list)

    def detect(self, index: int | None) -> arch.ArchSpec:
        return arch.ARCHS[self.name]

    def bwd_plan(self, *args: Any) -> BwdPlan:
        self.bwd_plans.append(bwd_plan(*args))
        return self.bwd_plans[-1]

    def compiled_kernel(self, key: CompileKey) -> Callable[..., None]:
        self.keys.append(key)
        kernel = {"bwd_preprocess": _before, "bwd_postprocess": _after}.get(
            key.kernel.removesuffix("_dlse").removesuffix("_ordered").removesuffix("_sm80"), _main
        )

        def launch(*args: Any) -> None:
            _check(key, args)
            self.calls.append((key.kernel, args))
            kernel(key, *args)

        return launch

    def arguments(self, prefix: str) -> tuple[Any, ...]:
        """Of the last launch of a kernel whose name begins so."""
        return next(args for name, args in reversed(self.calls) if name.startswith(prefix))


def _check(key: CompileKey, args: tuple[Any, ...]) -> None:
    """What the kernels are compiled for: see their `fake_arguments`."""
    for i, x in enumerate(args):
        if not isinstance(x, Tensor):
            continue
        if key.kernel.endswith("_custom") and any(x is one for one in args[-7:]):
            continue  # a bias and its gradient: see `tests.fake_custom`
        is_floats = key.static.features.out_dtype and i < 2
        if str(x.dtype) == f"torch.{key.static.dtype}" or is_floats:
            assert is_floats == (x.dtype == torch.float32)
            *outer, element = x.stride()
            assert x.shape[3] in (key.static.head_dim, key.static.width_v)
            assert element == 1 and all(stride % 8 == 0 for stride in outer)
            assert x.data_ptr() % 16 == 0
        else:
            assert x.is_contiguous() or (x.dtype == torch.float32 and x.dim() == 2)  # slopes
            assert x.dtype in (torch.float32, torch.int32) or x.shape == (2,)
            # The gradient of the LSE is read one by one; workspaces by 16 bytes.
            assert x.data_ptr() % 4 == 0


def _before(key, out, dout, lse, lse_log2, d, dq, counters, dlse, items) -> None:
    assert items is None
    assert ("_ordered" in key.kernel) == (counters is not None)
    assert key.kernel.endswith("_dlse") == (dlse is not None)
    assert lse_log2.data_ptr() % 16 == d.data_ptr() % 16 == dq.data_ptr() % 16 == 0
    seqlen = out.shape[2]
    has_keys = lse > -torch.inf
    lse_log2.fill_(torch.inf)
    lse_log2[:, :, :seqlen] = torch.where(has_keys, lse * LOG2_E, torch.inf)
    d.zero_()
    d[:, :, :seqlen] = (out.float() * dout.float()).sum(-1) - (0 if dlse is None else dlse * has_keys)
    assert dq.shape == (*d.shape[:2], d.shape[2] // key.tile.tile_m, key.tile.tile_m * key.tile.head_dim)
    dq.zero_()
    if counters is not None:
        counters.zero_()


class Terms(NamedTuple):
    """What a kernel with features takes last; None: not asked for."""

    softcap: float | None = None
    slopes: Tensor | None = None
    dslopes: Tensor | None = None
    threshold: int | None = None
    keep_scale: float | None = None
    rng: Tensor | None = None

    def check(self, key: CompileKey, key_blocks: int) -> None:
        """Against what the kernel was compiled for: see `kernels.bwd_general`."""
        features = key.static.features
        asked = (features.softcap, *(features.alibi,) * 2, *(features.dropout,) * 3)
        assert tuple(x is not None for x in self) == asked and features.in_gradients == features
        if self.slopes is not None and self.dslopes is not None:
            assert self.slopes.dtype == self.dslopes.dtype == torch.float32
            batch, heads = self.slopes.shape
            parts = key_blocks * slope_warps(key)
            assert self.dslopes.shape == (1 if features.varlen else batch, heads, parts)
            assert self.dslopes.is_contiguous() and not self.dslopes.any()
        if self.rng is not None and self.threshold is not None:
            assert self.rng.dtype == torch.int64 and self.rng.is_contiguous()
            assert 0 <= self.threshold < 1 << 31

    def factors(self, batch: range, heads: int, rows: range, keys: range) -> Tensor | float:
        """Of dropout."""
        if self.rng is None or self.threshold is None or self.keep_scale is None:
            return 1.0
        dropout = dropped(self.threshold, self.keep_scale, self.rng, heads)
        return dropout.keep_mask(batch, range(heads), rows, keys) * self.keep_scale

    def capped(self, scores: Tensor) -> tuple[Tensor, Tensor | float]:
        """The scores, and by what their gradients grow."""
        if self.softcap is None:
            return scores, 1.0
        tangent = (scores / self.softcap).tanh()
        return self.softcap * tangent, 1 - tangent**2


def slope_warps(key: CompileKey) -> int:
    return key.tile.num_warps if isinstance(key.tile, BwdTileSm80) else 8


def _main(key, q, k, v, dout, lse_log2, d, sums, *rest) -> None:
    kernel, terms, custom = key.kernel.removesuffix("_general").removesuffix("_custom"), Terms(), None
    if kernel != key.kernel:
        *rest, items = rest
        assert items is None
        if key.kernel.endswith("_custom"):
            rest, custom = rest[:-6], Given(key, *rest[-6:])
            custom.check(torch.Size((*q.shape[:3], k.shape[2])))
        rest, terms = rest[:-6], Terms(*rest[-6:])
    terms.check(key, -(-k.shape[2] // key.tile.tile_n))
    is_ordered = kernel in ("bwd_sm80_ordered", "bwd_sm90_ordered")
    counters, dk, dv, scale, left, right, section, *grid = rest
    if kernel.startswith("bwd_sm80"):
        assert grid == []
    else:
        num_blocks, counter = grid
        assert num_blocks >= 1
        static = key.static
        differs = static.has_left or static.has_right or static.features.block_map
        draws_tiles = differs and kernel == "bwd_sm90"
        assert (counter == COUNTER) == draws_tiles
    assert is_ordered == (counters is not None)
    assert 0 < scale < math.inf and section >= 1
    assert 0 <= left <= MAX_SEQLEN and 0 <= right <= MAX_SEQLEN
    assert lse_log2.data_ptr() % 16 == d.data_ptr() % 16 == sums.data_ptr() % 16 == 0
    heads, seqlen, width = q.shape[1:]
    band = Band(left if key.static.has_left else None, right if key.static.has_right else None)
    group = heads // k.shape[1]
    static = key.static
    assert [x.shape[3] for x in (q, k, dk)] == [static.head_dim] * 3
    assert [x.shape[3] for x in (v, dout, dv)] == [static.width_v] * 3
    q, k, v, dout = (x.float() for x in (q, k, v, dout))
    k, v = (x.repeat_interleave(group, 1) for x in (k, v))
    scores = q @ k.mT * scale
    rows, columns = torch.arange(seqlen)[:, None], torch.arange(k.shape[2])
    offset = columns - rows - (k.shape[2] - seqlen)
    hidden = (offset > (math.inf if band.right is None else band.right)) | (
        offset < (-math.inf if band.left is None else -band.left)
    )
    scores, slope_of_cap = terms.capped(scores)
    if terms.slopes is not None:
        scores = scores - terms.slopes[:, :, None, None] * offset.abs()
    before = scores
    if custom is not None:
        before = custom.before(scores)
        scores, hidden = custom.apply(before), hidden | custom.hidden(scores.shape)
    p = (scores - lse_log2[:, :, :seqlen, None] / LOG2_E).exp().masked_fill(hidden, 0)
    kept = terms.factors(range(len(q)), heads, range(seqlen), range(k.shape[2]))
    ds = p * (dout @ v.mT * kept - d[:, :, :seqlen, None])
    if custom is not None:
        ds = custom.differentiate(ds, before, p)
    if terms.dslopes is not None:
        # All of it in one of the parts.
        terms.dslopes[:, :, -1] = -(ds * offset.abs()).sum(dim=(2, 3))
    ds = ds * slope_of_cap
    dv.copy_(((p * kept).mT @ dout).unflatten(1, (-1, group)).sum(2))
    dk.copy_((ds.mT @ q * scale).unflatten(1, (-1, group)).sum(2))
    if is_ordered:
        assert not counters.any()
        counters.fill_(7)
    _rows(key, sums)[:, :, :seqlen, :width] += ds @ k


def _after(key, sums, dq, scale, items) -> None:
    assert items is None
    assert not key.kernel.endswith("_ordered")
    dq.copy_(_rows(key, sums)[:, :, : dq.shape[2], : dq.shape[3]] * scale)


def _rows(key, sums: Tensor) -> Tensor:
    return sums.view(*sums.shape[:2], -1, key.tile.head_dim)


def run(
    tensors: list[Tensor],
    scale: float = 0.3,
    left: int | None = None,
    right: int | None = None,
    *,
    dout: Tensor | None = None,
    dlse: Tensor | None = None,
    out: Tensor | None = None,
    deterministic: bool = False,
) -> tuple[Tensor, ...]:
    """The gradients of the CUDA path, compared with those of the CPU path."""
    found_out, lse = ops.fwd(*tensors, scale, left, right)
    out = found_out if out is None else out.copy_(found_out)
    if dout is None:
        generator = torch.Generator().manual_seed(5)
        dout = torch.randn(out.shape, generator=generator).to(out.dtype)
    args = (dout, dlse, *tensors, out, lse, scale, left, right, deterministic)
    before = [None if x is None else x.clone() for x in args[:7]]
    grads = backward.bwd_cuda(*args)
    for grad, expected, x in zip(grads, ops.bwd(*args), tensors, strict=True):
        assert (grad.shape, grad.stride(), grad.dtype) == (expected.shape, expected.stride(), x.dtype)
        torch.testing.assert_close(grad, expected, rtol=0.02, atol=0.02)
    assert all(x is None or torch.equal(x, y) for x, y in zip(args, before, strict=False)), (
        "inputs were written"
    )
    return grads
