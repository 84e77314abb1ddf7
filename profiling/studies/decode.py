"""Decoding beside other libraries: device time of `attn_decode` and its variants, and host time of a call.

    cells     one token for each sequence over a full K/V cache, beside SDPA (cuDNN, FlashAttention-2) and
              FlashAttention-3 with automatic splits, on the same memory
    variants  pages, several tokens, an FP8 cache, append with rotary embedding, `attn`, and the family sm80, beside the
              plain call
    layers    a CUDA graph of NUM_LAYERS calls with a cache each, as in a model: the gaps between their kernels
    host      time of warm calls in an asynchronous loop

Every result is first compared with fp64, in the first and the last sequence and K/V head. Then all calls of a cell are
timed in CUDA graphs, interleaved. Caches that fit in L2 stay there between calls, for all libraries.
"""

from __future__ import annotations

import math
import random
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import product

import torch
from torch import Tensor

from cute_flash.planning.launch import LaunchKey
from profiling.measure.accuracy import nan_in_new_memory
from profiling.measure.host_time import host_times
from profiling.measure.launches import needed_kernels
from profiling.measure.options import MS, ROUNDS, SEED
from profiling.measure.study import CellFailure, Record, Step, Study, Tools, failures_in
from profiling.measure.tables import Table, geometric_mean, number
from profiling.measure.timing import Samples, TimedCall, attempt_each, measure
from profiling.studies import decode_cases
from profiling.studies.decode_cases import OURS, PEERS, PLAIN, VARIANTS, Call, Inputs, Shape, Sizes

CELLS = (
    (1, 1024), (1, 8192), (1, 32768), (1, 131072), (2, 8192), (4, 8192), (8, 8192), (8, 32768), (16, 8192), (64, 4096),
    (64, 16384), (128, 4096),
)  # fmt: skip
VARIANT_CELLS = ((1, 8192), (8, 8192), (64, 4096))
LAYER_CELLS, NUM_LAYERS = ((1, 8192), (8, 8192)), 32
HOST_CELL = (1, 1024)
# The call of the host times that appends.
APPENDED = f"{OURS}, append"
# Host time: calls per loop, and number of loops.
HOST_CALLS, HOST_LOOPS = 200, 9
SMALL_BATCH = 4
# A relative error (Frobenius norm) above this is wrong; rounding to bf16 gives about 0.003.
MAX_ERROR = 0.01
# An estimate for an H200 with 16 cores: 20 s to compile about 12 kernels, 15 s of measurements, and imports.
EXPECTED_SECONDS = 40
METHOD = {
    "time": "device time: replays of CUDA graphs between events, median of interleaved rounds",
    "bytes": "K and V once",
    "check": "first and last sequence and K/V head against fp64, relative Frobenius norm; new memory holds NaN",
    "layers": "kernel intervals of one replay by torch.profiler; a gap is time in which no kernel runs",
    "host": f"median of {HOST_LOOPS} asynchronous loops of {HOST_CALLS} calls, interleaved in shuffled order",
}


@dataclass(frozen=True)
class Settings:
    cells: tuple[tuple[int, int], ...] = CELLS
    variant_cells: tuple[tuple[int, int], ...] = VARIANT_CELLS
    layer_cells: tuple[tuple[int, int], ...] = LAYER_CELLS
    host_cell: tuple[int, int] = HOST_CELL
    sizes: Sizes = field(default_factory=Sizes)
    rounds: int = ROUNDS(5)
    ms: float = MS(10.0)
    seed: int = SEED(0)


def inputs_of(cell: tuple[int, int], settings: Settings, tools: Tools) -> Inputs:
    return Inputs.random(Shape(*cell), settings.sizes, tools.device, settings.seed)


def kernels(settings: Settings, tools: Tools) -> list[LaunchKey]:
    calls: list[TimedCall] = []
    for cell in dict.fromkeys((settings.cells[0], *settings.variant_cells)):
        inputs = inputs_of(cell, settings, tools)
        ours = (decode_cases.library_calls(inputs)[OURS], *decode_cases.variants(inputs, settings.seed).values())
        calls += [TimedCall(call.call, call.context) for call in ours]
    return needed_kernels(calls)


