"""The figures of docs/how-it-works.md and docs/mla.md, from the models of the package: no measurement is read.

tiling            the tiles of Q, K, V and O, and both loop orders
online_softmax    maximum and sum of one row, block by block
ridge             attention shapes under the rooflines of three GPUs
overlap           copies, tensor cores and softmax of one SM over time (`timeline.py`)
banks             a column of a plain, a padded and a swizzled tile in shared memory
recompute         memory and matrix products of a backward that stores P, and of one that recomputes it
latent_row        a row of MLA's cache, beside the query and the output that decoding multiplies with it
"""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, Patch, Rectangle
from matplotlib.ticker import FixedLocator

from cute_flash.planning.plan import plan_backward
from cute_flash.smem.tile import CHUNK_BYTES, SmemTile
from cute_flash.spec import arch
from cute_flash.spec.problem import Problem
from cute_flash.tools import roofline
from layouts import layout_of, warp_access
from layouts.draw import GROUP_COLOURS, NUM_GROUPS
from profiling.documents.plot_style import (
    BLUE,
    DIM,
    GREEN,
    GREY,
    INK,
    ORANGE,
    PURPLE,
    RED,
    TEAL,
    add_legend,
    entry,
    length,
    new_figure,
    set_ticks,
)
from profiling.documents.timeline import COPY, TENSOR, Timeline, schedules

LENGTHS = (512, 1024, 2048, 4096, 8192, 16384)
GPUS = {"A100": GREEN, "H100": ORANGE, "H200": BLUE}


# Inches: narrower than figures of measurements, so that their text is larger on a page.
WIDTH = 8.4


def _figure(height: float, caption: str) -> Figure:
    figure = new_figure(height, caption)
    figure.set_figwidth(WIDTH)
    return figure


def _bare(axes: Axes) -> None:
    """Remove ticks, grid and spines from a panel that is a drawing."""
    axes.set(xticks=[], yticks=[])
    axes.grid(visible=False)
    for spine in axes.spines.values():
        spine.set_visible(False)


# ---- tiling

TILES, BLOCKS, HIGHLIGHTED = 4, 6, 1


def _box(axes: Axes, x: float, y: float, w: float, h: float, colour: str, alpha: float, text: str = "") -> None:
    axes.add_patch(Rectangle((x, y), w, h, facecolor=colour, alpha=alpha, edgecolor="none"))
    axes.add_patch(Rectangle((x, y), w, h, fill=False, edgecolor="white", lw=1.5))
    ink = "white" if alpha > 0.5 else INK
    axes.annotate(text, (x + w / 2, y + h / 2), ha="center", va="center", size="small", color=ink)


def _loops(axes: Axes, is_q_outer: bool) -> None:
    """Q and O left and right of the scores, K and V above them; the tiles that stay on the chip are dark."""
    depth, dark, pale = 1.1, 0.75, 0.22
    for i in range(TILES):
        alpha = dark if is_q_outer and i == HIGHLIGHTED else pale
        for x, name, colour in ((-depth - 0.3, "Q", BLUE), (BLOCKS + 0.3, "O", GREEN)):
            _box(axes, x, i, depth, 1, colour, alpha, f"{name}{i + 1}")
    for j in range(BLOCKS):
        alpha = dark if not is_q_outer and j == HIGHLIGHTED else pale
        for y, name, colour in ((-2.1, "K", ORANGE), (-1.1, "V", PURPLE)):
            _box(axes, j, y, 1, 0.9, colour, alpha, f"{name}{j + 1}")
    for i, j in product(range(TILES), range(BLOCKS)):
        outer, inner = (i, j) if is_q_outer else (j, i)
        is_visited = outer == HIGHLIGHTED
        _box(axes, j, i, 1, 1, GREY, 0.4 if is_visited else 0.12, str(inner + 1) if is_visited else "")
    middle = HIGHLIGHTED + 0.5
    ends = ((0.15, middle + 0.32), (BLOCKS - 0.15, middle + 0.32))
    if not is_q_outer:
        ends = ((middle + 0.32, 0.15), (middle + 0.32, TILES - 0.15))
    axes.add_patch(FancyArrowPatch(*ends, arrowstyle="-|>", mutation_scale=12, color=RED, lw=1.6))
    _bare(axes)
    axes.set(xlim=(-depth - 0.5, BLOCKS + depth + 0.5), ylim=(TILES + 0.1, -2.3))
    axes.set_aspect("equal")


