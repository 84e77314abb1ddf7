"""The steps of tuning that run in a worker process: compile a variant, check its results, time it.

A variant is correct if its output and LSE pass the tests' error bound on a few small shapes with odd sizes, with NaN
in all new memory, and have the same bits in a second run; and if the benchmark finds its output correct on the timed
shape.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cache
from typing import Any, ClassVar

import torch
from torch import Tensor

from cute_flash import reference
from cute_flash.jit.compile import precompile
from cute_flash.jit.resources import kernel_resources
from cute_flash.planning.plan import Plan
from cute_flash.runtime import binder
from cute_flash.spec.arch import ArchSpec
from cute_flash.spec.args import AttentionArgs
from cute_flash.spec.band import Band, ceil_div
from cute_flash.spec.describe import describe as describe_problem
from profiling.accuracy import nan_in_new_memory
from profiling.bench import Settings, Tools, run_cell
from profiling.providers import BackwardCall, Call, Provider, select
from profiling.record import Cell
from profiling.suites import DTYPES, MASKS
from profiling.timing import DeviceLost, EventTimer, GraphTimer, describe
from profiling.variants import Variant
from profiling.workers import Unusable, note
from tests.cases import Case, assert_close, make_inputs

FORWARD_ONLY = "a variant of a forward kernel has no backward"
# Batch, heads, K/V heads, queries, keys. With a causal mask the third has whole tiles that see no key.
ODD_SHAPES = ((2, 4, 2, 200, 333), (1, 2, 2, 129, 129), (1, 2, 1, 600, 77), (1, 3, 1, 257, 1027), (2, 6, 3, 1, 130))


def band_of(mask: str) -> Band:
    return Band.of(mask == MASKS[1], (None, None))


@dataclass(frozen=True)
class Build:
    """The compilation of one variant for one mask, and the resources of its kernel if they were read."""

    seconds: float | None = None
    registers: int | None = None
    stack_bytes: int | None = None
    spill_bytes: int | None = None
    ctas_per_sm: int | None = None
    notes: tuple[str, ...] = ()  # of ptxas: serialised wgmma
    error: str | None = None


def build(plan: Plan, stores_kernel: bool, reads_resources: bool) -> Build:
    """Compile into the cache, and once more for the resources that the compiler reports. Needs no GPU."""
    start = time.perf_counter()
    if stores_kernel:
        precompile(plan.main)
    if not reads_resources:
        return Build(seconds=time.perf_counter() - start)
    resources = kernel_resources(plan.main)
    # A warp gets registers in units of 256.
    registers_per_cta = plan.tile.num_threads // 32 * ceil_div(32 * resources.registers, 256) * 256
    return Build(
        seconds=time.perf_counter() - start,
        registers=resources.registers,
        stack_bytes=resources.stack_bytes,
        spill_bytes=resources.spill_bytes,
        ctas_per_sm=min(plan.ctas_per_sm, plan.arch.registers_per_sm // registers_per_cta),
        notes=resources.serialised_wgmma,
    )


# (q, k, v) -> (out, lse)
Forward = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]


def forward_of(plan: Plan, device: torch.device) -> Forward:
    """The forward pass of a plan, on contiguous inputs of its shape and with the default scale."""
    launch = binder.bind_forward(plan, device, copies_inputs=False, copies_output=False)
    left, right = plan.problem.band.bounds
    args = AttentionArgs(scale=plan.problem.head_dim**-0.5, window_left=left, window_right=right)

    def forward(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        out, lse, _max_logit = launch(q, k, v, args)
        return out, lse

    return forward


def tools(is_graph: bool) -> Tools:
    timer = GraphTimer() if is_graph else EventTimer()
    return Tools(timer=timer, device=torch.device("cuda", torch.cuda.current_device()), facts=dict, card_state=dict)


@dataclass(frozen=True)
class _Expected:
    inputs: tuple[Tensor, Tensor, Tensor]
    out: Tensor
    lse: Tensor
    low_precision: Tensor


@cache
def _expected(case: Case, dtype: torch.dtype, device: torch.device) -> _Expected:
    """Shared by all variants of a head dim."""
    inputs = make_inputs(case, dtype, str(device))
    out, lse = reference.dense(*inputs, case.band)
    low_precision, _ = reference.dense_low_precision(*inputs, case.band)
    return _Expected(inputs=inputs, out=out, lse=lse, low_precision=low_precision)


@torch.no_grad()
def check(variant: Variant, arch: ArchSpec, dtype: str, mask: str) -> str | None:
    """The mistake in the results of a variant, or None. Raises if a launch fails."""
    if not __debug__:
        raise RuntimeError("python -O removes the assertions that check the results")
    here = tools(is_graph=False)
    try:
        for sizes in ODD_SHAPES:
            case = Case(*sizes, variant.head_dim, band_of(mask))
            wrong = _check_case(variant, arch, case, DTYPES[dtype], here)
            if wrong is not None:
                return f"{case.id}: {wrong}"
        return None
    except Exception as error:
        try:
            here.timer.synchronize()
        except Exception:
            raise Unusable(describe(error)) from error
        raise


def _check_case(variant: Variant, arch: ArchSpec, case: Case, dtype: torch.dtype, here: Tools) -> str | None:
    expected = _expected(case, dtype, here.device)
    forward = forward_of(variant.plan(case.problem(dtype), arch), here.device)
    results = []
    for _ in range(2):
        with nan_in_new_memory():
            results.append(forward(*expected.inputs))
        here.timer.synchronize()
    try:
        assert_close(*results[0], expected.out, expected.lse, expected.low_precision)
    except AssertionError as wrong:
        # Caught around `assert_close` only: an assertion of the compiler or of torch is a failed launch.
        return str(wrong)
    return None if all(map(torch.equal, *results)) else "other bits on the same inputs"


@dataclass(frozen=True)
class TileProvider:
    """A variant as a provider of the benchmark; each call allocates its outputs, as `attn` does."""

    variant: Variant
    arch: ArchSpec
    is_ours: ClassVar[bool] = True
    is_bshd: ClassVar[bool] = False

    @property
    def name(self) -> str:
        return self.variant.text

    def available(self, direction: str = "fwd") -> str | None:
        return None if direction == "fwd" else FORWARD_ONLY

    def context(self) -> AbstractContextManager[Any]:
        return nullcontext()

    def prepare(self, q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Call:
        problem = describe_problem(q, k, v, reference.plain_args(q, band_of(MASKS[causal])))
        forward = forward_of(self.variant.plan(problem, self.arch), q.device)
        return lambda: forward(q, k, v)[0]

    def prepare_backward(self, q: Tensor, k: Tensor, v: Tensor, dout: Tensor, causal: bool) -> BackwardCall:
        raise NotImplementedError(FORWARD_ONLY)


@dataclass(frozen=True)
class _Noted:
    """A provider that reports its name to the parent process before it runs."""

    provider: Provider

    @property
    def name(self) -> str:
        return self.provider.name

    @property
    def is_ours(self) -> bool:
        return self.provider.is_ours

    @property
    def is_bshd(self) -> bool:
        return self.provider.is_bshd

    def available(self, direction: str = "fwd") -> str | None:
        return self.provider.available(direction)

    def context(self) -> AbstractContextManager[Any]:
        note(self.name)
        return self.provider.context()

    def prepare(self, q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Call:
        note(self.name)
        return self.provider.prepare(q, k, v, causal)

    def prepare_backward(self, q: Tensor, k: Tensor, v: Tensor, dout: Tensor, causal: bool) -> BackwardCall:
        note(self.name)
        return self.provider.prepare_backward(q, k, v, dout, causal)


@torch.no_grad()
def time_cell(
    cell: Cell, variants: Sequence[Variant], peers: Sequence[str], settings: Settings, arch: ArchSpec
) -> Cell:
    """The cell with the results of variants and peers, timed interleaved."""
    providers: list[Provider] = [*select(peers), *(TileProvider(variant, arch) for variant in variants)]
    try:
        return run_cell(cell, [_Noted(provider) for provider in providers], settings, tools(settings.graph))
    except DeviceLost as lost:
        raise Unusable(str(lost)) from lost
