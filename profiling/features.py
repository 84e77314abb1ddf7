"""What features cost: each timed in turns with the call that lacks it, forward and backward.

    feature   dropout, softcap, ALiBi, sinks against plain attention on the same tensors
    window    a window of 1024 keys against full causal attention
    equal     a packed batch of equal lengths against the dense call on the same memory
    ragged    a packed batch of lengths from 100 to 8192 against FlashAttention-3's varlen

A cell is one direction of one setting. Every ratio is the time of what it is compared with over the time of
the call: above 1 is faster. "both" adds the times of the two directions.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor

from profiling.providers import Call, fa3_ops
from profiling.terminal import Table
from profiling.timing import Contender, Failure, Samples, Timer, attempt, measure
from profiling.turns import Turns

DIRECTIONS = ("fwd", "bwd")
# What may lie between two sides that compute the same, in 16 bits: the norm of the difference over the norm.
AGREEMENT = 2e-2
SHORTEST, LONGEST = 100, 8192
Forward = Callable[..., Any]


@dataclass(frozen=True)
class Settings:
    head_dims: tuple[int, ...] = (64, 128)
    hidden: int = 2048
    batch: int = 4
    seqlen: int = 4096
    long: int = 16384  # where the window is measured
    window: int = 1024
    sequences: int = 16  # of the ragged batch
    rounds: int = 6
    ms: float = 15.0
    seed: int = 0
    # Of `mods`: which functions, and beside whom.
    functions: tuple[str, ...] = ()
    peers: tuple[str, ...] = ()


class Way(Protocol):
    """One way to compute a cell, prepared for one direction: a call that returns the output or gradients."""

    @property
    def is_bshd(self) -> bool:
        """Whether what it returns is (B, S, H, D)."""
        ...

    def prepare(self, direction: str) -> Contender: ...


def gradients_of(forward: Forward, inputs: Sequence[Tensor], is_bshd: bool = False) -> Contender:
    """The gradients of one forward pass, computed again by every call; the output's is the same for all."""
    leaves = [x.detach().requires_grad_() for x in inputs]
    with torch.enable_grad():
        out = forward(*leaves)
    shape = out.transpose(1, 2).shape if is_bshd else out.shape
    generator = torch.Generator(out.device).manual_seed(1)
    drawn = torch.randn(shape, generator=generator, device=out.device, dtype=out.dtype)
    # In the memory order of the output, as the next layer's gradient would be.
    dout = torch.empty_like(out).copy_(drawn.transpose(1, 2) if is_bshd else drawn)
    return Contender(lambda: torch.autograd.grad(out, leaves, dout, retain_graph=True))


@dataclass(frozen=True)
class Side:
    """One way to compute a cell: a forward pass on its own tensors, or calls that are ready-made."""

    forward: Forward | None = None
    inputs: tuple[Tensor, ...] = ()
    calls: Callable[[], dict[str, Call]] | None = None
    is_bshd: ClassVar[bool] = False

    def prepare(self, direction: str) -> Contender:
        if self.calls is not None:
            return Contender(self.calls()[direction])
        assert self.forward is not None
        if direction == "fwd":
            return Contender(torch.no_grad()(partial(self.forward, *self.inputs)))
        return gradients_of(self.forward, self.inputs)


@dataclass(frozen=True)
class Cell:
    """A setting: what is compared, and with which of them. Where all compute the same, `alike` names the side
    that the others must agree with before they are timed."""

    kind: str
    name: str
    sides: Mapping[str, Way]
    base: str
    alike: str | None = None


@dataclass(frozen=True)
class Found:
    kind: str
    name: str
    base: str
    samples: dict[str, dict[str, Samples]] = field(default_factory=dict)  # by direction and side
    errors: dict[str, str] = field(default_factory=dict)

    def ms(self, side: str, direction: str) -> float | None:
        parts = DIRECTIONS if direction == "both" else (direction,)
        found = [self.samples.get(part, {}).get(side) for part in parts]
        known = [samples.median_ms for samples in found if samples is not None]
        return sum(known) if len(known) == len(parts) else None

    def ratio(self, side: str, direction: str, base: str | None = None) -> float | None:
        mine, theirs = self.ms(side, direction), self.ms(base or self.base, direction)
        return theirs / mine if mine and theirs else None

    def rows(self) -> Iterator[tuple[str, ...]]:
        sides = dict.fromkeys(side for samples in self.samples.values() for side in samples)
        for side in sides:
            times = (self.ms(side, direction) for direction in DIRECTIONS)
            ratios = (self.ratio(side, direction) for direction in (*DIRECTIONS, "both"))
            numbers = [
                *(f"{x:.3f}" if x else "-" for x in times),
                *(f"{x:.2f}" if x else "-" for x in ratios),
            ]
            yield (f"{self.name}: {side}", *numbers)


# ---- the cells
# -------------------------------------------------------------------------------------------------------


