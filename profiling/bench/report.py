"""Tables of a run: one per head dim and mask, a summary of each peer, and the failures."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby

from profiling.bench.compare import Change
from profiling.measure.accuracy import Accuracy
from profiling.measure.record import Cell, Result, Run
from profiling.measure.study import CellFailure
from profiling.measure.tables import Table, geometric_mean, number
from profiling.peers.registry import OURS

# A larger spread of the rounds is marked.
NOISY_SPREAD = 0.05
LEGEND = (
    "TFLOP/s; `~` rounds differ by more than 5 %, `!` wrong output, `x` failed, `-` does not take the head dim; "
    "ours/ref, ours/best: our speed over that of the reference and of the fastest correct peer; "
    "err/ref: our relative error (Frobenius norm) over that of the reference; for gradients the worst of dq, dk and dv"
)
NOTHING = "-"
# The exact results that outputs are compared with, as the name of a failure.
ORACLE = "oracle"


def speed(result: Result | None) -> str:
    if result is None:
        return NOTHING
    if result.tflops is None:
        return "x"
    noisy = "~" if (result.spread or 0.0) > NOISY_SPREAD else ""
    return f"{result.tflops:.0f}{noisy}{'!' if result.is_wrong else ''}"


def _group(cell: Cell) -> tuple[str, str, int, str]:
    return cell.direction, cell.dtype, cell.shape.head_dim, cell.shape.mask


def _best_ratio(run: Run, cell: Cell, ours: str) -> float | None:
    best = run.best_peer(cell)
    return None if best is None else cell.ratio(ours, best)


def cell_tables(run: Run) -> list[Table]:
    tables = []
    for (direction, dtype, head_dim, mask), cells in groupby(run.cells, key=_group):
        columns = ["S", *run.names]
        if run.ours:
            columns += ["ours/ref", "ours/best", "best", "err/ref"]
        rows = []
        for cell in cells:
            row = [str(cell.shape.seqlen), *(speed(cell.results.get(name)) for name in run.names)]
            if run.ours:
                ours = run.ours[0]
                row += [number(cell.ratio(ours, run.reference)), number(_best_ratio(run, cell, ours))]
                row += [run.best_peer(cell) or NOTHING, number(cell.worst_error_ratio(ours, run.reference))]
            rows.append(tuple(row))
        tables.append(Table(f"{direction} {dtype}, D={head_dim}, {mask}", tuple(columns), tuple(rows)))
    return tables


def _lowest(ratios: Iterable[tuple[float, Cell]]) -> str:
    lowest = min(ratios, key=lambda pair: pair[0], default=None)
    return NOTHING if lowest is None else f"{lowest[0]:.2f} ({lowest[1].shape.id})"


def _versus(ratios: Sequence[tuple[float | None, Cell]]) -> list[str]:
    known = [(ratio, cell) for ratio, cell in ratios if ratio is not None]
    mean = geometric_mean([ratio for ratio, _ in known])
    wins = sum(ratio >= 1.0 for ratio, _ in known)
    return [number(mean), f"{wins}/{len(known)}", _lowest(known)] if known else [NOTHING, NOTHING, NOTHING]


def _directions(run: Run) -> str:
    return ", ".join(dict.fromkeys(cell.direction for cell in run.cells)) or NOTHING


def summary_table(run: Run) -> Table:
    """Every peer over all cells: our speed over each, and over the best peer of each cell."""
    ceiling = run.ceiling.tflops if run.ceiling else None
    columns = ["provider", "geomean TFLOP/s", "best TFLOP/s", "best % of matmul"]
    if run.ours:
        columns += ["ours/it geomean", "ours at least as fast", "lowest ours/it"]
    rows = []
    for name in run.names:
        speeds = [tflops for cell in run.cells if (tflops := cell.tflops(name))]
        best = max(speeds, default=None)
        percent = 100 * best / ceiling if best and ceiling else None
        row = [name, *(number(x, ".0f") for x in (geometric_mean(speeds), best, percent))]
        if run.ours:
            row += _versus([(cell.ratio(run.ours[0], name), cell) for cell in run.cells])
        rows.append(tuple(row))
    if run.ours:
        ratios = [(_best_ratio(run, cell, run.ours[0]), cell) for cell in run.cells]
        rows.append(("best peer of each cell", NOTHING, NOTHING, NOTHING, *_versus(ratios)))
    matmul = f"{run.ceiling.name}: {number(ceiling, '.0f')} TFLOP/s" if run.ceiling else "matmul not measured"
    return Table(f"All cells, {_directions(run)} ({matmul})", tuple(columns), tuple(rows))


# Field of `accuracy.Errors` -> its name in a column.
NORMS = {"relative": "Frobenius", "max_abs": "largest element"}


def accuracy_table(run: Run) -> Table | None:
    """The largest errors of each peer and of the yardstick over all cells, per distribution and gradient."""
    labels = list(dict.fromkeys(label for cell in run.cells for label in cell.yardstick))
    if not labels:
        return None
    columns = ["provider"]
    for label in labels:
        for norm in NORMS.values():
            columns += [f"{label}: {norm}", f"{norm} err/ref"]
    rows = []
    for name in run.names:
        row = [name]
        for label in labels:
            accuracies = [c.results[name].accuracy.get(label) for c in run.cells if name in c.results]
            for norm in NORMS:
                errors = [value for a in accuracies if a is not None and (value := getattr(a, norm)) is not None]
                ratios = [cell.error_ratio(name, run.reference, label, norm) for cell in run.cells]
                worst = max((ratio for ratio in ratios if ratio is not None), default=None)
                row += [f"{max(errors):.2e}" if errors else NOTHING, number(worst)]
        rows.append(tuple(row))
    last = ["unfused PyTorch"]
    for label in labels:
        for norm in NORMS:
            errors = [getattr(c.yardstick[label], norm) or 0.0 for c in run.cells if label in c.yardstick]
            last += [f"{max(errors):.2e}", NOTHING]
    title = (
        f"Worst error against fp64, {_directions(run)}: relative Frobenius norm, and largest difference of an element"
    )
    return Table(title, tuple(columns), (*rows, tuple(last)))


def tables(run: Run) -> list[Table]:
    accuracy = accuracy_table(run)
    return [*cell_tables(run), summary_table(run), *([accuracy] if accuracy else [])]


def failures(run: Run) -> list[CellFailure]:
    """What failed, was wrong or not repeatable; one for each message, with its first cell and the number of the others.

    Also cute_flash, if it is not available.
    """
    missing = [
        CellFailure("all cells", name, f"not available: {why}") for name, why in run.unavailable.items() if name in OURS
    ]
    cells: dict[tuple[str, str], list[str]] = {}
    for cell in run.cells:
        if cell.oracle_error:
            cells.setdefault((ORACLE, cell.oracle_error), []).append(cell.key)
        for name in (name for name in run.names if name in cell.results):
            result = cell.results[name]
            lines = [f"failed: {result.error}"] if result.error else []
            lines += [_wrong(label, a) for label, a in result.accuracy.items() if a.is_wrong]
            lines += ["gives other bits on the same inputs"] if result.is_repeatable is False else []
            for line in lines:
                cells.setdefault((name, line), []).append(cell.key)
    return missing + [
        CellFailure(first + (f" and {len(others)} more" if others else ""), name, line)
        for (name, line), (first, *others) in cells.items()
    ]


def _wrong(label: str, accuracy: Accuracy) -> str:
    distribution, _, gradient = label.partition(" ")
    where = f"in {gradient} on {distribution}" if gradient else f"on {distribution}"
    return (
        f"wrong {where} inputs: relative error {accuracy.relative}, max {accuracy.max_abs}, "
        f"{accuracy.non_finite} entries not finite, distance from the reference {accuracy.distance}"
    )


def change_table(changes: Sequence[Change], threshold: float) -> Table:
    rows = [
        (
            change.key,
            number(change.before),
            number(change.after),
            f"{100 * change.relative:+.1f} %" if change.after is not None else "failed now",
            "regression" if change.is_regression(threshold) else "",
        )
        for change in changes
    ]
    return Table("ours/ref against the base", ("cell", "base", "now", "change", ""), tuple(rows))