# ---- measurements
# -------------------------------------------------------------------------------------------------------


def checked_output(call: Call) -> Tensor | None:
    """The output of a call in memory that held NaN; None if an element is not finite."""
    with call.context(), nan_in_new_memory(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about operators that are not deterministic
        out = call.call()
    return out if bool(out.isfinite().all()) else None


def error_of(call: Call, sizes: Sizes) -> float | None:
    """The relative error of a sample against fp64; None if an element of the whole output is not finite."""
    out = checked_output(call)
    if out is None:
        return None
    difference = size = 0.0
    places = {(b, h) for b, h in product((0, out.shape[0] - 1), (0, sizes.heads_kv - 1))}
    for sequence, head in sorted(places):
        exact = call.exact(sequence, head)
        found = out[sequence, :, head * sizes.group : (head + 1) * sizes.group].double()
        difference += float((found - exact).square().sum())
        size += float(exact.square().sum())
    error = math.sqrt(difference / size)
    return error if math.isfinite(error) else None


def _timing(samples: Samples, num_bytes: int) -> Record:
    us = 1e3 * samples.median_ms
    return {
        "us": us,
        "tbps": num_bytes / us / 1e6,
        "spread": samples.spread,
        "calls": samples.calls,
        "round_us": [1e3 * ms for ms in samples.round_ms],
    }


def check_and_time(
    made: Mapping[str, Call],
    error: Callable[[Call], float | None],
    bytes_of: Mapping[str, int],
    tools: Tools,
    rounds: int,
    ms: float,
) -> Record:
    """Check all calls, then time them. A call with a wrong result is timed too, and listed as wrong."""
    errors, failures = attempt_each({name: partial(error, call) for name, call in made.items()}, tools.timer)
    timed_calls = {name: TimedCall(made[name].call, made[name].context) for name in errors}
    measured = measure(timed_calls, tools.timer, rounds, ms)
    return {
        "sides": {name: _timing(samples, bytes_of[name]) for name, samples in measured.samples.items()},
        "errors": errors,
        "wrong": [name for name, value in errors.items() if value is None or value > MAX_ERROR],
        "failures": failures | measured.errors,
    }


def measure_calls(shape: Shape, made: Mapping[str, Call], settings: Settings, tools: Tools) -> Record:
    """The result of a cell."""
    sizes = settings.sizes
    bytes_of = {name: shape.kv_bytes(sizes, 1 if name == decode_cases.FP8_CACHE else 2) for name in made}
    error = partial(error_of, sizes=sizes)
    return {
        "batch": shape.batch,
        "length": shape.length,
        "bytes": shape.kv_bytes(sizes),
        **check_and_time(made, error, bytes_of, tools, settings.rounds, settings.ms),
    }


@torch.no_grad()
def measure_layers(cell: tuple[int, int], settings: Settings, tools: Tools) -> Record:
    """Replay a CUDA graph of one call per layer, and measure the gaps between kernels. Needs a GPU."""
    calls = [decode_cases.library_calls(inputs_of(cell, settings, tools))[OURS].call for _ in range(NUM_LAYERS)]
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):
        calls[0]()
        with torch.cuda.graph(graph, stream=stream):
            for call in calls:
                call()
        graph.replay()
        events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
        events[0].record()
        for _ in range(settings.rounds):
            graph.replay()
        events[1].record()
        stream.synchronize()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            graph.replay()
            stream.synchronize()
    kernels = [x.time_range for x in profile.events() if x.device_type == torch.autograd.DeviceType.CUDA]
    return {
        "batch": cell[0],
        "length": cell[1],
        "layers": NUM_LAYERS,
        "graph_us": 1e3 * events[0].elapsed_time(events[1]) / settings.rounds,
        "kernels": len(kernels),
        **gaps_of([(kernel.start, kernel.end) for kernel in kernels]),
    }


