"""The documents' tables of the cost of features, from runs of `python -m profiling features`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from profiling.documents.figures import newest
from profiling.measure.tables import Table

FEATURES = newest("features")
_NAMES = {"dropout": "dropout 0.1", "softcap": "softcap 30", "alibi": "ALiBi", "sinks": "sinks"}
_SETTINGS = [(head_dim, mask) for head_dim in (64, 128) for mask in ("full", "causal")]
Cell = dict[str, Any]


def _ratio(cell: Cell, side: str) -> str:
    """Time of the base over time of the side, forward / backward."""
    sides = [cell["sides"][direction] for direction in ("fwd", "bwd")]
    return " / ".join(f"{x[cell['base']]['ms'] / x[side]['ms']:.2f}" for x in sides)


def _cells(path: Path) -> list[Cell]:
    cells: list[Cell] = json.loads(path.read_text(encoding="utf-8"))["cells"]
    return cells


def features(data: Path) -> Table:
    cells = _cells(data / FEATURES)

    def cell(kind: str, head_dim: int, mask: str) -> Cell:
        named = [x for x in cells if x["kind"] == kind and x["name"].startswith(f"D={head_dim} ")]
        return next(x for x in named if x["name"].endswith(mask) or kind == "window")

    def row(label: str, kind: str, side: str) -> tuple[str, ...]:
        return label, *(_ratio(cell(kind, *setting), side) for setting in _SETTINGS)

    window = ["-" if mask == "full" else _ratio(cell("window", d, mask), "window 1024") for d, mask in _SETTINGS]
    rows = [
        *(row(f"{label}, over plain", "feature", side) for side, label in _NAMES.items()),
        ("window of 1024 at S = 16384, over causal", *window),
        row("varlen, 4 x 4096, over dense", "equal", "varlen"),
        row("varlen, 16 lengths of 100 to 8192, over FlashAttention-3", "ragged", "varlen"),
    ]
    columns = (f"D = {head_dim} {mask}" for head_dim, mask in _SETTINGS)
    return Table("", ("forward / backward", *columns), tuple(rows))


_BY_HEAD_DIM = {
    **_NAMES,
    "score_mod": "score_mod",
    "bias": "bias (1, H, S, S)",
    "bias_gradient": "the same bias and its gradient",
    "varlen": "varlen, 4 x 4096",
    "deterministic": "deterministic",
}


def by_head_dim(data: Path) -> Table:
    """The cost of features by head dim, over plain causal attention."""
    cells = [cell for cell in _cells(data / FEATURES) if cell["kind"] == "head-dim"]
    rows = [(label, *(_ratio(cell, side) for cell in cells)) for side, label in _BY_HEAD_DIM.items()]
    columns = (cell["name"].partition(" S=")[0].replace("=", " = ").replace(" Dv", ", Dv") for cell in cells)
    return Table("", ("forward / backward", *columns), tuple(rows))
