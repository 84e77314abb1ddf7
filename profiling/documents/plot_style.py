"""The look of all figures: one colour and marker per peer, text kept as text, a white background on any page.

Files are reproducible: no date, and ids from a fixed salt.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import matplotlib
from matplotlib.artist import Artist
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

INK, DIM, GRID = "#1f2328", "#59636e", "#d8dee4"
BLUE, ORANGE, PURPLE, GREEN, RED = "#0550ae", "#bc4c00", "#8250df", "#1a7f37", "#cf222e"
GREY, PINK, TEAL = "#6e7781", "#bf3989", "#1b7c83"
# Inches. At the width of a README on GitHub a figure is drawn about a quarter larger than its nominal size.
WIDTH = 9.6

STYLE: dict[Any, Any] = {
    "figure.constrained_layout.w_pad": 0.08,
    "figure.constrained_layout.h_pad": 0.08,
    "svg.hashsalt": "cute_flash",
    "svg.fonttype": "none",
    "font.sans-serif": ["DejaVu Sans", "Verdana", "Arial", "sans-serif"],
    "font.size": 9,
    "text.color": INK,
    "axes.edgecolor": GRID,
    "axes.labelcolor": DIM,
    "axes.titlesize": "medium",
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.axisbelow": True,
    "axes.grid": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "grid.color": GRID,
    "grid.linewidth": 0.6,
    "xtick.color": GRID,
    "xtick.labelcolor": DIM,
    "ytick.color": GRID,
    "ytick.labelcolor": DIM,
    "legend.frameon": False,
    "legend.handlelength": 1.6,
    "legend.columnspacing": 1.4,
    "legend.borderpad": 0.0,
    "lines.markersize": 5,
}


class Look(NamedTuple):
    label: str
    marker: str
    colour: str


# The same in every figure. FlashAttention-2 and memory-efficient attention are backends of torch's SDPA.
LOOKS = {
    "cute_flash": Look("cute_flash", "o", BLUE),
    "fa3": Look("FlashAttention-3", "s", ORANGE),
    "fa4": Look("FlashAttention-4", "D", PURPLE),
    "sdpa-cudnn": Look("cuDNN", "^", GREEN),
    "sdpa-flash": Look("FlashAttention-2", "v", RED),
    "sdpa-efficient": Look("memory-efficient", "s", GREY),
    "flash_attn": Look("flash_attn 2", "^", PINK),
    "flex": Look("FlexAttention", "D", TEAL),
}


def new_figure(height: float, caption: str = "") -> Figure:
    """An empty figure with the conditions of the measurement below it; call inside of `style`."""
    figure = Figure((WIDTH, height), layout="constrained")
    if caption:
        figure.supxlabel(caption, x=0.01, ha="left", size="small", color=DIM)
    return figure


def add_legend(figure: Figure, title: str, handles: Sequence[Artist]) -> None:
    """The title of the figure, and the legend below it in one line."""
    font = FontProperties(size="large", weight="bold")
    figure.legend(
        handles=handles,
        title=title,
        title_fontproperties=font,
        alignment="left",
        loc="outside upper left",
        ncols=len(handles),
    )


def entry(label: str, **look: Any) -> Line2D:
    """An entry of a legend; `look` are the keywords of a line."""
    return Line2D([], [], label=label, **look)


def length(value: float) -> str:
    """A sequence length."""
    return f"{value / 1024:g}k" if value >= 1024 and value % 512 == 0 else f"{value:g}"


def set_ticks(axis: Axis, values: Sequence[float], form: Callable[[float], str] = "{:g}".format) -> None:
    """Ticks at these values only."""
    axis.set_major_locator(FixedLocator(values))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(FuncFormatter(lambda value, _: form(value)))


def style() -> AbstractContextManager[None]:
    return matplotlib.rc_context(STYLE)


def svg(figure: Figure) -> str:
    text = io.StringIO()
    figure.savefig(text, format="svg", metadata={"Date": None, "Creator": None})
    return text.getvalue()
