"""Scales, panels with axes, legends and paired bars, drawn on a `Canvas`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from profiling.svg import Canvas, Point


@dataclass(frozen=True)
class Scale:
    """Values from `low` to `high`, on a logarithmic scale if asked, with labels at `ticks`."""

    low: float
    high: float
    ticks: tuple[float, ...]
    is_log: bool = False

    def place(self, value: float) -> float:
        """0 at `low`, 1 at `high`."""
        if self.is_log:
            return math.log2(value / self.low) / math.log2(self.high / self.low)
        return (value - self.low) / (self.high - self.low)


def nice_top(value: float) -> float:
    """A round number that is not below `value`, up to 0.1 %."""
    power = 10.0 ** math.floor(math.log10(value))
    return next(step * power for step in (1, 1.5, 2, 2.5, 3, 4, 5, 6, 8, 10) if step * power >= value * 0.999)


def linear(top: float, num_steps: int = 4) -> Scale:
    high = nice_top(top)
    return Scale(0.0, high, tuple(high * step / num_steps for step in range(num_steps + 1)))


def short(value: float) -> str:
    """For a tick: 512, 1k, 16k, 2.5M."""
    for factor, letter in ((1e9, "G"), (1e6, "M")):
        if value >= factor:
            return f"{value / factor:g}{letter}"
    if value >= 1024 and value % 1024 == 0:
        return f"{value / 1024:g}k"
    return f"{value / 1e3:g}k" if value >= 1e4 else f"{value:g}"


@dataclass(frozen=True)
class Panel:
    canvas: Canvas
    left: float
    top: float
    width: float
    height: float
    x: Scale
    y: Scale

    def at(self, x: float, y: float) -> Point:
        return self.left + self.width * self.x.place(x), self.top + self.height * (1 - self.y.place(y))

    def frame(self, title: str, x_label: str = "", y_label: str = "") -> None:
        canvas, bottom, right = self.canvas, self.top + self.height, self.left + self.width
        canvas.rect(self.left, self.top, self.width, self.height, "panel")
        for tick in self.x.ticks:
            x, _ = self.at(tick, self.y.low)
            canvas.line((x, self.top), (x, bottom), "grid")
            canvas.text(x, bottom + 16, short(tick), "dim small", "middle")
        for tick in self.y.ticks:
            _, y = self.at(self.x.low, tick)
            canvas.line((self.left, y), (right, y), "grid")
            canvas.text(self.left - 6, y + 4, short(tick), "dim small", "end")
        canvas.text(self.left, self.top - 8, title, "ink bold")
        if x_label:
            canvas.text(self.left + self.width / 2, bottom + 34, x_label, "dim", "middle")
        if y_label:
            canvas.text(right, self.top - 8, y_label, "dim small", "end")

    def curve(self, points: Sequence[Point], shape: str, colour: str, is_thick: bool = False) -> None:
        placed = [self.at(*point) for point in points]
        if len(placed) > 1:
            self.canvas.path(placed, f"{colour} line{' thick' if is_thick else ''}")
        for point in placed:
            self.canvas.marker(point, shape, colour)


def legend(canvas: Canvas, at: Point, entries: Sequence[tuple[str, str, str]]) -> None:
    """Entries (label, marker, classes) in a row. Text is about 6.6 pixels a letter."""
    x, y = at
    for label, shape, kind in entries:
        canvas.marker((x + 6, y - 4), shape, kind)
        canvas.text(x + 16, y, label)
        x += 16 + 6.6 * len(label) + 22


@dataclass(frozen=True)
class Bar:
    """A predicted and a measured value, each with a part that is marked."""

    predicted: float | None
    measured: float | None
    label: str
    predicted_part: float = 0.0
    measured_part: float = 0.0


BAR_HEIGHT, ROW_HEIGHT = 10, 34


def bars(canvas: Canvas, at: Point, width: float, title: str, rows: Sequence[Bar], room: float = 112) -> None:
    """One row per bar, predicted above measured, marked parts in red; `room` is the width of the labels."""
    (left, top), known = at, [v for row in rows for v in (row.predicted, row.measured) if v is not None]
    full = width - room
    unit = full / max([*known, 1e-12])
    canvas.text(left, top - 10, title, "ink bold")
    canvas.line((left, top), (left, top + ROW_HEIGHT * len(rows)), "grid")
    for index, row in enumerate(rows):
        y, end = top + ROW_HEIGHT * index + 6, left
        pairs = ((row.predicted, row.predicted_part, "faint"), (row.measured, row.measured_part, "bar"))
        for line, (value, part, fill) in enumerate(pairs):
            if value is None:
                continue
            place = y + line * (BAR_HEIGHT + 1)
            length = max(value - part, 0.0) * unit
            # At least one pixel, so that a zero is visible.
            canvas.rect(left, place, max(length, 1.0), BAR_HEIGHT, f"blue {fill}")
            if part * unit >= 0.5:
                canvas.rect(left + length, place, part * unit, BAR_HEIGHT, f"red {fill}")
            end = max(end, left + value * unit)
        canvas.text(end + 6, y + BAR_HEIGHT + 4, row.label, "ink small")