def tiling() -> Figure:
    """Both loop orders: numbers are the steps of the inner loop."""
    figure = _figure(
        4.1, "dark: stays on the chip during the inner loop; grey squares: S and P, which never leave the chip"
    )
    panels = figure.subplots(1, 2)
    titles = {
        "FlashAttention-2: a CTA keeps Q2, O2, m and l": "each step reads K and V; O2 is written once",
        "FlashAttention-1: a CTA keeps K2 and V2": "each step reads Q, O, m, l and writes O, m, l",
    }
    for axes, is_q_outer, (title, cost) in zip(panels, (True, False), titles.items(), strict=True):
        _loops(axes, is_q_outer)
        axes.set_title(title)
        axes.set_xlabel(cost)
    arrow = entry("inner loop", color=RED, marker=">", lw=1.6)
    add_legend(figure, "Tiles of Q, K, V and O, and the order of the loops", [arrow])
    return figure


# ---- online softmax

KEYS, BLOCK, HEAD_DIM, SEED = 512, 32, 64, 5


def score_row() -> np.ndarray:
    """The scores of one query against `KEYS` keys, all N(0, 1), scaled by 1 / sqrt(d)."""
    random = np.random.default_rng(SEED)
    query, keys = random.standard_normal(HEAD_DIM), random.standard_normal((KEYS, HEAD_DIM))
    return keys @ query / HEAD_DIM**0.5


def row_statistics(scores: np.ndarray) -> list[tuple[float, float, float]]:
    """m, l and α after each block."""
    m, l, found = -np.inf, 0.0, []
    for block in scores.reshape(-1, BLOCK):
        m_new = max(m, block.max())
        alpha = np.exp(m - m_new)
        l = alpha * l + np.exp(block - m_new).sum()
        m = m_new
        found.append((float(m), float(l), float(alpha)))
    return found


def online_softmax() -> Figure:
    scores = score_row()
    statistics = row_statistics(scores)
    setting = f"one query and {KEYS} keys of N(0, 1), d = {HEAD_DIM}, blocks of {BLOCK} keys"
    figure = _figure(4.6, f"{setting}; α = exp(m − m′) multiplies l and O when m grows to m′")
    upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=(1.35, 1))
    upper.plot(np.arange(KEYS), scores, ".", color=GREY, ms=2, alpha=0.6)
    edges = np.arange(0, KEYS + 1, BLOCK)
    upper.stairs([m for m, _, _ in statistics], edges, color=BLUE, lw=2, baseline=None)
    lower.bar(edges[:-1], [l for _, l, _ in statistics], BLOCK * 0.86, align="edge", color=BLUE, alpha=0.35)
    before = [0.0, *(l for _, l, _ in statistics[:-1])]
    kept = [alpha * l for l, (_, _, alpha) in zip(before, statistics, strict=True)]
    lower.bar(edges[:-1], kept, BLOCK * 0.86, align="edge", color=BLUE, alpha=0.75)
    for first, (m, _, alpha) in zip(edges[1:-1], statistics[1:], strict=True):
        if alpha < 1:
            for axes in (upper, lower):
                axes.axvline(first, color=RED, lw=1, ls=(0, (4, 2)))
            look: dict[str, Any] = {"color": RED, "size": "small", "bbox": {"fc": "white", "ec": "none", "pad": 0.6}}
            upper.annotate(f"α = {alpha:.2f}", (first, m), (4, 5), textcoords="offset points", **look)
    upper.set(ylabel="score", ylim=(None, statistics[-1][0] + 0.9))
    lower.set(ylabel="l", xlabel="key", xlim=(0, KEYS))
    lower.xaxis.set_major_locator(FixedLocator(range(0, KEYS + 1, 2 * BLOCK)))
    entries = [
        entry("scores", color=GREY, marker=".", ls=""),
        entry("running maximum m", color=BLUE, lw=2),
        entry("rescale", color=RED, lw=1, ls=(0, (4, 2))),
        Patch(color=BLUE, alpha=0.75, label="α l of the blocks before"),
        Patch(color=BLUE, alpha=0.35, label="terms of the block"),
    ]
    add_legend(figure, "Online softmax of one row", entries)
    return figure


