"""The results of tuning: variants ranked by speed, as tables and as JSON.

A variant is ranked if it compiled, had correct results, and was timed in all cells. Variants are ordered by the
geometric mean of their speeds; tables show the ratio to the reference peer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from profiling.bench.report import NOTHING, speed
from profiling.measure.record import Cell, Result
from profiling.measure.tables import Table, geometric_mean
from profiling.tune.trial import Build
from profiling.tune.variants import Variant

SCHEMA = 1
SPEED_LEGEND = (
    "`*` row of the tile table; TFLOP/s; `~` rounds differ by more than 5 %, `!` wrong output, `x` failed; "
    "x ref: speed over that of the reference, geometric mean; a/b: of each mask"
)
RESOURCE_LEGEND = (
    "`*` row of the tile table; a/b: of each mask; CTAs/SM: by registers, shared memory and threads; "
    "ptxas: C75xx if it serialises wgmma or ignores setmaxnreg"
)


@dataclass
class Entry:
    """A variant and its results."""

    variant: Variant
    is_table_row: bool
    builds: dict[str, Build] = field(default_factory=dict)  # by mask
    wrong: str | None = None
    error: str | None = None

    @property
    def is_right(self) -> bool:
        return self.wrong is None and self.error is None

    @property
    def complaint(self) -> str | None:
        if self.wrong is not None:
            return f"WRONG: {self.wrong}"
        return None if self.error is None else f"failed: {self.error}"

    def read_cell(self, cell: Cell) -> None:
        """Record the error or the wrong result of this variant in a cell, if there is one."""
        result = cell.results.get(self.variant.text)
        if result is None or cell.shape.head_dim != self.variant.head_dim:
            return
        if result.error:
            self.error = f"{cell.key}: {result.error}"
        elif result.is_wrong or result.is_repeatable is False:
            why = "far from exact" if result.is_wrong else "other bits on the same inputs"
            self.wrong = f"{cell.key}: {why}"


@dataclass(frozen=True)
class Standing:
    """A variant of one head dim, or a peer if `entry` is None."""

    name: str
    entry: Entry | None
    tflops: float | None  # geometric mean; None if it is not ranked
    ratio: float | None  # to the reference peer, over the cells in which that peer was timed


@dataclass
class Tuning:
    settings: dict[str, Any]
    machine: dict[str, Any]
    method: dict[str, Any]
    entries: list[Entry]
    peers: tuple[str, ...] = ()  # the first is the reference
    unavailable: dict[str, str] = field(default_factory=dict)
    cells: list[Cell] = field(default_factory=list)
    is_complete: bool = False

    @property
    def head_dims(self) -> list[int]:
        return list(dict.fromkeys(entry.variant.head_dim for entry in self.entries))

    def cells_of(self, head_dim: int) -> list[Cell]:
        return [cell for cell in self.cells if cell.shape.head_dim == head_dim]

    def standings(self, head_dim: int) -> list[Standing]:
        """Peers and variants, the fastest first, those without a rank last."""
        cells = self.cells_of(head_dim)
        mine = [entry for entry in self.entries if entry.variant.head_dim == head_dim]
        standings = [self._standing(name, None, cells) for name in self.peers]
        standings += [self._standing(entry.variant.text, entry, cells) for entry in mine]
        return sorted(standings, key=lambda one: -(one.tflops or 0.0))

    def _standing(self, name: str, entry: Entry | None, cells: Sequence[Cell]) -> Standing:
        is_right = entry.is_right if entry else not any(_is_wrong(cell.results.get(name)) for cell in cells)
        speeds = [cell.tflops(name) for cell in cells]
        known = [speed for speed in speeds if speed]
        if not is_right or len(known) < len(cells):
            return Standing(name, entry, None, None)
        ratios = [cell.ratio(name, self.peers[0]) for cell in cells] if self.peers else []
        return Standing(name, entry, geometric_mean(known), geometric_mean([r for r in ratios if r]))

    def complaints(self) -> list[str]:
        return [f"{entry.variant}: {entry.complaint}" for entry in self.entries if entry.complaint]


def _is_wrong(result: Result | None) -> bool:
    return result is not None and result.is_wrong


def to_dict(tuning: Tuning) -> dict[str, Any]:
    standings = {
        (head_dim, one.name): (place, one)
        for head_dim in tuning.head_dims
        for place, one in enumerate(tuning.standings(head_dim), 1)
        if one.tflops
    }
    variants = []
    for entry in tuning.entries:
        variant = entry.variant
        place, standing = standings.get((variant.head_dim, variant.text), (None, None))
        variants.append(
            {
                "variant": str(variant),
                "family": variant.family,
                "head_dim": variant.head_dim,
                "tile": {name: v for name, v in asdict(variant.tile).items() if name != "measured"},
                "is_table_row": entry.is_table_row,
                "smem_bytes": variant.tile.smem_bytes,
                "accumulator_registers": variant.tile.accumulator_registers,
                "builds": {mask: asdict(build) for mask, build in entry.builds.items()},
                "wrong": entry.wrong,
                "error": entry.error,
                # Among the peers and variants of its head dim.
                "place": place,
                "geomean_tflops": standing and standing.tflops,
                "geomean_ratio": standing and standing.ratio,
            }
        )
    return {
        "schema": SCHEMA,
        "settings": tuning.settings,
        "machine": tuning.machine,
        "method": tuning.method,
        "peers": tuning.peers,
        "unavailable": tuning.unavailable,
        "variants": variants,
        "cells": [cell.as_dict() for cell in tuning.cells],
        "is_complete": tuning.is_complete,
    }


def _name(entry: Entry) -> str:
    return entry.variant.text + (" *" if entry.is_table_row else "")


def _by_mask(entry: Entry, field_name: str) -> str:
    """One number if all masks agree, else one per mask."""
    values = [getattr(build, field_name) for build in entry.builds.values()]
    texts = [NOTHING if value is None else str(value) for value in values] or [NOTHING]
    return texts[0] if len(set(texts)) == 1 else "/".join(texts)


def _worst(entry: Entry, field_name: str) -> float:
    values = [getattr(build, field_name) for build in entry.builds.values()]
    return max((value for value in values if value is not None), default=0)


def _kilobytes(entry: Entry) -> str:
    return f"{entry.variant.tile.smem_bytes / 1024:.0f}"


def _verdict(standing: Standing) -> str:
    if standing.entry is not None and not standing.entry.is_right:
        return "WRONG" if standing.entry.wrong is not None else "failed"
    return NOTHING if standing.ratio is None else f"{standing.ratio:.3f}"


def speed_tables(tuning: Tuning) -> list[Table]:
    """One per head dim, the fastest first."""
    tables = []
    for head_dim in tuning.head_dims:
        cells = tuning.cells_of(head_dim)
        columns = ["variant", "x ref", *(f"{cell.shape.mask} {cell.shape.seqlen}" for cell in cells)]
        rows = []
        for one in tuning.standings(head_dim):
            speeds = [speed(cell.results.get(one.name)) for cell in cells]
            if one.entry is None:
                rows.append((one.name, _verdict(one), *speeds, NOTHING, NOTHING, NOTHING))
                continue
            uses = (_by_mask(one.entry, "registers"), _by_mask(one.entry, "spill_bytes"), _kilobytes(one.entry))
            rows.append((_name(one.entry), _verdict(one), *speeds, *uses))
        title = f"{tuning.settings['family']} {tuning.settings['dtype']}, D={head_dim}"
        tables.append(Table(title, (*columns, "registers", "spilled B", "smem KB"), tuple(rows)))
    return tables


def _notes(entry: Entry) -> str:
    notes = {note for build in entry.builds.values() for note in build.notes}
    return " ".join(sorted(notes)) or NOTHING


def _cost(entry: Entry) -> tuple[bool, float, bool, float, str]:
    is_noted, registers = _notes(entry) != NOTHING, _worst(entry, "registers")
    return not entry.is_right, _worst(entry, "spill_bytes"), is_noted, registers, entry.variant.text


def resource_tables(tuning: Tuning) -> list[Table]:
    """One per head dim, ordered by spills, by notes of ptxas, and by registers."""
    columns = ("variant", "spilled B", "registers", "accumulators", "smem KB", "CTAs/SM", "ptxas")
    tables = []
    for head_dim in tuning.head_dims:
        mine = [entry for entry in tuning.entries if entry.variant.head_dim == head_dim]
        rows = tuple(
            (
                _name(entry),
                _by_mask(entry, "spill_bytes") if entry.is_right else "failed",
                _by_mask(entry, "registers"),
                str(entry.variant.tile.accumulator_registers),
                _kilobytes(entry),
                _by_mask(entry, "ctas_per_sm"),
                _notes(entry),
            )
            for entry in sorted(mine, key=_cost)
        )
        settings = tuning.settings
        title = f"{settings['family']} {settings['dtype']} for {settings['arch']}, D={head_dim}"
        tables.append(Table(title, columns, rows))
    return tables
