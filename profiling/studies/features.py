"""The cost of features: each call is timed interleaved with the call without the feature, forward and backward.

    feature   dropout, softcap, ALiBi, sinks against plain attention on the same tensors
    window    a window of 1024 keys against full causal attention
    equal     a varlen batch of equal lengths against the dense call on the same memory
    ragged    a varlen batch of lengths from 100 to 8192 against FlashAttention-3's varlen
    head-dim  features, deterministic gradients, varlen, a score_mod and a bias against causal attention, by head dim

A cell is one setting in both directions. A ratio is the time of the base over the time of the call: above 1 the
call is faster. "both" adds the times of the two directions. Times are device times, by CUDA graphs.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

import cute_flash
from cute_flash.planning.launch import LaunchKey
from profiling.measure.accuracy import relative_difference
from profiling.measure.gpu_lock import GpuLock
from profiling.measure.launches import needed_kernels
from profiling.measure.options import MS, ROUNDS, SEED, option
from profiling.measure.shapes import MASKS
from profiling.measure.study import CellFailure, Record, Step, Study, Tools
from profiling.measure.tables import Table, number
from profiling.measure.timing import TimedCall, Timer, attempt_each, measure
from profiling.peers.cute_flash import OPTIONS, our_peer
from profiling.peers.directions import DIRECTIONS
from profiling.peers.flash_attention import fa3_gradients, fa3_ops
from profiling.peers.peer import AGREEMENT, KERNELS, gradients_of

SHORTEST, LONGEST = 100, 8192


@dataclass(frozen=True)
class CellCall:
    """One call of a cell: a function of the direction that returns the call, whose result is out or the gradients."""

    prepare: Callable[[str], TimedCall]
    is_ours: bool = False
    is_bshd: bool = False  # whether its results are (B, S, H, D)


def through_autograd(function: Callable[..., Any], inputs: Sequence[Tensor], direction: str) -> TimedCall:
    if direction == "fwd":
        return TimedCall(torch.no_grad()(partial(function, *inputs)))
    return gradients_of(function, inputs)


def ours(function: Callable[..., Any], inputs: Sequence[Tensor], **options: Any) -> CellCall:
    """A function of cute_flash."""
    return CellCall(partial(through_autograd, partial(function, **options), inputs), is_ours=True)


@dataclass(frozen=True)
class Cell:
    """A setting: the calls to compare, and the base of their ratios.

    `alike` names the call whose results the others must match before they are timed; None: the calls compute
    different functions, and are not compared.
    """

    kind: str
    name: str
    calls: Mapping[str, CellCall]
    base: str
    alike: str | None = None


# ---- the cells
# -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Sizes:
    """The tensors of the cells of `features` and `mods`."""

    hidden: int = 2048
    batch: int = 4
    seqlen: int = 4096
    long: int = 16384  # length at which the window and mods are measured too
    window: int = 1024
    sequences: int = 16  # of the ragged batch
    # (D, Dv) of the cells by head dim.
    pairs: tuple[tuple[int, int], ...] = ((64, 64), (96, 96), (128, 128), (192, 192), (192, 128), (256, 256))


def random_qkv(seed: int, device: torch.device, *shape: int) -> tuple[Tensor, ...]:
    generator = torch.Generator(device).manual_seed(seed)
    return tuple(torch.randn(shape, generator=generator, device=device, dtype=torch.bfloat16) for _ in range(3))


# The features of `feature_cells`; `head_dim_cells` have all.
SCORE_FEATURES = ("plain", "dropout", "softcap", "alibi", "sinks")


def feature_cells(sizes: Sizes, seed: int, device: torch.device, head_dim: int) -> Iterator[Cell]:
    heads = sizes.hidden // head_dim
    inputs = random_qkv(seed, device, sizes.batch, heads, sizes.seqlen, head_dim)
    options = {name: OPTIONS[name](heads, sizes.seqlen, device) for name in SCORE_FEATURES}
    for causal in (False, True):
        calls = {name: ours(cute_flash.attn, inputs, causal=causal, **one) for name, one in options.items()}
        yield Cell("feature", f"D={head_dim} S={sizes.seqlen} {MASKS[causal]}", calls, "plain")


def window_cells(sizes: Sizes, seed: int, device: torch.device, head_dim: int) -> Iterator[Cell]:
    inputs = random_qkv(seed, device, 1, sizes.hidden // head_dim, sizes.long, head_dim)
    calls = {
        "causal": ours(cute_flash.attn, inputs, causal=True),
        f"window {sizes.window}": ours(cute_flash.attn, inputs, window=(sizes.window, 0)),
    }
    yield Cell("window", f"D={head_dim} S={sizes.long}", calls, "causal")


def varlen(inputs: Sequence[Tensor], lengths: Sequence[int], causal: bool) -> CellCall:
    offsets = offsets_of(lengths, inputs[0].device)
    return ours(cute_flash.attn_varlen, inputs, cu_seqlens_q=offsets, cu_seqlens_k=offsets, causal=causal)


def offsets_of(lengths: Sequence[int], device: torch.device) -> Tensor:
    total = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0)
    return total.to(device=device, dtype=torch.int32)


def equal_cells(sizes: Sizes, seed: int, device: torch.device, head_dim: int) -> Iterator[Cell]:
    lengths, heads = [sizes.seqlen] * sizes.batch, sizes.hidden // head_dim
    flat = random_qkv(seed, device, sum(lengths), heads, head_dim)
    dense = [x.view(sizes.batch, sizes.seqlen, heads, head_dim) for x in flat]
    for causal in (False, True):
        calls = {
            "dense": ours(cute_flash.attn, dense, causal=causal, layout="bshd"),
            "varlen": varlen(flat, lengths, causal),
        }
        yield Cell("equal", f"D={head_dim} {sizes.batch} x {sizes.seqlen} {MASKS[causal]}", calls, "dense")


def ragged_lengths(sizes: Sizes, seed: int) -> list[int]:
    generator = random.Random(seed)
    return [generator.randint(SHORTEST, LONGEST) for _ in range(sizes.sequences)]


def _fa3_varlen(inputs: Sequence[Tensor], lengths: Sequence[int], causal: bool, direction: str) -> TimedCall:
    """The operators of FlashAttention-3, which have no autograd formula."""
    q, k, v = inputs
    offsets, longest = offsets_of(lengths, q.device), max(lengths)
    forward = fa3_ops().fwd
    options = {
        "cu_seqlens_q": offsets,
        "cu_seqlens_k": offsets,
        "max_seqlen_q": longest,
        "max_seqlen_k": longest,
        "softmax_scale": q.shape[-1] ** -0.5,
        "is_causal": causal,
    }
    if direction == "fwd":
        return TimedCall(lambda: forward(q, k, v, num_splits=1, **options)[0])
    out, lse = forward(q, k, v, num_splits=1, **options)[:2]
    return TimedCall(partial(fa3_gradients, torch.randn_like(out), q, k, v, out, lse, **options))


def ragged_cells(sizes: Sizes, seed: int, device: torch.device, head_dim: int) -> Iterator[Cell]:
    lengths = ragged_lengths(sizes, seed)
    flat = random_qkv(seed, device, sum(lengths), sizes.hidden // head_dim, head_dim)
    for causal in (False, True):
        calls = {"fa3": CellCall(partial(_fa3_varlen, flat, lengths, causal)), "varlen": varlen(flat, lengths, causal)}
        name = f"D={head_dim} {len(lengths)} of {SHORTEST} to {LONGEST} {MASKS[causal]}"
        yield Cell("ragged", name, calls, "fa3")


def head_dim_cells(sizes: Sizes, seed: int, device: torch.device, pair: tuple[int, int]) -> Iterator[Cell]:
    d, dv = pair
    heads = sizes.hidden // d
    q, k, v = random_qkv(seed, device, sizes.batch, sizes.seqlen, heads, d)
    dense = q, k, v[..., :dv].contiguous()
    calls = {
        name: ours(cute_flash.attn, dense, causal=True, layout="bshd", **options(heads, sizes.seqlen, device))
        for name, options in OPTIONS.items()
    }
    calls["varlen"] = varlen([x.flatten(0, 1) for x in dense], [sizes.seqlen] * sizes.batch, True)
    name = f"D={d} S={sizes.seqlen}" if d == dv else f"D={d} Dv={dv} S={sizes.seqlen}"
    yield Cell("head-dim", name, calls, "plain")


# Kind -> (sizes, seed, device, head dim) -> its cells of that head dim.
KINDS: dict[str, Callable[..., Iterator[Cell]]] = {
    "feature": feature_cells,
    "window": window_cells,
    "equal": equal_cells,
    "ragged": ragged_cells,
    "head-dim": head_dim_cells,
}


@dataclass(frozen=True)
class Settings:
    kinds: tuple[str, ...] = option(tuple(KINDS), choices=KINDS)
    kernels: str = option("auto", "kernel family of cute_flash", choices=KERNELS)
    head_dims: tuple[int, ...] = option((64, 128))
    sizes: Sizes = Sizes()
    rounds: int = ROUNDS(6)
    ms: float = MS(15.0)
    seed: int = SEED(0)

    def groups(self, device: torch.device) -> dict[str, Callable[[], Iterator[Cell]]]:
        """The cells of each kind and head dim. Their tensors are made when they are measured."""
        return {
            f"{kind}, D={head_dim}": partial(KINDS[kind], self.sizes, self.seed, device, head_dim)
            for kind in self.kinds
            for head_dim in (self.sizes.pairs if kind == "head-dim" else self.head_dims)
        }


# ---- measuring
# -------------------------------------------------------------------------------------------------------


def kernels_of(groups: Mapping[str, Callable[[], Iterator[Cell]]]) -> list[LaunchKey]:
    """The kernels of all calls of cute_flash."""
    return needed_kernels(
        lambda call=call, direction=direction: call.prepare(direction).call()  # type: ignore[misc]
        for cells in groups.values()
        for cell in cells()
        for call in cell.calls.values()
        for direction in DIRECTIONS
        if call.is_ours
    )


@dataclass(frozen=True)
class Prepared:
    """A cell whose calls are compiled and checked."""

    cell: Cell
    timed_calls: dict[str, dict[str, TimedCall]]  # by direction and call
    errors: dict[str, str]

    def measure(self, timer: Timer, rounds: int, ms: float) -> Record:
        times: dict[str, Any] = {}
        errors = dict(self.errors)
        for direction, timed_calls in self.timed_calls.items():
            measured = measure(timed_calls, timer, rounds, ms)
            times[direction] = {name: samples.as_dict() for name, samples in measured.samples.items()}
            errors |= {f"{name} {direction}": error for name, error in measured.errors.items()}
        cell = self.cell
        return {"kind": cell.kind, "name": cell.name, "base": cell.base, "sides": times, "errors": errors}


def _first_call(call: CellCall, direction: str, timer: Timer, is_compared: bool) -> tuple[TimedCall, list[Tensor]]:
    """The call; and its results as (B, H, S, D), if they are compared."""
    with timer.stream():
        timed_call = call.prepare(direction)
        results = timed_call()
    tensors = results if isinstance(results, tuple) else (results,)
    return timed_call, [x.transpose(1, 2) if call.is_bshd else x for x in tensors] if is_compared else []


def prepare_cell(cell: Cell, timer: Timer) -> Prepared:
    """Call each call once in each direction, and keep the calls that run.

    If `cell.alike` names a call, only calls whose results match its results are kept. That call is called first:
    importing a peer may patch the DSL that compiles our kernels.
    """
    names = sorted(cell.calls, key=lambda name: name != cell.alike)
    actions = {
        f"{name} {direction}": partial(_first_call, cell.calls[name], direction, timer, cell.alike is not None)
        for name in names
        for direction in DIRECTIONS
    }
    called, errors = attempt_each(actions, timer)
    timed_calls: dict[str, dict[str, TimedCall]] = {direction: {} for direction in DIRECTIONS}
    for name in cell.calls:
        for direction in DIRECTIONS:
            place, expected = f"{name} {direction}", called.get(f"{cell.alike} {direction}")
            if place not in called:
                continue
            timed_call, results = called[place]
            difference = 0.0 if expected is None else relative_difference(results, expected[1])
            if difference < AGREEMENT:
                timed_calls[direction][name] = timed_call
            else:
                errors[place] = f"not timed: {difference:.2g} away from {cell.alike}"
    timer.synchronize()
    return Prepared(cell, timed_calls, errors)


def measure_cells(
    cells: Callable[[], Iterator[Cell]], rounds: int, ms: float, tools: Tools, lock: GpuLock | None = None
) -> list[Record]:
    """`lock`: shared with other processes; all cells are compiled before the first is timed."""
    prepared = (prepare_cell(cell, tools.timer) for cell in cells())
    if lock is None:
        return [one.measure(tools.timer, rounds, ms) for one in prepared]
    compiled = list(prepared)
    with lock.exclusive():
        return [one.measure(tools.timer, rounds, ms) for one in compiled]


# ---- report
# -------------------------------------------------------------------------------------------------------


def time_of(cell: Record, call: str, direction: str) -> float | None:
    """Milliseconds in a direction, or in "both"; None if it was not timed."""
    parts = DIRECTIONS if direction == "both" else (direction,)
    times = [cell["sides"].get(part, {}).get(call, {}).get("ms") for part in parts]
    return None if None in times else sum(times)


def ratio(cell: Record, call: str, direction: str, base: str | None = None) -> float | None:
    mine, theirs = time_of(cell, call, direction), time_of(cell, base or cell["base"], direction)
    return theirs / mine if mine and theirs else None


def tables(record: Record) -> list[Table]:
    """One for each kind."""
    rows: dict[str, list[tuple[str, ...]]] = {}
    for cell in record["cells"]:
        for call in dict.fromkeys(call for times in cell["sides"].values() for call in times):
            times = (number(time_of(cell, call, direction), ".3f") for direction in DIRECTIONS)
            ratios = (number(ratio(cell, call, direction)) for direction in (*DIRECTIONS, "both"))
            rows.setdefault(cell["kind"], []).append((f"{cell['name']}: {call}", *times, *ratios))
    columns = ("setting", "fwd ms", "bwd ms", "fwd ratio", "bwd ratio", "both")
    return [Table(kind, columns, tuple(of_kind)) for kind, of_kind in rows.items()]


def failures(record: Record) -> list[CellFailure]:
    return [CellFailure(cell["name"], name, text) for cell in record["cells"] for name, text in cell["errors"].items()]


STUDY = Study(
    name="features",
    help="calls with a feature beside calls without it",
    examples=("--head-dims 128",),
    settings=Settings,
    context=lambda settings: our_peer(kernels=settings.kernels).context(),
    kernels=lambda settings, tools: kernels_of(settings.groups(tools.device)),
    parts=lambda settings, tools: {"ragged": ragged_lengths(settings.sizes, settings.seed), "cells": []},
    steps=lambda settings, tools: [
        Step("cells", title, partial(measure_cells, cells, settings.rounds, settings.ms, tools))
        for title, cells in settings.groups(tools.device).items()
    ],
    tables=tables,
    failures=failures,
)
