"""fp32 attention beside torch's: device time of forward and backward, and errors against fp64.

Speed: `SUITE`, each peer in CUDA graphs, interleaved. Accuracy: one batch of `HEADS` heads, for three distributions of
q, k and v. TF32 is off, so `sdpa-math` computes fp32 products; `sdpa-efficient` computes them by three TF32 MMAs, and
cute_flash by three fp16 MMAs. `sdpa-math` stores all scores; above `MATH_LENGTH` it is left out.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend

from cute_flash import reference
from cute_flash.planning.launch import LaunchKey
from cute_flash.spec.band import Band
from profiling.bench.suites import Suite
from profiling.measure.accuracy import errors_of
from profiling.measure.launches import needed_kernels
from profiling.measure.options import MS, ROUNDS, SEED, option
from profiling.measure.shapes import MASKS, Shape
from profiling.measure.study import CellFailure, Record, Step, Study, Tools, failures_in
from profiling.measure.tables import Table, geometric_mean, number
from profiling.measure.timing import attempt_each, measure
from profiling.peers.cute_flash import our_peer
from profiling.peers.directions import calls_of, timed_call
from profiling.peers.peer import Peer
from profiling.peers.sdpa import sdpa_peer

OURS, EFFICIENT, MATH = "cute_flash", "sdpa-efficient", "sdpa-math"
SUITE = Suite(16384, 2048, (1024, 2048, 4096, 8192, 16384), (64, 128))
MATH_LENGTH = 4096
ERROR_LENGTHS, HEADS = (1024, 4096), 2
DIRECTIONS = ("fwd", "bwd")
OUTPUTS = ("out", "dq", "dk", "dv")
DISTRIBUTIONS = ("normal", "3 sigma", "outliers")
OUTLIER_FACTOR, OUTLIER_RATE = 30.0, 0.001
# An error is too large above MAX_TIMES times that of `sdpa-math`, plus SLACK times the largest exact element.
MAX_TIMES, SLACK = 2.0, 1e-6
METHOD = {
    "time": "device time: replays of CUDA graphs between events, median of interleaved rounds",
    "flops": "4 B H S^2 D, halved when causal; backward 2.5 times as many",
    "accuracy": f"against fp64; B = 1, H = {HEADS}; max: largest element, relative: Frobenius norm",
    "outliers": f"N(0, 1), each element multiplied by {OUTLIER_FACTOR:.0f} with probability {OUTLIER_RATE}",
    "float32_matmul_precision": "highest",
}


@dataclass(frozen=True)
class Settings:
    head_dims: tuple[int, ...] = option(SUITE.head_dims)
    masks: tuple[str, ...] = option(MASKS, choices=MASKS)
    lengths: tuple[int, ...] = option(SUITE.lengths)
    rounds: int = ROUNDS(4)
    ms: float = MS(15.0)
    seed: int = SEED(0)

    def shapes(self) -> list[Shape]:
        """Cells by length, so that short ones are complete if time is limited."""
        shapes = SUITE.narrowed(self.lengths, self.head_dims, self.masks).shapes()
        return sorted(shapes, key=lambda shape: shape.seqlen)

    def error_shapes(self) -> list[Shape]:
        lengths = [length for length in ERROR_LENGTHS if length <= max(self.lengths)] or [min(self.lengths)]
        return [
            Shape(1, HEADS, HEADS, length, head_dim, mask == "causal")
            for head_dim in self.head_dims
            for length in lengths
            for mask in self.masks
        ]


def peers() -> list[Peer]:
    return [our_peer(OURS), sdpa_peer(EFFICIENT, SDPBackend.EFFICIENT_ATTENTION), sdpa_peer(MATH, SDPBackend.MATH)]


def kernels(settings: Settings, tools: Tools) -> list[LaunchKey]:
    shapes = [*settings.error_shapes(), *settings.shapes()]
    return needed_kernels(calls_of(peers(), shapes, DIRECTIONS, torch.float32, tools.device))


@contextmanager
def exact_products() -> Iterator[None]:
    """Without TF32 in torch's matrix products."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(METHOD["float32_matmul_precision"])
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def random_inputs(shape: Shape, device: torch.device, seed: int, distribution: str = "normal") -> list[Tensor]:
    """q, k, v, and dout, which is normal."""
    generator = torch.Generator(device).manual_seed(seed)
    size = (shape.batch, shape.heads, shape.seqlen, shape.head_dim)
    *inputs, dout = (torch.randn(size, generator=generator, device=device) for _ in range(4))
    if distribution == "3 sigma":
        inputs = [3 * x for x in inputs]
    if distribution == "outliers":
        hits = [torch.rand(size, generator=generator, device=device) < OUTLIER_RATE for _ in inputs]
        inputs = [torch.where(hit, OUTLIER_FACTOR * x, x) for hit, x in zip(hits, inputs)]
    return [*inputs, dout]


