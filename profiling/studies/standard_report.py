"""Tables of standard attention beside cute_flash, and the answer to the usual claims about FlashAttention."""

from __future__ import annotations

from collections.abc import Sequence

from profiling.measure.shapes import MASKS
from profiling.measure.study import CellFailure, Record
from profiling.measure.tables import Table, number
from profiling.peers.directions import DIRECTIONS
from profiling.studies.standard import OURS, STANDARD

LABELS = {"fwd": "forward", "bwd": "backward"}


def _mask(cell: Record) -> str:
    return MASKS[cell["shape"]["causal"]]


def select(record: Record, direction: str, mask: str, head_dim: int | None = None) -> list[Record]:
    """Cells of a direction, mask and head dim, by length."""
    cells = [one for one in record["cells"] if one["direction"] == direction and _mask(one) == mask]
    if head_dim is not None:
        cells = [one for one in cells if one["shape"]["head_dim"] == head_dim]
    return sorted(cells, key=lambda one: one["shape"]["seqlen"])


def head_dims(record: Record) -> list[int]:
    return sorted({cell["shape"]["head_dim"] for cell in record["cells"]})


def _ratio(cell: Record, name: str) -> float | None:
    standard, ours = (cell["results"][peer][name] for peer in (STANDARD, OURS))
    return standard / ours if standard and ours else None


def speed_up(record: Record, cell: Record) -> float | None:
    """Time of standard attention over ours."""
    return _ratio(cell, "ms")


def memory_ratio(record: Record, cell: Record) -> float | None:
    return _ratio(cell, "peak_bytes")


def bytes_ratio(record: Record, cell: Record) -> float | None:
    """Counted HBM bytes of standard attention over ours; None if they were not counted."""
    found = (record.get("bytes") or {}).get("cells", {}).get(cell["key"], {})
    if not {STANDARD, OURS} <= found.keys():
        return None
    standard, ours = (found[name]["read"] + found[name]["write"] for name in (STANDARD, OURS))
    return standard / ours if ours else None


RATIOS = {"speed-up": speed_up, "fewer HBM bytes": bytes_ratio, "less memory": memory_ratio}


def _reach(record: Record, name: str, direction: str, mask: str, lengths: Sequence[int] | None = None) -> str:
    """The lowest and the highest ratio of all lengths and head dims, with their lengths."""
    points = [
        (ratio, cell["shape"]["seqlen"])
        for cell in select(record, direction, mask)
        if lengths is None or cell["shape"]["seqlen"] in lengths
        if (ratio := RATIOS[name](record, cell)) is not None
    ]
    if not points:
        return "-"
    (low, at_low), (high, at_high) = min(points), max(points)
    if len(points) == 1 or f"{low:.1f}" == f"{high:.1f}":
        return f"{high:.1f} x"
    return f"{low:.1f} x (N {at_low}) to {high:.1f} x (N {at_high})"


# Claim -> the ratio that answers it, and the lengths that it is made for; None: all.
CLAIMS: dict[str, tuple[str, tuple[int, ...] | None]] = {
    "2 to 8 x faster": ("speed-up", None),
    "about 25 x fewer HBM bytes, N = 4096": ("fewer HBM bytes", (4096,)),
    "HBM bytes, all counted lengths": ("fewer HBM bytes", None),
    "4 x (N = 512) to 64 x (N = 8192) less memory": ("less memory", (512, 1024, 2048, 4096, 8192)),
    "memory, all lengths": ("less memory", None),
}


def claims(record: Record) -> Table:
    """The usual claims beside the measured ratios, D = 64 and 128 together."""
    places = [(direction, mask) for direction in DIRECTIONS for mask in MASKS]
    rows = tuple(
        (claim, *(_reach(record, name, *place, lengths) for place in places))
        for claim, (name, lengths) in CLAIMS.items()
    )
    return Table("", ("claim", *(f"{LABELS[direction]}, {mask}" for direction, mask in places)), rows)


def _mb(value: float | None) -> str:
    return "-" if value is None else f"{value / 1e6:,.0f}"


def cells(record: Record, direction: str) -> Table:
    """One line per cell: times, peak memory and counted bytes of both, with ratios."""
    rows = []
    for head_dim in head_dims(record):
        for mask in MASKS:
            for cell in select(record, direction, mask, head_dim):
                shape, results = cell["shape"], cell["results"]
                both = (results[STANDARD], results[OURS])
                found = (record.get("bytes") or {}).get("cells", {}).get(cell["key"], {})
                moved = [
                    found[name]["read"] + found[name]["write"] if name in found else None for name in (STANDARD, OURS)
                ]
                rows.append(
                    (
                        f"D {head_dim}, {mask}, N {shape['seqlen']}, B {shape['batch']}, H {shape['heads']}",
                        *(number(one["ms"], ".3f") for one in both),
                        number(speed_up(record, cell), ".1f"),
                        *(_mb(one["peak_bytes"]) for one in both),
                        number(memory_ratio(record, cell), ".1f"),
                        *map(_mb, moved),
                        number(bytes_ratio(record, cell), ".1f"),
                    )
                )
    columns = ("standard, ms", "ours, ms", "ratio", "standard, MB", "ours, MB", "ratio")
    title = f"{LABELS[direction]}: time, peak memory above the inputs, HBM bytes"
    return Table(title, ("cell", *columns, "standard, MB moved", "ours, MB moved", "ratio"), tuple(rows))


def tables(record: Record) -> list[Table]:
    return [*(cells(record, direction) for direction in DIRECTIONS), claims(record)]


def failures(record: Record) -> list[CellFailure]:
    return [
        CellFailure(cell["key"], name, result["error"])
        for cell in record["cells"]
        for name, result in cell["results"].items()
        if result["error"]
    ]
