"""The record of a benchmark run: one JSON file with all results, per round.

Keys are stable and sorted, every field is always present, and a missing value is null, so files of different days can
be compared by text and by program.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from profiling.measure.accuracy import Accuracy, Errors
from profiling.measure.shapes import Shape

SCHEMA = 1


@dataclass(frozen=True)
class Result:
    """One peer in one cell: its times, or its error."""

    tflops: float | None = None
    ms: float | None = None
    spread: float | None = None
    calls: int | None = None
    round_ms: tuple[float, ...] = ()
    # By distribution of the inputs, such as "normal"; for gradients by their name too, such as "normal dq".
    accuracy: dict[str, Accuracy] = field(default_factory=dict)
    # The same bits before and after the timed calls; None for gradients, which may be summed in any order.
    is_repeatable: bool | None = None
    error: str | None = None

    @property
    def is_wrong(self) -> bool:
        return any(accuracy.is_wrong for accuracy in self.accuracy.values())

    @staticmethod
    def from_dict(data: dict[str, Any]) -> Result:
        accuracy = {name: Accuracy(**values) for name, values in data["accuracy"].items()}
        return Result(**{**data, "round_ms": tuple(data["round_ms"]), "accuracy": accuracy})


@dataclass(frozen=True)
class Cell:
    """All peers on one shape."""

    direction: str
    dtype: str
    shape: Shape
    flops: float
    working_set_bytes: int  # Q, K, V, O and the LSE; backward: dO, dQ, dK and dV too
    exceeds_l2: bool | None  # if not, repeated calls find their inputs in the cache
    results: dict[str, Result]
    yardstick: dict[str, Errors] = field(default_factory=dict)  # of unfused PyTorch; keys as in Result.accuracy
    oracle_error: str | None = None
    before: dict[str, Any] = field(default_factory=dict)
    after: dict[str, Any] = field(default_factory=dict)
    ceiling_tflops: float | None = None  # of the matrix product (`Ceiling`) in the rounds of this cell

    @property
    def key(self) -> str:
        return f"{self.direction}-{self.dtype}-{self.shape.id}"

    def tflops(self, name: str) -> float | None:
        return self.results[name].tflops if name in self.results else None

    def ratio(self, name: str, other: str) -> float | None:
        """Speed of one peer over another's: above 1 is faster."""
        mine, theirs = self.tflops(name), self.tflops(other)
        return mine / theirs if mine and theirs else None

    def error_ratio(self, name: str, other: str, label: str, norm: str = "relative") -> float | None:
        """The ratio of two errors against fp64; `norm`: "relative" (Frobenius) or "max_abs" (largest element)."""
        pair = [self.results[n].accuracy.get(label) for n in (name, other) if n in self.results]
        values = [getattr(accuracy, norm) for accuracy in pair if accuracy is not None]
        if len(values) != 2 or values[0] is None or not values[1]:
            return None
        return values[0] / values[1]

    def worst_error_ratio(self, name: str, other: str, distribution: str = "normal") -> float | None:
        """The ratio of relative errors of the output, or the largest ratio of dq, dk and dv; None if one is missing."""
        labels = [label for label in self.yardstick if label.partition(" ")[0] == distribution]
        ratios = [self.error_ratio(name, other, label) for label in labels]
        known = [ratio for ratio in ratios if ratio is not None]
        return max(known) if known and len(known) == len(ratios) else None

    def as_dict(self) -> dict[str, Any]:
        """The entry of a result file."""
        return {**asdict(self), "key": self.key}

    @staticmethod
    def from_dict(data: dict[str, Any]) -> Cell:
        fields = {name: value for name, value in data.items() if name != "key"}
        fields["shape"] = Shape(**data["shape"])
        fields["results"] = {name: Result.from_dict(value) for name, value in data["results"].items()}
        fields["yardstick"] = {name: Errors(**value) for name, value in data["yardstick"].items()}
        return Cell(**fields)


@dataclass(frozen=True)
class Ceiling:
    """A large matrix product through cuBLAS, timed in the rounds of all cells.

    In older files it is timed at the beginning and the end of the run, and cells have no time of it.
    """

    name: str
    tflops: float | None
    round_ms: tuple[float, ...]


@dataclass(frozen=True)
class Run:
    """The parts of a record that tables and documents read."""

    settings: dict[str, Any]
    machine: dict[str, Any]
    ours: tuple[str, ...]  # the names of cute_flash among `names`; ratios use the first
    names: tuple[str, ...]  # cute_flash and its peers; "providers" in the file
    unavailable: dict[str, str]
    ceiling: Ceiling | None = None
    cells: tuple[Cell, ...] = ()
    is_complete: bool = False

    @property
    def peers(self) -> tuple[str, ...]:
        return tuple(name for name in self.names if name not in self.ours)

    @property
    def reference(self) -> str:
        return self.settings["reference"]

    def best_peer(self, cell: Cell) -> str | None:
        """The fastest peer whose output is correct."""
        right = [n for n in self.peers if cell.tflops(n) and not cell.results[n].is_wrong]
        return max(right, key=lambda name: cell.tflops(name) or 0.0, default=None)

    def over_best(self, cell: Cell) -> float | None:
        """Our speed over that of the fastest peer whose output is correct."""
        best = self.best_peer(cell)
        return None if best is None else cell.ratio(self.ours[0], best)

    @staticmethod
    def from_dict(data: dict[str, Any]) -> Run:
        if data.get("schema") != SCHEMA:
            raise ValueError(
                f"a result file of schema {data.get('schema')}: this version reads schema {SCHEMA}; measure it again"
            )
        ceiling = data["ceiling"]
        return Run(
            settings=data["settings"],
            machine=data["machine"],
            ours=tuple(data["ours"]),
            names=tuple(data["providers"]),
            unavailable=data["unavailable"],
            ceiling=Ceiling(**{**ceiling, "round_ms": tuple(ceiling["round_ms"])}) if ceiling else None,
            cells=tuple(Cell.from_dict(cell) for cell in data["cells"]),
            is_complete=data["is_complete"],
        )


def write_json(data: Any, path: Path | None) -> None:
    """Write a file atomically: a run that is killed while writing leaves the previous file. No path: nothing."""
    if path is None:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f"{path.name}.part")
    part.write_text(json.dumps(data, indent=1, sort_keys=True, allow_nan=False) + "\n")
    os.replace(part, path)


def load(path: Path) -> Run:
    return Run.from_dict(json.loads(path.read_text()))
