"""What is done to a variant, in a process that it may take down: build it, check it, time it.

A variant is right if its output and its LSE pass the tests' own error rule on a few small and awkward shapes,
written over NaN, twice with the same bits; and if the benchmark finds its output right on the timed shape.
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
from cute_flash.jit.compile import compiled, precompile
from cute_flash.jit.resources import resources
from cute_flash.ops import problem_of
from cute_flash.planning.plan import Plan
from cute_flash.runtime import counters
from cute_flash.spec.arch import ArchSpec
from cute_flash.spec.band import Band, ceil_div
from cute_flash.spec.problem import Problem
from profiling.bench import Settings, Tools, run_cell
from profiling.providers import BackwardCall, Call, Provider, select
from profiling.record import Cell
from profiling.suites import DTYPES, MASKS
from profiling.timing import DeviceLost, EventTimer, GraphTimer, describe
from profiling.variants import Variant
from profiling.workers import Unusable, note
from tests.cases import Case, assert_close, make_inputs

FORWARD_ONLY = "a variant of a forward kernel"
# Batch, heads, key heads, queries, keys. Under a causal mask the third has whole tiles that see no key.
AWKWARD = (
    (2, 4, 2, 200, 333),
    (1, 2, 2, 129, 129),
    (1, 2, 1, 600, 77),
    (1, 3, 1, 257, 1027),
    (2, 6, 3, 1, 130),
)


def band_of(mask: str) -> Band:
    return Band.of(mask == MASKS[1], (None, None))


@dataclass(frozen=True)
class Build:
    """How compiling one variant for one mask went; what it uses, where that was asked for."""

    seconds: float | None = None
    registers: int | None = None
    stack_bytes: int | None = None
    spill_bytes: int | None = None
    blocks_per_sm: int | None = None
    notes: tuple[str, ...] = ()  # of ptxas: serialised wgmma
    error: str | None = None


def build(plan: Plan, keeps_kernel: bool, reads_resources: bool) -> Build:
    """Compile into the cache, and once more to read what the compiler says of it. Needs no GPU."""
    start = time.perf_counter()
    if keeps_kernel:
        precompile(plan.key)
    if not reads_resources:
        return Build(time.perf_counter() - start)
    found = resources(plan)
    # Registers are given out by 256 to a warp.
    per_block = plan.tile.num_threads // 32 * ceil_div(32 * found.registers, 256) * 256
    blocks = min(plan.blocks_per_sm, plan.arch.registers_per_sm // per_block)
    seconds = time.perf_counter() - start
    uses = (found.registers, found.stack_bytes, found.spill_bytes, blocks)
    return Build(seconds, *uses, notes=found.serialised_wgmma)


Launch = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], None]


def launch_of(variant: Variant, problem: Problem, arch: ArchSpec) -> Launch:
    """`launch(q, k, v, out, lse)` for one problem."""
    return launch_plan(variant.plan(problem, arch))


def launch_plan(plan: Plan) -> Launch:
    problem = plan.problem
    function, scale = compiled(plan), problem.head_dim**-0.5
    left, right = problem.band.left or 0, problem.band.right or 0

    def launch(q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor) -> None:
        arguments = plan.launch_arguments
        if plan.draws_tiles:
            # Held until the launch is enqueued.
            _held, address = counters.counter(q.get_device())
            arguments = (*arguments, address)
        function(q, k, v, out, lse, scale, left, right, *arguments)

    return launch


def tools(is_graph: bool) -> Tools:
    timer = GraphTimer() if is_graph else EventTimer()
    return Tools(timer=timer, device=torch.device("cuda"), facts=dict, card_state=dict)


@dataclass(frozen=True)
class _Expected:
    inputs: tuple[Tensor, Tensor, Tensor]
    out: Tensor
    lse: Tensor
    low_precision: Tensor


@cache
def _expected(case: Case, dtype: torch.dtype, device: torch.device) -> _Expected:
    """The same for all variants of a head dim."""
    inputs = make_inputs(case, dtype, str(device))
    low_precision, _ = reference.dense_low_precision(*inputs, case.band)
    return _Expected(inputs, *reference.dense(*inputs, case.band), low_precision)


@torch.no_grad()
def check(variant: Variant, arch: ArchSpec, dtype: str, mask: str) -> str | None:
    """What is wrong with the results of a variant, or None. What fails to launch raises."""
    if not __debug__:
        raise RuntimeError("python -O leaves out the assertions that check the results")
    here = tools(is_graph=False)
    try:
        for sizes in AWKWARD:
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
    launch = launch_of(variant, case.problem(dtype), arch)
    results = []
    for _ in range(2):
        out = torch.full_like(expected.inputs[0], torch.nan)
        lse = torch.full_like(expected.lse, torch.nan, dtype=torch.float32)
        launch(*expected.inputs, out, lse)
        here.timer.synchronize()
        results.append((out, lse))
    try:
        assert_close(*results[0], expected.out, expected.lse, expected.low_precision)
    except AssertionError as wrong:
        # Only here: an assertion of the compiler or of torch is a failure, and says nothing of the results.
        return str(wrong)
    return None if all(map(torch.equal, *results)) else "other bits on the same inputs"


@dataclass(frozen=True)
class TileProvider:
    """A variant as the benchmark sees it: outputs of its own for every call, as `attn` gives them."""

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
        band = band_of(MASKS[causal])
        launch = launch_of(self.variant, problem_of(q, k, v, (band.left, band.right)), self.arch)

        def call() -> Tensor:
            out = torch.empty_like(q)
            launch(q, k, v, out, torch.empty(q.shape[:3], dtype=torch.float32, device=q.device))
            return out

        return call

    def prepare_backward(self, q: Tensor, k: Tensor, v: Tensor, dout: Tensor, causal: bool) -> BackwardCall:
        raise NotImplementedError(FORWARD_ONLY)


@dataclass(frozen=True)
class _Noted:
    """A provider whose name is known to the parent before anything of it runs."""

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
    """The cell with the results of variants and peers, timed against each other."""
    providers: list[Provider] = [*select(peers), *(TileProvider(variant, arch) for variant in variants)]
    try:
        return run_cell(cell, [_Noted(provider) for provider in providers], settings, tools(settings.graph))
    except DeviceLost as lost:
        raise Unusable(str(lost)) from lost
