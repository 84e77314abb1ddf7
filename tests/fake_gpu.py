"""A GPU on the CPU: `ops.fwd_cuda` is called directly, with stand-ins for the driver, compiler and kernel.

The kernel refuses what a real one could not read, and computes by the reference: results must equal the CPU
path's bit for bit.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cute_flash import ops
from cute_flash.planning.plan import MAX_SEQLEN, Plan
from cute_flash.reference import dropout as philox
from cute_flash.reference import tiled as reference
from cute_flash.reference.dropout import Dropout
from cute_flash.spec.band import Band
from cute_flash.spec.problem import PLAIN, Features
from tests.fake_custom import GivenForward

D = 16
# The address of a counter, which only a GPU would read.
COUNTER = 1 << 40


class Extras(NamedTuple):
    """What a kernel of the general operator takes last; None: not asked for."""

    softcap: float | None
    slopes: Tensor | None
    sinks: Tensor | None
    threshold: int | None
    keep_scale: float | None
    rng: Tensor | None
    max_logit: Tensor | None

    def check(self, features: Features) -> None:
        """Against what the kernel was compiled for: see `kernels.extras.fake_extras`."""
        dropout = (features.dropout,) * 3
        asked = (features.softcap, features.alibi, features.sinks, *dropout, features.return_max_logit)
        assert tuple(x is not None for x in self) == asked
        assert all(x is None or x.dtype == torch.float32 for x in (self.slopes, self.sinks, self.max_logit))
        if self.max_logit is not None:
            assert self.max_logit.is_contiguous() and (self.max_logit == -torch.inf).all()
        if self.rng is not None and self.threshold is not None:
            assert self.rng.dtype == torch.int64 and self.rng.is_contiguous()
            assert 0 <= self.threshold < 1 << 31 and self.keep_scale is not None

    def score(self, heads: int, sequence: int | None = None) -> reference.Score:
        """Of the batch, or of one sequence of a packed one."""
        dropout, slopes = None, self.slopes
        if sequence is not None and slopes is not None:
            slopes = slopes[sequence : sequence + 1]
        if self.rng is not None and self.threshold is not None:
            assert self.keep_scale is not None
            dropout = dropped(self.threshold, self.keep_scale, self.rng, heads, sequence or 0)
        return reference.Score(self.softcap, slopes, self.sinks, dropout)


def dropped(threshold: int, keep_scale: float, rng: Tensor, heads: int, first: int = 0) -> Dropout:
    """What a launch says of dropout, which agrees with itself."""
    p = 1 - 1 / keep_scale
    assert threshold == philox.threshold(p) * 0x10001, "in both halves"
    return Dropout(p, rng, heads, first)


@dataclass
class Launch:
    """What a kernel was called with, and what was compiled into it."""

    plan: Plan
    q: Tensor
    k: Tensor
    v: Tensor
    out: Tensor
    lse: Tensor
    scale: float
    left: int
    right: int
    arguments: tuple[int, ...]  # the plan's, and the address of a counter
    extras: Extras | None = None  # of what is not plain
    given: GivenForward | None = None  # of a bias, functions and a block map

    def _by_head(self, tensor: Tensor) -> Tensor:
        """(B, Hkv, group S, ...) as (B, Hkv, group, S, ...), in place."""
        return tensor.unflatten(2, (self.plan.problem.group, self.plan.problem.seqlen_q))

    def heads(self, tensor: Tensor) -> Tensor:
        """The tensor (B, H, S, ...), where its heads are packed too."""
        return self._by_head(tensor).flatten(1, 2) if self.plan.packs_heads else tensor

    def write(self, target: Tensor, values: Tensor) -> None:
        if self.plan.packs_heads:
            target, values = self._by_head(target), values.unflatten(1, (target.shape[1], -1))
        target.copy_(values)


@dataclass
class FakeGpu:
    name: str
    plans: list[Plan] = field(default_factory=list)
    launches: list[Launch] = field(default_factory=list)
    current: int | None = None  # the index of a CPU device, where the tensors are
    entered: list[int | None] = field(default_factory=list)

    @property
    def last(self) -> Launch:
        return self.launches[-1]

    def compiled(self, plan: Plan) -> Any:
        self.plans.append(plan)

        def kernel(*args: Any) -> None:
            extras = given = None
            if plan.problem.features != PLAIN:
                *args, items = args
                assert items is None, "the list of a packed batch's tiles"
                if plan.problem.features.is_written:
                    args, given = args[:-4], GivenForward(*args[-4:])
                args, extras = args[:-7], Extras(*args[-7:])
                extras.check(plan.problem.features)
            launch = Launch(plan, *args[:8], tuple(args[8:]), extras, given)
            check(launch)
            static = plan.problem.static
            band = Band(launch.left if static.has_left else None, launch.right if static.has_right else None)
            q, score, most = launch.heads(launch.q), None, None
            if extras is not None:
                score, most = extras.score(q.shape[1]), extras.max_logit
                if given is not None:
                    shape = torch.Size((*q.shape[:3], launch.k.shape[2]))
                    score = replace(score, written=given.written(plan.key, shape))
            out, lse = reference.forward(
                q, launch.k, launch.v, band, launch.scale, score, most, launch.out.dtype
            )
            launch.write(launch.out, out)
            launch.write(launch.lse, lse)
            self.launches.append(launch)

        return kernel

    @contextlib.contextmanager
    def device(self, index: int | None) -> Iterator[None]:
        self.entered.append(index)
        before, self.current = self.current, index
        yield
        self.current = before


def check(launch: Launch) -> None:
    """What the kernels are compiled for: see their `fake_arguments`."""
    for tensor in (launch.q, launch.k, launch.v, launch.out):
        *outer, element = tensor.stride()
        assert element == 1
        assert all(stride % 8 == 0 for stride in outer)
        # 32-bit offsets within a tile of up to 512 rows.
        assert outer[-1] * 512 < 1 << 31
        assert tensor.data_ptr() % 16 == 0
        is_float = tensor is launch.out and launch.plan.problem.features.out_dtype
        assert str(tensor.dtype) == f"torch.{'float32' if is_float else launch.plan.problem.dtype}"
    assert launch.lse.dtype == torch.float32
    assert launch.lse.is_contiguous()
    assert 0 < launch.scale < math.inf
    assert 0 <= launch.left <= MAX_SEQLEN
    assert 0 <= launch.right <= MAX_SEQLEN
    p = launch.plan.problem
    rows = (p.heads_kv, p.group * p.seqlen_q) if launch.plan.packs_heads else (p.heads, p.seqlen_q)
    assert launch.q.shape == (p.batch, *rows, p.head_dim)
    assert launch.out.shape == (p.batch, *rows, p.width_v)
    assert launch.lse.shape == (p.batch, *rows)
    counter = (COUNTER,) if launch.plan.draws_tiles else ()
    assert launch.arguments == (*launch.plan.launch_arguments, *counter)
    assert len(launch.arguments) == (4 if launch.plan.is_persistent else 1)


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(shape, generator=generator).to(dtype)


def inputs(heads_kv: int = 2, sk: int = 9, dtype: torch.dtype = torch.bfloat16) -> list[Tensor]:
    shapes = ((2, 4, 7, D), (2, heads_kv, sk, D), (2, heads_kv, sk, D))
    return [normal(*shape, seed=i, dtype=dtype) for i, shape in enumerate(shapes)]


def run(
    tensors: list[Tensor], scale: float = 0.3, left: int | None = None, right: int | None = None
) -> tuple[Tensor, Tensor]:
    """The CUDA path, compared with the CPU path."""
    before = [x.clone() for x in tensors]
    out, lse = ops.fwd_cuda(*tensors, scale, left, right)
    expected, expected_lse = ops.fwd(*tensors, scale, left, right)
    assert torch.equal(out, expected)
    assert torch.equal(lse, expected_lse)
    assert out.stride() == expected.stride()
    assert (lse.dtype, lse.stride()) == (expected_lse.dtype, expected_lse.stride())
    assert all(map(torch.equal, tensors, before)), "inputs were written"
    return out, lse
