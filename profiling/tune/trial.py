"""The steps of tuning that run in a worker process: compile a variant, check its results, time it.

A variant is correct if its results (output and LSE, or dq, dk and dv) pass the tests' error bound on a few small shapes
with odd sizes, with NaN in all new memory; if an output has the same bits in a second run; and if the benchmark finds
the results correct on the timed shape.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any, cast

import torch
from torch import Tensor

from cute_flash import reference
from cute_flash.jit.kernels import precompile
from cute_flash.jit.resources import kernel_resources
from cute_flash.planning.plan import Plan, plan_forward
from cute_flash.runtime import binder
from cute_flash.spec.arch import ArchSpec
from cute_flash.spec.args import AttentionArgs
from cute_flash.spec.band import Band, ceil_div
from cute_flash.spec.describe import describe as describe_problem
from cute_flash.spec.problem import Problem
from profiling.bench.bench import Settings, run_cell
from profiling.measure.accuracy import nan_in_new_memory
from profiling.measure.record import Cell
from profiling.measure.shapes import DTYPES, MASKS
from profiling.measure.study import Tools
from profiling.measure.timing import EventTimer, GraphTimer, unusable_if_lost
from profiling.measure.workers import note
from profiling.peers.peer import BackwardCall, Forward, Peer
from profiling.peers.registry import select
from profiling.tune.variants import Variant, family_of
from tests import gradients
from tests.cases import Case, assert_close, make_inputs

# Batch, heads, K/V heads, queries, keys. With a causal mask the third has whole tiles that see no key. The last has
# more queries than `BwdTileSm90Wide.max_queries_claimed`.
ODD_SHAPES = (
    (2, 4, 2, 200, 333), (1, 2, 2, 129, 129), (1, 2, 1, 600, 77), (1, 3, 1, 257, 1027), (2, 6, 3, 1, 130),
    (1, 2, 1, 1100, 90),
)  # fmt: skip


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


def build(plan: Plan, stores_kernels: bool, reads_resources: bool) -> Build:
    """Compile the kernels of a plan into the cache, and the main one once more for the resources that ptxas reports.

    Needs no GPU.
    """
    start = time.perf_counter()
    for key in plan.host_calls if stores_kernels else ():
        precompile(key)
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


def forward_of(plan: Plan, device: torch.device) -> Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]:
    """The forward pass of a plan: (q, k, v) -> (out, lse), for contiguous inputs of its shape and the default scale."""
    launch, args = binder.bind_forward(plan, device, copies_inputs=False, copies_output=False), _args(plan)

    def forward(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        out, lse, _max_logit = launch(q, k, v, args)
        return out, lse

    return forward


def _args(plan: Plan) -> AttentionArgs:
    left, right = plan.problem.band.bounds
    return AttentionArgs(scale=plan.problem.head_dim**-0.5, window_left=left, window_right=right)


# (dout, q, k, v, out, lse) -> (dq, dk, dv)
Backward = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor], tuple[Tensor, ...]]


def backward_of(plan: Plan, device: torch.device) -> Backward:
    """The backward pass of a plan, as `forward_of`."""
    launch, args = binder.bind_backward(plan, device, copies_inputs=False, copies_gradients=False), _args(plan)

    def backward(dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor) -> tuple[Tensor, ...]:
        return launch(dout, None, q, k, v, out, lse, args)[:3]

    return backward


def tools(is_graph: bool) -> Tools:
    timer = GraphTimer() if is_graph else EventTimer()
    return Tools(timer, device=torch.device("cuda", torch.cuda.current_device()), facts=dict, card_state=dict)


@dataclass(frozen=True)
class _ForwardCase:
    inputs: tuple[Tensor, Tensor, Tensor]
    out: Tensor
    lse: Tensor
    low_precision: Tensor


@cache
def _forward_case(case: Case, dtype: torch.dtype, device: torch.device) -> _ForwardCase:
    """The inputs and right results of a case. Shared by all variants of a head dim."""
    inputs = make_inputs(case, dtype, str(device))
    out, lse = reference.dense(*inputs, case.band)
    low_precision, _ = reference.dense_low_precision(*inputs, case.band)
    return _ForwardCase(inputs=inputs, out=out, lse=lse, low_precision=low_precision)


@cache
def _expected_gradients(case: Case, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, gradients.Expected]:
    """dout, and the gradients for it. Shared by all variants of a head dim."""
    inputs = _forward_case(case, dtype, device).inputs
    dout = torch.randn(inputs[0].shape, generator=torch.Generator().manual_seed(1)).to(device, dtype)
    with torch.enable_grad():
        return dout, gradients.Expected.of(inputs, case.band, gradients.weighted(dout))


@torch.no_grad()
def check(variant: Variant, arch: ArchSpec, dtype: str, mask: str) -> str | None:
    """The mistake in the results of a variant, or None. Raises if a launch fails."""
    if not __debug__:
        raise RuntimeError("python -O removes the assertions that check the results")
    here = tools(is_graph=False)
    assert_right = _assert_output if family_of(variant.family).direction == "fwd" else _assert_gradients
    with unusable_if_lost(here.timer):
        for sizes in ODD_SHAPES:
            case = Case(*sizes, variant.head_dim, band_of(mask))
            try:
                assert_right(variant.plan(case.problem(DTYPES[dtype]), arch), case, DTYPES[dtype], here)
            except _Wrong as wrong:
                return f"{case.id}: {wrong}"
    return None


class _Wrong(Exception):
    """Results are wrong. An AssertionError of the compiler or of torch is a failed launch instead."""


@contextmanager
def _wrong_if_assertions_fail() -> Iterator[None]:
    try:
        yield
    except AssertionError as error:
        raise _Wrong(str(error)) from error


def _assert_output(plan: Plan, case: Case, dtype: torch.dtype, here: Tools) -> None:
    """Raise `_Wrong` if output or LSE are wrong, or differ between two runs."""
    known, forward, results = _forward_case(case, dtype, here.device), forward_of(plan, here.device), []
    for _ in range(2):
        with nan_in_new_memory():
            results.append(forward(*known.inputs))
        here.timer.synchronize()
    with _wrong_if_assertions_fail():
        assert_close(*results[0], known.out, known.lse, known.low_precision)
        assert all(map(torch.equal, *results)), "other bits on the same inputs"


def _assert_gradients(plan: Plan, case: Case, dtype: torch.dtype, here: Tools) -> None:
    """Raise `_Wrong` if gradients are wrong. Additions to dq are in no fixed order, so there is no second run."""
    known, backward = _forward_case(case, dtype, here.device), backward_of(plan, here.device)
    dout, expected = _expected_gradients(case, dtype, here.device)
    with nan_in_new_memory():
        found = backward(dout, *known.inputs, known.out.to(dtype), known.lse.float())
    here.timer.synchronize()
    with _wrong_if_assertions_fail():
        gradients.assert_close(found, known.inputs, expected)


def tile_peer(variant: Variant, arch: ArchSpec) -> Peer:
    """A variant as a peer of the benchmark; each call allocates its outputs, as `attn` does."""

    def problem(q: Tensor, k: Tensor, causal: bool) -> Problem:
        return describe_problem(q, k, k, reference.plain_args(q, band_of(MASKS[causal])))

    def make_forward(q: Tensor, k: Tensor, causal: bool) -> Forward:
        forward = forward_of(variant.plan(problem(q, k, causal), arch), q.device)
        return lambda q, k, v: forward(q, k, v)[0]

    def prepare_backward(q: Tensor, k: Tensor, v: Tensor, dout: Tensor, causal: bool) -> BackwardCall:
        kernels = family_of(variant.family).kernels
        out, lse = forward_of(plan_forward(problem(q, k, causal), arch, kernels), q.device)(q, k, v)
        backward = backward_of(variant.plan(problem(q, k, causal), arch), q.device)
        dout = torch.empty_like(out).copy_(dout)
        return lambda: backward(dout, q, k, v, out, lse)

    return Peer(variant.text, lambda: make_forward, lambda: prepare_backward, is_ours=True)


class _Noted:
    """A peer that reports its name to the parent process before it runs: all its calls are inside `context`."""

    def __init__(self, peer: Peer) -> None:
        self._peer = peer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._peer, name)

    def context(self) -> AbstractContextManager[Any]:
        note(self._peer.name)
        return self._peer.context()


@torch.no_grad()
def time_cell(
    cell: Cell, variants: Sequence[Variant], peers: Sequence[str], settings: Settings, arch: ArchSpec
) -> Cell:
    """The cell with the results of variants and peers, timed interleaved."""
    timed: list[Peer] = [*select(peers), *(tile_peer(variant, arch) for variant in variants)]
    here = tools(settings.graph)
    with unusable_if_lost(here.timer):
        return run_cell(cell, [cast(Peer, _Noted(peer)) for peer in timed], settings, here)
