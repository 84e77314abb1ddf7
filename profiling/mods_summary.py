"""What a run of `mods` comes to: geometric means over its cells, and runs of its parts put together."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from typing import Any

from profiling.features import DIRECTIONS, Found
from profiling.mods import KINDS, OURS, PEERS, PLAIN, WITH_MAP, WITHOUT_MAP
from profiling.terminal import Table
from profiling.timing import Samples

COLUMNS = ("geometric mean (least)", "cells", "fwd", "bwd", "both")


def geometric_mean(values: Sequence[float]) -> float:
    return math.exp(sum(map(math.log, values)) / len(values))


def _row(label: str, found: Iterable[Found], side: str, base: str) -> tuple[str, ...] | None:
    """One mean for each direction; nothing if no cell has both sides."""
    cells = list(found)
    texts, counts = [], []
    for direction in (*DIRECTIONS, "both"):
        ratios = [x for x in (one.ratio(side, direction, base) for one in cells) if x is not None]
        counts.append(len(ratios))
        texts.append(f"{geometric_mean(ratios):.2f} ({min(ratios):.2f})" if ratios else "-")
    if not any(counts):
        return None
    # Fewer in one direction: what failed there is told under the tables.
    number = f"{counts[0]}" if len(set(counts)) == 1 else f"{counts[0]}, {counts[1]}"
    return (label, number, *texts)


def summary(found: Sequence[Found]) -> Table:
    """Ours over each peer on the same functions, documents with a map over without, biases over none."""

    def of(kind: str) -> list[Found]:
        return [one for one in found if one.kind == kind]

    biases = dict.fromkeys(side for one in of("bias") for side in one.samples["fwd"] if side != PLAIN)
    rows = [
        *(_row(f"functions: {OURS} over {peer}", of("function"), OURS, peer) for peer in PEERS),
        _row(f"documents: {WITH_MAP} over {WITHOUT_MAP}", of("documents"), WITH_MAP, WITHOUT_MAP),
        *(_row(f"documents: {WITH_MAP} over {peer}", of("documents"), WITH_MAP, peer) for peer in PEERS),
        *(_row(f"{bias} over {PLAIN}", of("bias"), bias, PLAIN) for bias in biases),
    ]
    return Table("summary", COLUMNS, tuple(row for row in rows if row is not None))


def from_dict(data: dict[str, Any]) -> list[Found]:
    return [
        Found(
            cell["kind"],
            cell["name"],
            cell["base"],
            {
                direction: {name: Samples(x["calls"], tuple(x["round_ms"])) for name, x in sides.items()}
                for direction, sides in cell["sides"].items()
            },
            cell["errors"],
        )
        for cell in data["cells"]
    ]


def _place(cell: dict[str, Any]) -> tuple[int, list[int]]:
    """By kind, then by the numbers of the name."""
    return list(KINDS).index(cell["kind"]), [int(x) for x in re.findall(r"\d+", cell["name"])]


def merged(parts: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """One record of runs that measured different cells with the same settings on the same machine."""
    choices = ("head_dims", "functions", "peers")
    same = [
        {name: value for name, value in part["settings"].items() if name not in choices} for part in parts
    ]
    names = [(cell["kind"], cell["name"]) for part in parts for cell in part["cells"]]
    if any(settings != same[0] for settings in same):
        raise ValueError("the parts were measured with different settings")
    if len(set(names)) < len(names):
        raise ValueError("the parts have cells in common")
    head_dims = sorted({x for part in parts for x in part["settings"]["head_dims"]})
    chosen = {"head_dims": head_dims, "functions": [], "peers": []}
    cells = sorted((cell for part in parts for cell in part["cells"]), key=_place)
    return {**parts[0], "settings": {**same[0], **chosen}, "cells": cells}
