"""The cost model of context parallelism (`layouts.studies.cp_cost`) as a figure and a table of docs/distributed.md."""

from __future__ import annotations

from functools import cache

from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from cute_flash.spec.band import Band
from cute_flash.spec.problem import Problem
from layouts.studies.cp_cost import LINKS, Cost, Model
from profiling.documents.plot_style import BLUE, GREEN, ORANGE, PURPLE, add_legend, entry, new_figure, set_ticks
from profiling.measure.tables import Table
from profiling.studies.context_parallel import Settings

RANKS = (2, 4, 8, 16, 32, 64, 128, 256, 512)
METHODS = ("ring", "allgather", "ulysses", "usp")
LABELS = {"nvlink": "NVLink", "infiniband": "InfiniBand"}
PROBLEM = Problem(1, 64, 8, 1 << 19, 1 << 19, 128, band=Band(None, 0))
CONDITIONS = "H200, bf16, B = 1, H = 64, Hkv = 8, D = 128, S = 524,288, causal, zigzag, forward and backward"


@cache
def costs(link: str, ranks: int) -> dict[str, Cost]:
    return {cost.method: cost for cost in Model(PROBLEM, ranks, LINKS[link]).costs()}


def table() -> Table:
    """Milliseconds and efficiency of each method and link."""
    rows = []
    for link, label in LABELS.items():
        for ranks in RANKS:
            found = costs(link, ranks)
            cells = [
                f"{found[name].ms:,.0f} ({found[name].efficiency:.0%})" if name in found else "-" for name in METHODS
            ]
            best = min(found.values(), key=lambda cost: cost.ms)
            rows.append((label, str(ranks), f"{PROBLEM.seqlen_q // ranks:,}", *cells, best.method))
    columns = ("link", "GPUs", "tokens of a GPU", *(f"{name}, ms" for name in METHODS), "fastest")
    return Table("", columns, tuple(rows))


def ratios() -> str:
    """The ratios that the model predicts for `python -m profiling context-parallel` with its defaults."""
    s = Settings()
    forward, backward = Model(s.problem, s.ranks, LINKS["nvlink"]).kernel_ratios()
    shape = f"S = {s.seqlen}, {s.ranks} ranks, H = {s.heads}, Hkv = {s.heads_kv}, D = {s.head_dim}"
    return (
        f"For {shape}, the model predicts a sum over ranks of {forward:.2f} (forward) and {backward:.2f} (backward) "
        f"times the unsharded call."
    )


def efficiency() -> Figure:
    """Efficiency against the number of GPUs, a panel for each link."""
    looks = dict(zip(METHODS, zip((BLUE, ORANGE, GREEN, PURPLE), "osD^")))
    figure = new_figure(3.6, f"A model, not a measurement. {CONDITIONS}. usp: 8-way Ulysses over NVLink")
    for axes, (link, label) in zip(figure.subplots(1, 2, sharey=True), LABELS.items()):
        for name, (colour, marker) in looks.items():
            points = [(n, costs(link, n)[name].efficiency) for n in RANKS if name in costs(link, n)]
            axes.plot(*zip(*points), color=colour, marker=marker)
        axes.set(title=label, xlabel="GPUs", xscale="log", ylim=(0, 1))
        set_ticks(axes.xaxis, RANKS)
        axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    entries = [entry(name, color=colour, marker=marker) for name, (colour, marker) in looks.items()]
    add_legend(figure, "Predicted efficiency of context parallelism: speed-up / GPUs", entries)
    return figure
