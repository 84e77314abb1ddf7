"""`python -m profiling plots`: the figures of the documents, from checked-in files.

matplotlib is imported when a figure is drawn: the other commands do not need it.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from profiling.machine import ROOT
from profiling.record import Run, load

if TYPE_CHECKING:
    from matplotlib.figure import Figure as Drawing

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


def _overview() -> Drawing:
    from profiling import plot_speed

    runs = {"Forward": _run(FORWARD), "Backward (dq, dk, dv)": _run(BACKWARD)}
    return plot_speed.overview(runs, "Attention on an H200, with our speed over the best peer")


def _speed_forward() -> Drawing:
    from profiling import plot_speed

    return plot_speed.speed(_run(FORWARD), "Forward: TFLOP/s against sequence length")


def _speed_backward() -> Drawing:
    from profiling import plot_speed

    return plot_speed.speed(_run(BACKWARD), "Backward (dq, dk, dv): TFLOP/s against sequence length")


def _roofline() -> Drawing:
    from profiling.plot_speed import Kernel, roofline
    from profiling.plot_style import BLUE, GREEN, ORANGE

    kernels = (
        Kernel("forward, sm90", _run(FORWARD), "o", BLUE),
        Kernel("backward, sm90", _run(BACKWARD), "D", ORANGE),
        Kernel("forward, sm80 kernel on this GPU", _run(FORWARD_SM80), "s", GREEN),
    )
    return roofline(kernels, "The kernels under the roofline of an H200")


def _conflicts() -> Drawing:
    from profiling import plot_counters

    record = json.loads((DATA / COUNTERS).read_text(encoding="utf-8"))
    return plot_counters.conflicts(record, "Shared memory by layout: wavefronts, bank conflicts, time")


def _hbm_bytes() -> Drawing:
    from profiling import plot_counters

    record = json.loads((DATA / COUNTERS).read_text(encoding="utf-8"))
    return plot_counters.hbm_bytes(record, "HBM traffic of one launch")


@dataclass(frozen=True)
class Figure:
    sources: tuple[str, ...]  # in profiling/
    draw: Callable[[], Drawing]

    @property
    def missing(self) -> list[str]:
        return [source for source in self.sources if not (DATA / source).exists()]

    def svg(self) -> str:
        from profiling.plot_style import style, svg

        with style():
            return svg(self.draw())


FIGURES = {
    "overview.svg": Figure((FORWARD, BACKWARD), _overview),
    "forward.svg": Figure((FORWARD,), _speed_forward),
    "backward.svg": Figure((BACKWARD,), _speed_backward),
    "roofline.svg": Figure((FORWARD, BACKWARD, FORWARD_SM80), _roofline),
    "conflicts.svg": Figure((COUNTERS,), _conflicts),
    "hbm.svg": Figure((COUNTERS,), _hbm_bytes),
}


def write(folder: Path = FOLDER) -> dict[str, list[str]]:
    """Write the figures, and return the missing files of those that cannot be drawn."""
    folder.mkdir(parents=True, exist_ok=True)
    missing = {}
    for name, figure in FIGURES.items():
        if figure.missing:
            missing[name] = figure.missing
        else:
            (folder / name).write_text(figure.svg(), encoding="utf-8")
    return missing