# ---- roofline


def _points(head_dim: int) -> tuple[float, list[float]]:
    """FLOP per byte of unfused attention at the longest length, and of fused attention at `LENGTHS`."""
    problems = [Problem(1, 1, 1, n, n, head_dim, "bfloat16") for n in LENGTHS]
    unfused = roofline.flops(problems[-1]) / roofline.standard_bytes(problems[-1])
    return unfused, [roofline.flops(p) / roofline.hbm_bytes(p) for p in problems]


def ridge(head_dim: int = 128) -> Figure:
    unfused, fused = _points(head_dim)
    low, high = 1.0, 16384.0
    # Softmax reads and writes two bytes of each score, and takes about five operations.
    softmax = 5 / (2 * 2)
    figure = _figure(4.3, f"d = {head_dim}, 16 bits, no mask; fused: Q, K, V, O and the LSE move once; {_rates()}")
    axes = figure.subplots()
    for name, colour in GPUS.items():
        spec = arch.GPUS[name]
        roof = lambda x, spec=spec: min(x * spec.hbm_tbps, spec.tensor_tflops)  # noqa: E731
        axes.plot([low, spec.ridge, high], [roof(low), roof(spec.ridge), roof(high)], color=colour, lw=1.8)
        axes.plot(spec.ridge, spec.tensor_tflops, "D", color=colour, ms=6)
        axes.plot(softmax, roof(softmax), "v", color=colour, ms=6)
        axes.plot(unfused, roof(unfused), "s", color=colour, ms=6)
        axes.plot(fused, [roof(x) for x in fused], "o", color=colour, ms=5, markerfacecolor="white", zorder=3)
    for n, x in zip(LENGTHS, fused, strict=True):
        axes.annotate(f"N = {length(n)}", (x, 1130), ha="center", va="bottom", size="x-small", color=DIM, rotation=30)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    set_ticks(axes.xaxis, [4.0**i for i in range(8)])
    set_ticks(axes.yaxis, (2, 8, 32, 128, 512))
    axes.set(xlim=(low, high), ylim=(1.5, 2200), xlabel="FLOP per byte of HBM", ylabel="attainable TFLOP/s")
    entries = [
        *(entry(name, color=colour, lw=1.8) for name, colour in GPUS.items()),
        entry("softmax alone", color=INK, marker="v", ls=""),
        entry("unfused attention", color=INK, marker="s", ls=""),
        entry("ridge", color=INK, marker="D", ls=""),
        entry("fused", color=INK, marker="o", ls="", markerfacecolor="white"),
    ]
    add_legend(figure, "Attention under the rooflines of three GPUs", entries)
    return figure


def _rates() -> str:
    return "ridges " + ", ".join(f"{name} {arch.GPUS[name].ridge:.0f}" for name in GPUS) + " FLOP/B"


# ---- overlap of copies and arithmetic

KIND_COLOURS = {"K": ORANGE, "V": PURPLE, "QK": BLUE, "PV": GREEN, "softmax": GREY}
LABELS = {"QK": "QKᵀ ", "PV": "PV ", "softmax": "softmax "}
SHOWN, SIMULATED, SHOWN_CLOCKS = 4, 64, 6400