def _draw(settings: Settings, device: torch.device, *shape: int) -> tuple[Tensor, ...]:
    generator = torch.Generator(device).manual_seed(settings.seed)
    return tuple(
        torch.randn(shape, generator=generator, device=device, dtype=torch.bfloat16) for _ in range(3)
    )


def feature_cells(settings: Settings, device: torch.device) -> Iterator[Cell]:
    from cute_flash import attn

    for head_dim in settings.head_dims:
        heads = settings.hidden // head_dim
        inputs = _draw(settings, device, settings.batch, heads, settings.seqlen, head_dim)
        slopes = torch.linspace(0.5, 0.01, heads, device=device)
        kinds: dict[str, dict[str, Any]] = {
            "plain": {},
            "dropout": {"dropout": 0.1},
            "softcap": {"softcap": 30.0},
            "alibi": {"alibi": slopes},
            "sinks": {"sinks": torch.zeros(heads, device=device)},
        }
        for causal in (False, True):
            sides = {name: Side(partial(attn, causal=causal, **kind), inputs) for name, kind in kinds.items()}
            mask = "causal" if causal else "full"
            yield Cell("feature", f"D={head_dim} S={settings.seqlen} {mask}", sides, "plain")


def window_cells(settings: Settings, device: torch.device) -> Iterator[Cell]:
    from cute_flash import attn

    for head_dim in settings.head_dims:
        inputs = _draw(settings, device, 1, settings.hidden // head_dim, settings.long, head_dim)
        sides = {
            "causal": Side(partial(attn, causal=True), inputs),
            f"window {settings.window}": Side(partial(attn, window=(settings.window, 0)), inputs),
        }
        yield Cell("window", f"D={head_dim} S={settings.long}", sides, "causal")


def _offsets(lengths: list[int], device: torch.device) -> Tensor:
    total = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0)
    return total.to(device=device, dtype=torch.int32)


def equal_cells(settings: Settings, device: torch.device) -> Iterator[Cell]:
    from cute_flash import attn, attn_varlen

    batch, seqlen = settings.batch, settings.seqlen
    offsets = _offsets([seqlen] * batch, device)
    for head_dim in settings.head_dims:
        heads = settings.hidden // head_dim
        packed = _draw(settings, device, batch * seqlen, heads, head_dim)
        dense = tuple(x.view(batch, seqlen, heads, head_dim) for x in packed)
        for causal in (False, True):
            varlen = partial(attn_varlen, cu_seqlens_q=offsets, cu_seqlens_k=offsets, causal=causal)
            sides = {
                "dense": Side(partial(attn, causal=causal, layout="bshd"), dense),
                "varlen": Side(varlen, packed),
            }
            mask = "causal" if causal else "full"
            yield Cell("equal", f"D={head_dim} {batch} x {seqlen} {mask}", sides, "dense")


def ragged_lengths(settings: Settings) -> list[int]:
    drawn = random.Random(settings.seed)
    return [drawn.randint(SHORTEST, LONGEST) for _ in range(settings.sequences)]


def _fa3_varlen(inputs: tuple[Tensor, ...], offsets: Tensor, longest: int, causal: bool) -> dict[str, Call]:
    """Its operators: they come without an autograd of their own."""
    q, k, v = inputs
    forward, backward = fa3_ops().fwd, fa3_ops().bwd
    options = {
        "cu_seqlens_q": offsets,
        "cu_seqlens_k": offsets,
        "max_seqlen_q": longest,
        "max_seqlen_k": longest,
        "softmax_scale": q.shape[-1] ** -0.5,
        "is_causal": causal,
    }
    out, lse = forward(q, k, v, num_splits=1, **options)[:2]
    dout = torch.randn_like(out)

    def gradients() -> tuple[Tensor, ...]:
        dq, dk, dv = (torch.empty_like(x) for x in (q, k, v))
        backward(dout, q, k, v, out, lse, dq=dq, dk=dk, dv=dv, **options)
        return dq, dk, dv

    return {"fwd": lambda: forward(q, k, v, num_splits=1, **options)[0], "bwd": gradients}


