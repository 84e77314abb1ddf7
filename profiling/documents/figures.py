"""`python -m profiling plots`: the figures of the documents, from checked-in files.

matplotlib is imported when a figure is drawn: the other commands do not need it.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from profiling.measure.machine import PLOTS, ROOT
from profiling.measure.record import Run, load

if TYPE_CHECKING:
    from matplotlib.figure import Figure

DATA = ROOT / "profiling"
RESULTS = "results/h200"


def newest(name: str, folder: str = RESULTS) -> str:
    """The newest run of this name, as a path from DATA: <folder>/<date>-<name>.json."""
    dated = "[0-9]" * 4 + "-[0-9][0-9]" * 2
    found = sorted((DATA / folder).glob(f"{dated}-{name}.json"))
    if not found:
        raise FileNotFoundError(f"{DATA / folder}: no run {name}")
    return found[-1].relative_to(DATA).as_posix()


# The runs that are plotted: those of `python -m profiling all`.
FORWARD, FORWARD_SM80 = newest("fwd-sm90-paper"), newest("fwd-sm80-paper")
BACKWARD, BACKWARD_SM80 = newest("bwd-sm90-paper"), newest("bwd-sm80-paper")
# The same with (B, H, S, D) memory; the runs above have (B, S, H, D) memory.
BACKWARD_SM80_BHSD = newest("bwd-sm80-paper-bhsd")
COUNTERS = "reports/h200/ncu.json"
BY_INSTRUCTION = "results/h200/2026-11-18-bwd-by-instruction.txt"
STANDARD, NUMERICS_GPU = newest("standard"), newest("numerics")
NUMERICS_CPU = newest("numerics", "results/cpu")


@cache
def _run(path: str) -> Run:
    return load(DATA / path)


# Figure -> the files that it is drawn from.
FIGURES: dict[str, tuple[str, ...]] = {
    "summary.svg": (FORWARD, BACKWARD),
    "forward.svg": (FORWARD,),
    "backward.svg": (BACKWARD,),
    "roofline.svg": (FORWARD, BACKWARD, FORWARD_SM80),
    "conflicts.svg": (COUNTERS,),
    "hbm.svg": (COUNTERS,),
    "standard.svg": (STANDARD,),
    "numerics-accumulation.svg": (NUMERICS_CPU,),
    "numerics-dtypes.svg": (NUMERICS_CPU,),
    "numerics-gpu.svg": (NUMERICS_GPU,),
    # Figures of models, which read no file.
    "tiling.svg": (),
    "online-softmax.svg": (),
    "ridge.svg": (),
    "overlap.svg": (),
    "banks.svg": (),
    "recompute.svg": (),
    "context-parallel.svg": (),
}


def missing(name: str) -> list[str]:
    """The missing files of a figure."""
    return [source for source in FIGURES[name] if not (DATA / source).exists()]


def _drawing(name: str) -> Figure:
    from profiling.documents import plot_concepts, plot_counters, plot_cp, plot_numerics, plot_speed, plot_standard
    from profiling.documents.plot_speed import Kernel
    from profiling.documents.plot_style import BLUE, GREEN, ORANGE

    if not FIGURES[name]:
        return {**plot_concepts.DRAWINGS, **plot_cp.DRAWINGS}[name]()
    if name == "summary.svg":
        return plot_speed.summary({"Forward, H200": _run(FORWARD), "Backward (dq, dk, dv), H200": _run(BACKWARD)})
    if name == "forward.svg":
        return plot_speed.speed(_run(FORWARD), "Forward: TFLOP/s against sequence length")
    if name == "backward.svg":
        return plot_speed.speed(_run(BACKWARD), "Backward (dq, dk, dv): TFLOP/s against sequence length")
    if name == "roofline.svg":
        kernels = (
            Kernel("forward, sm90", _run(FORWARD), "o", BLUE),
            Kernel("backward, sm90", _run(BACKWARD), "D", ORANGE),
            Kernel("forward, sm80 kernel on this GPU", _run(FORWARD_SM80), "s", GREEN),
        )
        return plot_speed.roofline(kernels, "The kernels under the roofline of an H200")
    studies: dict[str, tuple[Callable[[dict[str, Any], str], Figure], str]] = {
        "standard.svg": (plot_standard.standard, "Standard attention over cute_flash"),
        "numerics-accumulation.svg": (plot_numerics.accumulation, "Error of the online softmax in fp32"),
        "numerics-dtypes.svg": (plot_numerics.dtypes, "Error of the CPU path by dtype and distribution"),
        "numerics-gpu.svg": (plot_numerics.gpu, "Error of GPU kernels by dtype and distribution"),
    }
    if name in studies:
        draw_study, title = studies[name]
        (source,) = FIGURES[name]
        return draw_study(json.loads((DATA / source).read_text(encoding="utf-8")), title)
    record = json.loads((DATA / COUNTERS).read_text(encoding="utf-8"))
    if name == "conflicts.svg":
        return plot_counters.conflicts(record, "Shared memory by layout: wavefronts, bank conflicts, time")
    return plot_counters.hbm_bytes(record, "HBM traffic of one launch")


def draw(name: str) -> str:
    """The text of a figure's file."""
    from profiling.documents.plot_style import style, svg

    with style():
        return svg(_drawing(name))


def write(folder: Path = PLOTS) -> dict[str, list[str]]:
    """Write the figures, and return the missing files of those that cannot be drawn."""
    folder.mkdir(parents=True, exist_ok=True)
    lacking = {name: missing(name) for name in FIGURES if missing(name)}
    for name in FIGURES.keys() - lacking.keys():
        (folder / name).write_text(draw(name), encoding="utf-8")
    return lacking