def busy(line: Timeline) -> float:
    """The part of the time in which the tensor cores work, without start and end."""
    end = max(event.end for event in line.events)
    return line.tensor_busy(end / 4, 3 * end / 4)


def _draw_timeline(axes: Axes, line: Timeline) -> None:
    # Copies, tensor cores, then the softmax of each CTA or warpgroup.
    rows = sorted({event.row for event in line.events}, key=lambda row: (row not in (COPY, TENSOR), row))
    for event in line.events:
        if event.start >= SHOWN_CLOCKS:
            continue
        y, width = rows.index(event.row), event.end - event.start
        colour = KIND_COLOURS[event.kind]
        axes.barh(y, width, 0.82, event.start, color=colour, alpha=0.45 if event.owner else 0.85, edgecolor="white")
        text = f"{LABELS.get(event.kind, event.kind)}{event.block + 1}"
        middle = event.start + width / 2
        if event.end < SHOWN_CLOCKS + 100:
            size, ink = "x-small" if width > 300 else 6.2, INK if event.owner else "white"
            axes.text(middle, y, text, ha="center", va="center", size=size, color=ink)
    axes.set_yticks(range(len(rows)), rows)
    axes.set(xlim=(0, SHOWN_CLOCKS), ylim=(len(rows) - 0.45, -0.55))
    axes.tick_params(length=0)
    axes.grid(visible=False, axis="y")
    axes.spines["left"].set_visible(False)


def overlap() -> Figure:
    caption = "model: one SM at peak rates, head dim 128; A100: 128 x 48 tiles, H100: 128 x 128; latencies are left out"
    lines = schedules(SHOWN + 8)
    ratios = [len({event.row for event in line.events}) + 0.9 for line in lines]
    figure = _figure(1.1 + 0.3 * sum(ratios), caption)
    panels = figure.subplots(len(lines), 1, sharex=True, height_ratios=ratios)
    for axes, line, long_line in zip(panels, lines, schedules(SIMULATED), strict=True):
        _draw_timeline(axes, line)
        axes.set_title(f"{line.title}: tensor cores busy {busy(long_line):.0%} of the time")
        axes.label_outer()
    panels[-1].set_xlabel("clocks")
    kinds = {"K": "load K", "V": "load V", "QK": "S = QKᵀ", "softmax": "softmax", "PV": "O += PV"}
    entries = [Patch(color=KIND_COLOURS[kind], label=label) for kind, label in kinds.items()]
    pale = Patch(facecolor=GREY, alpha=0.45, label="pale: second CTA or warpgroup")
    add_legend(figure, "Overlap of copies, tensor cores and softmax", [*entries, pale])
    return figure


# ---- banks

VARIANTS = {"plain": "plain rows", "padded": "padded by 16 bytes", "swizzled": "swizzled"}