def gaps_of(intervals: Sequence[tuple[float, float]]) -> Record:
    """The time from the first start to the last end, and the time in which no kernel runs, in us."""
    if not intervals:
        return {"span_us": None, "idle_us": None, "largest_gap_us": None}
    ordered = sorted(intervals)
    latest, gaps = ordered[0][1], [0.0]
    for start, end in ordered[1:]:
        gaps.append(max(0.0, start - latest))
        latest = max(latest, end)
    return {"span_us": latest - ordered[0][0], "idle_us": sum(gaps), "largest_gap_us": max(gaps)}


@torch.no_grad()
def measure_host(settings: Settings, tools: Tools) -> Record:
    """Host time of a call: plain, with append and rotary embedding, and of the peers."""
    inputs, names = inputs_of(settings.host_cell, settings, tools), _available()
    made = {name: call for name, call in decode_cases.library_calls(inputs).items() if name in names}
    made[APPENDED] = decode_cases.variants(inputs, settings.seed)[decode_cases.APPEND]
    return time_host(made, settings.seed, tools)


def time_host(made: Mapping[str, Call], seed: int, tools: Tools) -> Record:
    """Host time of calls by name, and the failures of others."""
    timed_calls = {("decode", name): TimedCall(call.call, call.context) for name, call in made.items()}
    times = host_times(timed_calls, tools.events, tools.clock, HOST_CALLS, HOST_LOOPS, random.Random(seed))
    return {
        "us": {name: us for (_, name), us in times.us.items()},
        "failures": {name: error for (_, name), error in times.errors.items()},
    }


def _available() -> list[str]:
    unavailable = decode_cases.unavailable()
    return [name for name in (OURS, *PEERS) if name not in unavailable]


@torch.no_grad()
def measure_cell(cell: tuple[int, int], settings: Settings, tools: Tools) -> Record:
    """cute_flash and its peers."""
    made = decode_cases.library_calls(inputs_of(cell, settings, tools))
    return measure_calls(Shape(*cell), {name: made[name] for name in _available()}, settings, tools)


@torch.no_grad()
def measure_variants(cell: tuple[int, int], settings: Settings, tools: Tools) -> Record:
    made = decode_cases.variants(inputs_of(cell, settings, tools), settings.seed)
    return measure_calls(Shape(*cell), made, settings, tools)


def steps(settings: Settings, tools: Tools) -> list[Step]:
    cells = {"cells": settings.cells, "variants": settings.variant_cells, "layers": settings.layer_cells}
    measures = {"cells": measure_cell, "variants": measure_variants, "layers": measure_layers}
    titles = {"cells": "", "variants": "variants ", "layers": f"{NUM_LAYERS} layers "}
    found = [
        Step(part, f"{titles[part]}{Shape(*cell).id}", partial(measures[part], cell, settings, tools))
        for part in cells
        if part != "layers" or tools.device.type == "cuda"
        for cell in cells[part]
    ]
    return [*found, Step("host", "host", partial(measure_host, settings, tools))]


# ---- report
# -------------------------------------------------------------------------------------------------------


def best_peer(cell: Record) -> str | None:
    """The fastest peer with a correct result."""
    names = [name for name in PEERS if name in cell["sides"] and name not in cell["wrong"]]
    return min(names, key=lambda name: cell["sides"][name]["us"], default=None)


def over_best(cell: Record) -> float | None:
    """The time of the best peer over that of cute_flash."""
    best = best_peer(cell)
    if best is None or OURS not in cell["sides"]:
        return None
    return cell["sides"][best]["us"] / cell["sides"][OURS]["us"]


def ratios(record: Record, max_batch: int | None = None) -> list[float]:
    """`over_best` of all cells up to a batch."""
    cells = [cell for cell in record["cells"] if max_batch is None or cell["batch"] <= max_batch]
    return [ratio for ratio in map(over_best, cells) if ratio is not None]


def over_plain(cell: Record, variant: str) -> float | None:
    """The speed of a variant over that of the plain call: plain time / its time."""
    sides = cell["sides"]
    return sides[PLAIN]["us"] / sides[variant]["us"] if PLAIN in sides and variant in sides else None


