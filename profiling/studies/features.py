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

import argparse
import json
import random
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor

from cute_flash.planning.plan import CompileKey
from cute_flash.tools.precompile import precompile_keys
from cute_flash.tools.progress import steps
from profiling.measure import machine
from profiling.measure.accuracy import relative_difference
from profiling.measure.gpu_lock import GpuLock
from profiling.measure.launches import recorded_kernels
from profiling.measure.options import MS, ROUNDS, SEED, add_jobs, add_options, add_out, name_list, option, settings_of
from profiling.measure.record import write_json
from profiling.measure.study import FAILED, OK, Command, need_gpu
from profiling.measure.tables import Table, print_lines, show
from profiling.measure.timing import Failure, GraphTimer, Samples, TimedCall, Timer, attempt, measure
from profiling.peers.cute_flash import OPTIONS, our_library
from profiling.peers.directions import DIRECTIONS
from profiling.peers.flash_attention import fa3_ops
from profiling.peers.peer import AGREEMENT, KERNELS, Call, gradients_of

SHORTEST, LONGEST = 100, 8192
Forward = Callable[..., Any]


@dataclass(frozen=True)
class Settings:
    head_dims: tuple[int, ...] = option((64, 128))
    hidden: int = 2048
    batch: int = 4
    seqlen: int = 4096
    long: int = 16384  # length at which the window is measured
    window: int = 1024
    sequences: int = 16  # of the ragged batch
    # (D, Dv) of the cells by head dim.
    pairs: tuple[tuple[int, int], ...] = ((64, 64), (96, 96), (128, 128), (192, 192), (192, 128), (256, 256))
    rounds: int = ROUNDS(6)
    ms: float = MS(15.0)
    seed: int = SEED(0)
    # Of `mods`: the functions and peers to measure; empty: all.
    functions: tuple[str, ...] = ()
    peers: tuple[str, ...] = ()


class Implementation(Protocol):
    """One implementation in a cell; its calls return the output or the gradients."""

    @property
    def is_bshd(self) -> bool:
        """Whether its results are (B, S, H, D)."""
        ...

    def prepare(self, direction: str) -> TimedCall: ...


@dataclass(frozen=True)
class AutogradCall:
    """A forward pass on its own tensors, or ready-made calls for each direction."""

    forward: Forward | None = None
    inputs: tuple[Tensor, ...] = ()
    calls: Callable[[], dict[str, Call]] | None = None
    is_bshd: ClassVar[bool] = False

    @property
    def is_ours(self) -> bool:
        """Whether the forward pass is a function of cute_flash, with or without bound arguments."""
        function = self.forward.func if isinstance(self.forward, partial) else self.forward
        return str(getattr(function, "__module__", "")).partition(".")[0] == "cute_flash"

    def prepare(self, direction: str) -> TimedCall:
        if self.calls is not None:
            return TimedCall(self.calls()[direction])
        assert self.forward is not None
        if direction == "fwd":
            return TimedCall(torch.no_grad()(partial(self.forward, *self.inputs)))
        return gradients_of(self.forward, self.inputs)


@dataclass(frozen=True)
class Cell:
    """A setting: the calls to compare, and the base of their ratios.

    `alike` names the call whose results the others must match before they are timed; None: the calls compute
    different functions, and are not compared.
    """

    kind: str
    name: str
    calls: Mapping[str, Implementation]
    base: str
    alike: str | None = None


