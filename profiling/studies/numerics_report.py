"""Tables of the numerics study, from its records."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from profiling.measure.tables import Table
from profiling.studies.numerics import CPU_DTYPES, DISTRIBUTIONS, UNFUSED, WAYS

Records = Sequence[dict[str, Any]]


def pick(records: Records, **conditions: Any) -> list[dict[str, Any]]:
    return [one for one in records if all(one[name] == value for name, value in conditions.items())]


def _cell(found: Records) -> str:
    """The relative error, and the largest error of an element; "-" if there is no result."""
    if not found or found[0]["relative"] is None or found[0]["max_abs"] is None:
        return "-"
    return f"{found[0]['relative']:.1e}, {found[0]['max_abs']:.1e}"


def ways(records: Records) -> Table:
    """Each way to accumulate, at the shortest and the longest sequence."""
    return _by_length("By length", pick(records, study="length"), (*WAYS, UNFUSED))


def dtypes(records: Records) -> Table:
    """The CPU path by dtype, at the shortest and the longest sequence."""
    return _by_length("CPU path", pick(records, study="dtype"), tuple(CPU_DTYPES))


def _by_length(title: str, found: Records, names: Sequence[str]) -> Table:
    lengths = sorted({one["seqlen"] for one in found})
    columns = [(distribution, length) for distribution in DISTRIBUTIONS for length in (lengths[0], lengths[-1])]
    rows = tuple(
        (way, *(_cell(pick(found, way=way, distribution=name, seqlen=length)) for name, length in columns))
        for way in names
    )
    return Table(title, ("relative, largest", *(f"{name}, {length}" for name, length in columns)), rows)


def tiles(records: Records) -> Table:
    """Relative errors by the width of a K/V block, normal inputs, and the rescales of a row."""
    return _by_block("By tile width, normal inputs", pick(records, study="tile", distribution="normal"), "block")


def rescales(records: Records) -> Table:
    return _by_block("By rescales of a row, same keys in other orders", pick(records, study="rescales"), "rescales")


def _by_block(title: str, found: Records, axis: str) -> Table:
    values = sorted({one[axis] for one in found})
    rows = [(way, *(f"{pick(found, way=way, **{axis: value})[0]['relative']:.2e}" for value in values)) for way in WAYS]
    if axis == "block":
        rows.append(("rescales of a row", *(f"{pick(found, block=value)[0]['rescales']:.1f}" for value in values)))
    return Table(title, ("relative error", *(f"{value:.0f}" for value in values)), tuple(rows))


def gpu(records: Records, outputs: Sequence[str] = ("out", "dq", "dk", "dv")) -> Table:
    """The GPU kernels by dtype, at the longest sequence of each output."""
    rows = []
    for output in outputs:
        of_output = pick(records, output=output)
        seqlen = max((one["seqlen"] for one in of_output), default=0)
        for dtype in CPU_DTYPES:
            for peer in dict.fromkeys(one["provider"] for one in records):
                conditions = {"provider": peer, "dtype": dtype, "seqlen": seqlen}
                cells = [_cell(pick(of_output, distribution=name, **conditions)) for name in DISTRIBUTIONS]
                if any(cell != "-" for cell in cells):
                    rows.append((f"{output}, S {seqlen}, {dtype}, {peer}", *cells))
    return Table("GPU", ("relative, largest", *DISTRIBUTIONS), tuple(rows))


def gpu_out(records: Records) -> Table:
    return gpu(records, ("out",))


def worst_over(records: Records, peer: str, norm: str) -> dict[str, float]:
    """For each output, the largest ratio of an error to the peer's on the same 16-bit inputs."""
    cells = {
        (one["output"], one["dtype"], one["distribution"], one["seqlen"], one["provider"]): one[norm]
        for one in records
        if not one["absent"] and one["dtype"] != "fp32"
    }
    worst: dict[str, float] = {}
    for (*cell, name), error in cells.items():
        theirs = cells.get((*cell, peer))
        if name == "cute_flash" and theirs:
            worst[cell[0]] = max(worst.get(cell[0], 0.0), error / theirs)
    return worst


def absent(records: Records) -> list[str]:
    """The peers without a result, once for each dtype and message."""
    lines = (f"{one['provider']}, {one['dtype']}: {one['absent']}" for one in records if one["absent"])
    return list(dict.fromkeys(lines))


def cpu_tables(records: Records) -> list[Table]:
    return [ways(records), tiles(records), rescales(records), dtypes(records)]