# ---- accuracy
# -------------------------------------------------------------------------------------------------------


def exact_results(inputs: Sequence[Tensor], causal: bool) -> list[Tensor]:
    """out, dq, dk and dv in fp64."""
    *leaves, dout = (x.double() for x in inputs)
    leaves = [x.requires_grad_() for x in leaves]
    with torch.enable_grad():
        out, _ = reference.dense(leaves[0], leaves[1], leaves[2], Band.of(causal, (None, None)))
    return [out.detach(), *torch.autograd.grad(out, leaves, dout)]


def results_of(peer: Peer, inputs: Sequence[Tensor], causal: bool) -> list[Tensor]:
    q, k, v, dout = inputs
    with peer.context():
        out = peer.prepare(q, k, v, causal)()
        return [out, *peer.prepare_backward(q, k, v, dout, causal)()]


def errors(results: Sequence[Tensor], exact: Sequence[Tensor]) -> Record:
    """Output -> its largest error and its relative error; None if that is not finite."""
    found = {name: errors_of(x, y) for name, x, y in zip(OUTPUTS, results, exact, strict=True)}
    return {name: {"max": one.max_abs, "relative": one.relative} for name, one in found.items()}


@torch.no_grad()
def measure_errors(shape: Shape, settings: Settings, tools: Tools) -> list[Record]:
    """The errors of all peers, for each distribution of the inputs."""
    cells = []
    for distribution in DISTRIBUTIONS:
        inputs = random_inputs(shape, tools.device, settings.seed, distribution)
        exact = exact_results(inputs, shape.causal)
        calls = {peer.name: partial(results_of, peer, inputs, shape.causal) for peer in peers()}
        results, failures = attempt_each(calls, tools.timer)
        cells.append(
            {
                "shape": asdict(shape),
                "distribution": distribution,
                "largest": {name: float(x.abs().max()) for name, x in zip(OUTPUTS, exact, strict=True)},
                "errors": {name: errors(one, exact) for name, one in results.items()},
                "failures": failures,
            }
        )
    return cells


def wrong_results(cell: Record) -> list[str]:
    """The outputs of cute_flash that are not as accurate as those of `sdpa-math`."""
    ours, theirs = (cell["errors"].get(name, {}) for name in (OURS, MATH))
    wrong = []
    for name, error in ours.items():
        if error["max"] is None:
            wrong.append(name)
        elif name in theirs and theirs[name]["max"] is not None:
            if error["max"] > MAX_TIMES * theirs[name]["max"] + SLACK * cell["largest"][name]:
                wrong.append(name)
    return wrong


# ---- speed
# -------------------------------------------------------------------------------------------------------


@torch.no_grad()
def measure_speed(shape: Shape, direction: str, settings: Settings, tools: Tools) -> Record:
    inputs = tuple(random_inputs(shape, tools.device, settings.seed))[: 3 if direction == "fwd" else 4]
    makes = {
        peer.name: partial(timed_call, peer, direction, inputs, shape.causal, tools.timer)
        for peer in peers()
        if peer.name != MATH or shape.seqlen <= MATH_LENGTH
    }
    timed_calls, failures = attempt_each(makes, tools.timer)
    measured = measure(timed_calls, tools.timer, settings.rounds, settings.ms)
    # The scores of `sdpa-math`.
    timed_calls.clear()
    tools.release()
    flops = shape.flops(direction)
    return {
        "direction": direction,
        "shape": asdict(shape),
        "flops": flops,
        "sides": {name: samples.with_tflops(flops) for name, samples in measured.samples.items()},
        "failures": failures | measured.errors,
    }


def steps(settings: Settings, tools: Tools) -> list[Step]:
    """Accuracy, then speed."""
    accuracy = [
        Step("accuracy", f"accuracy {shape.id}", partial(measure_errors, shape, settings, tools))
        for shape in settings.error_shapes()
    ]
    return accuracy + [
        Step("cells", f"{direction} {shape.id}", partial(measure_speed, shape, direction, settings, tools))
        for shape in settings.shapes()
        for direction in DIRECTIONS
    ]


# ---- report
# -------------------------------------------------------------------------------------------------------


def ratio(cell: Record, other: str) -> float | None:
    """The time of a peer over that of cute_flash."""
    sides = cell["sides"]
    return sides[other]["ms"] / sides[OURS]["ms"] if OURS in sides and other in sides else None


