"""Compare two runs by the speed of cute_flash over the reference peer of the same run.

Absolute speeds depend on the card and its temperature; the ratio to a peer timed in the same rounds does not.
"""

from __future__ import annotations

from dataclasses import dataclass

from profiling.measure.record import Cell, Run


@dataclass(frozen=True)
class Change:
    key: str
    before: float
    after: float | None  # None: measured before, failed now

    @property
    def relative(self) -> float:
        return -1.0 if self.after is None else self.after / self.before - 1.0

    def is_regression(self, threshold: float) -> bool:
        return self.relative < -threshold


def changes(run: Run, base: Run) -> list[Change]:
    """The cells that both runs have, if the base has a ratio to the reference peer of `run`."""
    if not run.ours or not base.ours:
        return []
    earlier: dict[str, Cell] = {cell.key: cell for cell in base.cells}
    result = []
    for cell in run.cells:
        if cell.key not in earlier:
            continue
        before = earlier[cell.key].ratio(base.ours[0], run.reference)
        # A cell without the peer cannot be compared. A cell without cute_flash is a failure.
        is_comparable = cell.tflops(run.reference) or not cell.tflops(run.ours[0])
        if before is not None and is_comparable:
            result.append(Change(cell.key, before, cell.ratio(run.ours[0], run.reference)))
    return result