def column_read(tile: SmemTile) -> tuple[list[list[int]], list[int]]:
    """The groups of banks of the first eight rows, and the wavefront that serves each row when a column is read."""
    layout = layout_of(tile)
    columns = range(0, tile.cols, tile.chunk_cols)
    groups = [
        [layout(row, col) * tile.element_bytes // CHUNK_BYTES % NUM_GROUPS for col in columns] for row in range(8)
    ]
    phase = warp_access(layout, [(row, 0) for row in range(8)] + [None] * 24).phases[0]
    turn_of = {thread: number for number, turn in enumerate(phase.wavefront_words) for thread, _ in turn}
    return groups, [turn_of[row] for row in range(8)]


def _cell(axes: Axes, x: int, y: int, colour: str, text: str = "") -> None:
    axes.add_patch(Rectangle((x, y), 1, 1, facecolor=colour, edgecolor="white"))
    if text:
        axes.text(x + 0.5, y + 0.5, text, ha="center", va="center", size="small")


def banks() -> Figure:
    figure = _figure(4.9, "64 columns of 16 bits; a cell is 16 bytes, its number and colour are its group of 4 banks")
    panels = figure.subplots(2, len(VARIANTS), height_ratios=(1, 0.92))
    for (variant, title), upper, lower in zip(VARIANTS.items(), *panels, strict=True):
        tile = SmemTile(8, 64, variant=variant)
        groups, wavefronts = column_read(tile)
        for row, cells in enumerate(groups):
            for col, group in enumerate(cells):
                _cell(upper, col, row, GROUP_COLOURS[group], str(group))
            upper.add_patch(Rectangle((0, row), 1, 1, fill=False, edgecolor=INK, lw=1.8, zorder=3))
        for number, group in product(range(8), range(NUM_GROUPS)):
            _cell(lower, group, number, "#f4f4f4")
        for row, number in enumerate(wavefronts):
            group = groups[row][0]
            _cell(lower, group, number, GROUP_COLOURS[group], f"t{row}")
        count = max(wavefronts) + 1
        upper.set_title(title)
        lower.set_title(f"{count} wavefront{'s' if count > 1 else ''}")
        for axes in (upper, lower):
            _bare(axes)
            axes.set(xlim=(-0.05, 8.05), ylim=(8.05, -0.05))
            axes.tick_params(length=0, labelsize="small")
            axes.set_yticks([0.5, 3.5, 7.5], ["row 0", "3", "7"] if axes is upper else ["first", "4th", "8th"])
            axes.set_xticks([])
        lower.set_xticks([0.5, 3.5, 7.5], ["banks 0-3", "12-15", "28-31"])
    panels[0][0].set_ylabel("tile")
    panels[1][0].set_ylabel("wavefront")
    entries = [Patch(facecolor="white", edgecolor=INK, label="read together, one row for each thread t0 to t7")]
    add_legend(figure, "A column of eight rows in shared memory", entries)
    return figure


# ---- recomputation

MIB = 1 << 20
PRODUCTS = {"QKᵀ": BLUE, "PV": GREEN, "dP = dO Vᵀ": ORANGE, "dV": PURPLE, "dQ": TEAL, "dK": RED}


def saved_bytes(n: int, head_dim: int) -> dict[str, int]:
    """Bytes of one head that a training step keeps from the forward to the backward, and the backward's workspace."""
    problem = Problem(1, 1, 1, n, n, head_dim, "bfloat16")
    tensors = roofline.hbm_bytes(problem)  # Q, K, V, O and the LSE
    plan = plan_backward(problem, arch.SM_90)
    workspace = sum(4 * int(np.prod(buffer.shape)) for buffer in plan.workspace)
    matrix = 2 * n * n
    return {"stored": tensors + matrix, "recomputed": tensors, "workspace": tensors + workspace}


def recompute(head_dim: int = 128) -> Figure:
    figure = _figure(
        3.5,
        f"one head, d = {head_dim}, 16 bits; with Q, K, V, O and LSE; workspace: fp32 sums of dQ, Δ and LSE of rows",
    )
    left, right = figure.subplots(1, 2, width_ratios=(1, 1.1))
    sizes = [saved_bytes(n, head_dim) for n in LENGTHS]
    looks = {
        "stored": ("P stored", RED, "s"),
        "workspace": ("P recomputed, with the workspace", BLUE, "^"),
        "recomputed": ("P recomputed", BLUE, "o"),
    }
    for key, (label, colour, marker) in looks.items():
        line = "-" if key != "workspace" else (0, (4, 2))
        left.plot(LENGTHS, [size[key] / MIB for size in sizes], color=colour, marker=marker, ls=line, label=label)
    left.set_xscale("log", base=2)
    left.set_yscale("log", base=2)
    set_ticks(left.xaxis, LENGTHS, length)
    set_ticks(left.yaxis, (1, 4, 16, 64, 256))
    left.set(title="Memory between forward and backward, MiB", xlabel="sequence length N")
    rows = {
        "forward": ("QKᵀ", "PV"),
        "backward, P stored": ("dP = dO Vᵀ", "dV", "dQ", "dK"),
        "backward, P recomputed": ("QKᵀ", "dP = dO Vᵀ", "dV", "dQ", "dK"),
    }
    for y, names in enumerate(rows.values()):
        for start, name in enumerate(names):
            right.barh(y, 1, 0.6, start, color=PRODUCTS[name], alpha=0.8, edgecolor="white")
            right.text(start + 0.5, y, name, ha="center", va="center", size="x-small", color="white")
    right.set_yticks(range(len(rows)), list(rows))
    right.set(xlim=(0, 5), ylim=(len(rows) - 0.5, -0.5), title="Matrix products of 2 N² d FLOP", xlabel="products")
    right.grid(visible=False, axis="y")
    right.tick_params(length=0)
    add_legend(figure, "Recomputation: less memory for one more product", left.get_lines())
    return figure


# ---- multi-head latent attention

LATENT, ROTARY = 512, 64  # columns of a row in DeepSeek's models
HEADS, KEY_DIM, VALUE_DIM = 128, 192, 128  # of the same models, without absorption


def cached_numbers() -> dict[str, int]:
    """Numbers that a layer caches for each token, by the kind of attention."""
    return {
        f"MHA, {HEADS} heads, {KEY_DIM}/{VALUE_DIM}": HEADS * (KEY_DIM + VALUE_DIM),
        "GQA, 8 K/V heads, 128": 8 * 2 * 128,
        "MLA": LATENT + ROTARY,
    }


def latent_row() -> Figure:
    """The row of a token: columns of the query, the key, the value and the output are aligned."""
    figure = _figure(2.9, f"one token of a layer; a row has {2 * (LATENT + ROTARY):,} bytes in 16 bits")
    left, right = figure.subplots(1, 2, width_ratios=(1.75, 1))
    rows = {
        "query of a head": (("W_UKᵀ q_C", BLUE, 0.22), ("q_R", ORANGE, 0.22)),
        "cached row": (("c", BLUE, 0.75), ("k_R", ORANGE, 0.75)),
        "output of a head": (("Σ p c, then W_UV", GREEN, 0.22),),
    }
    for y, parts in enumerate(rows.values()):
        for (text, colour, alpha), x, width in zip(parts, (0, LATENT), (LATENT, ROTARY)):
            _box(left, x, 1.7 * y, width, 1, colour, alpha, text)
    for top, width, text in (
        (1.37, LATENT + ROTARY, f"key of all heads: {LATENT + ROTARY} columns"),
        (3.07, LATENT, f"value of all heads: {LATENT} columns"),
    ):
        left.annotate("", (0, top), (width, top), arrowprops={"arrowstyle": "<|-|>", "color": INK, "lw": 1})
        left.text(width / 2, top - 0.06, text, ha="center", va="bottom", size="small")
    _bare(left)
    left.set(xlim=(-6, LATENT + ROTARY + 6), ylim=(4.5, -0.15))
    left.set_yticks([0.5, 2.2, 3.9], list(rows))
    left.tick_params(length=0)
    numbers = cached_numbers()
    right.barh(range(len(numbers)), list(numbers.values()), 0.55, color=[GREY, GREY, BLUE], alpha=0.8)
    for i, (name, number) in enumerate(numbers.items()):
        right.text(0, i - 0.36, f"{name}: {number:,}", ha="left", va="bottom", size="small")
    right.set(ylim=(len(numbers) - 0.5, -0.75), yticks=[], title="Numbers of a token in the cache")
    right.grid(visible=False, axis="y")
    set_ticks(right.xaxis, (0, 20_000, 40_000), "{:,.0f}".format)
    add_legend(figure, "The cache of multi-head latent attention", [])
    return figure