@dataclass(frozen=True)
class CellResult:
    kind: str
    name: str
    base: str
    samples: dict[str, dict[str, Samples]] = field(default_factory=dict)  # by direction and call
    errors: dict[str, str] = field(default_factory=dict)

    def ms(self, call: str, direction: str) -> float | None:
        parts = DIRECTIONS if direction == "both" else (direction,)
        samples = [self.samples.get(part, {}).get(call) for part in parts]
        times = [x.median_ms for x in samples if x is not None]
        return sum(times) if len(times) == len(parts) else None

    def ratio(self, call: str, direction: str, base: str | None = None) -> float | None:
        mine, theirs = self.ms(call, direction), self.ms(base or self.base, direction)
        return theirs / mine if mine and theirs else None

    def rows(self) -> Iterator[tuple[str, ...]]:
        calls = dict.fromkeys(call for samples in self.samples.values() for call in samples)
        for call in calls:
            times = (self.ms(call, direction) for direction in DIRECTIONS)
            ratios = (self.ratio(call, direction) for direction in (*DIRECTIONS, "both"))
            numbers = [*(f"{x:.3f}" if x else "-" for x in times), *(f"{x:.2f}" if x else "-" for x in ratios)]
            yield (f"{self.name}: {call}", *numbers)


# ---- the cells
# -------------------------------------------------------------------------------------------------------


def random_qkv(settings: Settings, device: torch.device, *shape: int) -> tuple[Tensor, ...]:
    generator = torch.Generator(device).manual_seed(settings.seed)
    return tuple(torch.randn(shape, generator=generator, device=device, dtype=torch.bfloat16) for _ in range(3))


# The features of `feature_cells`; `head_dim_cells` have all.
SCORE_FEATURES = ("plain", "dropout", "softcap", "alibi", "sinks")


def feature_cells(settings: Settings, device: torch.device) -> Iterator[Cell]:
    from cute_flash import attn

    for head_dim in settings.head_dims:
        heads = settings.hidden // head_dim
        inputs = random_qkv(settings, device, settings.batch, heads, settings.seqlen, head_dim)
        kinds = {name: OPTIONS[name](heads, settings.seqlen, device) for name in SCORE_FEATURES}
        for causal in (False, True):
            calls = {name: AutogradCall(partial(attn, causal=causal, **kind), inputs) for name, kind in kinds.items()}
            mask = "causal" if causal else "full"
            yield Cell("feature", f"D={head_dim} S={settings.seqlen} {mask}", calls, "plain")


def window_cells(settings: Settings, device: torch.device) -> Iterator[Cell]:
    from cute_flash import attn

    for head_dim in settings.head_dims:
        inputs = random_qkv(settings, device, 1, settings.hidden // head_dim, settings.long, head_dim)
        calls = {
            "causal": AutogradCall(partial(attn, causal=True), inputs),
            f"window {settings.window}": AutogradCall(partial(attn, window=(settings.window, 0)), inputs),
        }
        yield Cell("window", f"D={head_dim} S={settings.long}", calls, "causal")


def _offsets(lengths: list[int], device: torch.device) -> Tensor:
    total = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0)
    return total.to(device=device, dtype=torch.int32)


def equal_cells(settings: Settings, device: torch.device) -> Iterator[Cell]:
    from cute_flash import attn, attn_varlen

    batch, seqlen = settings.batch, settings.seqlen
    offsets = _offsets([seqlen] * batch, device)
    for head_dim in settings.head_dims:
        heads = settings.hidden // head_dim
        flat = random_qkv(settings, device, batch * seqlen, heads, head_dim)
        dense = tuple(x.view(batch, seqlen, heads, head_dim) for x in flat)
        for causal in (False, True):
            varlen = partial(attn_varlen, cu_seqlens_q=offsets, cu_seqlens_k=offsets, causal=causal)
            calls = {
                "dense": AutogradCall(partial(attn, causal=causal, layout="bshd"), dense),
                "varlen": AutogradCall(varlen, flat),
            }
            mask = "causal" if causal else "full"
            yield Cell("equal", f"D={head_dim} {batch} x {seqlen} {mask}", calls, "dense")


def ragged_lengths(settings: Settings) -> list[int]:
    generator = random.Random(settings.seed)
    return [generator.randint(SHORTEST, LONGEST) for _ in range(settings.sequences)]


