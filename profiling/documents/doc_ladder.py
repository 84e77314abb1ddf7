"""Tables of docs/ladder.md."""

from __future__ import annotations

from profiling.measure.tables import Table

HEAD_DIM = 128
# Rung and order of its tiles.
TILES = (("2", "plain"), ("3", "padded"), ("3", "swizzled"))


def conflicts() -> Table:
    """Predicted wavefronts of shared memory for one block of keys."""
    # Imports the CuTe DSL, which takes seconds.
    from examples.ladder.__main__ import rung_class
    from examples.ladder.conflicts import uses

    rows = []
    for name, variant in TILES:
        rung = rung_class(name)(HEAD_DIM, False)
        rung.variant = variant
        found = {use.name: f"{use.wavefronts} ({use.conflicts})" for use in uses(rung)}
        rows.append((name, variant, *(found[f"{what} of K"] for what in ("copy", "ldmatrix"))))
    columns = ("rung", "tiles", "copy of a block of K", "ldmatrix of K, all warps")
    return Table("Wavefronts (of them conflicts), D = 128, predicted", columns, tuple(rows))