def ratios(cells: Sequence[Record], other: str, **of_shape: Any) -> list[float]:
    """The ratios of all cells whose direction and shape have these values."""
    found = []
    for cell in cells:
        values = cell["shape"] | {"direction": cell["direction"]}
        if all(values[name] == value for name, value in of_shape.items()):
            found.append(ratio(cell, other))
    return [x for x in found if x is not None]


def _speed_table(record: Record, direction: str) -> Table:
    rows = []
    for cell in record["cells"]:
        if cell["direction"] != direction:
            continue
        shape = Shape(**cell["shape"])
        speeds = [cell["sides"].get(name, {}).get("tflops") for name in (OURS, EFFICIENT, MATH)]
        over = [ratio(cell, name) for name in (EFFICIENT, MATH)]
        numbers = [*(number(x, ".1f") for x in speeds), *(number(x, ".2f") for x in over)]
        rows.append((f"D={shape.head_dim} {shape.mask}", str(shape.seqlen), *numbers))
    rows.sort(key=lambda row: (row[0].startswith("D=128"), row[0], int(row[1])))
    names = (f"{OURS}, TFLOP/s", EFFICIENT, MATH, f"over {EFFICIENT}", f"over {MATH}")
    return Table(f"{direction} fp32", ("head dim, mask", "S", *names), tuple(rows))


def summary_table(record: Record) -> Table:
    """Geometric means of the speed over each peer, and the lowest ratio."""
    rows = []
    for direction, label in zip(DIRECTIONS, ("forward", "backward")):
        for other in (EFFICIENT, MATH):
            every = ratios(record["cells"], other, direction=direction)
            parts = [
                ratios(record["cells"], other, direction=direction, head_dim=d, causal=causal)
                for d in SUITE.head_dims
                for causal in (False, True)
            ]
            lowest = min(every) if every else None
            means = [number(geometric_mean(x), ".2f") for x in (every, *parts)]
            rows.append((f"{label}, over {other}", str(len(every)), means[0], number(lowest, ".2f"), *means[1:]))
    places = [f"D = {d} {mask}" for d in SUITE.head_dims for mask in MASKS]
    return Table("Geometric means", ("fp32", "cells", "mean", "lowest", *places), tuple(rows))


def worst_errors(record: Record, distribution: str, output: str, norm: str) -> dict[str, float]:
    """Peer -> its largest error over all shapes."""
    worst: dict[str, float] = {}
    for cell in record["accuracy"]:
        for name, found in cell["errors"].items():
            error = found[output][norm]
            if cell["distribution"] == distribution:
                worst[name] = max(worst.get(name, 0.0), math.inf if error is None else error)
    return worst


def accuracy_table(record: Record) -> Table:
    rows = []
    for distribution in DISTRIBUTIONS:
        for output in OUTPUTS:
            texts = []
            for norm in ("max", "relative"):
                worst = worst_errors(record, distribution, output, norm)
                texts += [number(worst.get(name), ".1e") for name in (OURS, EFFICIENT, MATH)]
            rows.append((f"{distribution}, {output}", *texts))
    names = ("cute_flash", "efficient", "math")
    columns = [*(f"largest, {name}" for name in names), *(f"norm, {name}" for name in names)]
    return Table("Error against fp64, worst of all shapes", ("inputs, result", *columns), tuple(rows))


def tables(record: Record) -> list[Table]:
    speeds = [_speed_table(record, direction) for direction in DIRECTIONS]
    return [*(table for table in speeds if table.rows), summary_table(record), accuracy_table(record)]


def _title(cell: Record) -> str:
    return f"{cell.get('direction', 'accuracy')} {Shape(**cell['shape']).id}"


def failures(record: Record) -> list[CellFailure]:
    wrong = [
        CellFailure(
            f"{_title(cell)}, {cell['distribution']}",
            OURS,
            f"{name}: more than {MAX_TIMES:.0f} times the error of {MATH}",
        )
        for cell in record["accuracy"]
        for name in wrong_results(cell)
    ]
    return failures_in((*record["accuracy"], *record["cells"]), _title) + wrong


STUDY = Study(
    name="fp32",
    help="fp32 beside torch's: device time, errors against fp64",
    examples=("--out fp32.json", "--head-dims 128 --masks causal --lengths 4096"),
    settings=Settings,
    check=Settings.shapes,
    context=lambda settings: exact_products(),
    kernels=kernels,
    method=METHOD,
    parts=lambda settings, tools: {"accuracy": [], "cells": []},
    steps=steps,
    tables=tables,
    failures=failures,
    ours=(OURS,),
)