def _fa3_varlen(inputs: tuple[Tensor, ...], offsets: Tensor, longest: int, causal: bool) -> dict[str, Call]:
    """The operators of FlashAttention-3, which have no autograd formula."""
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
        flat = random_qkv(settings, device, sum(lengths), settings.hidden // head_dim, head_dim)
        for causal in (False, True):
            varlen = partial(attn_varlen, cu_seqlens_q=offsets, cu_seqlens_k=offsets, causal=causal)
            calls = {
                "fa3": AutogradCall(calls=partial(_fa3_varlen, flat, offsets, longest, causal)),
                "varlen": AutogradCall(varlen, flat),
            }
            mask = "causal" if causal else "full"
            name = f"D={head_dim} {len(lengths)} of {SHORTEST} to {LONGEST} {mask}"
            yield Cell("ragged", name, calls, "fa3")


def head_dim_cells(settings: Settings, device: torch.device) -> Iterator[Cell]:
    from cute_flash import attn, attn_varlen

    batch, seqlen = settings.batch, settings.seqlen
    offsets = _offsets([seqlen] * batch, device)
    for d, dv in settings.pairs:
        heads = settings.hidden // d
        q, k, v = random_qkv(settings, device, batch, seqlen, heads, d)
        dense = q, k, v[..., :dv].contiguous()
        flat = tuple(x.flatten(0, 1) for x in dense)
        kinds = {name: options(heads, seqlen, device) for name, options in OPTIONS.items()}
        calls = {
            name: AutogradCall(partial(attn, causal=True, layout="bshd", **kind), dense) for name, kind in kinds.items()
        }
        varlen = partial(attn_varlen, cu_seqlens_q=offsets, cu_seqlens_k=offsets, causal=True)
        name = f"D={d} S={seqlen}" if d == dv else f"D={d} Dv={dv} S={seqlen}"
        yield Cell("head-dim", name, {**calls, "varlen": AutogradCall(varlen, flat)}, "plain")


Cells = Callable[[Settings, torch.device], Iterator[Cell]]
KINDS: dict[str, Cells] = {
    "feature": feature_cells,
    "window": window_cells,
    "equal": equal_cells,
    "ragged": ragged_cells,
    "head-dim": head_dim_cells,
}


def cells_of(
    kinds: Sequence[str], settings: Settings, device: torch.device, known: Mapping[str, Cells] = KINDS
) -> Iterator[Cell]:
    """The cells of these kinds; `ValueError` for an unknown kind."""
    for kind in kinds:
        if kind not in known:
            raise ValueError(f"kind {kind!r}: choose from {', '.join(known)}")
    return (cell for kind in kinds for cell in known[kind](settings, device))


def needed_kernels(cells: Iterable[Cell]) -> list[CompileKey]:
    """The kernels of all calls of cute_flash in these cells; nothing is compiled or launched."""
    keys: dict[CompileKey, None] = {}
    for cell in cells:
        ours = [call for call in cell.calls.values() if isinstance(call, AutogradCall) and call.is_ours]
        for call, direction in product(ours, DIRECTIONS):
            with recorded_kernels(keys):
                call.prepare(direction).call()
    return list(keys)


# ---- measuring
# -------------------------------------------------------------------------------------------------------


def _first_call(call: Implementation, direction: str) -> tuple[TimedCall, tuple[Tensor, ...]]:
    """The call, and its results as (B, H, S, D)."""
    timed_call = call.prepare(direction)
    with timed_call.context():
        results = timed_call.call()
    tensors = results if isinstance(results, tuple) else (results,)
    return timed_call, tuple(x.transpose(1, 2) for x in tensors) if call.is_bshd else tensors


@dataclass(frozen=True)
class Prepared:
    """A cell whose calls are compiled and checked."""

    result: CellResult
    timed_calls: dict[str, dict[str, TimedCall]]  # by direction and call

    def measure(self, timer: Timer, settings: Settings) -> CellResult:
        for direction, timed_calls in self.timed_calls.items():
            measured = measure(timed_calls, timer, settings.rounds, settings.ms)
            self.result.samples[direction] = measured.samples
            errors = {f"{name} {direction}": error for name, error in measured.errors.items()}
            self.result.errors.update(errors)
        return self.result


def prepare_cell(cell: Cell, timer: Timer) -> Prepared:
    """Call each call once in each direction, and keep the calls that run.

    If `cell.alike` names a call, only calls whose results match its results are kept. That call is called first:
    importing a peer may patch the DSL that compiles our kernels.
    """
    result = CellResult(cell.kind, cell.name, cell.base)
    ready: dict[str, dict[str, TimedCall]] = {direction: {} for direction in DIRECTIONS}
    expected: dict[str, tuple[Tensor, ...]] = {}
    for name in sorted(cell.calls, key=lambda name: name != cell.alike):
        for direction in DIRECTIONS:
            with timer.stream():
                called = attempt(partial(_first_call, cell.calls[name], direction), timer)
            if isinstance(called, Failure):
                result.errors[f"{name} {direction}"] = called.message
                continue
            timed_call, results = called
            if name == cell.alike:
                expected[direction] = results
            difference = relative_difference(results, expected[direction]) if direction in expected else 0.0
            if difference < AGREEMENT:
                ready[direction][name] = timed_call
            else:
                message = f"not timed: {difference:.2g} away from {cell.alike}"
                result.errors[f"{name} {direction}"] = message
    timer.synchronize()
    in_order = {
        direction: {name: calls[name] for name in cell.calls if name in calls} for direction, calls in ready.items()
    }
    return Prepared(result, in_order)


def measure_cell(cell: Cell, timer: Timer, settings: Settings) -> CellResult:
    return prepare_cell(cell, timer).measure(timer, settings)


def run_features(
    kinds: tuple[str, ...],
    settings: Settings,
    timer: Timer,
    device: torch.device,
    step: Callable[[str], None] = lambda line: None,
    cells: Mapping[str, Cells] | None = None,
    lock: GpuLock | None = None,
    save: Callable[[list[CellResult]], None] = lambda results: None,
) -> list[CellResult]:
    """Measure all cells of the kinds.

    `cells`: the kinds to choose from; by default those of features. `lock`: shared with other processes; all cells
    are compiled before the first is timed. `save` is called with all results after every cell.
    """
    results: list[CellResult] = []
    chosen = cells_of(kinds, settings, device, KINDS if cells is None else cells)
    prepared: Iterable[Prepared] = (prepare_cell(cell, timer) for cell in chosen)
    if lock is not None:
        prepared = list(prepared)
    with lock.exclusive() if lock is not None else nullcontext():
        for one in prepared:
            results.append(one.measure(timer, settings))
            step(f"{one.result.kind}, {one.result.name}")
            save(results)
    return results


def to_dict(results: Sequence[CellResult], settings: Settings, facts: dict[str, Any]) -> dict[str, Any]:
    cells = []
    for one in results:
        calls = {
            direction: {name: one_call.as_dict() for name, one_call in samples.items()}
            for direction, samples in one.samples.items()
        }
        cells.append({"kind": one.kind, "name": one.name, "base": one.base, "sides": calls, "errors": one.errors})
    lengths = ragged_lengths(settings)
    return {"settings": asdict(settings), "ragged": lengths, "machine": facts, "cells": cells}


def from_dict(data: dict[str, Any]) -> list[CellResult]:
    return [
        CellResult(
            cell["kind"],
            cell["name"],
            cell["base"],
            {
                direction: {name: Samples(x["calls"], tuple(x["round_ms"])) for name, x in calls.items()}
                for direction, calls in cell["sides"].items()
            },
            cell["errors"],
        )
        for cell in data["cells"]
    ]


def merged(parts: Sequence[dict[str, Any]], kinds: Sequence[str]) -> dict[str, Any]:
    """Merge the records of runs that measured different cells with the same settings on the same machine.

    The cells are sorted by kind, in the order of `kinds`, then by the numbers in their names.
    """

    def place(cell: dict[str, Any]) -> tuple[int, list[int]]:
        return kinds.index(cell["kind"]), [int(x) for x in re.findall(r"\d+", cell["name"])]

    choices = ("head_dims", "functions", "peers")
    same = [{name: value for name, value in part["settings"].items() if name not in choices} for part in parts]
    names = [(cell["kind"], cell["name"]) for part in parts for cell in part["cells"]]
    if any(settings != same[0] for settings in same):
        raise ValueError(
            "--parts: the files were measured with different settings; repeat one run with those of the other"
        )
    if len(set(names)) < len(names):
        raise ValueError("--parts: two files have cells in common; leave one file out")
    head_dims = sorted({x for part in parts for x in part["settings"]["head_dims"]})
    chosen = {"head_dims": head_dims, "functions": [], "peers": []}
    cells = sorted((cell for part in parts for cell in part["cells"]), key=place)
    return {**parts[0], "settings": {**same[0], **chosen}, "cells": cells}


def tables(results: Sequence[CellResult]) -> list[Table]:
    columns = ("setting", "fwd ms", "bwd ms", "fwd ratio", "bwd ratio", "both")
    by_kind: dict[str, list[tuple[str, ...]]] = {}
    for one in results:
        by_kind.setdefault(one.kind, []).extend(one.rows())
    return [Table(kind, columns, tuple(rows)) for kind, rows in by_kind.items() if rows]


# ---- the command
# -------------------------------------------------------------------------------------------------------


def add_arguments(parser: argparse.ArgumentParser, kinds: Mapping[str, Cells] = KINDS) -> None:
    add = parser.add_argument
    add("--kinds", type=name_list, default=tuple(kinds), metavar="LIST", help=f"default: {','.join(kinds)}")
    add("--kernels", choices=KERNELS, default="auto", help="kernel family of cute_flash (default: %(default)s)")
    add_options(parser, Settings)
    add_jobs(parser)
    add_out(parser)
    add("--lock", type=Path, metavar="FILE", help="processes with the same FILE measure one after another")
    text = "only merge the JSON files of runs that shared a --lock; needs no GPU"
    add("--parts", type=Path, nargs="+", metavar="FILE", help=text)


def merge_parts(args: argparse.Namespace, kinds: Mapping[str, Cells] = KINDS) -> list[CellResult]:
    data = merged([json.loads(path.read_text()) for path in args.parts], tuple(kinds))
    write_json(data, args.out)
    return from_dict(data)


def measure_kinds(args: argparse.Namespace, settings: Settings, kinds: Mapping[str, Cells] = KINDS) -> list[CellResult]:
    need_gpu()
    lock, facts, device = GpuLock(args.lock) if args.lock else None, machine.facts(), torch.device("cuda")

    def save(results: Sequence[CellResult]) -> None:
        write_json(to_dict(results, settings, facts), args.out)

    with our_library(kernels=args.kernels).context():
        precompile_keys(needed_kernels(cells_of(args.kinds, settings, device, kinds)), args.jobs)
        with steps(f"timing {args.command}", len(args.kinds) * 2 * len(settings.head_dims)) as done:
            return run_features(args.kinds, settings, GraphTimer(), device, done, kinds, lock, save)


def report(results: Sequence[CellResult], summaries: Sequence[Table] = ()) -> int:
    show([*tables(results), *summaries])
    errors = [f"{one.name}, {name}: {text}" for one in results for name, text in one.errors.items()]
    print_lines("Failures", errors)
    return FAILED if errors else OK


def run(args: argparse.Namespace) -> int:
    return report(merge_parts(args) if args.parts else measure_kinds(args, settings_of(Settings, args)))


COMMAND = Command("features", "calls with a feature beside calls without it", ("--head-dims 128",), add_arguments, run)
