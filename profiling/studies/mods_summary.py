"""Geometric means over the cells of a run of `mods`."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from profiling.measure.tables import Table
from profiling.studies.features import DIRECTIONS, CellResult
from profiling.studies.mods import OURS, PEERS, PLAIN, WITH_BLOCK_MASK, WITHOUT_BLOCK_MASK

COLUMNS = ("geometric mean (lowest)", "cells", "fwd", "bwd", "both")


def geometric_mean(values: Sequence[float]) -> float:
    return math.exp(sum(map(math.log, values)) / len(values))


def _row(label: str, results: Iterable[CellResult], call: str, base: str) -> tuple[str, ...] | None:
    """One mean for each direction; None if no cell has both calls."""
    cells = list(results)
    texts, counts = [], []
    for direction in (*DIRECTIONS, "both"):
        ratios = [x for x in (one.ratio(call, direction, base) for one in cells) if x is not None]
        counts.append(len(ratios))
        texts.append(f"{geometric_mean(ratios):.2f} ({min(ratios):.2f})" if ratios else "-")
    if not any(counts):
        return None
    # If the directions differ, some cells failed; the failures are printed after the tables.
    number = f"{counts[0]}" if len(set(counts)) == 1 else f"{counts[0]}, {counts[1]}"
    return (label, number, *texts)


def summary(results: Sequence[CellResult]) -> Table:
    """Ours over each peer with the same function, with a block mask over without, each bias over plain."""

    def of(kind: str) -> list[CellResult]:
        return [one for one in results if one.kind == kind]

    biases = dict.fromkeys(call for one in of("bias") for call in one.samples["fwd"] if call != PLAIN)
    rows = [
        *(_row(f"functions: {OURS} over {peer}", of("function"), OURS, peer) for peer in PEERS),
        *(
            _row(f"documents: {WITH_BLOCK_MASK} over {base}", of("documents"), WITH_BLOCK_MASK, base)
            for base in (WITHOUT_BLOCK_MASK, *PEERS)
        ),
        *(_row(f"{bias} over {PLAIN}", of("bias"), bias, PLAIN) for bias in biases),
    ]
    return Table("summary", COLUMNS, tuple(row for row in rows if row is not None))