def ragged_cells(settings: Settings, device: torch.device) -> Iterator[Cell]:
    from cute_flash import attn_varlen

    lengths = ragged_lengths(settings)
    offsets, longest = _offsets(lengths, device), max(lengths)
    for head_dim in settings.head_dims:
        packed = _draw(settings, device, sum(lengths), settings.hidden // head_dim, head_dim)
        for causal in (False, True):
            varlen = partial(attn_varlen, cu_seqlens_q=offsets, cu_seqlens_k=offsets, causal=causal)
            sides = {
                "fa3": Side(calls=partial(_fa3_varlen, packed, offsets, longest, causal)),
                "varlen": Side(varlen, packed),
            }
            mask = "causal" if causal else "full"
            name = f"D={head_dim} {len(lengths)} of {SHORTEST} to {LONGEST} {mask}"
            yield Cell("ragged", name, sides, "fa3")


KINDS: dict[str, Callable[[Settings, torch.device], Iterator[Cell]]] = {
    "feature": feature_cells,
    "window": window_cells,
    "equal": equal_cells,
    "ragged": ragged_cells,
}


# ---- measuring
# -------------------------------------------------------------------------------------------------------


def _first_call(way: Way, direction: str) -> tuple[Contender, tuple[Tensor, ...]]:
    """The call, and what it returned, as (B, H, S, D)."""
    contender = way.prepare(direction)
    with contender.context():
        found = contender.call()
    tensors = found if isinstance(found, tuple) else (found,)
    return contender, tuple(x.transpose(1, 2) for x in tensors) if way.is_bshd else tensors


def _difference(mine: Sequence[Tensor], theirs: Sequence[Tensor]) -> float:
    """The largest of all tensors; infinite where something is no number."""
    found = [((x.float() - y.float()).norm() / y.float().norm()).item() for x, y in zip(mine, theirs)]
    return max(x if x == x else float("inf") for x in found)


@dataclass(frozen=True)
class Prepared:
    """A cell of which everything is compiled and checked."""

    found: Found
    contenders: dict[str, dict[str, Contender]]  # by direction and side

    def measure(self, timer: Timer, settings: Settings) -> Found:
        for direction, contenders in self.contenders.items():
            measured = measure(contenders, timer, settings.rounds, settings.ms)
            self.found.samples[direction] = measured.samples
            errors = {f"{name} {direction}": error for name, error in measured.errors.items()}
            self.found.errors.update(errors)
        return self.found


def prepare_cell(cell: Cell, timer: Timer) -> Prepared:
    """Each side is called once in each direction; ready are those that run and, where all should be alike,
    agree. That one comes first: importing a peer may patch the DSL that ours is compiled by."""
    found = Found(cell.kind, cell.name, cell.base)
    ready: dict[str, dict[str, Contender]] = {direction: {} for direction in DIRECTIONS}
    expected: dict[str, tuple[Tensor, ...]] = {}
    for name in sorted(cell.sides, key=lambda name: name != cell.alike):
        for direction in DIRECTIONS:
            called = attempt(partial(_first_call, cell.sides[name], direction), timer)
            if isinstance(called, Failure):
                found.errors[f"{name} {direction}"] = called.message
                continue
            contender, results = called
            if name == cell.alike:
                expected[direction] = results
            difference = _difference(results, expected[direction]) if direction in expected else 0.0
            if difference < AGREEMENT:
                ready[direction][name] = contender
            else:
                what = f"not timed: {difference:.2g} away from {cell.alike}"
                found.errors[f"{name} {direction}"] = what
    timer.synchronize()
    in_order = {way: {name: some[name] for name in cell.sides if name in some} for way, some in ready.items()}
    return Prepared(found, in_order)


def measure_cell(cell: Cell, timer: Timer, settings: Settings) -> Found:
    return prepare_cell(cell, timer).measure(timer, settings)


def run_features(
    kinds: tuple[str, ...],
    settings: Settings,
    timer: Timer,
    device: torch.device,
    step: Callable[[str], None] = lambda line: None,
    cells: Mapping[str, Callable[[Settings, torch.device], Iterator[Cell]]] | None = None,
    turns: Turns | None = None,
    keep: Callable[[list[Found]], None] = lambda found: None,
) -> list[Found]:
    """`cells`: what there is to choose from, if not the features. `turns`: with other processes; then all is
    compiled before anything is timed. `keep`: given what was found so far, after every cell."""
    everything: list[Found] = []
    known = KINDS if cells is None else cells
    for kind in kinds:
        if kind not in known:
            raise ValueError(f"{kind!r}: choose from {', '.join(known)}")
    drawn = (cell for kind in kinds for cell in known[kind](settings, device))
    prepared: Iterable[Prepared] = (prepare_cell(cell, timer) for cell in drawn)
    if turns is not None:
        prepared = list(prepared)
    with turns.alone() if turns is not None else nullcontext():
        for one in prepared:
            everything.append(one.measure(timer, settings))
            step(f"{one.found.kind}, {one.found.name}")
            keep(everything)
    return everything


def to_dict(found: Sequence[Found], settings: Settings, facts: dict[str, Any]) -> dict[str, Any]:
    cells = []
    for one in found:
        sides = {
            direction: {
                name: {"ms": s.median_ms, "spread": s.spread, "calls": s.calls, "round_ms": s.round_ms}
                for name, s in samples.items()
            }
            for direction, samples in one.samples.items()
        }
        cells.append(
            {"kind": one.kind, "name": one.name, "base": one.base, "sides": sides, "errors": one.errors}
        )
    lengths = ragged_lengths(settings)
    return {"settings": asdict(settings), "ragged": lengths, "machine": facts, "cells": cells}


def tables(found: Sequence[Found]) -> list[Table]:
    columns = ("setting", "fwd ms", "bwd ms", "fwd ratio", "bwd ratio", "both")
    by_kind: dict[str, list[tuple[str, ...]]] = {}
    for one in found:
        by_kind.setdefault(one.kind, []).extend(one.rows())
    return [Table(kind, columns, tuple(rows)) for kind, rows in by_kind.items() if rows]