def cell_table(record: Record) -> Table:
    rows = []
    for cell in record["cells"]:
        texts = []
        for name in (OURS, *PEERS):
            side = cell["sides"].get(name)
            mark = " wrong" if name in cell["wrong"] else ""
            texts.append("-" if side is None else f"{side['us']:.1f}, {side['tbps']:.2f}{mark}")
        rows.append((str(cell["batch"]), str(cell["length"]), *texts, number(over_best(cell), ".2f")))
    columns = ("B", "K/V length", *(f"{name}: µs, TB/s" for name in (OURS, *PEERS)), "over the best peer")
    return Table("Decoding, one token", columns, tuple(rows))


def mean_table(record: Record) -> Table:
    parts = {f"B ≤ {SMALL_BATCH}": ratios(record, SMALL_BATCH), "all": ratios(record)}
    rows = []
    for name, values in parts.items():
        lowest = number(min(values, default=None), ".2f")
        rows.append((name, str(len(values)), number(geometric_mean(values), ".2f"), lowest))
    return Table("Speed over the best peer", ("cells", "number", "geometric mean", "lowest"), tuple(rows))


def variant_table(record: Record) -> Table:
    rows = []
    for name, description in VARIANTS.items():
        texts = []
        for cell in record["variants"]:
            us, ratio = cell["sides"].get(name, {}).get("us"), over_plain(cell, name)
            mark = " wrong" if name in cell["wrong"] else ""
            texts.append("-" if us is None else f"{us:.1f} ({number(ratio, '.2f')}){mark}")
        rows.append((description, *texts))
    columns = [f"B = {cell['batch']}, {cell['length']} keys" for cell in record["variants"]]
    return Table("Variants: µs (speed over the plain call)", ("call", *columns), tuple(rows))


def layer_table(record: Record) -> Table:
    rows = []
    for cell in record["layers"]:
        place = str(cell["batch"]), str(cell["length"]), str(cell["kernels"])
        rows.append(
            (
                *place,
                *(number(cell[f"{name}_us"], ".1f") for name in ("graph", "span", "idle")),
                number(cell["largest_gap_us"], ".2f"),
            )
        )
    columns = ("B", "K/V length", "kernels", "replay, µs", "first start to last end, µs", "no kernel runs, µs")
    return Table(f"CUDA graph of {NUM_LAYERS} layers", (*columns, "largest gap, µs"), tuple(rows))


def host_table(record: Record) -> Table:
    rows = tuple((name, f"{us:.1f}") for name, us in record["host"]["us"].items())
    return Table("Host time of a warm call", ("call", "µs"), rows)


def tables(record: Record) -> list[Table]:
    return [cell_table(record), mean_table(record), variant_table(record), layer_table(record), host_table(record)]


def _title(cell: Record) -> str:
    return Shape(cell["batch"], cell["length"]).id


def failures_of(cells: Sequence[Record], title: Callable[[Record], str], host: Record) -> list[CellFailure]:
    """The calls of cells that failed, those with wrong results, and those that failed in `measure_host`."""
    wrong = [(cell, name, cell["errors"][name]) for cell in cells for name in cell["wrong"]]
    return [
        *failures_in(cells, title),
        *(
            CellFailure(title(cell), name, "not finite" if error is None else f"error {error:.1e}")
            for cell, name, error in wrong
        ),
        *failures_in([host], lambda _: "host"),
    ]


def failures(record: Record) -> list[CellFailure]:
    return failures_of([*record["cells"], *record["variants"]], _title, record["host"])


STUDY = Study(
    name="decode",
    help=f"attn_decode beside other libraries; about {EXPECTED_SECONDS} s on an H200",
    examples=("--out decode.json", "--rounds 3 --ms 5"),
    settings=Settings,
    kernels=kernels,
    method=METHOD,
    parts=lambda settings, tools: {
        "unavailable": decode_cases.unavailable(),
        "cells": [],
        "variants": [],
        "layers": [],
        "host": {"us": {}, "failures": {}},
    },
    steps=steps,
    tables=tables,
    failures=failures,
    ours=(OURS, APPENDED, *VARIANTS),
)
