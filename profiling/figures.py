"""`python -m profiling plots`: the figures of the documents, from checked-in files, reproducible byte for byte."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from profiling import plot_counters, plot_speed
from profiling.machine import ROOT
from profiling.plot_speed import Kernel
from profiling.record import Run, load

FOLDER = ROOT / "profiling" / "plots"
DATA = ROOT / "profiling"
# The runs that are plotted. To plot a newer run, name it here.
FORWARD = "results/h200/2026-11-15-fwd-sm90-paper.json"
FORWARD_SM80 = "results/h200/2026-11-15-fwd-sm80-paper.json"
BACKWARD = "results/h200/2026-11-15-bwd-sm90-paper.json"
BACKWARD_SM80 = "results/h200/2026-11-15-bwd-sm80-paper.json"
COUNTERS = "reports/h200/ncu.json"


@cache
def _run(path: str) -> Run:
    return load(DATA / path)


def _summary() -> str:
    from profiling import plot_summary

    return plot_summary.svg({"Forward, H200": _run(FORWARD), "Backward (dq, dk, dv), H200": _run(BACKWARD)})


def _speed_forward() -> str:
    return plot_speed.speed(_run(FORWARD), "Forward: TFLOP/s against length")


def _speed_backward() -> str:
    return plot_speed.speed(_run(BACKWARD), "Backward (dq, dk, dv): TFLOP/s against length")


def _roofline() -> str:
    kernels = (
        Kernel("forward, sm90", _run(FORWARD), "circle", "blue"),
        Kernel("backward, sm90", _run(BACKWARD), "diamond", "orange"),
        Kernel("forward, sm80 kernel on this GPU", _run(FORWARD_SM80), "square", "green"),
    )
    return plot_speed.roofline(kernels, "Where the kernels stand under the roofline of an H200")


def _conflicts() -> str:
    record = json.loads((DATA / COUNTERS).read_text(encoding="utf-8"))
    return plot_counters.conflicts(record, "Shared memory by layout: wavefronts, bank conflicts, time")


def _hbm_bytes() -> str:
    record = json.loads((DATA / COUNTERS).read_text(encoding="utf-8"))
    return plot_counters.hbm_bytes(record, "HBM traffic of one launch")


@dataclass(frozen=True)
class Figure:
    sources: tuple[str, ...]  # in profiling/
    draw: Callable[[], str]

    @property
    def missing(self) -> list[str]:
        return [source for source in self.sources if not (DATA / source).exists()]


FIGURES = {
    "summary.svg": Figure((FORWARD, BACKWARD), _summary),
    "forward.svg": Figure((FORWARD,), _speed_forward),
    "backward.svg": Figure((BACKWARD,), _speed_backward),
    "roofline.svg": Figure((FORWARD, BACKWARD, FORWARD_SM80), _roofline),
    "conflicts.svg": Figure((COUNTERS,), _conflicts),
    "hbm.svg": Figure((COUNTERS,), _hbm_bytes),
}


def write(folder: Path = FOLDER) -> dict[str, list[str]]:
    """Write the figures; returns the missing files of those that cannot be drawn."""
    folder.mkdir(parents=True, exist_ok=True)
    missing = {}
    for name, figure in FIGURES.items():
        if figure.missing:
            missing[name] = figure.missing
        else:
            (folder / name).write_text(figure.draw(), encoding="utf-8")
    return missing
