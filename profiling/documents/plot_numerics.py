"""Figures of the numerics study."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from profiling.documents.plot_style import (
    BLUE,
    GREEN,
    GREY,
    LOOKS,
    ORANGE,
    PURPLE,
    TEAL,
    Look,
    add_legend,
    entry,
    length,
    new_figure,
    set_ticks,
)
from profiling.documents.sources import commit_of
from profiling.studies.numerics import CPU_DTYPES, DISTRIBUTIONS, UNFUSED, WAYS
from profiling.studies.numerics_report import pick

WAY_LOOKS = {
    name: Look(name, marker, colour)
    for name, marker, colour in zip((*WAYS, UNFUSED), "osD^v", (BLUE, ORANGE, PURPLE, GREEN, GREY), strict=True)
}
DTYPE_LOOKS = {
    name: Look(name, marker, colour)
    for name, marker, colour in zip(CPU_DTYPES, "osD", (BLUE, ORANGE, GREEN), strict=True)
}
DTYPE_LINES: dict[str, Any] = {"bf16": "-", "fp16": "--", "fp32": ":"}
PEER_LOOKS = {**LOOKS, "sdpa-math": Look("SDPA math, unfused", "X", TEAL)}


def _axis(axes: Axes, title: str, label: str, values: Sequence[float]) -> None:
    axes.set(title=title, xlabel=label)
    if values[0] > 0:
        axes.set_xscale("log", base=2)
    else:
        axes.set_xscale("symlog", base=2, linthresh=1)
    set_ticks(axes.xaxis, values, length)
    axes.tick_params(axis="x", labelsize="small")


def _curve(axes: Axes, found: Sequence[dict[str, Any]], axis: str, look: Look, line: str = "-") -> None:
    points = sorted((one[axis], one["relative"]) for one in found if one["relative"])
    if points:
        axes.plot(*zip(*points), marker=look.marker, color=look.colour, linestyle=line, label=look.label)


def _caption(record: dict[str, Any], text: str) -> str:
    machine = record["machine"]
    return f"{machine.get('gpu') or 'CPU'}, commit {commit_of(machine)}; ‖out − exact‖ / ‖exact‖ against fp64; {text}"


def _add_legend(figure: Figure, title: str, looks: Sequence[Look], lines: Sequence[tuple[str, Any]] = ()) -> None:
    entries = [entry(look.label, marker=look.marker, color=look.colour) for look in looks]
    add_legend(figure, title, [*entries, *(entry(label, color=GREY, linestyle=style) for label, style in lines)])


def accumulation(record: dict[str, Any], title: str = "Error of the online softmax in fp32") -> Figure:
    """Error by length, by tile width and by number of rescales, a curve for each way to accumulate."""
    sizes = record["settings"]
    setting = f"normal inputs in fp32, {sizes['rows']} rows, {sizes['heads']} heads, D {sizes['head_dim']}"
    figure = new_figure(3.6, _caption(record, setting))
    # Study, title, label, and the field along x.
    panels = (
        ("length", f"Length, K/V blocks of {sizes['block']} keys", "keys", "seqlen"),
        ("tile", f"Tile width, {length(sizes['seqlen'])} keys", "keys of a K/V block", "block"),
        ("rescales", f"Rescales, blocks of {sizes['rescale_block']} keys", "rescales of a row", "rescales"),
    )
    for axes, (study, name, label, axis) in zip(figure.subplots(1, 3, sharey=True), panels, strict=True):
        found = pick(record["records"], study=study, distribution="normal")
        for way, look in WAY_LOOKS.items():
            _curve(axes, pick(found, way=way), axis, look)
        values = sorted({one[axis] for one in found if one[axis] is not None})
        _axis(axes, name, label, values[::2] if len(values) > 6 else values)
    figure.axes[0].set_ylim(0)
    figure.axes[0].set_ylabel("relative error")
    _add_legend(figure, title, list(WAY_LOOKS.values()))
    return figure


def dtypes(record: dict[str, Any], title: str = "Error of the CPU path by dtype and distribution") -> Figure:
    """The CPU path by length, a panel for each distribution and a curve for each dtype."""
    sizes = record["settings"]
    setting = f"`attn` on the CPU, {sizes['rows']} rows, {sizes['heads']} heads, D {sizes['head_dim']}"
    figure = new_figure(3.4, _caption(record, setting))
    for axes, distribution in zip(figure.subplots(1, len(DISTRIBUTIONS), sharey=True), DISTRIBUTIONS, strict=True):
        found = pick(record["records"], study="dtype", distribution=distribution)
        for name, look in DTYPE_LOOKS.items():
            _curve(axes, pick(found, way=name), "seqlen", look)
        _axis(axes, distribution, "keys", sorted({one["seqlen"] for one in found})[::2])
    figure.axes[0].set(yscale="log", ylabel="relative error")
    _add_legend(figure, title, list(DTYPE_LOOKS.values()))
    return figure


def gpu(record: dict[str, Any], title: str = "Error of GPU kernels by dtype and distribution") -> Figure:
    """The GPU kernels by length: a panel for each distribution, a colour for each peer, a line for each dtype."""
    settings = record["settings"]
    setting = f"forward, full, H {settings['heads']}, D {settings['head_dim']}"
    figure = new_figure(3.8, _caption(record, setting))
    found = pick(record["records"], output="out")
    peers = [name for name in PEER_LOOKS if pick(found, provider=name)]
    for axes, distribution in zip(figure.subplots(1, len(DISTRIBUTIONS), sharey=True), DISTRIBUTIONS, strict=True):
        for peer in peers:
            for dtype, line in DTYPE_LINES.items():
                curve = pick(found, provider=peer, dtype=dtype, distribution=distribution)
                _curve(axes, curve, "seqlen", PEER_LOOKS[peer], line)
        _axis(axes, distribution, "keys", sorted({one["seqlen"] for one in found}))
    figure.axes[0].set(yscale="log", ylabel="relative error")
    _add_legend(figure, title, [PEER_LOOKS[name] for name in peers], list(DTYPE_LINES.items()))
    return figure
