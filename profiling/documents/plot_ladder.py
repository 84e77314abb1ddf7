"""The figure of docs/ladder.md: TFLOP/s by rung."""

from __future__ import annotations

from typing import Any

from matplotlib.figure import Figure

from profiling.documents.doc_ladder import PRODUCTS
from profiling.documents.plot_style import BLUE, GREY, ORANGE, add_legend, entry, new_figure
from profiling.documents.sources import commit_of

COLOURS = {"64": BLUE, "128": ORANGE}
LINES: dict[str, Any] = {"full": "-", "causal": "--"}


def speeds(record: dict[str, Any]) -> Figure:
    machine = record["machine"]
    figure = new_figure(
        3.6,
        f"{machine['gpu']}, bf16, B {record['batch']}, H {record['heads']}, S {record['seqlen']}, commit "
        f"{commit_of(machine)}. {PRODUCTS['forward']} and {PRODUCTS['backward']}: cute_flash",
    )
    forward, backward = (
        sorted(name for name in record["rungs"] if " " not in name and name.startswith("B") == is_backward)
        for is_backward in (False, True)
    )
    panels = figure.subplots(1, 2, sharey=True, width_ratios=(len(forward), len(backward)))
    for axes, names, title in zip(panels, (forward, backward), ("Forward", "Backward"), strict=True):
        for i, case in enumerate(record["cases"]):
            head_dim, mask = case.split()
            values = [record["rungs"][name]["tflops"][i] for name in names]
            axes.plot(names, values, color=COLOURS[head_dim], linestyle=LINES[mask], marker="o")
        axes.set(title=title, xlabel="rung")
    panels[0].set(ylabel="TFLOP/s", ylim=(0, None))
    entries = [
        *(entry(f"D = {dim}", color=colour) for dim, colour in COLOURS.items()),
        *(entry(mask, color=GREY, linestyle=line) for mask, line in LINES.items()),
    ]
    add_legend(figure, "TFLOP/s by rung", entries)
    return figure
