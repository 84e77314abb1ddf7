"""The figures of the documents, from checked-in files and from models."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from profiling.documents import (
    plot_concepts,
    plot_counters,
    plot_cp,
    plot_ladder,
    plot_numerics,
    plot_speed,
    plot_standard,
    sources,
)
from profiling.documents.plot_style import style, svg
from profiling.documents.sources import Recipe
from profiling.measure.machine import PLOTS

FIGURES = {
    "summary.svg": Recipe(plot_speed.summary, (sources.FORWARD, sources.BACKWARD)),
    "forward.svg": Recipe(partial(plot_speed.speed, title="Forward"), (sources.FORWARD,)),
    "backward.svg": Recipe(partial(plot_speed.speed, title="Backward (dq, dk, dv)"), (sources.BACKWARD,)),
    "roofline.svg": Recipe(plot_speed.roofline, (sources.FORWARD, sources.BACKWARD, sources.FORWARD_SM80)),
    "conflicts.svg": Recipe(plot_counters.conflicts, (sources.COUNTERS,)),
    "hbm.svg": Recipe(plot_counters.hbm_bytes, (sources.COUNTERS,)),
    "standard.svg": Recipe(plot_standard.standard, (sources.STANDARD,)),
    "numerics-accumulation.svg": Recipe(plot_numerics.accumulation, (sources.NUMERICS_CPU,)),
    "numerics-dtypes.svg": Recipe(plot_numerics.dtypes, (sources.NUMERICS_CPU,)),
    "numerics-gpu.svg": Recipe(plot_numerics.gpu, (sources.NUMERICS_GPU,)),
    "ladder.svg": Recipe(plot_ladder.speeds, (sources.LADDER,)),
    "tiling.svg": Recipe(plot_concepts.tiling),
    "online-softmax.svg": Recipe(plot_concepts.online_softmax),
    "ridge.svg": Recipe(plot_concepts.ridge),
    "overlap.svg": Recipe(plot_concepts.overlap),
    "banks.svg": Recipe(plot_concepts.banks),
    "recompute.svg": Recipe(plot_concepts.recompute),
    "mla-row.svg": Recipe(plot_concepts.latent_row),
    "context-parallel.svg": Recipe(plot_cp.efficiency),
}


def draw(name: str) -> str:
    """The text of a figure's file."""
    with style():
        return svg(FIGURES[name].make())


def write(folder: Path = PLOTS) -> dict[str, str]:
    """Write the figures, and return the missing file of each that cannot be drawn."""
    folder.mkdir(parents=True, exist_ok=True)
    missing = {}
    for name in FIGURES:
        try:
            (folder / name).write_text(draw(name), encoding="utf-8")
        except FileNotFoundError as error:
            missing[name] = str(error)
    return missing
